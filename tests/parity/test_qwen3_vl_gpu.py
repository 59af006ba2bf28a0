"""On a GPU in bf16: each set of modules within transformers' own error. float32 is in test_plain_gpu.py.

The yardstick for bf16 is what bf16 costs transformers itself: the distance of its bf16 from its float32. Two
implementations that round at different places lie within twice that of each other, so ours may be at most that far
from the float32 truth.
"""

import pytest
import torch

from tests.helpers.bins import MIXED, TEXT_ONLY, make_samples
from tests.helpers.hardware import ON_CUDA, requires_engine, requires_gpus
from tests.helpers.reference import load_reference, random_hf_dir, reference_logits
from tests.helpers.run_dir import log_of, metrics_of, run_trainer, write_job
from tests.helpers.single_rank import build_tiny, single_rank
from trainer.data.micro_batch import geometry_of, make_micro_batch
from trainer.model.registry import read_model

pytestmark = pytest.mark.promise(
    "On GPUs each set of modules differs from float32, and each layout from one GPU, at most twice as much as "
    "transformers' bfloat16 from its float32."
)

SEQ_LEN = 128
# Tiny widths make bf16's rounding large and erratic; twice the yardstick is derived above, not fitted.
YARDSTICKS = 2.0


def relative(ours: torch.Tensor, truth: torch.Tensor) -> float:
    return float((ours.double().cpu() - truth.double().cpu()).norm() / truth.double().norm())


@requires_gpus(1)
@pytest.mark.parametrize("modules", ON_CUDA)
@pytest.mark.parametrize("shape", ["first", "second"])
def test_logits_in_bf16(shape, modules):
    reference = load_reference(random_hf_dir(shape))
    geometry = geometry_of(read_model(random_hf_dir(shape))[1])
    samples = make_samples(MIXED, geometry, range(20, 300))
    with torch.no_grad():
        truth = torch.cat([reference_logits(reference, sample) for sample in samples])
        reference = reference.bfloat16()
        short = torch.cat([reference_logits(reference, sample).float() for sample in samples])
    yardstick = relative(short, truth)
    with single_rank() as mesh:
        model = build_tiny(random_hf_dir(shape), mesh, SEQ_LEN, torch.bfloat16, modules=modules)
        batch = make_micro_batch(samples, geometry, SEQ_LEN).to(mesh.device)
        with torch.no_grad():
            logits = model.hidden_states(batch)[: len(truth), 0] @ model.language.output_weight.t()
        error = relative(logits, truth)
        print(f"\n{shape}, {modules}: logits, relative to float32: ours {error:.2e}, transformers bf16 {yardstick:.2e}")
        assert error <= YARDSTICKS * yardstick


@requires_gpus(1)
@pytest.mark.parametrize("modules", ON_CUDA)
def test_a_bin_without_an_image_gives_vision_a_zero_gradient(modules):
    with single_rank() as mesh:
        model = build_tiny(random_hf_dir("first"), mesh, SEQ_LEN, torch.bfloat16, modules=modules)
        geometry = geometry_of(model.shape)
        batch = make_micro_batch(make_samples([TEXT_ONLY], geometry, range(20, 300)), geometry, SEQ_LEN)
        model(batch.to(mesh.device)).sum().backward()
        assert all(p.grad is not None and not p.grad.any() for p in model.vision.parameters())
        assert model.language.embedding.weight.grad.any()


@requires_gpus(1)
def test_pixels_are_normalised_to_the_same_bits_as_on_a_cpu():
    values = torch.arange(256, dtype=torch.float32)
    for mean, std in ((0.5, 0.5), (0.48145466, 0.26862954), (0.406, 0.225)):
        offset, divisor = torch.tensor(mean) * 255, torch.tensor(std) * 255
        on_gpu = values.cuda().sub(offset.cuda()).div(divisor.cuda()).cpu()
        assert torch.equal(on_gpu, values.sub(offset).div(divisor))


@requires_gpus(1)
@pytest.mark.parametrize("precision", ["bfloat16", pytest.param("float8", marks=requires_engine)])
def test_training_in_a_low_precision_follows_float32(tmp_path, precision):
    run = write_job(tmp_path, num_steps=30)
    run = run.model_copy(update={"train": run.train.model_copy(update={"precision": precision})})
    assert run_trainer(run) == 0, log_of(run)
    rows = metrics_of(run)
    assert rows[-1].loss < 0.5 * rows[0].loss
    assert all(0 < r.vision_seconds + r.language_seconds + r.optimizer_seconds <= r.step_seconds * 1.05 for r in rows)
