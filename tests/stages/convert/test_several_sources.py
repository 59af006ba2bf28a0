"""Several sources in one convert: each is read as it would be by itself, under its own names."""

import json

import pytest

from dataset_builders.errors import InputError
from stages.answer.heldout import GeneratedAnswer
from stages.convert.config import ConvertConfig, MixedConvertConfig, SourceReading
from stages.convert.stage import STAGE
from stages.evaluate.config import EvaluateConfig
from stages.evaluate.stage import STAGE as EVALUATE
from stages.shared.artifacts.artifact import External
from stages.shared.artifacts.run_stage import run_stage
from tests.helpers.evaluation import answers_artifact
from tests.helpers.own_data import captions, csv_paths, draw_rows
from tests.helpers.raw_rows import png, row, write_source
from tests.stages.convert.test_convert import samples_of

pytestmark = pytest.mark.promise(
    "Each builder turns its source's rows into samples, names and counts each bad row, and no image is both "
    "trained on and held out."
)

TABLE = {"builder": "table", "options": {"image": "image", "question": "question", "answer": "answer"}}
FOLDER = {"builder": "image_folder", "options": {"answer": "text_file", "question": "Describe the image."}}
LIMITS = {
    **{"heldout_fraction": 0.2, "min_heldout": 2, "seed": 0, "max_skip_fraction": 0.1},
    **{"max_image_pixels": 10**6, "min_image_side": 4, "shard_size_mb": 0.05},
}


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Return a table and a folder of captions that have one image in common."""
    directory = tmp_path_factory.mktemp("sources")
    rows = draw_rows(7, 40)
    csv_paths(directory / "table", rows[:20])
    captions(directory / "folder", rows[19:])
    return {name: External(directory / name, "raw", "0" * 16) for name in ("table", "folder")}


def samples(config, inputs, root) -> dict[str, tuple[str, object]]:
    """Return key -> (split, sample) for every sample made."""
    made = run_stage(STAGE, config, inputs, root).artifact
    return {sample.key: (split, sample) for split in ("train", "heldout") for sample in samples_of(made, split)}


def mixed(**limits) -> MixedConvertConfig:
    readings = {"mine": SourceReading(**TABLE), "caps": SourceReading(**FOLDER)}
    return MixedConvertConfig(**{**LIMITS, **limits}, sources=readings)


def test_each_source_gives_the_samples_that_it_gives_alone(sources, tmp_path):
    both = samples(mixed(), {"raw-mine": sources["table"], "raw-caps": sources["folder"]}, tmp_path)
    for name, kind, reading in (("mine", "table", TABLE), ("caps", "folder", FOLDER)):
        alone = samples(ConvertConfig(**LIMITS, **reading), {"raw": sources[kind]}, tmp_path)
        found = {key: sample for key, (_, sample) in both.items() if key.startswith(f"{name}_")}
        assert {key.removeprefix(f"{name}_") for key in found} == set(alone)
        assert {(s.messages, s.images) for s in found.values()} == {(s.messages, s.images) for _, s in alone.values()}
    assert len(both) == 41
    splits = {}
    for split, sample in both.values():
        splits.setdefault(sample.images, set()).add(split)
    assert len(splits) == 40 and all(len(found) == 1 for found in splits.values())  # including the image in common


def test_a_few_rows_are_taken_from_all_sources_together(sources, tmp_path):
    inputs = {"raw-mine": sources["table"], "raw-caps": sources["folder"]}
    few, more = (samples(mixed(max_rows=number), inputs, tmp_path) for number in (15, 30))
    assert (len(few), len(more)) == (15, 30) and set(few) < set(more)
    assert {key.partition("_")[0] for key in few} == {"mine", "caps"}


def test_a_source_without_rows_is_named(sources, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "data.csv").write_text("image,question,answer\n")
    inputs = {"raw-mine": External(tmp_path / "empty", "raw", "0" * 16), "raw-caps": sources["folder"]}
    with pytest.raises(InputError, match=r"the files below .*empty hold no rows"):
        run_stage(STAGE, mixed(), inputs, tmp_path / "root")


def test_a_known_subset_keeps_its_metric_and_its_spellings_and_a_name_alone_gives_none(tmp_path):
    asked = [row([png(i)], [("Which word?", "Open.")]) for i in range(8)]
    others = [row([png(i)], [("Which word?", "Open.")]) for i in range(8, 16)]
    write_source(tmp_path / "web", {"docvqa": asked, "x_docvqa": others})
    csv_paths(tmp_path / "mine", draw_rows(7, 12))
    (tmp_path / "mine" / "data.csv").rename(tmp_path / "mine" / "docvqa.csv")
    cauldron = {"builder": "the_cauldron", "options": {"turns": "chat"}}
    readings = {"web": SourceReading(**cauldron), "mine": SourceReading(**TABLE)}
    config = MixedConvertConfig(**{**LIMITS, "heldout_fraction": 0.5}, sources=readings)
    inputs = {f"raw-{name}": External(tmp_path / name, "raw", "0" * 16) for name in readings}
    made = run_stage(STAGE, config, inputs, tmp_path / "root").artifact
    heldout = samples_of(made, "heldout")
    spellings = {sample.subset: sample.messages[1].references for sample in heldout}
    assert spellings == {"web_docvqa": ("Open.", "Open"), "web_x_docvqa": (), "mine_docvqa": ()}
    lines = [GeneratedAnswer(key=s.key, turn=0, answer="Opes", stopped=True, ids=[7]) for s in heldout]
    asked_of = {"answers": answers_artifact(tmp_path / "answers", lines), "samples": made}
    scored = run_stage(EVALUATE, EvaluateConfig(max_new_tokens=6), asked_of, tmp_path / "root").artifact
    scores = scored.manifest.stats["scores"]
    assert (scores["web_docvqa"]["anls"], scores["web_docvqa"]["exact_match"]) == (0.75, 0.0)
    assert all("anls" not in scores[subset] for subset in ("web_x_docvqa", "mine_docvqa"))
    headlines = json.loads((scored.dir / "report.json").read_text())["sections"][0]["rows"]
    why = {cells[0]: (cells[1], cells[-1]) for cells in headlines}
    assert why["web_docvqa"] == ("anls", "docvqa: the task's own metric: text read off a page")
    assert why["web_x_docvqa"] == ("exact_match", "an unknown subset: the strictest metric")
    unlike = "read by table, so not taken for the known docvqa: the strictest metric"
    assert why["mine_docvqa"] == ("exact_match", unlike)
