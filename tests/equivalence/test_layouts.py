"""Every parallel layout trains as one process does: loss, gradient norms and weights, on gloo, in float32.

The bins hold what breaks layouts: samples of every kind side by side, with videos too, bins without an image, bins
whose loss tokens all lie on one rank or that have none, images that do not divide among the ranks.
"""

import dataclasses
import functools
import itertools
from pathlib import Path

import pytest
import torch

from dataset_builders.contracts.tokenized import TokenizedSample
from tests.helpers.bins import MIXED, ONE_IMAGE, TALL_IMAGE, TEXT_ONLY, TWO_IMAGES, Kind
from tests.helpers.process_dir import process_dir
from tests.helpers.reference import load_reference, random_hf_dir, reference_losses
from tests.helpers.run_dir import OPTIM, make_bins, model_dir, write_job
from tests.helpers.tiers import full, tiered
from tests.helpers.world import World, exported, run_world
from trainer.contract.names import HELDOUT_BASE_JSONL, HELDOUT_JSONL
from trainer.contract.parallel import ParallelConfig
from trainer.contract.result import HeldoutRow, read_heldout
from trainer.contract.run import ExpertsConfig, OptimConfig, PartConfig, RunConfig
from trainer.data.micro_batch import geometry_of, make_micro_batch
from trainer.model.registry import read_model

pytestmark = pytest.mark.promise(
    "Layouts of tp, sp, pp, cp, dp and ep, with recompute, and images that other ranks encode train on up to 16 "
    "processes as one does: losses to 1e-5, gradient norms to 1e-4, weights to 2e-6."
)

STEPS, SEQ_LEN = 5, 192
GLOBAL_BATCH = 4
# A gradient that is nothing but rounding would move a weight by a whole step; with this eps it moves it by rounding.
SMOOTH = OPTIM.model_copy(update={"adam_eps": 1e-3})


def silent(kind: Kind) -> Kind:
    """Return the sample with an empty loss mask."""
    return dataclasses.replace(kind, learnt=0.0)


KINDS = [
    MIXED,
    [TEXT_ONLY] * 5,
    [silent(TWO_IMAGES), silent(TEXT_ONLY), ONE_IMAGE],
    [Kind(40), silent(ONE_IMAGE)],
    [silent(kind) for kind in MIXED],
    MIXED[::-1] * 2,
    [Kind(90, learnt=1e-9)],  # the last token alone
    [TALL_IMAGE, Kind(30, ((1, 8, 8),)), TEXT_ONLY],
]

# What breaks chunks of 64 tokens: segments that end one before, at or one after the end of a chunk, or are one token,
# also as padding; a bin of one segment. All fit when each segment is padded to a multiple of 8.
CHUNK_KINDS = [
    [Kind(1, learnt=0), Kind(63), Kind(1, learnt=0), Kind(64)],
    [Kind(65), Kind(63)],
    [Kind(127), Kind(64)],
    [Kind(192)],
]


def kinds_of(shape: str) -> list[list[Kind]]:
    """The bins of a shape."""
    return KINDS + CHUNK_KINDS if shape.startswith(("hybrid-", "mtp-")) else KINDS


def steps_of(shape: str) -> int:
    """Twelve bins are trained on once: a step in chunks takes several times as long as another."""
    return STEPS if kinds_of(shape) is KINDS else len(kinds_of(shape)) // GLOBAL_BATCH


FULL = {"recompute": "full", "recompute_vision": True}
SELECTIVE = {"recompute": "selective"}
SP = {"sequence_parallel": True}


def own(ranks: int) -> dict:
    """Ranks that encode images and do nothing else."""
    return {"vision": {"ranks": ranks}}


DEALT = {"vision": "dealt"}
CUT_VISION = {"vision_split": "tensor_parallel"}
FOURFOLD = {"tp": 2, "pp": 2, "cp": 2, **SP}  # sixteen processes: dp 2
# name -> (layout, processes, shape)
LAYOUTS = {
    "full-recompute": (FULL, 1, "first"),
    "dp2": ({}, 2, "first"),
    "dp2-undealt": ({"balance": False}, 2, "first"),
    "tp2": ({"tp": 2}, 2, "first"),
    "tp2-selective": ({"tp": 2, **SELECTIVE}, 2, "first"),
    "tp2-vision": ({"tp": 2, **CUT_VISION}, 2, "first"),
    "tp2-sp": ({"tp": 2, **SP}, 2, "first"),
    "tp2-sp-full": ({"tp": 2, **SP, **FULL}, 2, "first"),
    "tp2-sp-vision": ({"tp": 2, **SP, **CUT_VISION}, 2, "first"),
    "pp2": ({"pp": 2}, 2, "first"),
    "pp2-full": ({"pp": 2, **FULL}, 2, "first"),
    "pp2-first-3": ({"pp": 2, "first_pipeline_layers": 3}, 2, "first"),
    "pp2-untied": ({"pp": 2, "first_pipeline_layers": 3}, 2, "second"),
    "pp2-vpp2": ({"pp": 2, "vpp": 2}, 2, "deep"),
    "pp2-vpp2-full": ({"pp": 2, "vpp": 2, **FULL}, 2, "deep"),
    "pp2-uneven": ({"pp": 2}, 2, "second"),
    "pp2-vpp2-uneven": ({"pp": 2, "vpp": 2}, 2, "odd"),
    "own-1+1": (own(1), 2, "first"),
    "own-1+1-full": ({**own(1), **FULL}, 2, "first"),
    "own-2+2": (own(2), 4, "first"),
    "own-1+2": (own(1), 3, "first"),
    "own-2+1": (own(2), 3, "first"),
    "own-1+2-pp2": ({"pp": 2, **own(1)}, 3, "first"),
    "own-2+2-pp2": ({"pp": 2, **own(2)}, 4, "second"),
    "own-1+2-pp2-vpp2": ({"pp": 2, "vpp": 2, **own(1)}, 3, "deep"),
    "own-2+2-cp2": ({"cp": 2, **own(2)}, 4, "first"),
    "own-2+1-vision-tp2": ({"vision": {"ranks": 2, "tp": 2}}, 3, "first"),
    "own-2+2-pp2-vision-tp2-full": ({"pp": 2, "vision": {"ranks": 2, "tp": 2}, **FULL}, 4, "first"),
    "own-4+2-dp2-vision-tp2": ({"vision": {"ranks": 4, "tp": 2}}, 6, "first"),
    "own-1+2-tp2-sp": ({"tp": 2, **SP, **own(1)}, 3, "first"),
    "pp2-dealt": ({"pp": 2, **DEALT}, 2, "first"),
    "pp2-dealt-full": ({"pp": 2, **DEALT, **FULL}, 2, "first"),
    "pp2-dealt-untied": ({"pp": 2, **DEALT}, 2, "second"),
    "pp2-vpp2-dealt": ({"pp": 2, "vpp": 2, **DEALT}, 2, "deep"),
    "pp2-cp2-dealt": ({"pp": 2, "cp": 2, **DEALT}, 4, "first"),
    "pp2-dp2-dealt": ({"pp": 2, **DEALT}, 4, "first"),
    "tp2-pp2-dealt": ({"tp": 2, "pp": 2, **DEALT}, 4, "first"),
    "tp2-sp-pp2-dealt": ({"tp": 2, "pp": 2, **SP, **DEALT}, 4, "first"),
    "pp4-dealt": ({"pp": 4, **DEALT}, 4, "wide"),
    "cp2": ({"cp": 2}, 2, "first"),
    "cp2-selective": ({"cp": 2, **SELECTIVE, "recompute_vision": True}, 2, "first"),
    "cp2-untied": ({"cp": 2}, 2, "second"),
    "tp2-cp2": ({"tp": 2, "cp": 2}, 4, "first"),
    "tp2-sp-cp2-vision": ({"tp": 2, "cp": 2, **SP, **CUT_VISION, **FULL}, 4, "first"),
    "tp2-pp2": ({"tp": 2, "pp": 2}, 4, "first"),
    "tp2-sp-pp2-full": ({"tp": 2, "pp": 2, **SP, **FULL}, 4, "first"),
    "tp4-sp": ({"tp": 4, **SP}, 4, "wide"),
    "pp4": ({"pp": 4}, 4, "wide"),
    "cp4": ({"cp": 4}, 4, "wide"),
    "dp4": ({}, 4, "wide"),
    "cp2-dp2": ({"cp": 2}, 4, "first"),
    "cp2-dp2-full": ({"cp": 2, **FULL}, 4, "first"),
    "text-dp2": ({}, 2, "text-first"),
    "text-tp2": ({"tp": 2}, 2, "text-first"),
    "text-tp2-sp": ({"tp": 2, **SP}, 2, "text-second"),
    "text-pp2": ({"pp": 2}, 2, "text-first"),
    "text-pp2-untied-first-1": ({"pp": 2, "first_pipeline_layers": 1}, 2, "text-second"),
    "text-cp2": ({"cp": 2}, 2, "text-first"),
    "hybrid-full": (FULL, 1, "hybrid-first"),
    "hybrid-selective": (SELECTIVE, 1, "hybrid-first"),
    "hybrid-dp2": ({}, 2, "hybrid-first"),
    "hybrid-tp2": ({"tp": 2}, 2, "hybrid-first"),
    "hybrid-tp2-selective": ({"tp": 2, **SELECTIVE}, 2, "hybrid-first"),
    "hybrid-tp2-sp": ({"tp": 2, **SP}, 2, "hybrid-first"),
    "hybrid-tp2-sp-full": ({"tp": 2, **SP, **FULL}, 2, "hybrid-second"),
    "hybrid-pp2": ({"pp": 2}, 2, "hybrid-first"),
    "hybrid-pp2-full": ({"pp": 2, **FULL}, 2, "hybrid-first"),
    "hybrid-pp2-untied": ({"pp": 2, "first_pipeline_layers": 2}, 2, "hybrid-second"),
    "hybrid-pp2-vpp2": ({"pp": 2, "vpp": 2}, 2, "hybrid-deep"),
    "hybrid-pp2-uneven": ({"pp": 2}, 2, "hybrid-second"),
    "hybrid-pp2-vpp2-uneven": ({"pp": 2, "vpp": 2}, 2, "hybrid-odd"),
    "hybrid-own-1+2-pp2": ({"pp": 2, **own(1)}, 3, "hybrid-first"),
    "hybrid-own-2+2-cp2": ({"cp": 2, **own(2)}, 4, "hybrid-first"),
    "hybrid-pp2-dealt": ({"pp": 2, **DEALT}, 2, "hybrid-first"),
    "hybrid-pp2-vpp2-dealt": ({"pp": 2, "vpp": 2, **DEALT}, 2, "hybrid-deep"),
    "hybrid-pp2-cp2-dealt": ({"pp": 2, "cp": 2, **DEALT}, 4, "hybrid-first"),
    "hybrid-pp3-uneven": ({"pp": 3}, 3, "hybrid-odd"),
    "hybrid-tp2-pp2": ({"tp": 2, "pp": 2}, 4, "hybrid-first"),
    "hybrid-tp4-sp": ({"tp": 4, **SP}, 4, "hybrid-deep"),
    "hybrid-cp2": ({"cp": 2}, 2, "hybrid-first"),
    "hybrid-cp2-selective": ({"cp": 2, **SELECTIVE}, 2, "hybrid-second"),
    "hybrid-cp4": ({"cp": 4}, 4, "hybrid-deep"),
    "hybrid-tp2-cp2": ({"tp": 2, "cp": 2}, 4, "hybrid-deep"),
    "hybrid-linear-tp2-sp": ({"tp": 2, **SP}, 2, "hybrid-linear"),
    "hybrid-linear-pp2": ({"pp": 2}, 2, "hybrid-linear"),
    "hybrid-tp2-sp-cp2": ({"tp": 2, "cp": 2, **SP, **FULL}, 4, "hybrid-deep"),
    "experts-full": (FULL, 1, "experts-listed"),
    "experts-dp2": ({}, 2, "experts-shared"),
    "experts-ep2-dp2": ({"ep": 2}, 2, "experts-shared"),
    "experts-ep2-dp4": ({"ep": 2}, 4, "experts-sparse"),
    "experts-ep4-dp4": ({"ep": 4}, 4, "experts-many"),
    "experts-ep2-tp2-sp": ({"ep": 2, "tp": 2, **SP}, 2, "experts-listed"),
    "experts-ep2-cp2-full": ({"ep": 2, "cp": 2, **FULL}, 2, "experts-many"),
    "experts-ep2-pp2": ({"ep": 2, "pp": 2}, 4, "experts-listed"),
    "experts-ep2-pp2-dealt": ({"ep": 2, "pp": 2, **DEALT}, 4, "experts-listed"),
    "experts-ep2-pp2-vpp2": ({"ep": 2, "pp": 2, "vpp": 2}, 4, "experts-shared"),
    "experts-ep2-tp2-sp-dp2": ({"ep": 2, "tp": 2, **SP}, 4, "experts-sparse"),
    "experts-ep4-tp2-sp-dp2": ({"ep": 4, "tp": 2, **SP}, 4, "experts-shared"),
    "experts-tp2-sp": ({"tp": 2, **SP}, 2, "experts-listed"),
    "experts-tp2-sp-full": ({"tp": 2, **SP, **FULL}, 2, "experts-shared"),
    "experts-pp2": ({"pp": 2}, 2, "experts-sparse"),
    "experts-pp2-vpp2-full": ({"pp": 2, "vpp": 2, **FULL}, 2, "experts-shared"),
    "experts-pp2-dealt": ({"pp": 2, **DEALT}, 2, "experts-listed"),
    "experts-own-1+2-tp2-sp": ({"tp": 2, **SP, **own(1)}, 3, "experts-listed"),
    "experts-cp2": ({"cp": 2}, 2, "experts-many"),
    "experts-tp2-sp-cp2": ({"tp": 2, "cp": 2, **SP}, 4, "experts-shared"),
    "experts-tp2-sp-pp2": ({"tp": 2, "pp": 2, **SP}, 4, "experts-shared"),
    "mtp-full": (FULL, 1, "mtp-first"),
    "mtp-dp2": ({}, 2, "mtp-first"),
    "mtp-tp2-selective": ({"tp": 2, **SELECTIVE}, 2, "mtp-first"),
    "mtp-tp2-vision": ({"tp": 2, **CUT_VISION}, 2, "mtp-first"),
    "mtp-tp2-sp": ({"tp": 2, **SP}, 2, "mtp-first"),
    "mtp-tp2-sp-full": ({"tp": 2, **SP, **FULL}, 2, "mtp-second"),
    "mtp-cp2": ({"cp": 2}, 2, "mtp-first"),
    "mtp-cp2-untied": ({"cp": 2}, 2, "mtp-second"),
    "mtp-own-1+1": (own(1), 2, "mtp-first"),
    "mtp-own-2+2-cp2": ({"cp": 2, **own(2)}, 4, "mtp-first"),
    "mtp-tp2-sp-cp2": ({"tp": 2, "cp": 2, **SP}, 4, "mtp-deep"),
    "mtp-experts-full": (FULL, 1, "mtp-experts-shared"),
    "mtp-experts-ep2-dp2": ({"ep": 2}, 2, "mtp-experts-shared"),
    "mtp-experts-ep2-tp2-sp": ({"ep": 2, "tp": 2, **SP}, 2, "mtp-experts-shared"),
    "mtp-experts-cp2": ({"cp": 2}, 2, "mtp-experts-many"),
    "experts-lone-ep2-dp2": ({"ep": 2}, 2, "experts-lone"),
    "experts-lone-ep2-cp2": ({"ep": 2, "cp": 2}, 2, "experts-lone"),
    "experts-lone-ep2-tp2-sp-full": ({"ep": 2, "tp": 2, **SP, **FULL}, 2, "experts-lone"),
    "experts-lone-ep2-pp2": ({"ep": 2, "pp": 2}, 4, "experts-lone"),
    "experts-lone-ep4-tp2-sp-dp2": ({"ep": 4, "tp": 2, **SP}, 4, "experts-lone"),
    "fourfold": (FOURFOLD, 16, "first"),
    "fourfold-dealt": ({**FOURFOLD, **DEALT}, 16, "first"),
    "fourfold-full": ({**FOURFOLD, **FULL}, 16, "first"),
}


# test_vision_elsewhere.py has the others.
ELSEWHERE = [name for name, (layout, _, _) in LAYOUTS.items() if "vision" in layout]
HERE = [name for name in LAYOUTS if name not in ELSEWHERE]
# Every axis and every family once, as pairs; on two ranks, because processor seconds grow with the ranks. Adapters,
# frozen parts, cached features and images elsewhere have theirs in the files of their names, on other axes. A model
# with multi-token prediction has the layers of the hybrid family.
CORE = ("dp2", "pp2", "text-tp2-sp", "mtp-tp2-sp-full", "experts-ep2-tp2-sp", "mtp-cp2-untied")


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The result of all steps in a layout."""

    world: World
    weights: dict[str, torch.Tensor]
    heldout: list[HeldoutRow]
    before: list[HeldoutRow]  # the same before the first step


def layout_of(name: str) -> tuple[dict, int]:
    """A layout and its processes. "alone" is one process."""
    return LAYOUTS[name][:2] if name != "alone" else ({}, 1)


def job(
    root: Path,
    name: str,
    shape: str,
    layout: dict,
    *,
    num_steps: int | None = None,
    global_batch_size: int = GLOBAL_BATCH,
    bins: list[list[TokenizedSample]] | None = None,
    optim: OptimConfig = SMOOTH,
) -> RunConfig:
    """A job whose bins hold what breaks layouts. Without another number it has the steps of its shape."""
    run = write_job(
        root,
        num_steps=num_steps or steps_of(shape),
        shape=shape,
        bins=bins or make_bins(shape, kinds_of(shape)),
        global_batch_size=global_batch_size,
        parallel=ParallelConfig(**layout),
        optim=optim,
        name=name,
    )
    return run.model_copy(update={"seq_len": SEQ_LEN})


def outcome_of(run: RunConfig, processes: int) -> Outcome:
    world = run_world(run, processes)
    heldout, before = (read_heldout(run.output_dir / name) for name in (HELDOUT_JSONL, HELDOUT_BASE_JSONL))
    return Outcome(world, exported(run), heldout, before)


@functools.cache
def layout_runner():
    """Runs a layout once, for test_vision_elsewhere.py too."""
    directory = process_dir("layouts")

    @functools.cache
    def run_layout(name: str, shape: str, frozen: tuple[str, ...] = ()) -> Outcome:
        layout, processes = layout_of(name)
        run = job(directory / shape, "-".join((name, "frozen", *frozen)), shape, layout)
        train = run.train.model_copy(update={part: PartConfig(frozen=True) for part in frozen})
        if "experts-" in shape and shape != "experts-lone":  # the loss would move tokens to other experts
            train = train.model_copy(update={"experts": ExpertsConfig(auxiliary_loss="layer", coefficient=0.1)})
        return outcome_of(run.model_copy(update={"train": train}), processes)

    return run_layout


@pytest.fixture
def outcome():
    return layout_runner()


@pytest.mark.parametrize("name", tiered(HERE, CORE))
def test_a_layout_trains_as_one_process_does(name, outcome):
    shape = LAYOUTS[name][2]
    compare(outcome(name, shape), outcome("alone", shape))


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name in HERE if name.startswith("experts-lone")])
def test_one_expert_has_all_tokens_in_every_step(name, outcome):
    """So a rank that divides the experts has no token in any layer, and another has those of all ranks."""
    rows = outcome(name, LAYOUTS[name][2]).world.rows
    assert [
        (row.model_extra["layers_experts_idle"], row.model_extra["layers_expert_load"]) for row in rows
    ] == STEPS * [(7 / 8, 8.0)]


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("pp2", [[0, 1], [2, 3]]),
        full("pp2-first-3", [[0, 1, 2], [3]]),
        full("pp2-uneven", [[0, 1, 2], [3, 4]]),
        full("pp2-vpp2-uneven", [[0, 1, 4], [2, 3, 5, 6]]),
        full("hybrid-pp2-uneven", [[0], [1, 2, 3, 4]]),  # the first rank encodes images and videos too
        full("hybrid-pp2-vpp2-uneven", [[0, 1, 4], [2, 3, 5, 6]]),
        full("hybrid-pp3-uneven", [[0, 1], [2, 3], [4, 5, 6]]),
    ],
)
def test_the_layers_that_pipeline_ranks_hold(name, layers, outcome):
    assert [rank["layers"] for rank in outcome(name, LAYOUTS[name][2]).world.ranks] == layers


FROZEN = [
    *itertools.product(
        ["tp2", "tp2-sp-vision", "cp2", "pp2", "pp2-full", "dp2"],
        [("vision",), ("vision", "merger"), ("language",), ("vision", "language")],
    ),
    *itertools.product(["hybrid-tp2-sp", "hybrid-cp2", "hybrid-pp2-full"], [("vision", "merger"), ("language",)]),
]


@pytest.mark.full
@pytest.mark.parametrize(("name", "frozen"), FROZEN, ids=str)
def test_with_frozen_parts_too(name, frozen, outcome):
    shape = LAYOUTS[name][2]
    compare(outcome(name, shape, frozen), outcome("alone", shape, frozen))


def compare(ours: Outcome, alone: Outcome) -> None:
    compare_steps(ours, alone)
    has_mtp = ours.world.rows[0].mtp_loss is not None
    trained = [weight for name, weight in ours.weights.items() if has_mtp or not name.startswith("mtp.")]
    norm = float(torch.nn.utils.get_total_norm(trained))  # in float32, as of the model: alone that rounds by 1e-6
    assert ours.world.rows[-1].param_norm == pytest.approx(norm, rel=1e-6)


def compare_steps(ours: Outcome, alone: Outcome) -> None:
    """All but that the norm which was written down is that of the weights."""
    assert [row.step for row in ours.world.rows] == list(range(1, len(alone.world.rows) + 1))
    for a, b in zip(ours.world.rows, alone.world.rows, strict=True):
        assert a.loss == pytest.approx(b.loss, rel=1e-5), f"step {a.step}"
        assert a.mtp_loss == (b.mtp_loss and pytest.approx(b.mtp_loss, rel=1e-5)), f"step {a.step}"
        norms = [name for name in b.model_dump() if name.endswith("grad_norm")]
        assert len(norms) > 1
        for norm in norms:
            expected = getattr(b, norm)
            wanted = None if expected is None else pytest.approx(expected, rel=1e-4)  # a frozen part has none
            assert getattr(a, norm) == wanted, f"step {a.step}: {norm}"
        reported = {name: value for name, value in b.model_extra.items() if name.startswith("layers_")}
        assert {name: a.model_extra[name] for name in reported} == pytest.approx(reported, rel=1e-6), f"step {a.step}"
        assert a.param_norm == pytest.approx(b.param_norm, rel=1e-6), f"step {a.step}"
        assert (a.tokens, a.loss_tokens) == (b.tokens, b.loss_tokens)
        if b.heldout_loss is not None:
            assert a.heldout_loss == pytest.approx(b.heldout_loss, rel=1e-5)
    for a, b in zip([*ours.heldout, *ours.before], [*alone.heldout, *alone.before], strict=True):
        assert (a.key, a.loss_tokens) == (b.key, b.loss_tokens)
        assert a.loss == pytest.approx(b.loss, rel=1e-5), a.key
    assert_close(ours.weights, alone.weights)


def assert_close(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for key, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[key], rtol=0, atol=2e-6, msg=lambda text, k=key: f"{k}: {text}")


def test_bins_of_delta_layers_hold_what_breaks_chunks():
    bins = make_bins("hybrid-first", kinds_of("hybrid-first"))
    geometry = geometry_of(read_model(model_dir("hybrid-first"))[1])
    segments = [make_micro_batch(samples, geometry, SEQ_LEN).chunks.lengths() for samples in bins]
    assert {1, 63, 64, 65, 127, 192} < {length for lengths in segments for length in lengths}
    assert [192] in segments and 1 in [lengths[-1] for lengths in segments]


@pytest.mark.parametrize("name", tiered(HERE, CORE))
def test_copies_of_a_parameter_stay_identical(name, outcome):
    """Norms (of queries and keys too), the vision encoder, tied embeddings: bit for bit, wherever one is held."""
    assert all(rank["drift"] == 0.0 for rank in outcome(name, LAYOUTS[name][2]).world.ranks)


def test_the_held_out_samples_make_the_held_out_loss(outcome):
    alone = outcome("alone", "first")
    bins = make_bins("first", KINDS)[:2]  # write_job holds these out
    samples = [sample for samples in bins for sample in samples]
    assert [row.loss_tokens for row in alone.heldout] == [int(s.loss_mask[1:].sum()) for s in samples]
    total = sum(row.loss * row.loss_tokens for row in alone.heldout if row.loss_tokens)
    mean = total / sum(row.loss_tokens for row in alone.heldout)
    assert alone.world.rows[-1].heldout_loss == pytest.approx(mean, rel=1e-6)


def test_before_the_first_step_they_have_transformers_losses(outcome):
    alone = outcome("alone", "first")
    model = load_reference(random_hf_dir("first"))
    samples = [sample for samples in make_bins("first", KINDS)[:2] for sample in samples]
    with torch.no_grad():
        theirs = [reference_losses(model, sample) for sample in samples]
    for row, losses in zip(alone.before, theirs, strict=True):
        assert row.loss_tokens == len(losses)
        assert row.loss == (pytest.approx(float(losses.mean()), rel=1e-5) if len(losses) else None)
    assert [row.loss for row in alone.before] != [row.loss for row in alone.heldout]


def test_training_moved_every_part(outcome):
    rows = outcome("alone", "first").world.rows
    assert rows[-1].heldout_loss < rows[2].heldout_loss
    assert all(row.language_grad_norm > 1e-2 for row in rows)
    # The first global batch holds images, and none in a sample with an answer: exact zeros, in every layout.
    assert rows[0].vision_grad_norm == rows[0].merger_grad_norm == 0
    assert all(min(row.vision_grad_norm, row.merger_grad_norm) > 1e-2 for row in rows[1:])


@pytest.mark.full
def test_the_bins_hold_what_breaks_layouts(outcome):
    """Else the tests above would show less than they say."""
    cp2, tp2, dp2, pp2 = (outcome(name, "first").world.ranks for name in ("cp2", "tp2", "dp2", "pp2"))
    pairs = list(zip(cp2[0]["loss_tokens"], cp2[1]["loss_tokens"], strict=True))
    assert any(sum(pair) and 0 in pair for pair in pairs), "no bin whose loss tokens are all on one rank"
    assert any(sum(pair) == 0 for pair in pairs), "no bin without a loss token"
    assert any(a != b and a and b for a, b in pairs), "no uneven split of loss tokens"
    for ranks in (cp2, tp2):
        images = list(zip(ranks[0]["encoded"], ranks[1]["encoded"], strict=True))
        assert any(sum(pair) and 0 in pair for pair in images), "no bin that leaves a rank without an image"
        assert any(sum(pair) == 0 for pair in images), "no bin without an image"
        assert any(a and b for a, b in images), "no bin whose images are shared"
    assert any(0 in pair and sum(pair) for pair in zip(dp2[0]["encoded"], dp2[1]["encoded"])), "dp: no rank without"
    assert [rank["pixels"] for rank in pp2] == [True, False], "pixels beyond the first pipeline rank"
