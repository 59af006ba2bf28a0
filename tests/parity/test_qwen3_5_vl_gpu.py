"""Qwen3.5 on a GPU in bf16: each set of modules and the delta rule's kernels; the merger.

The yardstick for bf16 is what bf16 costs transformers itself, as in test_qwen3_vl_gpu.py, of logits and of gradients.
The plain modules are held to it on a CPU too.
"""

import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch

from tests.helpers.bins import make_samples
from tests.helpers.hardware import ON_CUDA, requires_engine, requires_gpus
from tests.helpers.parity import KINDS, SEQ_LEN
from tests.helpers.reference import load_reference, reference_logits, reference_losses
from tests.helpers.single_rank import build_tiny, single_rank
from tests.helpers.tiers import full
from tests.helpers.tiny_hybrid_model import hybrid_hf_dir
from tests.parity.test_qwen3_vl_gpu import YARDSTICKS, relative
from trainer.data.micro_batch import geometry_of, make_micro_batch
from trainer.families.qwen3_vl.family import part_of, rules
from trainer.families.qwen3_vl.model import Qwen3VLModel
from trainer.layers.module_set import TorchModules
from trainer.model.registry import read_model
from trainer.model.rules import global_names
from trainer.model.shape import VisionShape
from trainer.parts.delta.part import DeltaNet
from trainer.parts.delta.rule.gated_delta_net import DeltaHeads, kernels_fit

pytestmark = pytest.mark.promise(
    "On GPUs each set of modules differs from float32, and each layout from one GPU, at most twice as much as "
    "transformers' bfloat16 from its float32."
)

EXACT = ("A_log", "dt_bias")
# transformers' merger of the large encoders in a model of width 3584. megatron-core's examples/multimodal_dev found
# 2.551e-05 in float32 and 3.906e-03 in bf16 for theirs.
MERGER = {"hidden_size": 1152, "spatial_merge_size": 2, "out_hidden_size": 3584}
MERGER_BARS = {torch.float32: 2.6e-5, torch.bfloat16: 3.91e-3}


def samples_of(shape: str):
    return make_samples(KINDS, geometry_of(read_model(hybrid_hf_dir(shape))[1]), range(20, 300))


def by_part(gradients: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Our names of parameters, and gradients -> of each part one vector."""
    parts: dict[str, list[torch.Tensor]] = {}
    for name in sorted(gradients):
        parts.setdefault(part_of(name), []).append(gradients[name].flatten().double().cpu())
    return {part: torch.cat(vectors) for part, vectors in parts.items()}


def of_reference(model, shape: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """(logits of all samples, gradients of each part of the mean loss), sample by sample."""
    model.zero_grad()
    samples = samples_of(shape)
    logits = torch.cat([reference_logits(model, sample).detach().float() for sample in samples])
    count = sum(int(sample.loss_mask[1:].sum()) for sample in samples)
    for sample in samples:
        (reference_losses(model, sample).float().sum() / count).backward()
    found = {name: param.grad for name, param in model.named_parameters()}
    table = rules(read_model(hybrid_hf_dir(shape))[1])
    return logits, by_part({rule.ours: rule.packing.fuse([found[name] for name in rule.hf], 1) for rule in table})


def of_ours(model, shape: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the losses of a packed bin."""
    samples = samples_of(shape)
    batch = make_micro_batch(samples, geometry_of(model.shape), SEQ_LEN).to(model.mesh.device)
    count = sum(len(sample.input_ids) for sample in samples)
    with torch.no_grad():
        logits = model.hidden_states(batch)[:count, 0] @ model.language.output_weight.t()
    model.zero_grad()
    model(batch).mean().backward()
    return logits, by_part({name: param.grad for name, param in global_names(model)})


def rounded(model) -> torch.nn.Module:
    """The reference in bf16, but for what is float32 in a published model's computation too."""
    for name, param in model.named_parameters():
        if not name.endswith(EXACT):
            param.data = param.data.bfloat16()
    return model


def check_bf16(shape: str, build: Callable) -> None:
    """Logits and the gradient of each part at most two yardsticks from transformers in float32."""
    truth, exact = of_reference(load_reference(hybrid_hf_dir(shape)), shape)
    theirs, their_gradients = of_reference(rounded(load_reference(hybrid_hf_dir(shape))), shape)
    with single_rank() as mesh:
        ours, gradients = of_ours(build(mesh), shape)
    errors = {"logits": (relative(ours, truth), relative(theirs, truth))}
    errors |= {part: (relative(gradients[part], exact[part]), relative(their_gradients[part], exact[part]))
               for part in exact}  # fmt: skip
    shown = ", ".join(f"{name} {ours:.2e} (transformers bf16 {theirs:.2e})" for name, (ours, theirs) in errors.items())
    print(f"\n{shape}, relative to float32: {shown}")
    assert len(errors) == 4
    for name, (mine, yardstick) in errors.items():
        assert mine <= YARDSTICKS * yardstick, name


@pytest.mark.parametrize("shape", ["second", full("third")])
def test_plain_modules_in_bf16(shape):
    check_bf16(shape, lambda mesh: build_tiny(hybrid_hf_dir(shape), mesh, SEQ_LEN, torch.bfloat16))


@requires_gpus(1)
@pytest.mark.parametrize("modules", ON_CUDA)
@pytest.mark.parametrize("shape", ["second", "third"])
def test_a_set_of_modules_in_bf16(shape, modules):
    """The heads of the third shape are those of the kernels, the second goes the plain way."""

    def build(mesh) -> Qwen3VLModel:
        model = build_tiny(hybrid_hf_dir(shape), mesh, SEQ_LEN, torch.bfloat16, modules=modules)
        like = torch.empty(0, dtype=torch.bfloat16, device=mesh.device)
        is_hopper = torch.cuda.get_device_capability()[0] == 9
        delta = next(part for part in model.shape.language.mixers if isinstance(part, DeltaNet))
        heads = DeltaHeads(delta.key_heads, delta.value_heads, delta.head_dim)
        assert kernels_fit(like, heads) is (shape == "third" and is_hopper and modules != "portable")
        return model

    check_bf16(shape, build)


def merger_distances(modules, dtype: torch.dtype, mesh) -> tuple[float, float]:
    """64 patches -> (16, 3584) by the same weights: the largest difference of our merger from transformers', and of
    transformers' from itself in float32."""
    from megatron.core.process_groups_config import ProcessGroupCollection
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5VisionConfig, Qwen3_5VisionPatchMerger

    from trainer.contract.parallel import ParallelConfig
    from trainer.parts.vision.module import PatchMerger, vision_config

    torch.manual_seed(0)
    theirs = Qwen3_5VisionPatchMerger(Qwen3_5VisionConfig(**MERGER)).to(mesh.device, dtype)
    shape = VisionShape(
        **MERGER, num_layers=1, num_heads=16, intermediate_size=4304, patch_size=16, temporal_patch_size=2,
        num_positions=2304, activation="gelu_pytorch_tanh", deepstack_layers=(), rope_theta=10_000.0,
    )  # fmt: skip
    groups = ProcessGroupCollection(tp=mesh.alone, cp=mesh.alone, pp=mesh.alone)
    config = vision_config(shape, ParallelConfig(), dtype)
    ours = PatchMerger(config, shape, modules, groups, norm_after=False).to(mesh.device)
    weights = dict(theirs.named_parameters())
    with torch.no_grad():
        for name, param in ours.named_parameters():
            param.copy_(weights.pop(name))
        assert not weights
        patches = torch.randn(64, MERGER["hidden_size"]).to(mesh.device, dtype)
        expected, found = theirs(patches).float(), ours(patches[:, None]).float()
        exact = theirs.float()(patches.float())
    return float((found - expected).abs().max()), float((expected - exact).abs().max())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_merger_of_plain_modules(dtype):
    with single_rank() as mesh:
        found, own = merger_distances(TorchModules(), dtype, mesh)
    assert found <= (1e-6 if dtype is torch.float32 else YARDSTICKS * own)


_MERGER = """
import torch
from tests.helpers.single_rank import single_rank
from tests.parity.test_qwen3_5_vl_gpu import merger_distances
from trainer.layers.modules.choice import choose_modules
with single_rank() as mesh:
    torch.backends.cuda.matmul.allow_tf32 = False
    print("distances", *merger_distances(choose_modules("engine", mesh.device), getattr(torch, "{dtype}"), mesh))
"""


@requires_gpus(1)
@requires_engine
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_merger_of_transformer_engine(dtype):
    """In a process of its own, whose cuBLAS has no tf32: Transformer Engine takes it for float32 products (3.4e-4)."""
    code = _MERGER.format(dtype=str(dtype).removeprefix("torch."))
    environment = {**os.environ, "NVIDIA_TF32_OVERRIDE": "0"}
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    found, own = map(float, done.stdout.rpartition("distances")[2].split())
    print(f"\nmerger in {dtype}: {found:.3e} from transformers', bar {MERGER_BARS[dtype]:.2e}; its own {own:.3e}")
    assert found <= MERGER_BARS[dtype]
