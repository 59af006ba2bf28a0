"""Language layers replayed as CUDA graphs against the same layers launched kernel by kernel: the same bits."""

import pytest
import torch
from torch.testing import assert_close

from tests.equivalence.test_layouts_gpu import job
from tests.helpers.gpu_world import run_worlds
from tests.helpers.hardware import requires_engine, requires_gpus
from tests.helpers.run_dir import changed
from tests.helpers.world import World
from trainer.contract.adapter import AdapterConfig
from trainer.contract.run import PartConfig, RunConfig

pytestmark = pytest.mark.promise(
    "Kernels on a GPU give plain torch's numbers but for rounding; layers in CUDA graphs give the bits of "
    "single launches."
)

SAME = ("loss", "heldout_loss", "mtp_loss", "grad_norm", "vision_grad_norm", "merger_grad_norm", "language_grad_norm")
FROZEN = {part: {part: PartConfig(frozen=True)} for part in ("vision", "language")}


def adapters(kind: str, base: str = "train_precision") -> dict[str, AdapterConfig]:
    return {"adapter": AdapterConfig(kind=kind, rank=4, alpha=8, base=base)}


# Each with graphs and without: layout, shape of the model, what of the training differs, GPUs.
CASES = {
    "all": ({}, "first", {}, 1),
    "deep": ({}, "deep", {}, 1),
    "selective": ({"recompute": "selective"}, "first", {}, 1),
    "frozen language": ({}, "first", FROZEN["language"], 1),
    "frozen vision": ({}, "first", FROZEN["vision"], 1),
    "tp2": ({"tp": 2}, "first", {}, 2),
    "tp2-sp": ({"tp": 2, "sequence_parallel": True}, "first", {}, 2),
    "cp2": ({"cp": 2}, "first", {}, 2),
    "dp2": ({}, "first", {}, 2),
    "delta": ({}, "hybrid-third", {}, 1),
    "delta wide": ({}, "hybrid-wide", {}, 1),
    # Two queries share a key: FlashAttention 4 adds the gradients of a key over its queries in no fixed order, and the
    # sum of three depends on the order.
    "delta plain rule": ({}, "hybrid-first", {}, 1),
    "delta selective": ({"recompute": "selective"}, "hybrid-third", {}, 1),
    "delta frozen vision": ({}, "hybrid-third", FROZEN["vision"], 1),
    "delta tp2-sp": ({"tp": 2, "sequence_parallel": True}, "hybrid-third", {}, 2),
    "delta cp2": ({"cp": 2}, "hybrid-third", {}, 2),
    "lora": ({}, "first", adapters("lora"), 1),
    "lora beside float8": ({}, "first", adapters("lora", "float8"), 1),
    "dora selective": ({"recompute": "selective"}, "first", adapters("dora"), 1),
    "lora tp2-sp": ({"tp": 2, "sequence_parallel": True}, "first", adapters("lora"), 2),
    "delta lora": ({}, "hybrid-third", adapters("lora"), 1),
    "mtp": ({}, "mtp-first", {"mtp_loss_scaling_factor": 0.3}, 1),
    "experts": ({}, "experts-listed", {}, 1),
    "experts shared": ({}, "experts-shared", {}, 1),
    "experts lora": ({}, "experts-many", adapters("lora"), 1),
    "experts tp2-sp": ({"tp": 2, "sequence_parallel": True}, "experts-listed", {}, 2),
    "experts ep2": ({"ep": 2}, "experts-shared", {}, 2),
    "experts ep2 lora": ({"ep": 2, "recompute": "selective"}, "experts-many", adapters("lora"), 2),
    "experts ep2 tp2-sp": ({"ep": 2, "tp": 2, "sequence_parallel": True}, "experts-listed", {}, 2),
    "pp2": ({"pp": 2}, "first", {}, 2),
    "pp2 dealt": ({"pp": 2, "vision": "dealt"}, "first", {}, 2),
    "pp2 experts": ({"pp": 2}, "experts-shared", {}, 2),
}
AGAIN = ("delta", "experts", "all")  # each runs twice without graphs
GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0


def variant(root, name: str, cuda_graphs: bool, ending: str = "") -> RunConfig:
    layout, shape, train, _ = CASES[name]
    run = job(root, f"{name}-{cuda_graphs}{ending}", layout, shape)
    return changed(run, train=run.train.model_copy(update=train), cuda_graphs=cuda_graphs)


@pytest.fixture(scope="module")
def worlds(tmp_path_factory, request):
    root = tmp_path_factory.mktemp("graphs")
    chosen = {item.callspec.params.get("name") for item in request.session.items if hasattr(item, "callspec")}
    cases = {name: case[3] for name, case in CASES.items() if name in chosen and case[3] <= GPUS}
    cases |= dict.fromkeys(AGAIN, 1)
    both = {(name, graphs): (variant(root, name, graphs), n) for name, n in cases.items() for graphs in (True, False)}
    again = {f"{name} again": (variant(root, name, False, "-again"), 1) for name in AGAIN}
    return run_worlds(root, {**both, **again})


def check_same(ours: World | str, theirs: World | str) -> None:
    assert isinstance(ours, World) and isinstance(theirs, World), (ours, theirs)
    for a, b in zip(ours.rows, theirs.rows, strict=True):
        for name in SAME:
            assert getattr(a, name) == getattr(b, name), (a.step, name)


@requires_gpus(1)
@pytest.mark.parametrize("name", CASES)
def test_graphs_give_the_bits_of_layers_launched_one_by_one(name, worlds):
    if CASES[name][3] > GPUS:
        pytest.skip(f"needs {CASES[name][3]} GPUs, this machine has {GPUS}")
    plain = next(plain for plain in AGAIN if name.startswith(plain) or plain == "all")
    check_same(worlds[f"{plain} again"], worlds[plain, False])  # or nothing could be said of the others
    check_same(worlds[name, True], worlds[name, False])


@requires_gpus(1)
@requires_engine
@pytest.mark.parametrize(("heads", "groups", "dim", "causal"), [(16, 8, 128, True), (16, 16, 64, False)])
def test_attention_called_directly_gives_what_transformer_engine_s_own_way_gives(heads, groups, dim, causal):
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.transformer_config import TransformerConfig

    from trainer.layers.modules.engine import PackedAttention
    from trainer.layers.segments import PackedSegments

    torch.manual_seed(0)
    like = {"device": "cuda", "dtype": torch.bfloat16}
    config = TransformerConfig(
        num_layers=1,
        hidden_size=heads * dim,
        num_attention_heads=heads,
        num_query_groups=groups,
        kv_channels=dim,
        attention_dropout=0.0,
        bf16=True,
        params_dtype=torch.bfloat16,
    )
    mask = AttnMaskType.causal if causal else AttnMaskType.no_mask
    attention = PackedAttention(
        config=config,
        layer_number=1,
        attn_mask_type=mask,
        attention_type="self",
        pg_collection=ProcessGroupCollection(tp=None, cp=None),
    )
    q, k = (torch.randn(512, n, dim, **like) for n in (heads, groups))
    v = torch.randn(512, 2 * groups, dim, **like)[:, :groups]  # as a part of a projection
    segments = PackedSegments.of(torch.tensor([0, 70, 75, 400, 512], dtype=torch.int32, device="cuda"), 325)

    def once() -> list[torch.Tensor]:
        inputs = [x.detach().requires_grad_() for x in (q, k, v)]
        assert not inputs[2].is_contiguous()
        out = attention(*inputs, None, attn_mask_type=mask, packed_seq_params=segments)
        return [out, *torch.autograd.grad(out, inputs, torch.ones_like(out))]

    theirs, ours = once(), once()
    assert attention._uses_cudnn
    assert torch.equal(ours[0], theirs[0])
    for mine, own in zip(ours[1:], theirs[1:]):
        assert_close(mine, own)  # cuDNN adds the queries' gradients up in no fixed order
