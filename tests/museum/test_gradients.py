"""Losses, gradients and the updates that the optimizer makes of them."""

import dataclasses
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.transformer.transformer_config import TransformerConfig

from tests.helpers.run_dir import write_job
from tests.helpers.single_rank import single_rank
from tests.museum.fault import fault_seen
from tests.trainer.loop.test_optim import NUM_STEPS, TRAIN, Toy, give_gradients, wrap
from trainer.contract.run import OptimConfig, PartConfig, TrainConfig
from trainer.data.reader import prefetch
from trainer.families.qwen3_vl.family import FAMILY
from trainer.layers.vocabulary import _OutputLoss
from trainer.loop.loss import Totals, loss_of
from trainer.loop.optim import build_optimizer, clip_and_update, set_learning_rate
from trainer.loop.set_up import Trainer, set_up
from trainer.loop.step import run_micro_batches
from trainer.model.family import freeze
from trainer.parts.delta.module import Decay

pytestmark = pytest.mark.promise(
    "athanor has none of the museum's published faults, and each test fails where the fault is put in."
)

# Same rates, same decays: the groups of two parts then agree in all numbers.
ALIKE = TRAIN.model_copy(update={"vision": PartConfig(), "merger": PartConfig(), "language": PartConfig()})
CLIPPED = ALIKE.model_copy(update={"optim": ALIKE.optim.model_copy(update={"clip_grad_norm": 0.5})})


@pytest.fixture(scope="module")
def mesh():
    with single_rank() as mesh:
        yield mesh


@pytest.fixture(scope="module")
def trainer(mesh, tmp_path_factory) -> Trainer:
    """Return a text model that is ready for its first step. Its bins have unequal numbers of loss tokens."""
    return set_up(write_job(tmp_path_factory.mktemp("job"), num_steps=9, shape="text-first"), mesh)


def gradients(trainer: Trainer, bins: list[int]) -> torch.Tensor:
    """Return the gradients of all parameters for one step over some bins, as the optimizer gets them."""
    for chunk in trainer.chunks:
        chunk.zero_grad_buffer()
    batches = prefetch(trainer.order.reader, iter(bins), 1, pin=False)
    run_micro_batches(trainer.chunks, batches, len(bins), trainer.context)
    return torch.cat([param.main_grad.flatten() for param in trainer.chunks[0].parameters()])


def test_ranks_add_sums_and_not_means(trainer, monkeypatch):
    """Each rank divided by its own number of loss tokens, so tokens of a rank with few of them counted more.

    https://github.com/PrimeIntellect-ai/prime-rl/pull/2562 https://github.com/NVIDIA/Megatron-LM/issues/906
    """

    monkeypatch.setattr("torch.distributed.ProcessGroup.size", lambda group: 2)

    def check(config: TransformerConfig) -> None:
        """Check that the gradients of two ranks are added unchanged, and the sum is divided by the tokens of both."""
        chunk = DistributedDataParallel(config, DistributedDataParallelConfig(), Toy())
        assert {buffer.gradient_scaling_factor for buffer in chunk.buffers} == {1.0}

    config = trainer.chunks[0].module.config
    check(config)
    with fault_seen():
        check(dataclasses.replace(config, calculate_per_token_loss=False))


def test_the_loss_is_summed_in_float32(mesh):
    """The cross entropy of bfloat16 logits was bfloat16 as well, where a loss of 36 has steps of a quarter.

    https://github.com/Modalities/modalities/pull/464 https://github.com/google-deepmind/optax/issues/1020
    """
    generator = torch.Generator().manual_seed(1)
    hidden, weight = (torch.randn(size, 64, generator=generator).bfloat16() for size in (40, 300))
    labels = torch.randint(300, (40,), generator=generator)
    exact = F.cross_entropy((hidden @ weight.t()).double(), labels, reduction="none")

    def check(losses: torch.Tensor) -> None:
        torch.testing.assert_close(losses.double(), exact, rtol=0, atol=1e-4)

    check(_OutputLoss.apply(hidden, weight, labels, mesh.groups.tp, False))
    with fault_seen():
        check(F.cross_entropy(hidden @ weight.t(), labels, reduction="none"))


def logged_loss(trainer: Trainer) -> float:
    """Return the loss that is logged for a step over two bins."""
    context = dataclasses.replace(trainer.context, totals=Totals.zero(trainer.mesh.device))
    batches = prefetch(trainer.order.reader, iter([0, 1]), 1, pin=False)
    run_micro_batches(trainer.chunks, batches, 2, context, forward_only=True)
    total, tokens = context.totals.over_ranks(trainer.mesh)[:2].tolist()
    return total / tokens


def test_the_logged_loss_is_the_one_that_is_minimised(trainer, monkeypatch):
    """The logged loss was a mean of the micro batches' means, but the optimised loss was the mean of all tokens.

    https://github.com/NovaSky-AI/SkyRL/pull/1893
    """
    params = list(trainer.chunks[0].parameters())
    gradient = gradients(trainer, [0, 1])
    direction = gradient / gradient.norm()

    def check() -> None:
        """Check that the logged loss grows along the gradient by the gradient's length."""
        losses = []
        for shift in (0.01, -0.02):
            with torch.no_grad():
                for param, part in zip(params, direction.split([param.numel() for param in params]), strict=True):
                    param += shift * part.view_as(param)
            losses.append(logged_loss(trainer))
        with torch.no_grad():
            for param, part in zip(params, direction.split([param.numel() for param in params]), strict=True):
                param += 0.01 * part.view_as(param)
        assert (losses[0] - losses[1]) / 0.02 == pytest.approx(float(gradient.norm()), rel=2e-3)

    check()

    def logs_means(losses: torch.Tensor, lengths: object = None):
        total, count, _ = loss_of(losses)
        mean = losses.detach().mean().double()
        return total, count, {"loss_and_tokens": torch.stack([mean, torch.ones_like(mean)])}

    monkeypatch.setattr("trainer.loop.step.loss_of", logs_means)
    with fault_seen():
        check()


def rates(step_of: Callable[[int], int]) -> list[float]:
    """Return the learning rates of the optimizer's groups at each of the updates."""
    optimizer = build_optimizer([wrap(Toy())], ALIKE, torch.float32, FAMILY)
    taken = []
    for update in range(NUM_STEPS):
        set_learning_rate(optimizer, step_of(update), ALIKE.optim, NUM_STEPS)
        taken.append({group["lr"] for group in optimizer.param_groups})
    return [rate for (rate,) in taken]


def test_the_learning_rate_counts_updates(mesh):
    """The learning-rate schedule advanced with every micro batch, or once per process, and ended before half of the
    training.

    https://github.com/huggingface/accelerate/issues/963 https://github.com/huggingface/transformers/pull/24088
    """

    def check(taken: list[float]) -> None:
        optim = ALIKE.optim
        assert taken.index(max(taken)) in (optim.warmup_steps - 1, optim.warmup_steps)
        assert taken[-1] == pytest.approx(optim.lr * optim.min_lr_fraction) and taken[-1] < taken[-2]

    check(rates(lambda update: update))
    with fault_seen():
        check(rates(lambda update: 4 * update))  # 4 micro batches per step


def test_one_norm_clips_all_groups(mesh):
    """Gradients were clipped group by group, or by norms of parts, so the parts' gradients lost their proportions.

    https://github.com/huggingface/transformers/pull/614 https://github.com/NVIDIA-NeMo/Automodel/issues/3816
    """
    chunk = wrap(Toy())
    optimizer = build_optimizer([chunk], CLIPPED, torch.float32, FAMILY)
    grads = give_gradients(chunk, 0)
    whole = torch.nn.utils.get_total_norm(list(grads.values())).item()
    ours, *by_part = clip_and_update(optimizer, torch.device("cpu")).sqrt().tolist()

    def check(norm: float) -> None:
        assert norm == pytest.approx(whole, rel=1e-6)

    check(ours)
    factors = {name: chunk.module.get_parameter(name).main_grad.norm() / grad.norm() for name, grad in grads.items()}
    assert all(factor == pytest.approx(0.5 / whole, rel=1e-4) for factor in factors.values())
    with fault_seen():
        check(max(by_part))


def moved_by_decay(config: TrainConfig, frozen: tuple[str, ...], *, are_left_out: bool) -> set[str]:
    """Return the parameters that some updates without any gradient change. `frozen` parts are left out, or only get no
    gradient."""
    module = Toy()
    parts = {part: PartConfig(frozen=True) for part in frozen} if are_left_out else {}
    config = config.model_copy(update=parts)
    freeze(module, config, FAMILY)
    before = {name: param.detach().clone() for name, param in module.named_parameters()}
    optimizer = build_optimizer([wrap(module)], config, torch.float32, FAMILY)
    for step in range(3):
        set_learning_rate(optimizer, step, config.optim, NUM_STEPS)
        clip_and_update(optimizer, torch.device("cpu"))
    return {name for name, param in module.named_parameters() if not torch.equal(param, before[name])}


def test_frozen_weights_do_not_decay(mesh):
    """Weights were frozen by gradients of zero, but weight decay continued to shrink them.

    https://github.com/huggingface/diffusers/issues/1009
    """

    def check(moved: set[str]) -> None:
        assert {name.partition(".")[0] for name in moved} == {"language"}

    parts = ("vision", "merger")
    check(moved_by_decay(ALIKE, parts, are_left_out=True))
    with fault_seen():
        check(moved_by_decay(ALIKE, parts, are_left_out=False))


def test_small_updates_of_bfloat16_weights_add_up(mesh):
    """Weights were bfloat16 without a float32 copy, so every update below half a step of their rounding was lost.

    https://github.com/NVIDIA-NeMo/Automodel/pull/3444 https://github.com/vllm-project/speculators/pull/765
    """
    # The weight of a norm is one. 40 of these updates make two steps of bfloat16, but a single update is lost.
    steps, rate = 40, 2e-4
    optim = OptimConfig(lr=rate, min_lr_fraction=1.0, warmup_steps=0, weight_decay=0.0)
    config = ALIKE.model_copy(update={"optim": optim, "precision": "bfloat16"})

    def check(module: Toy) -> None:
        assert (module.language.norm.weight < 1 - 0.5 * steps * rate).all()

    ours = Toy().bfloat16()
    chunk = wrap(ours)
    optimizer = build_optimizer([chunk], config, torch.bfloat16, FAMILY)
    for step in range(steps):
        set_learning_rate(optimizer, step, config.optim, steps)
        for param in ours.parameters():
            param.main_grad.fill_(1.0)
        clip_and_update(optimizer, torch.device("cpu"))
    check(ours)
    theirs = Toy().bfloat16()
    adam = torch.optim.AdamW(theirs.parameters(), lr=rate, weight_decay=0.0)
    for param in theirs.parameters():
        param.grad = torch.ones_like(param)
    for _ in range(steps):
        adam.step()
    with fault_seen():
        check(theirs)


def test_the_decay_of_the_delta_rule_stays_float32(mesh):
    """The logarithm of the decay in the gated delta rule was cast to bfloat16, although the models keep it in float32.

    https://github.com/vllm-project/vllm/pull/37810 https://github.com/sgl-project/sglang/pull/19961
    """
    exact = torch.tensor([-1.003, 2.017, 0.3021])
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1, params_dtype=torch.bfloat16)

    def check(decay: Decay) -> None:
        decay.a_log.data.copy_(exact)
        assert torch.equal(decay.a_log.float(), exact)

    check(Decay(config, 3))
    with fault_seen():
        check(Decay(config, 3).bfloat16())
