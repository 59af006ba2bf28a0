"""The learning rate as a function of the step; groups by part against torch's AdamW; gradient norms by part."""

import copy

import pytest
import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.transformer.transformer_config import TransformerConfig

from tests.helpers.single_rank import single_rank
from trainer.contract.run import OptimConfig, PartConfig, TrainConfig
from trainer.families.qwen3_vl.family import FAMILY, part_of
from trainer.loop.optim import build_optimizer, clip_and_update, learning_rate, set_learning_rate, trained_parts
from trainer.model.family import freeze

CONFIG = OptimConfig(lr=1.0, min_lr_fraction=0.1, warmup_steps=4, weight_decay=0)
NUM_STEPS = 6
TRAIN = TrainConfig(
    seed=1,
    num_steps=NUM_STEPS,
    global_batch_size=1,
    precision="float32",
    heldout_interval=1,
    optim=OptimConfig(lr=3e-2, min_lr_fraction=0.1, warmup_steps=2, weight_decay=0.3),
    vision=PartConfig(lr=1e-2),
    merger=PartConfig(lr=7e-2, weight_decay=0.05),
    language=PartConfig(weight_decay=0.0),
)
PEAKS = {"vision": 1e-2, "merger": 7e-2, "language": 3e-2}
DECAYS = {"vision": 0.3, "merger": 0.05, "language": 0.0}


def test_warmup_peak_middle_and_end():
    rates = [learning_rate(step, CONFIG, 15) for step in range(15)]
    assert rates[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert rates[9] == pytest.approx(0.55)  # half way down
    assert rates[-1] == pytest.approx(0.1)
    assert rates[4:] == sorted(rates[4:], reverse=True)


def test_without_warmup_the_first_step_is_at_the_peak():
    config = CONFIG.model_copy(update={"warmup_steps": 0})
    assert learning_rate(0, config, 10) == 1.0
    assert learning_rate(0, config, 1) == 1.0


@pytest.fixture(scope="module", autouse=True)
def mesh():
    with single_rank() as mesh:
        yield mesh


class Layer(torch.nn.Module):
    """A matrix, a bias, a norm's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(5, 3)
        self.norm = torch.nn.LayerNorm(7)


class Toy(torch.nn.Module):
    """The parts, with names like the model's."""

    def __init__(self) -> None:
        super().__init__()
        self.vision = Layer()
        self.vision.merger = Layer()
        self.vision.deepstack_mergers = torch.nn.ModuleList([Layer()])
        self.language = Layer()


def wrap(module: torch.nn.Module) -> DistributedDataParallel:
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1, calculate_per_token_loss=True)
    return DistributedDataParallel(config, DistributedDataParallelConfig(use_distributed_optimizer=True), module)


def give_gradients(chunk: DistributedDataParallel, step: int) -> dict[str, torch.Tensor]:
    """Put random gradients where backward leaves them; the norm of their whole is over the clipping norm."""
    generator = torch.Generator().manual_seed(step)
    grads = {}
    for name, param in chunk.module.named_parameters():
        if param.requires_grad:
            grads[name] = torch.randn(param.shape, generator=generator)
            param.main_grad.copy_(grads[name])
    return grads


def reference_groups(module: torch.nn.Module) -> list[dict[str, object]]:
    """torch's groups, one a parameter, written by hand."""
    return [
        {
            "params": [param],
            "peak": PEAKS[part_of(name)],
            "weight_decay": 0.0 if "bias" in name or "norm" in name else DECAYS[part_of(name)],
        }
        for name, param in module.named_parameters()
    ]


@pytest.mark.parametrize("clip", [1e9, 0.5])
def test_rates_and_decays_by_part_give_the_bits_of_torch_adamw(clip, mesh):
    config = TRAIN.model_copy(update={"optim": TRAIN.optim.model_copy(update={"clip_grad_norm": clip})})
    torch.manual_seed(3)
    ours = Toy()
    theirs = copy.deepcopy(ours)
    chunk = wrap(ours)
    optimizer = build_optimizer([chunk], config, torch.float32, FAMILY)
    adam = torch.optim.AdamW(reference_groups(theirs), lr=0.0, betas=(0.9, 0.95), eps=1e-8)
    for step in range(NUM_STEPS):
        for group in adam.param_groups:
            group["lr"] = learning_rate(step, config.optim.model_copy(update={"lr": group["peak"]}), NUM_STEPS)
        grads = give_gradients(chunk, step)
        for name, param in theirs.named_parameters():
            param.grad = grads[name]
        norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), clip)
        adam.step()
        assert set_learning_rate(optimizer, step, config.optim, NUM_STEPS) == learning_rate(
            step, config.optim, NUM_STEPS
        )
        assert clip_and_update(optimizer, mesh.device)[0].sqrt().item() == pytest.approx(norm.item(), rel=1e-6)
        for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
            # Clipped, the factor has the rounding of two different sums in it.
            torch.testing.assert_close(a, b, rtol=0 if clip > 1 else 1e-6, atol=0 if clip > 1 else 1e-7, msg=name)


@pytest.mark.parametrize("frozen", [(), ("vision",), ("merger", "language")])
def test_gradient_norms_by_part(frozen, mesh):
    config = TRAIN.model_copy(update={part: PartConfig(frozen=True) for part in frozen})
    module = Toy()
    freeze(module, config, FAMILY)
    module.vision.merger.linear.weight.shared = True  # as a tied embedding's second copy: counted elsewhere
    chunk = wrap(module)
    optimizer = build_optimizer([chunk], config, torch.float32, FAMILY)
    grads = give_gradients(chunk, 0)
    whole, *squares = clip_and_update(optimizer, mesh.device).tolist()
    expected = {part: 0.0 for part in PEAKS if part not in frozen}
    for name, grad in grads.items():
        if name != "vision.merger.linear.weight":
            expected[part_of(name)] += grad.double().square().sum().item()
    assert dict(zip(trained_parts(optimizer), squares, strict=True)) == pytest.approx(expected, rel=1e-6)
    assert whole > TRAIN.optim.clip_grad_norm**2  # it clipped
    assert sum(squares) == pytest.approx(whole, rel=1e-6)


def test_chunks_of_a_virtual_pipeline_share_groups(mesh):
    chunks = [wrap(Toy()), wrap(Toy())]
    optimizer = build_optimizer(chunks, TRAIN, torch.float32, FAMILY)
    whole = [grad for chunk in chunks for grad in give_gradients(chunk, 0).values()]
    squares = clip_and_update(optimizer, mesh.device)
    assert len(optimizer.param_groups) == 6
    assert squares[1:].sum().item() == pytest.approx(sum(g.square().sum().item() for g in whole), rel=1e-6)
