"""Ranks that hold unlike parts of what is trained, or nothing of it: their checkpoints do not show who held what.

Each case is saved after three of six steps by a layout of such ranks and by one process. Both go on in the layout of
the ranks, and the ranks' own checkpoint on one process too.
"""

from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from megatron.core import dist_checkpointing

from tests.equivalence.test_layouts import own
from tests.equivalence.test_resharding import job as job_of
from tests.helpers.resuming import STEPS, assert_resumes, checkpoint_of, exported_file
from tests.helpers.run_dir import changed
from tests.helpers.single_rank import single_rank
from tests.helpers.tiers import tiered
from tests.helpers.world import World, exported, run_world
from trainer.contract.adapter import AdapterConfig
from trainer.contract.run import PartConfig, RunConfig

pytestmark = pytest.mark.promise(
    "A checkpoint resumes to the bit, and in other layouts with losses to 1e-6 and gradient norms to 1e-5, also "
    "where ranks hold unlike parts; one of adapters refuses another base; all layouts export the same bytes."
)

PP2 = {"pp": 2}


@dataclass(frozen=True)
class Case:
    """A training whose ranks differ.

    Attributes:
        targets: targets of adapters; empty: the model is trained without adapters.
    """

    shape: str = "first"
    layout: dict = field(default_factory=lambda: PP2)
    processes: int = 2
    targets: tuple[str, ...] = ()
    adapter: dict = field(default_factory=dict)
    train: dict = field(default_factory=dict)


LATE = r".*language_model\.layers\.[23]\..*q_proj"
MIDDLE = r".*language_model\.layers\.[12]\..*q_proj"
FROZEN = PartConfig(frozen=True)
CASES = {
    "adapters of the last rank": Case(targets=(LATE,)),
    "adapters of the last rank and the whole output": Case(
        "second", targets=(LATE,), adapter={"modules_to_save": ("lm_head",)}
    ),
    "the output alone beside adapters of vision": Case(
        "second", targets=("vision",), adapter={"modules_to_save": ("lm_head",)}
    ),
    "adapters of vision": Case(targets=("vision",)),
    "DoRA of the merger": Case(targets=("merger",), adapter={"kind": "dora"}),
    "adapters of vision, dealt": Case(layout={**PP2, "vision": "dealt"}, targets=("vision",)),
    "adapters of vision beside ranks of images": Case(layout={**PP2, **own(1)}, processes=3, targets=("vision",)),
    "adapters of the last rank beside ranks of images": Case(layout={**PP2, **own(1)}, processes=3, targets=(LATE,)),
    "adapters of the delta rule of the last rank": Case("hybrid-first", targets=(LATE,)),
    "adapters of a chunk between": Case("deep", {**PP2, "vpp": 2}, targets=(r".*language_model\.layers\.[45]\..*",)),
    "adapters of one of four ranks": Case("deep", {"pp": 4}, 4, targets=(r".*language_model\.layers\.4\..*",)),
    "adapters where a part is frozen": Case(targets=("vision", LATE), train={"vision": FROZEN, "merger": FROZEN}),
    "experts of the last rank": Case("experts-late"),
    "experts of the last rank, divided": Case("experts-late", {**PP2, "ep": 2}, 4),
    "experts of the last rank beside ranks of images": Case("experts-late", {**PP2, **own(1)}, 3),
    "adapters of experts of the last rank": Case("experts-late", targets=("experts", "vision"), adapter={"rank": 8}),
    "adapters of nothing but experts": Case("experts-late", targets=("experts",), adapter={"rank": 5}),
    "adapters of nothing but experts, divided": Case(
        "experts-shared", {"ep": 2}, 2, targets=("experts",), adapter={"rank": 8}
    ),
    "language frozen": Case(train={"language": FROZEN}),
    "language frozen, four ranks": Case("deep", {"pp": 4}, 4, train={"language": FROZEN}),
    "adapters of vision, divided by fsdp": Case(layout={"sharding": "fsdp"}, targets=("vision",), adapter={"rank": 1}),
}
CORE = ("adapters of the last rank",)


def job(root: Path, name: str, case: Case, layout: dict) -> RunConfig:
    run = job_of(root, name, layout, case.shape)
    settings = {"rank": 4, "alpha": 8, "targets": case.targets, **case.adapter}
    adapter = AdapterConfig(**settings) if case.targets else None
    train = run.train.model_copy(update={"adapter": adapter, **case.train})
    return changed(run, train=train, base_digest="hf_dir@1234")


def entries(run: RunConfig, step: int = STEPS) -> dict[str, int]:
    """The numbers of each tensor of a checkpoint."""
    with single_rank():
        found = dist_checkpointing.load_plain_tensors(str(checkpoint_of(run, step)))
    return {name: value.numel() for name, value in found.items() if isinstance(value, torch.Tensor)}


@pytest.mark.parametrize("name", tiered(CASES, CORE))
def test_saved_and_resumed(name, tmp_path):
    case = CASES[name]
    run, alone = job(tmp_path, "ranks", case, case.layout), job(tmp_path, "alone", case, {})
    whole = run, run_world(run, case.processes, save=True)
    again = job(tmp_path, "again", case, case.layout)
    assert_same_bits(whole, again, assert_resumes(whole, again, case.processes, exact=True))
    expected = alone, run_world(alone, 1, save=True)
    assert [row.loss for row in whole[1].rows] == pytest.approx([row.loss for row in expected[1].rows], rel=1e-5)
    if "sharding" in case.layout:  # its checkpoints are not for others
        return
    assert entries(run) == entries(alone)
    for saved, resumed, processes in (
        (whole, job(tmp_path, "ranks-alone", case, {}), 1),
        (expected, job(tmp_path, "alone-ranks", case, case.layout), case.processes),
    ):
        assert_resumes(saved, resumed, processes)
        ours, theirs = exported(resumed), exported(saved[0])
        assert max(float((ours[key] - theirs[key]).abs().max()) for key in theirs) < 2e-6


def assert_same_bits(whole: tuple[RunConfig, World], resumed: RunConfig, world: World) -> None:
    norms = [row.param_norm for row in whole[1].rows]
    assert [row.param_norm for row in world.rows] == norms[-len(world.rows) :]
    if resumed.execution.parallel.sharding != "fsdp":
        ours, theirs = exported(resumed), exported(whole[0])
        assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


@pytest.mark.full
@pytest.mark.parametrize("name", ["adapters of vision", "adapters of the last rank", "experts of the last rank"])
def test_exported_by_ranks_that_differ_and_by_one(name, tmp_path):
    case = CASES[name]
    run = job(tmp_path, "saved", case, {})
    run_world(run, 1, save=True)
    whole = exported_file(run, job(tmp_path, "export", case, {}), 1)
    assert exported_file(run, job(tmp_path, "export-ranks", case, case.layout), case.processes) == whole
