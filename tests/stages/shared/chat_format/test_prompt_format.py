"""A model before training gets the same tokens, pixels and system prompt as its export will get."""

import itertools
import json
import shutil
from pathlib import Path

import pytest

import stages.answer.stage as answer
import stages.answer.worker as answer_worker
from dataset_builders.contracts.manifest import Manifest
from dataset_builders.errors import InputError
from dataset_builders.storage.files import write_json, write_text
from stages.answer.heldout import ANSWERS_JSONL
from stages.answer.stage import AnswerConfig
from stages.answer.transformers_engine import Generator
from stages.export.stage import copy_processor_files
from stages.shared.artifacts.artifact import Artifact
from stages.shared.artifacts.workers import StageResources
from stages.shared.chat_format.config import BoxFormat
from stages.shared.chat_format.prompt import BOX_FORMAT, SYSTEM_PROMPT, read_prompt_format, read_system_prompt
from stages.shared.chat_format.text import load_tokenizer
from stages.shared.inputs.model_directory import ModelDirectory, model_input
from stages.shared.launchers.config import ClusterConfig
from stages.tokenize.config import TokenizeConfig
from tests.helpers.boxes import ONE, asked_sample, boxed_sample
from tests.helpers.evaluation import answered, hf_artifact, mixed_samples, samples_artifact, talkative_hf_dir
from tests.helpers.tiers import tiered

CONFIG = AnswerConfig(max_new_tokens=4, part_size=4, batch_size=8)
OTHER = {"min_pixels": 64 * 64, "max_pixels": 96 * 96}  # both limits are reached by the images of mixed_samples
LINES = BoxFormat(convention="resized_pixels", form="lines", order="sorted")
OTHERS = [
    OTHER | {"system_prompt": "Be brief: \u00e9\u4e00\U0001f600\n\tone word."},
    OTHER | {"system_prompt": None},
    OTHER,
    {"max_pixels": 96 * 96, "system_prompt": "Be brief."},
    {"boxes": LINES.model_dump()},
    {"system_prompt": ""},
    {},
]


def _source(directory: Path, system_prompt: str | None = "Be long.", **preprocessor) -> Path:
    """Write a model directory with its own system prompt."""
    shutil.copytree(talkative_hf_dir(), directory)
    if system_prompt is not None:
        (directory / SYSTEM_PROMPT).write_text(system_prompt)
    file = directory / "preprocessor_config.json"
    kept = {k: v for k, v in json.loads(file.read_text()).items() if k not in preprocessor}
    file.write_text(json.dumps(kept | {k: v for k, v in preprocessor.items() if v is not None}))
    return directory


def _exported(directory: Path, source: Path, stats: dict) -> Path:
    """Write the export of a training from `source`, with the initial weights."""
    directory.mkdir()
    shutil.copyfile(source / "model.safetensors", directory / "model.safetensors")
    copy_processor_files(source, directory, stats)
    return directory


def _tokenized(directory: Path, stats: dict) -> Artifact:
    directory.mkdir()
    manifest = Manifest(stage="tokenize", version=1, fingerprint="d" * 16, config={}, parents={}, stats=stats)
    manifest.write(directory)
    return Artifact.load(directory)


@pytest.mark.parametrize("stats", OTHERS)
@pytest.mark.parametrize("own_prompt", [None, "Be long."])
def test_it_is_what_the_export_says(tmp_path, stats, own_prompt):
    source = _source(tmp_path / "source", own_prompt)
    exported = _exported(tmp_path / "hf", source, stats)
    assert read_prompt_format(ModelDirectory(source), stats) == read_prompt_format(ModelDirectory(exported))
    own = read_prompt_format(ModelDirectory(source))
    assert own.system_prompt == own_prompt and own.pixels.max_pixels == 256 * 256
    assert (read_prompt_format(ModelDirectory(source), stats) == own) == (
        stats in ({}, {"system_prompt": ""}) and own_prompt is None
    )


def test_the_older_spelling_of_limits_is_overridden_as_in_the_export(tmp_path):
    source = _source(tmp_path / "source", size=None, min_pixels=1, max_pixels=2)
    exported = _exported(tmp_path / "hf", source, OTHER)
    assert read_prompt_format(ModelDirectory(source), OTHER) == read_prompt_format(ModelDirectory(exported))
    own = read_prompt_format(ModelDirectory(source)).pixels
    assert (own.min_pixels, own.max_pixels) == (1, 2)


@pytest.fixture(scope="module")
def samples(tmp_path_factory):
    return samples_artifact(tmp_path_factory.mktemp("asked") / "samples", mixed_samples(14))


@pytest.fixture
def asked(monkeypatch):
    """Return the input of every generator: ids, grids and pixels of each prompt, in order when run with one thread."""
    seen, real = [], Generator.encode_prompt

    def encode_prompt(self, messages, images, videos):
        prompt = real(self, messages, images, videos)
        seen.append((prompt.input_ids.tolist(), images.grids.tolist(), [p.tobytes() for p in images.patches]))
        return prompt

    monkeypatch.setattr(Generator, "encode_prompt", encode_prompt)
    return seen


def _run(asked, inputs, root: Path, processes: int = 1):
    """Return the answers' bytes, their artifact, and the recorded generator input."""
    asked.clear()
    resources = StageResources(cluster=ClusterConfig(processes=processes, num_threads=1))
    artifact = answered(CONFIG, inputs, root, resources)
    return (artifact.dir / ANSWERS_JSONL).read_bytes(), list(asked), artifact


@pytest.fixture
def launched(monkeypatch):
    """Patch a launcher so that its one worker answers in this process, from its job.json."""
    started = []

    def run_job(launcher, job, on_poll):
        started.append(job.arguments)
        assert answer_worker.main(job.arguments[2:]) == 0

    monkeypatch.setattr(answer_worker, "run_job", run_job)
    return started


@pytest.fixture
def planned(monkeypatch):
    """Return the token counts of the prompts of the newest plan."""
    lengths, real = [], answer.write_plan

    def write_plan(path, questions):
        lengths[:] = [question.num_tokens for question in questions]
        real(path, questions)

    monkeypatch.setattr(answer, "write_plan", write_plan)
    return lengths


@pytest.mark.parametrize(("stats", "processes"), tiered(itertools.product(OTHERS[:2], (1, 2)), [(OTHERS[0], 1)]))
def test_a_model_before_training_is_asked_as_its_export_is(
    samples, asked, planned, launched, tmp_path, stats, processes
):
    source = _source(tmp_path / "source")
    export = {"hf": hf_artifact(tmp_path / "e", _exported(tmp_path / "hf", source, stats)), "samples": samples}
    base = {"hf": model_input(ModelDirectory(source)), "samples": samples}
    told = base | {"tokenized": _tokenized(tmp_path / "t", stats)}
    after, plain = _run(asked, export, tmp_path / "a"), _run(asked, base, tmp_path / "b")
    before = _run(asked, told, tmp_path / "c", processes)
    assert len(launched) == processes - 1
    assert sorted(planned) == sorted(len(ids) for ids, _, _ in before[1])
    assert before[1] == after[1] and len(before[1]) == 20
    assert before[0] == after[0]
    assert before[1] != plain[1] and before[0] != plain[0]
    areas = [16 * 16 * t * h * w for _, grids, _ in before[1] for t, h, w in grids]
    assert min(areas) >= OTHER["min_pixels"] and max(areas) <= OTHER["max_pixels"]


def test_tokenized_samples_that_say_nothing_change_nothing_but_the_identity(samples, asked, tmp_path):
    base = {"hf": model_input(ModelDirectory(talkative_hf_dir())), "samples": samples}
    plain = _run(asked, base, tmp_path / "a")
    told = _run(asked, base | {"tokenized": _tokenized(tmp_path / "t", {})}, tmp_path / "b")
    assert told[:2] == plain[:2] and len(plain[1]) == 20
    assert told[2].manifest.fingerprint != plain[2].manifest.fingerprint
    assert told[2].manifest.parents["tokenized"].fingerprint == "d" * 16


def test_a_prompt_of_crlf_lines_is_the_same_in_training_and_asking(tmp_path):
    """An export's file is read with universal newlines, so other newlines in a prompt would change it."""
    prompt = "Be brief.\r\nThen\rstop."
    config = TokenizeConfig(max_seq_len=8, max_pixels=None, max_skip_fraction=1.0, system_prompt=prompt)
    assert config.system_prompt == "Be brief.\nThen\nstop."
    write_text(tmp_path / SYSTEM_PROMPT, config.system_prompt)
    assert read_system_prompt(tmp_path) == config.system_prompt


@pytest.mark.promise(
    "Boxes are written in the model's convention and the recipe's form where a prompt is made, in training, in every "
    "question and in an export; no text reaches a model with boxes that are not written."
)
def test_questions_have_boxes_in_the_form_of_the_training_before_and_after_it(asked, tmp_path):
    source, stats = _source(tmp_path / "source", None), {"boxes": LINES.model_dump()}
    samples = samples_artifact(tmp_path / "samples", [boxed_sample(), asked_sample()])
    export = {"hf": hf_artifact(tmp_path / "e", _exported(tmp_path / "hf", source, stats)), "samples": samples}
    base = {"hf": model_input(ModelDirectory(source)), "samples": samples}
    after = _run(asked, export, tmp_path / "a")
    before = _run(asked, base | {"tokenized": _tokenized(tmp_path / "t", stats)}, tmp_path / "b")
    assert after[1] == before[1] and after[0] == before[0]
    assert after[2].manifest.stats["prompt"]["boxes"] == before[2].manifest.stats["prompt"]["boxes"] == stats["boxes"]
    texts = load_tokenizer(source).batch_decode([ids for ids, _, _ in after[1]])
    assert sum(f"What is at {ONE['resized_pixels']}?" in text for text in texts) == 2
    # The reference of an earlier turn, sorted by label.
    assert sum("Here: a dog: [144, 0, 288, 2]\ncat: [4, 8, 135, 160]<" in text for text in texts) == 1


def test_a_form_of_boxes_stays_until_boxes_are_trained_in_another(tmp_path):
    source = _source(tmp_path / "source")
    write_json(source / BOX_FORMAT, LINES.model_dump())
    kept = _exported(tmp_path / "kept", source, {"boxes": None})
    assert read_prompt_format(ModelDirectory(kept)).boxes == LINES
    assert read_prompt_format(ModelDirectory(source), {"boxes": None}).boxes == LINES
    changed = _exported(tmp_path / "changed", source, {"boxes": BoxFormat(form="fenced").model_dump()})
    assert read_prompt_format(ModelDirectory(changed)).boxes == BoxFormat(form="fenced")
    write_json(source / BOX_FORMAT, {"form": "xml"})
    with pytest.raises(InputError, match=r"box_format.json: form should be 'bbox_2d', 'fenced' or 'lines'; copy"):
        read_prompt_format(ModelDirectory(source))
