"""The lmms-eval task: contents of its files; its functions ask and score as our own evaluation does."""

import importlib.util
import io
import itertools
import json
import shlex
import shutil
from pathlib import Path
from types import ModuleType

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from PIL import Image

from dataset_builders.contracts.sample import Message, Sample
from dataset_builders.errors import InputError
from dataset_builders.pictures.pixels import encode_image
from dataset_builders.storage.files import write_json
from stages.evaluate.lmms_eval import functions as lmms_eval_functions
from stages.evaluate.lmms_eval.__main__ import main
from stages.evaluate.lmms_eval.task import LmmsEvalTask, write_lmms_eval_task
from stages.evaluate.predictions import PREDICTIONS_SCHEMA
from stages.shared.chat_format.chat import ChatEncoder
from stages.shared.chat_format.config import BoxFormat
from stages.shared.chat_format.images import load_image_config
from stages.shared.chat_format.prompt import BOX_FORMAT, SYSTEM_PROMPT
from stages.shared.chat_format.text import load_tokenizer
from stages.shared.inputs.model_directory import ModelDirectory
from stages.shared.scoring.metrics.texts import normalize
from tests.helpers.boxes import WRITTEN, boxed_sample
from tests.helpers.evaluation import conversation, mixed_samples, picture, samples_artifact
from tests.helpers.raw_rows import BAD_IMAGES, encode, jpeg_with_exif, orientation_exif, png
from tests.helpers.raw_rows import picture as blocks
from tests.helpers.tiny_model import tiny_hf_dir
from tests.stages.artifacts import stage_artifact

pytestmark = pytest.mark.promise(
    "The held-out questions are a task of lmms-eval with the prompts, pictures and scores of our own evaluation."
)


def task(**changes: object) -> LmmsEvalTask:
    return LmmsEvalTask(**{"name": "heldout", "max_new_tokens": 16, "metrics": {}} | changes)


def written(directory: Path, samples: list[Sample], hf_dir: Path | None = None, **changes: object) -> list[dict]:
    """Return the rows of a task, with images decoded as `datasets` decodes them."""
    write_lmms_eval_task(directory, hf_dir or tiny_hf_dir(), samples, task(**changes))
    rows = pq.read_table(directory / "heldout.parquet").to_pylist()
    for row in rows:
        row["images"] = [Image.open(io.BytesIO(image["bytes"])) for image in row["images"]]
    return rows


def utils_of(directory: Path) -> ModuleType:
    """Load utils.py as lmms-eval does, by its path."""
    spec = importlib.util.spec_from_file_location("utils_of_a_task", directory / "utils.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def read_yaml(path: Path) -> dict:
    """Read YAML; `!function utils.f` becomes the text utils.f."""

    class Loader(yaml.SafeLoader):
        pass

    Loader.add_constructor("!function", lambda loader, node: loader.construct_scalar(node))
    return yaml.load(path.read_text(), Loader)


def test_the_yaml_names_the_data_the_functions_and_the_metrics(tmp_path):
    written(tmp_path / "task", mixed_samples(4), metrics={"single": "anls"})
    config = read_yaml(tmp_path / "task" / "heldout.yaml")
    assert config["dataset_path"] == "parquet" and config["test_split"] == "test" and config["task"] == "heldout"
    assert config["dataset_kwargs"] == {"data_files": {"test": str(tmp_path / "task" / "heldout.parquet")}}
    assert config["generation_kwargs"] == {"max_new_tokens": 16, "temperature": 0, "do_sample": False}
    assert [metric["metric"] for metric in config["metric_list"]] == [
        *("anls", "exact_match", "exact_match_multi", "exact_match_pair", "anls_single", "exact_match_text")
    ]
    utils = utils_of(tmp_path / "task")
    named = {key: value for key, value in config.items() if str(value).startswith("utils.")}
    assert len(named) == 5 and all(callable(getattr(utils, value.removeprefix("utils."))) for value in named.values())


def test_every_answer_is_a_row_with_what_came_before(tmp_path):
    rows = written(tmp_path / "task", mixed_samples(4))
    assert [(row["key"], row["turn"], len(row["images"])) for row in rows] == [
        ("text/00000000", 0, 0),
        ("single/00000001", 0, 1),
        ("pair/00000002", 0, 2),
        *(("multi/00000003", turn, 1) for turn in range(3)),
    ]
    assert [m["role"] for m in json.loads(rows[-1]["messages"])] == ["user", "assistant"] * 2 + ["user"]
    assert rows[-1]["references"] == ["Yes."] and rows[-1]["subset"] == "multi"


@pytest.mark.parametrize("system_prompt", [None, "Answer with one word."])
def test_the_prompt_is_that_of_our_own_evaluation(tmp_path, system_prompt):
    """The prompt is built as lmms-eval does: messages with typed content, then the export's own chat template."""
    hf_dir = Path(shutil.copytree(tiny_hf_dir(), tmp_path / "hf"))
    if system_prompt:
        (hf_dir / SYSTEM_PROMPT).write_text(system_prompt)
    samples = mixed_samples(8)
    samples.append(conversation("mid/00000009", [("Left <image> or\nright<image>?", "  left ")] * 2, [picture(1)] * 4))
    encoder, tokenizer = ChatEncoder(ModelDirectory(hf_dir), system_prompt=system_prompt), load_tokenizer(hf_dir)
    rows = iter(written(tmp_path / "task", samples, hf_dir))
    for sample in samples:
        for place, message in enumerate(sample.messages):
            if message.role != "assistant":
                continue
            messages = lmms_eval_functions.doc_to_messages(next(rows))
            images = [part["url"] for m in messages for part in m["content"] if part["type"] == "image"]
            for m in messages:  # as lmms_eval.protocol.ChatMessages.to_hf_messages
                m["content"] = [p if p["type"] == "text" else {"type": "image"} for p in m["content"]]
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            grids = np.array([[1, 2, 2]] * len(images), np.int32)
            ours = encoder.encode_prompt(sample.messages[:place], grids)
            assert tokenizer(text, add_special_tokens=False)["input_ids"] == ours.tolist()
            assert len(images) == sum(m.text.count("<image>") for m in sample.messages[:place])
    assert next(rows, None) is None


def test_boxes_are_in_the_form_of_the_export(tmp_path):
    hf_dir = Path(shutil.copytree(tiny_hf_dir(), tmp_path / "hf"))
    write_json(hf_dir / BOX_FORMAT, BoxFormat(convention="resized_pixels", form="lines").model_dump())
    first, second = written(tmp_path / "task", [boxed_sample()], hf_dir)
    by_hand = f"Here: {WRITTEN['resized_pixels', 'lines']}"
    assert first["references"] == [by_hand]
    assert [m["text"] for m in json.loads(second["messages"])[1:]] == [by_hand, "What is at [144, 0, 288, 2]?"]


def test_pictures_have_the_pixels_of_training(tmp_path):
    """Rotated, transparent, 16-bit and too large images are covered; scaling them again changes nothing."""
    clear = blocks(3).copy()
    clear.putalpha(100)
    wide = Image.fromarray(np.arange(0, 65536, 16, np.uint16).reshape(64, 64))
    odd = [jpeg_with_exif(blocks(2), orientation_exif(6)), encode(clear), encode(wide), encode(blocks(4, mode="P"))]
    sample = conversation("a/00000000", [("<image>" * 6 + "What?", "that")], [*odd, png(5, 900, 500), png(6, 64, 64)])
    (row,) = written(tmp_path / "task", [sample])
    config = load_image_config(ModelDirectory(tiny_hf_dir()))
    images = lmms_eval_functions.doc_to_visual(row)
    for image, data in zip(images, sample.images, strict=True):
        patches, grid = encode_image(data, config)
        again, grid_again = encode_image(encode(image), config)
        assert np.array_equal(patches, again) and np.array_equal(grid, grid_again)
        assert image.size == (16 * grid[2], 16 * grid[1]) and image.size[0] % 32 == image.size[1] % 32 == 0
    assert images[5].tobytes() == blocks(6, 64, 64).tobytes()  # already of the right size


def test_pictures_that_lmms_eval_enlarges_are_told(tmp_path):
    small = conversation("a/00000000", [("<image>?", "a")], [png(0, 32, 64)])
    large = conversation("a/00000001", [("<image>?", "a")], [png(1, 64, 64)])
    one = write_lmms_eval_task(tmp_path / "one", tiny_hf_dir(), [small, large], task())
    two = write_lmms_eval_task(tmp_path / "two", tiny_hf_dir(), [large], task())
    assert (one.num_questions, one.num_small, two.num_questions, two.num_small) == (2, 1, 1, 0)
    told, quiet = ((tmp_path / name / "README.md").read_text() for name in ("one", "two"))
    assert "but for 1 questions with a picture of fewer than 4096 pixels" in told and "fewer than" not in quiet


def test_a_system_prompt_in_front_is_not_taken(tmp_path):
    """lmms_eval/models/chat/qwen3_vl.py puts this prompt before every conversation."""
    (row,) = written(tmp_path / "task", mixed_samples(1))
    messages = lmms_eval_functions.doc_to_messages(row)
    messages.insert(0, {"role": "system", "content": [{"type": "text", "text": "You are a helpful assistant."}]})
    assert [message["role"] for message in messages] == ["user"]
    messages.insert(0, {"role": "user", "content": []})
    assert len(messages) == 2


def test_a_picture_that_cannot_be_asked_is_left_out(tmp_path):
    broken = BAD_IMAGES["half a png"][0]()
    messages = (Message(role="user", text="<image>What?"), Message(role="assistant", text="that"))
    bad = Sample(key="a/00000001", messages=messages, images=(broken,))
    assert {row["key"] for row in written(tmp_path / "task", [bad, *mixed_samples(1)])} == {"text/00000000"}


def test_only_what_is_asked_for_is_written(tmp_path):
    rows = written(tmp_path / "task", mixed_samples(4), questions={("multi/00000003", 1), ("pair/00000002", 0)})
    assert [(row["key"], row["turn"]) for row in rows] == [("pair/00000002", 0), ("multi/00000003", 1)]
    with pytest.raises(InputError, match="no held-out question for the lmms-eval task heldout"):
        written(tmp_path / "none", mixed_samples(4), questions=set())


def test_a_metric_that_is_not_there_is_named(tmp_path):
    with pytest.raises(InputError, match=r"metrics\.pair=cider is not scored in lmms-eval; choose from exact_match"):
        written(tmp_path / "task", mixed_samples(4), metrics={"pair": "cider"})
    assert not (tmp_path / "task").exists()


def test_exact_match_is_ours():
    texts = ["7", " 7 ", "\n7\n", "7.", "1,000", "Seven", "", "caf\u00e9", "Stra\u00dfe"]
    texts += ["The  left\tone.", "the LEFT one"]
    for answer, reference in itertools.product(texts, texts):
        assert lmms_eval_functions.exact_match(answer, [reference]) == float(normalize(answer) == normalize(reference))


def test_scores_are_given_overall_and_by_subset(tmp_path):
    sample = conversation("a/00000000", [("What?", "That one")])
    many = Message(role="assistant", text="four", references=("four", "4"))
    second = Sample(key="b/00000000", messages=(Message(role="user", text="How many?"), many), images=())
    first_row, second_row = written(tmp_path / "task", [sample, second])
    utils = utils_of(tmp_path / "task")
    assert utils.process_results(first_row, ["that  ONE "]) == {"exact_match": 1.0, "exact_match_a": 1.0}
    assert utils.process_results(second_row, ["4"]) == {"exact_match": 1.0, "exact_match_b": 1.0}
    assert utils.process_results(second_row, ["five"]) == {"exact_match": 0.0, "exact_match_b": 0.0}
    assert (utils.doc_to_target(second_row), utils.doc_to_text(second_row)) == ("four", "How many?")


def test_the_command_is_in_the_readme_and_a_shell_reads_it(tmp_path):
    """The directory's name contains a space."""
    write_lmms_eval_task(tmp_path / "a task", tiny_hf_dir(), mixed_samples(4), task())
    (line,) = (line for line in (tmp_path / "a task" / "README.md").read_text().splitlines() if "-m lmms_eval" in line)
    words = shlex.split(line)
    assert words[:7] == ["python", "-m", "lmms_eval", "--model", "qwen3_vl", "--model_args", "pretrained=HF_DIR"]
    assert words[7:11] == ["--include_path", str(tmp_path / "a task"), "--tasks", "heldout"]


def test_a_finished_run_gives_the_questions_that_its_evaluation_counts(tmp_path, capsys):
    artifacts, samples = tmp_path / "root" / "artifacts", mixed_samples(3)
    made = samples_artifact(artifacts / "convert" / ("c" * 16), samples)
    about = zip(samples, ("cer", "anls", "anls"), (None, "same file", None))
    answers = [{"key": s.key, "turn": 0, "subset": s.subset, "metric": m, "contaminated": c} for s, m, c in about]
    settings = {"config": {"max_new_tokens": 7}}
    evaluate, release = artifacts / "evaluate" / ("f" * 16), artifacts / "release" / ("a" * 16)
    evaluated = stage_artifact(evaluate, "evaluate", fingerprint="f" * 16, **settings)
    pq.write_table(pa.Table.from_pylist(answers, PREDICTIONS_SCHEMA), evaluate / "predictions.parquet")
    shutil.copytree(tiny_hf_dir(), release / "hf")
    parents = {"samples": made.parent(), "evaluate": evaluated.parent()}
    stage_artifact(release, "release", fingerprint="a" * 16, parents=parents, **settings)
    for given in (release, release / "hf"):
        assert main([str(given), str(tmp_path / "task")]) == 0
    assert f"{tmp_path / 'task' / 'README.md'} has the command" in capsys.readouterr().out
    asked = pq.read_table(tmp_path / "task" / "heldout.parquet").to_pylist()
    # lmms-eval lacks cer, and the second sample's picture is in the training split.
    wanted = [(samples[0].key, 0, "exact_match"), (samples[2].key, 0, "anls")]
    assert [(row["key"], row["turn"], row["metric"]) for row in asked] == wanted
    assert read_yaml(tmp_path / "task" / "heldout.yaml")["generation_kwargs"]["max_new_tokens"] == 7
    assert main([str(evaluate), str(tmp_path / "task")]) == 2
    line = f"athanor: {evaluate} is no artifact of the stage release; give the one that `athanor run` printed"
    assert capsys.readouterr().err.splitlines() == [line]
