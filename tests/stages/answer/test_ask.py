"""The command `ask`: the same answer as the evaluation gives, and one line for every possible error."""

import os
import shutil

import pytest

from dataset_builders.errors import InputError
from stages.answer.ask import ask
from stages.evaluate.config import EvaluateConfig
from stages.evaluate.predictions import read_predictions
from tests.helpers.evaluation import conversation, evaluated, hf_artifact, picture, samples_artifact, talkative_hf_dir

pytestmark = pytest.mark.promise(
    "`athanor ask` and the page of `athanor chat` give the answer that the evaluation scores; the page opens only with "
    "its password."
)


def test_a_question_gets_the_answer_that_the_evaluation_scores(tmp_path):
    data = picture(3, 72, 40)
    (tmp_path / "digit.png").write_bytes(data)
    samples = [
        conversation("digits/00000000", [("<image>Which digit is this?", "7")], [data]),
        conversation("digits/00000001", [("What is three plus four?", "7")]),
    ]
    export = hf_artifact(tmp_path / "export", talkative_hf_dir())
    inputs = {"hf": export, "samples": samples_artifact(tmp_path / "samples", samples)}
    scored = evaluated(EvaluateConfig(max_new_tokens=9), inputs, tmp_path / "root")
    wanted = [row["answer"].strip() for row in read_predictions(scored.dir).to_pylist()]
    hf_dir = export.dir / "hf"
    assert ask(hf_dir, tmp_path / "digit.png", "Which digit is this?", max_new_tokens=9) == wanted[0]
    assert ask(hf_dir, None, "What is three plus four?", max_new_tokens=9) == wanted[1]
    assert wanted[0] != wanted[1]


def _error(call, *arguments) -> str:
    with pytest.raises(InputError) as error:
        call(*arguments)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_picture_that_is_not_there(tmp_path):
    assert f"picture {tmp_path / 'no.png'} does not exist" in _error(ask, talkative_hf_dir(), tmp_path / "no.png", "?")
    assert "does not exist, or is not a file" in _error(ask, talkative_hf_dir(), tmp_path, "?")


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_picture_that_may_not_be_read(tmp_path):
    path = tmp_path / "picture.png"
    path.write_bytes(picture(1))
    path.chmod(0)
    assert "cannot be read" in _error(ask, talkative_hf_dir(), path, "?")


@pytest.mark.parametrize(
    ("content", "question", "line"),
    [
        pytest.param(b"", "Which?", "picture.png cannot be used", id="empty file"),
        pytest.param(b"some text\n", "Which?", "picture.png cannot be used", id="text file"),
        pytest.param(picture(1)[:200], "Which?", "picture.png cannot be used", id="cut picture"),
        pytest.param(picture(1, 1000, 2), "Which?", "aspect", id="hopeless shape"),
        pytest.param(picture(1), " ", "question is empty", id="no question"),
        pytest.param(picture(1), "what <image> is", "holds <image>", id="slot"),
        pytest.param(picture(1), "<|im_end|> and then", "special tokens", id="special token"),
    ],
)
def test_a_picture_or_question_that_cannot_be_asked(tmp_path, content, question, line):
    (tmp_path / "picture.png").write_bytes(content)
    assert line in _error(ask, talkative_hf_dir(), tmp_path / "picture.png", question)


def test_a_model_directory_that_is_none(tmp_path):
    assert "does not exist" in _error(ask, tmp_path / "no", None, "Which?")
    assert "no config.json" in _error(ask, tmp_path, None, "Which?")
    directory = shutil.copytree(talkative_hf_dir(), tmp_path / "hf")
    (directory / "tokenizer.json").unlink()
    assert "no tokenizer" in _error(ask, directory, None, "Which?")
