"""The layouts on GPUs: bf16, Transformer Engine, NCCL, each against one GPU.

The yardstick is what bf16 costs transformers itself on the same bins: how far its bf16 losses and gradients lie from
its float32 ones. Two roundings of that size at different places lie within twice of it from each other. It applies to
every step: the weights themselves are float32 and move by what the gradients say.
"""

import functools
import shutil

import numpy as np
import pytest
import torch

from tests.equivalence import test_layouts
from tests.equivalence.test_layouts import CUT_VISION, DEALT, FULL, KINDS, SELECTIVE, SMOOTH, SP, STEPS, own
from tests.equivalence.test_unlike_ranks import CASES
from tests.equivalence.test_unlike_ranks import job as unlike_job
from tests.helpers.gpu_world import run_worlds
from tests.helpers.hardware import requires_engine, requires_gpus
from tests.helpers.reference import load_reference, reference_losses
from tests.helpers.run_dir import changed, make_bins, model_dir
from tests.helpers.world import World
from tests.parity.test_qwen3_5_vl_gpu import rounded
from trainer.contract.run import CheckpointConfig, RunConfig

pytestmark = pytest.mark.promise(
    "On GPUs each set of modules differs from float32, and each layout from one GPU, at most twice as much as "
    "transformers' bfloat16 from its float32."
)

YARDSTICKS = 2.0
# At SMOOTH's rate a difference of 0.5% in the norm of a tiny hybrid's gradient grew to 26% in three steps (CPU, bf16).
SLOW = SMOOTH.model_copy(update={"lr": 3e-4})
EP2 = {"ep": 2}
SAVED_AT = 3
TWO = {
    "alone-again": ({}, 1),
    "alone-full": (FULL, 1),
    "dp2": ({}, 2),
    "tp2": ({"tp": 2}, 2),
    "tp2-selective": ({"tp": 2, **SELECTIVE}, 2),
    "tp2-vision": ({"tp": 2, **CUT_VISION}, 2),
    "tp2-sp": ({"tp": 2, **SP}, 2),
    "tp2-sp-full": ({"tp": 2, **SP, **FULL}, 2),
    "pp2": ({"pp": 2}, 2),
    "pp2-first-3": ({"pp": 2, "first_pipeline_layers": 3}, 2),
    "pp2-full": ({"pp": 2, **FULL}, 2),
    "pp2-dealt": ({"pp": 2, **DEALT}, 2),
    "own-1+1": (own(1), 2),
    "pp2-dealt-full": ({"pp": 2, **DEALT, **FULL}, 2),
    "cp2": ({"cp": 2}, 2),
    "cp2-full": ({"cp": 2, **FULL}, 2),
    "fsdp2": ({"sharding": "fsdp"}, 2),
}
FOUR = {
    "dp4": ({}, 4),
    "tp2-cp2": ({"tp": 2, "cp": 2}, 4),
    "tp2-sp-cp2": ({"tp": 2, "cp": 2, **SP}, 4),
    "tp2-sp-pp2": ({"tp": 2, "pp": 2, **SP}, 4),
    "cp2-dp2": ({"cp": 2}, 4),
    "pp2-dp2": ({"pp": 2}, 4),
    "pp2-dp2-dealt": ({"pp": 2, **DEALT}, 4),
    "own-2+2-cp2": ({"cp": 2, **own(2)}, 4),
    "own-2+2-vision-tp2": ({"vision": {"ranks": 2, "tp": 2}}, 4),
    "tp2-sp-pp2-dealt": ({"tp": 2, "pp": 2, **SP, **DEALT}, 4),
    "fsdp4": ({"sharding": "fsdp"}, 4),
}
# name -> (layout, GPUS, shape): the other families, where their layers or ranks of experts differ.
OTHERS = {
    "hybrid-tp2-sp": ({"tp": 2, **SP}, 2, "hybrid-third"),
    "hybrid-cp2": ({"cp": 2}, 2, "hybrid-third"),
    "hybrid-pp2-dealt": ({"pp": 2, **DEALT}, 2, "hybrid-third"),
    "hybrid-own-1+1": (own(1), 2, "hybrid-third"),
    "hybrid-cp4": ({"cp": 4}, 4, "hybrid-deep"),
    "hybrid-tp2-sp-cp2": ({"tp": 2, "cp": 2, **SP}, 4, "hybrid-deep"),
    "experts-dp2": ({}, 2, "experts-listed"),
    "experts-ep2": (EP2, 2, "experts-listed"),
    "experts-ep2-tp2-sp": ({**EP2, "tp": 2, **SP}, 2, "experts-shared"),
    "experts-ep2-cp2-full": ({**EP2, "cp": 2, **FULL}, 2, "experts-many"),
    "experts-pp2-dealt": ({"pp": 2, **DEALT}, 2, "experts-listed"),
    "experts-own-1+1": (own(1), 2, "experts-shared"),
    "experts-ep4": ({"ep": 4}, 4, "experts-shared"),
    "experts-ep2-pp2": ({**EP2, "pp": 2}, 4, "experts-shared"),
    "experts-ep4-tp2-sp": ({"ep": 4, "tp": 2, **SP}, 4, "experts-listed"),
}
GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
LAYOUTS = {name: (*case, "first") for name, case in {**TWO, **FOUR}.items()}
LAYOUTS |= {"deep-vpp2": ({"pp": 2, "vpp": 2}, 2, "deep"), **OTHERS}
LAYOUTS = {name: case for name, case in LAYOUTS.items() if case[1] <= max(GPUS, 2)}
RESUMED = {"tp2": ({"tp": 2}, 2), "pp2": ({"pp": 2}, 2), "dp2": ({}, 2), "cp2": ({"cp": 2}, 2), "alone": ({}, 1)}


def job(root, name: str, layout: dict, shape: str = "first", save_interval: int = 1000):
    optim = SLOW if shape in {case[2] for case in OTHERS.values()} else SMOOTH
    bins = make_bins(shape, KINDS)
    run = test_layouts.job(root / shape, name, shape, layout, num_steps=STEPS, bins=bins, optim=optim)
    train = run.train.model_copy(update={"precision": "bfloat16"})
    return changed(run, train=train, checkpoint=CheckpointConfig(save_interval=save_interval, keep_last=5))


@pytest.fixture(scope="module")
def worlds(tmp_path_factory, request):
    """The layouts of the chosen tests, and one GPU for each of their shapes."""
    root = tmp_path_factory.mktemp("gpu")
    chosen = {item.callspec.params.get("name") for item in request.session.items if hasattr(item, "callspec")}
    jobs = {name: (job(root, name, *LAYOUTS[name][::2]), LAYOUTS[name][1]) for name in LAYOUTS if name in chosen}
    alone = {LAYOUTS[name][2] for name in jobs} | {"first"}
    return run_worlds(root, {shape: (job(root, f"alone-{shape}", {}, shape), 1) for shape in alone} | jobs)


@functools.cache
def yardstick_of(shape: str) -> dict[str, float]:
    """How far transformers' bf16 losses and gradients lie from its float32 ones, on the worse of two global batches.

    The losses of the loss tokens, mean absolute difference over the mean: no mean of them can be further off. The
    gradient of each part, length of the difference over the length: no norm of it can be further off.
    """
    bins = make_bins(shape, KINDS)
    batches = [[s for number in range(first, first + 4) for s in bins[number]] for first in (0, 4)]
    exact, short = load_reference(model_dir(shape)).cuda(), rounded(load_reference(model_dir(shape)).cuda())
    found = [_errors(_losses_and_gradients(exact, b), _losses_and_gradients(short, b)) for b in batches]
    return {name: max(errors[name] for errors in found) for name in found[0]}


def _losses_and_gradients(model, samples) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad()
    count = sum(int(sample.loss_mask[1:].sum()) for sample in samples)
    losses = []
    for sample in samples:
        losses.append(reference_losses(model, sample).float())
        (losses[-1].sum() / count).backward()
    parts: dict[str, list[torch.Tensor]] = {"vision": [], "merger": [], "language": []}
    for name, param in model.named_parameters():
        part = "merger" if "merger" in name else "vision" if "visual" in name else "language"
        parts[part].append(param.grad.double().flatten())
    return torch.cat(losses).detach(), {part: torch.cat(grads) for part, grads in parts.items()}


def _errors(exact, rounded) -> dict[str, float]:
    errors = {"loss": float((rounded[0] - exact[0]).abs().mean() / exact[0].mean())}
    both = {**exact[1], "all": torch.cat(list(exact[1].values()))}
    theirs = {**rounded[1], "all": torch.cat(list(rounded[1].values()))}
    for part, gradient in both.items():
        name = "grad_norm" if part == "all" else f"{part}_grad_norm"
        errors[name] = float((theirs[part] - gradient).norm() / gradient.norm())
    return errors


def distance(ours: World, theirs: World) -> dict[str, float]:
    """The largest relative difference over the steps; 1 where only one of two is 0, as of a step that learns from no
    image.
    """
    pairs = list(zip(ours.rows, theirs.rows, strict=True))
    return {
        name: max(_relative(getattr(a, name), getattr(b, name)) for a, b in pairs)
        for name in ("loss", "grad_norm", "vision_grad_norm", "merger_grad_norm", "language_grad_norm")
    }


def _relative(a: float, b: float) -> float:
    return abs(a / b - 1) if b else float(a != 0)


@requires_gpus(2)
@pytest.mark.parametrize("name", LAYOUTS, ids=lambda name: f"{name}-on-{LAYOUTS[name][1]}")
def test_a_layout_trains_as_one_gpu_does(name, worlds):
    shape = LAYOUTS[name][2]
    ours, alone, yardstick = worlds[name], worlds[shape], yardstick_of(shape)
    assert isinstance(ours, World) and isinstance(alone, World), ours if isinstance(ours, str) else alone
    found = distance(ours, alone)
    print(f"\n{name}: " + ", ".join(f"{k} {v:.1e} (bf16 costs {yardstick[k]:.1e})" for k, v in found.items()))
    assert all(rank["drift"] == 0.0 for rank in ours.ranks)
    for norm, value in found.items():
        assert value <= YARDSTICKS * yardstick[norm], norm


def whole_trainings(root, jobs: dict) -> dict[str, World]:
    """Train jobs that save."""
    worlds = run_worlds(root, jobs, save=True)
    assert all(isinstance(world, World) for world in worlds.values()), worlds
    return worlds


def distances_after_resume(root, saved: RunConfig, whole: World, jobs: dict) -> dict[str, dict[str, float]]:
    """How far jobs that go on from a checkpoint of `saved` are from the uninterrupted training, in what follows."""
    checkpoint = f"checkpoints/step-{SAVED_AT:06d}"
    for run, _ in jobs.values():
        shutil.copytree(saved.output_dir / checkpoint, run.output_dir / checkpoint)
    expected, found = [row for row in whole.rows if row.step > SAVED_AT], {}
    for name, world in run_worlds(root, jobs).items():
        assert isinstance(world, World), world
        rows = [row for row in world.rows if row.step > SAVED_AT]
        assert [row.step for row in rows] == [row.step for row in expected]
        found[name] = distance(World(rows, []), World(expected, []))
    return found


@requires_gpus(2)
def test_a_checkpoint_of_one_layout_goes_on_in_another(tmp_path):
    """Losses after the resume against the uninterrupted run; beside it the noise of doing the same twice."""
    jobs = {name: (job(tmp_path, name, {"tp": 2}, save_interval=SAVED_AT), 2) for name in ("first", "again")}
    whole = whole_trainings(tmp_path, jobs)
    noise = distance(whole["again"], whole["first"])["loss"]
    print(f"\nthe same twice: loss {noise:.1e}")
    resumed = {name: (job(tmp_path, f"resumed-{name}", layout), n) for name, (layout, n) in RESUMED.items()}
    for name, found in distances_after_resume(tmp_path, jobs["first"][0], whole["first"], resumed).items():
        print(f"saved on tp2, resumed on {name}: loss {found['loss']:.1e}")
        limit = noise if name == "tp2" else YARDSTICKS * yardstick_of("first")["loss"]
        assert found["loss"] <= max(limit, 1e-6), name


@requires_gpus(2)
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["adapters of the last rank", "adapters of vision", "experts of the last rank"])
def test_ranks_that_hold_unlike_parts_go_on(name, precision, tmp_path):
    """On two GPUs as far off as the same training twice; on one at most twice as far as a whole training there, or as
    the precision."""
    case = CASES[name]

    def run_of(called: str, layout: dict) -> RunConfig:
        run = unlike_job(tmp_path, called, case, layout)
        return run.model_copy(update={"train": run.train.model_copy(update={"precision": precision})})

    jobs = {called: (run_of(called, case.layout), case.processes) for called in ("first", "again")}
    whole = whole_trainings(tmp_path, jobs | {"whole alone": (run_of("whole alone", {}), 1)})
    noise, apart = (distance(whole[called], whole["first"]) for called in ("again", "whole alone"))
    resumed = {"resumed": (run_of("resumed", case.layout), case.processes), "alone": (run_of("alone", {}), 1)}
    for called, found in distances_after_resume(tmp_path, jobs["first"][0], whole["first"], resumed).items():
        print(f"\n{name}, {precision}, {called}: {found}; the same twice: {noise}; one GPU: {apart}")
        for key in ("loss", "grad_norm"):
            rounding = YARDSTICKS * (apart[key] if precision == "float32" else yardstick_of(case.shape)[key])
            assert found[key] <= max(noise[key], 1e-6 if called == "resumed" else rounding), (called, key)


@requires_gpus(1)
@pytest.mark.parametrize("precision", ["bfloat16", pytest.param("float8", marks=requires_engine)])
def test_one_gpu_goes_on_from_its_own_checkpoint(tmp_path, precision):
    """No state of Transformer Engine's modules is kept: what is rounded to float8 has no history."""
    if precision == "float8" and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("float8 needs a GPU of the Hopper generation or newer")

    def one(name: str, save_interval: int = 1000) -> tuple[RunConfig, int]:
        run = job(tmp_path, name, {}, save_interval=save_interval)
        return run.model_copy(update={"train": run.train.model_copy(update={"precision": precision})}), 1

    first = one("first", SAVED_AT)
    whole = whole_trainings(tmp_path, {"first": first, "again": one("again")})
    found = distances_after_resume(tmp_path, first[0], whole["first"], {"resumed": one("resumed")})["resumed"]["loss"]
    noise = distance(whole["again"], whole["first"])["loss"]
    print(f"\n{precision}: the same twice: loss {noise:.1e}; resumed: {found:.1e}")
    assert found <= max(noise, 1e-6)


@requires_gpus(2)
@requires_engine
def test_our_zigzag_is_transformer_engines():
    import transformer_engine_torch as tex

    from trainer.data.slices import zigzag_order

    bounds = np.array([0, 8, 12, 40, 64])
    for cp in (2, 4):
        padded = bounds * cp
        order = zigzag_order(padded, cp).reshape(cp, -1)
        for rank in range(cp):
            theirs = tex.thd_get_partitioned_indices(
                torch.tensor(padded, dtype=torch.int32).cuda(), int(padded[-1]), cp, rank
            )
            assert theirs.tolist() == order[rank].tolist()
