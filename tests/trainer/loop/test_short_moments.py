"""Moments in bfloat16 between two updates: how far the weights come from those of float32, what is kept and taken."""

import copy

import pytest
import torch
from pydantic import ValidationError

from dataset_builders.contracts.manifest import fingerprint
from dataset_builders.contracts.strict import EVERY_FIELD
from tests.helpers.hardware import requires_gpus
from tests.helpers.run_dir import OPTIM, changed, write_job
from tests.helpers.world import train_rank
from trainer.contract.run import OptimConfig, RunConfig
from trainer.loop import optim as loop_optim
from trainer.loop.optim import MOMENTS, PiecewiseAdam

pytestmark = pytest.mark.promise(
    "With AdamW's moments in bfloat16, weights are after 20 updates less than 4% of their way off, and a "
    "training resumes to the bit."
)

UPDATES = 20
SHORT = OPTIM.model_copy(update={"moments": "bfloat16"})
# A moment stands still where it is off by 2^-9 / (1 - decay): 2% of the first, 3.9% of the second, of which an update
# takes the root. Roundings that went one way at every number and update would come to this.
BOUND = 0.02 + 0.039 / 2


def updated(kind, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor, torch.optim.Optimizer]:
    """Two parameters in one vector, before and after some updates by gradients that have a direction and noise."""
    draw = torch.Generator().manual_seed(0)
    params = [torch.randn(size, generator=draw).to(device).requires_grad_() for size in (1000, 37)]
    before = torch.cat([param.detach().clone() for param in params])
    settings = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    adam = kind([{"params": [params[0]], **settings}, {"params": [params[1]], **settings}])
    direction = [torch.randn(param.shape, generator=draw) for param in params]
    for _ in range(UPDATES):
        for param, mean in zip(params, direction):
            param.grad = (mean + torch.randn(param.shape, generator=draw)).to(device)
        adam.step()
    return before, torch.cat([param.detach() for param in params]), adam


def check_close_to_float32(device: str) -> None:
    before, exact, _ = updated(torch.optim.AdamW, device)
    _, short, adam = updated(PiecewiseAdam, device)
    off = float((short - exact).norm() / (exact - before).norm())
    print(f"\nafter {UPDATES} updates: {off:.1e} of the way off, bound {BOUND:.1e}")
    assert 0 < off < BOUND
    for state in adam.state.values():
        assert {state[name].dtype for name in MOMENTS} == {torch.bfloat16}


def test_weights_stay_near_those_of_float32_moments():
    check_close_to_float32("cpu")


@requires_gpus(1)
def test_weights_stay_near_those_of_float32_moments_on_a_gpu():
    check_close_to_float32("cuda")


def test_arithmetic_is_float32():
    """One update from moments of zero rounds nothing: it is torch's own."""
    adams = [kind([{"params": [torch.ones(5).requires_grad_()], "betas": (0.9, 0.95), "eps": 1e-8, "lr": 1e-3,
                    "weight_decay": 0.1}]) for kind in (torch.optim.AdamW, PiecewiseAdam)]  # fmt: skip
    for adam in adams:
        adam.param_groups[0]["params"][0].grad = torch.linspace(-1, 1, 5)
        adam.step()
    exact, short = (adam.param_groups[0]["params"][0] for adam in adams)
    assert torch.allclose(exact, short, rtol=1e-6, atol=0)


def test_pieces_are_small_and_change_no_bit(monkeypatch):
    _, whole, _ = updated(PiecewiseAdam)
    sizes, update = [], PiecewiseAdam._update

    def counting(self, group, pieces):
        sizes.append(sum(part.stop - part.start for _, part in pieces))
        return update(self, group, pieces)

    monkeypatch.setattr(loop_optim, "PIECE", 300)
    monkeypatch.setattr(PiecewiseAdam, "_update", counting)
    _, pieced, _ = updated(PiecewiseAdam)
    assert torch.equal(pieced, whole)
    assert sizes == [300, 300, 300, 100, 37] * UPDATES


def test_loaded_moments_are_the_same_bits():
    _, _, adam = updated(PiecewiseAdam)
    other = PiecewiseAdam([{**group} for group in adam.param_groups])
    other.load_state_dict(copy.deepcopy(adam.state_dict()))
    for param, state in adam.state.items():
        assert all(torch.equal(other.state[param][name], state[name]) for name in (*MOMENTS, "step"))
        assert other.state[param]["exp_avg"].dtype is torch.bfloat16
    assert [group["step"] for group in other.param_groups] == [UPDATES, UPDATES]


def test_a_training_without_the_setting_keeps_its_identity():
    before = {"lr": 3e-3, "min_lr_fraction": 0.1, "warmup_steps": 2, "weight_decay": 0.1, "adam_beta1": 0.9}
    before |= {"adam_beta2": 0.95, "adam_eps": 1e-8, "clip_grad_norm": 1.0}
    assert OPTIM.model_dump(mode="json") == before
    assert fingerprint(SHORT.model_dump(mode="json")) != fingerprint(before)
    assert OPTIM.model_dump(context=EVERY_FIELD)["moments"] == "float32"
    assert OptimConfig.model_validate_json(SHORT.model_dump_json()) == SHORT


@pytest.mark.parametrize("name", ["adam_beta1", "adam_beta2"])
def test_a_decay_that_bfloat16_cannot_follow_is_refused(name):
    with pytest.raises(ValidationError, match=f"{name}=0.99 changes a moment by less than moments=bfloat16 can hold"):
        OptimConfig(**{**SHORT.model_dump(), name: 0.99})
    OptimConfig(**{**SHORT.model_dump(), name: 0.98})
    OptimConfig(**{**OPTIM.model_dump(), name: 0.999})


def step_memory(run: RunConfig) -> int:
    """Bytes that a GPU's last update takes beside what is there before it."""
    taken, step = [], PiecewiseAdam.step

    def measured(self, closure=None):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step(self, closure)
        taken.append(torch.cuda.max_memory_allocated() - before)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PiecewiseAdam, "step", measured)
        train_rank(run.output_dir, 0, save=False)
    return taken[-1]


@requires_gpus(1)
def test_an_update_on_a_gpu_takes_a_piece_at_a_time(tmp_path, monkeypatch):
    """Moments in float32 of one piece, and rounding of the allocator; all of them at once would be over 1 MB."""
    monkeypatch.setattr(loop_optim, "PIECE", 2**14)
    run = write_job(tmp_path, num_steps=4, shape="hybrid-third", optim=SHORT)
    run = changed(run, train=run.train.model_copy(update={"precision": "bfloat16"}))
    (run.output_dir / "run.json").write_text(run.model_dump_json())
    assert step_memory(run) < 2**19
