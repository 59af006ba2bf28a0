"""Where images are encoded: each choice's seconds are those that a hand computes, and the advice follows them."""

import dataclasses

import pytest

from tests.helpers.shapes import QWEN_2B
from tests.stages.test_estimate import training
from tests.trainer.plan.test_pieces import MIX, priced
from trainer.contract.parallel import ParallelConfig
from trainer.contract.run import PartConfig
from trainer.model.shape import ModelShape, VisionShape, Work
from trainer.plan import placement
from trainer.plan.placement import (
    LANGUAGE_RATE,
    VISION_RATE,
    Placement,
    PlacementJob,
    current_placement,
    own_ranks,
    placements,
    recommended,
)

pytestmark = pytest.mark.promise(
    "`athanor plan` advises where images should be encoded, from seconds that equal those computed by hand."
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CountedVision(VisionShape):
    """A vision encoder that takes one FLOP a patch, forward."""

    @property
    def forward_flops(self) -> dict[str, int]:
        return {"per_patch": 1, "per_patch_squared": 0}


def counted(*prices: int) -> ModelShape:
    """Layers of these prices, and a vision encoder, without deepstack levels."""
    sizes = {field.name: getattr(QWEN_2B.vision, field.name) for field in dataclasses.fields(VisionShape)}
    return dataclasses.replace(priced(*prices), vision=CountedVision(**sizes | {"deepstack_layers": ()}))


EIGHT = counted(*(1,) * 8)


@pytest.fixture
def in_flops(monkeypatch):
    """Seconds are FLOPs."""
    monkeypatch.setattr(placement, "VISION_RATE", 1)
    monkeypatch.setattr(placement, "LANGUAGE_RATE", 1)


def job(
    processes: int = 2,
    *,
    shape: ModelShape = EIGHT,
    patches: int = 4,
    squares: int = 0,
    bins: int = 4,
    frozen: tuple[str, ...] = (),
    **layout: object,
) -> PlacementJob:
    parts = {part: PartConfig(frozen=True) for part in frozen}
    return PlacementJob(
        shape=shape,
        parallel=ParallelConfig(**layout),
        train=training(bins).model_copy(update=parts),
        processes=processes,
        seq_len=64,
        max_patches=64,
        work=Work(1, 0, 0, patches, squares),
    )


def named(choices: list[Placement]) -> dict[str, Placement]:
    return {choice.name: choice for choice in choices}


STILL = ("vision", "merger")


def test_one_pipeline_rank_encodes_all_and_the_other_waits(in_flops):
    """Vision 4 x 3 and layers of 3: with four layers each, ranks of 24 and 12."""
    choice = current_placement(job(pp=2, first_pipeline_layers=4))
    assert choice.name == "first_rank" and choice.ranks == ((48, 48), (0, 48))
    assert (choice.step, choice.start) == (4 * 24 + 12, 12)
    assert choice.waits == [1 - 96 / 108, 1 - 48 / 108]
    dealt_by_cost = current_placement(job(pp=2))  # two layers and vision, six layers
    assert dealt_by_cost.ranks == ((48, 24), (0, 72)) and dealt_by_cost.step == 4 * 18 + 18


def test_dealt_vision_is_the_same_on_all_ranks_and_outside_of_the_pipeline(in_flops):
    choice = current_placement(job(pp=2, vision="dealt"))
    assert choice.name == "dealt" and choice.ranks == ((24, 48), (24, 48))
    assert (choice.step, choice.start) == (4 * 18 + 12, 12)
    interleaved = current_placement(job(pp=2, vpp=2, vision="dealt"))
    assert (interleaved.step, interleaved.start) == (4 * 18 + 6, 6)
    assert current_placement(job(4, pp=2, vision="dealt")).step == 2 * 18 + 12  # two replicas, two micro batches each
    assert current_placement(job(4, pp=2, tp=2, vision="dealt")).step == 4 * 9 + 6


def test_no_share_is_smaller_than_an_image(in_flops):
    choice = current_placement(job(pp=2, vision="dealt", squares=16))  # one image
    assert choice.ranks == ((48, 48), (0, 48)) and choice.step == 4 * 24 + 12
    choice = current_placement(
        job(4, pp=4, vision="dealt", squares=8)
    )  # two images: half a bin's patches, the rest the others'
    assert [rank.vision for rank in choice.ranks] == [24, 8, 8, 8]
    assert current_placement(job(4, tp=4, squares=8)).ranks == ((24, 24),)
    assert current_placement(job(4, tp=4, squares=8, vision_split="tensor_parallel")).ranks == ((12, 24),)


def test_ranks_of_their_own_are_one_more_rank_of_the_pipeline(in_flops):
    (one,) = own_ranks(job())
    assert (one.parallel.vision_ranks, one.parallel.pp) == (1, 1) and one.ranks == ((0, 96), (48, 0))
    assert (one.step, one.start) == (4 * 24 + 12, 12)
    found = {choice.parallel.vision_ranks: choice for choice in own_ranks(job(4))}  # 3 replicas do not divide 4 bins
    assert sorted(found) == [2, 3]
    assert found[3].ranks == ((0, 96), (16, 0)) and found[3].step == 4 * 24 + 4
    assert found[2].ranks == ((0, 48), (24, 0)) and found[2].step == 2 * 24 + 12
    heavy = min(own_ranks(job(4, patches=24)), key=lambda choice: choice.step)
    assert heavy.parallel.vision_ranks == 3 and heavy.step == 4 * 24 + 24  # vision takes as long as the language model
    interleaved = own_ranks(job(4, pp=2, vpp=2, first_pipeline_layers=3))
    shorter = {(c.parallel.pp, c.parallel.vpp, c.parallel.vision_ranks) for c in interleaved}
    assert shorter == {(1, 1, 3), (1, 1, 2), (2, 2, 2)}


def test_ranks_of_their_own_may_be_the_layout_at_hand(in_flops):
    """Three processes: two pipeline ranks, and one for images, whose four layers cost 12 each."""
    one = job(3, pp=2, vision={"ranks": 1})
    assert current_placement(one).ranks == ((0, 48), (0, 48), (48, 0)) and current_placement(one).step == 4 * 12 + 24
    assert [len(piece) for piece in one.pieces] == [4, 4]
    choices = placements(one)  # three processes are no whole pipelines of two
    assert [(choice.parallel.vision_ranks, choice.parallel.pp) for choice in choices] == [(1, 2), (1, 1)]
    assert choices[1].step == 2 * 24 + 24  # for two replicas
    together = placements(job(3, vision={"ranks": 2, "tp": 2}, squares=16))
    assert [choice.parallel.vision_ranks for choice in together] == [2]  # three replicas do not divide four bins
    assert together[0].ranks == ((0, 96), (24, 0)) and together[0].step == 4 * 24 + 6
    two = placements(job(2, vision={"ranks": 1}))
    assert [choice.name for choice in two] == ["own_ranks", "first_rank"] and two[1] == current_placement(job(2))
    assert all(
        choice.parallel == ParallelConfig(**choice.parallel.model_dump()) for choice in (*choices, *together, *two)
    )


def test_no_more_ranks_of_their_own_than_can_be_set():
    found = {choice.parallel.vision_ranks for choice in own_ranks(job(1536, bins=4096))}
    assert found == {512, 1024}  # 1,280 would do for 256 replicas
    few = [choice.parallel.vision_ranks for choice in own_ranks(job(5, bins=6))]
    assert few == [4]  # neither 3 for two replicas nor 2 for three


def test_a_cached_encoder_leaves_the_language_model(in_flops):
    assert "cached" not in named(placements(job(pp=2))) and "cached" not in named(placements(job(frozen=("vision",))))
    choice = named(placements(job(pp=2, frozen=STILL)))["cached"]
    assert choice.ranks == ((0, 48), (0, 48)) and choice.step == 4 * 12 + 12
    assert current_placement(job(frozen=STILL)).ranks == ((8, 48),)  # forward alone
    cached = dataclasses.replace(job(pp=2, frozen=STILL), is_cached=True)
    assert placements(cached)[0] == current_placement(cached) == choice and recommended(placements(cached)) == choice
    assert [len(piece) for piece in cached.pieces] == [4, 4]
    assert [len(piece) for piece in job(pp=2, frozen=STILL, patches=12).pieces] == [2, 6]


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"pp": 2, "patches": 0}, "first_rank"),
        ({"pp": 2, "patches": 4}, "dealt"),
        ({"pp": 2, "patches": 16}, "dealt"),
        ({"pp": 2, "vision": "dealt"}, "dealt"),
        ({"pp": 2, "vision": "dealt", "squares": 16}, "first_rank"),  # one image cannot be dealt, but layers around it
        ({"pp": 2, "frozen": STILL}, "cached"),
        ({"frozen": STILL}, "cached"),
        ({"pp": 2, "shape": counted(*(50,) * 8)}, "first_rank"),  # a step of 3,048 for 3,024
        ({"patches": 16}, "first_rank"),
        ({"processes": 4, "pp": 4, "squares": 16, "bins": 16}, "own_ranks"),  # two bins at a time, of one image each
        ({"patches": 0, "frozen": STILL}, "first_rank"),
    ],
)
def test_the_advice(in_flops, changes, name):
    assert recommended(placements(job(**changes))).name == name


def test_what_has_no_room_is_not_advised(in_flops, monkeypatch):
    choices = placements(job(pp=2))
    now, dealt = choices[0], named(choices)["dealt"]
    assert now.bytes < dealt.bytes and recommended(choices) is dealt
    monkeypatch.setattr(placement, "GPU_MEMORY", dealt.bytes - 1)
    assert recommended(choices) is now
    monkeypatch.setattr(placement, "GPU_MEMORY", now.bytes - 1)  # then it is another GPU
    assert recommended(choices) is dealt


def test_two_h200_as_they_were_measured():
    """tests/bench/results/layouts.md: 2B, 16 bins of 8,192 of MIX, 14 layers on each rank. A step of
    4.14 s for 2.65 of dp 2, the second rank waits for 76%."""
    half = MIX._replace(**{name: getattr(MIX, name) / 2 for name in MIX._fields})
    sizes = {"shape": QWEN_2B, "bins": 16}
    pipeline = dataclasses.replace(job(**sizes, pp=2, first_pipeline_layers=14), work=half)
    data_parallel = dataclasses.replace(job(**sizes), work=half)
    choice, alone = current_placement(pipeline), current_placement(data_parallel)
    assert alone.step / choice.step == pytest.approx(2.646 / 4.140, rel=0.03)
    assert choice.waits[1] == pytest.approx(0.763, abs=0.06)
    assert choice.step == pytest.approx(4.14, rel=0.15)  # the plan's mean bin does not know how unequal images are
    assert alone.ranks[0].vision == pipeline.vision * 8 and 0.5 < data_parallel.vision_share < 0.6
    assert pipeline.vision == 3 * cost(QWEN_2B.vision, half) / VISION_RATE
    assert sum(rank.language for rank in choice.ranks) == pytest.approx(16 * 71.2e12 / LANGUAGE_RATE, rel=0.01)


def cost(vision: VisionShape, work: Work) -> float:
    flops = vision.forward_flops
    return flops["per_patch"] * work.patches + flops["per_patch_squared"] * work.patches_squared
