"""The table and the advice of `athanor plan` about where images are encoded."""

import dataclasses
import re
from argparse import Namespace

import pytest

from flows.cli import plan
from flows.cli.plan import COLUMNS, advice, is_worth_showing, vision_rows
from flows.pipeline.plan import Plan
from flows.pipeline.recipe import load_recipe
from tests.helpers.shapes import QWEN_2B
from tests.stages.test_estimate import frozen, training
from tests.trainer.plan.test_pieces import MIX
from trainer.contract.parallel import ParallelConfig
from trainer.plan.placement import PlacementJob, placements

pytestmark = pytest.mark.promise(
    "`athanor plan` advises where images should be encoded, from seconds that equal those computed by hand."
)

REAL = (
    "model={kind: random, variant: qwen3_vl_2b, seed: 0}",
    "train.precision=bfloat16",
    "train.global_batch_size=16",
    "tokenize.max_pixels=1048576",
    "plan_bins.max_patches=24576",
    "plan_bins.seq_len=8192",
)
FROZEN = ("train.vision.frozen=true", "train.merger.frozen=true")


def job(processes: int, *, still: tuple[str, ...] = (), seq_len: int = 24_576, **layout: object) -> PlacementJob:
    return PlacementJob(
        shape=QWEN_2B,
        parallel=ParallelConfig(**layout),
        train=frozen(*still) if still else training(8),
        processes=processes,
        seq_len=seq_len,
        max_patches=4 * seq_len,
        work=MIX,
    )


def rows_of(one: PlacementJob) -> list[dict[str, str]]:
    return [dict(zip(COLUMNS, row, strict=True)) for row in vision_rows(placements(one))]


def plan_of(capsys, tmp_path, *overrides: str) -> str:
    opened = Plan.open(load_recipe("embedded", list(overrides)), tmp_path)
    args = Namespace(plan=opened, launcher=None, gpu_memory=None)
    assert plan.plan_command(args) == 0
    return capsys.readouterr().out


def test_a_pipeline_is_shown_choice_by_choice():
    first, dealt, own = rows_of(job(2, pp=2))
    assert [row["images are encoded by"] for row in (first, dealt, own)] == [
        "the first pipeline rank",
        "all pipeline ranks (vision=dealt)",
        "1 rank of its own (vision={ranks: 1}), pp=1",
    ]
    assert first["vision"] == "2.5, 0" and dealt["vision"] == "1.25" and own["vision"] == "0, 2.5"
    assert (first["language"], dealt["language"], own["language"]) == ("0.233, 1.92", "1.09, 1.06", "2.15, 0")
    assert first["waiting"] == "8%, 36%" and first["start, end"] == "8%"
    assert [row["tokens/s"] for row in (first, dealt, own)] == ["1.00 (now)", "1.20", "1.07"]
    assert first["memory"].endswith(" GB") and first["memory"] != dealt["memory"]


def test_equal_ranks_are_counted():
    first = rows_of(job(4, pp=4))[0]
    assert (first["vision"], first["language"]) == ("2.5, 3 x 0", "0.233, 2 x 0.622, 0.672")
    assert first["waiting"] == "8%, 2 x 79%, 77%"
    assert rows_of(job(4))[0]["images are encoded by"] == "every rank"
    own = rows_of(job(3, vision={"ranks": 2, "tp": 2}))[0]
    assert own["images are encoded by"] == "2 ranks of their own (vision={ranks: 2, tp: 2})"


def test_the_advice_is_one_line():
    assert advice(placements(job(2, pp=2))) == (
        "Advice: set execution.parallel.vision={ranks: 1}, execution.parallel.pp=1: 1.07 times the tokens/s; measured "
        "on two GPUs: 0.85 of data parallel at 2B, 0.73 to 0.77 at 4B. With all pipeline ranks (vision=dealt) it would "
        "be 1.12 times as fast as that, but 186 GB are more than an H200 has; recompute_vision saves some."
    )
    said = advice(placements(job(2, pp=2, seq_len=8192)))
    assert said.startswith("Advice: set execution.parallel.vision=dealt: 1.20 times the tokens/s, and ")
    assert " GB more in the fullest process; measured on two GPUs: " in said and said.endswith(
        "2B, 0.88 to 0.89 at 4B."
    )
    assert advice(placements(job(2, pp=2, seq_len=8192, vision="dealt"))) == (
        "Advice: keep the present layout; no layout that fits in memory gains more than 2%."
    )
    still = advice(placements(job(2, pp=2, seq_len=8192, still=("vision", "merger"))))
    assert still.startswith("Advice: set encode_images.dtype=bfloat16: 1.") and "epoch" in still
    assert "GPUs" not in still


def test_all_settings_that_the_advice_takes_are_named():
    """Half of a bin's patches are one image, which two ranks cannot share. Vision ranks of their own
    take one bin each."""
    work = MIX._replace(patches_squared=MIX.patches**2 // 2)
    one = job(8, pp=4, tp=2, vpp=2, first_pipeline_layers=4, seq_len=1024)
    said = advice(placements(dataclasses.replace(one, work=work)))
    settings = "vision={ranks: 4}, execution.parallel.pp=1, execution.parallel.vpp=1, "
    assert said.startswith(f"Advice: set execution.parallel.{settings}execution.parallel.first_pipeline_layers=null: ")
    asked = re.findall(r"execution\.parallel\.[a-z_]+=(?:\{[^}]*\}|\w+)", said)
    layout = ["tp=2", "pp=4", "vpp=2", "first_pipeline_layers=4"]
    common = [*REAL, "execution.cluster.processes=8", *(f"execution.parallel.{field}" for field in layout)]
    assert load_recipe("embedded", [*common, *asked]).config.execution.parallel == ParallelConfig(
        tp=2, vision={"ranks": 4}
    )


@pytest.mark.parametrize(
    ("overrides", "is_shown"),
    [
        ((), False),
        (("execution.cluster.processes=2", "train.global_batch_size=2"), False),  # in float32
        (REAL, False),
        ((*REAL, "execution.cluster.processes=2"), True),  # vision takes 42% of a step
        ((*REAL, *FROZEN), False),  # 19%
        ((*REAL, *FROZEN, "train.language.frozen=false", "plan_bins.max_patches=98304"), True),
        ((*REAL, "execution.cluster.processes=2", "execution.parallel.tp=2"), True),
        (
            (*("train.global_batch_size=2", "execution.cluster.processes=2"), "execution.parallel.vision={ranks: 1}"),
            True,
        ),
        ((*REAL, "execution.cluster.processes=2", "execution.parallel.pp=2"), True),
    ],
)
def test_it_is_shown_where_ranks_share_a_model_or_vision_is_large(capsys, tmp_path, overrides, is_shown):
    text = plan_of(capsys, tmp_path, *overrides)
    assert ("\nVision (if bins were full; for these bins known once the data is made)\n" in text) is is_shown
    assert ("\nAdvice: " in text) is is_shown and ("TFLOP/s per GPU" in text) is is_shown
    assert text.index("Size") < text.index("stages would be made")


def test_a_model_without_vision_has_no_table():
    text = dataclasses.replace(job(2, tp=2), shape=dataclasses.replace(QWEN_2B, vision=None))
    assert not is_worth_showing(text, placements(text))
