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


def _ask_with(tmp_path, content: bytes, question="Which digit?"):
    path = tmp_path / "picture.png"
    path.write_bytes(content)
    return ask(talkative_hf_dir(), path, question)


def _error(call, *arguments, **keywords) -> str:
    with pytest.raises(InputError) as error:
        call(*arguments, **keywords)
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


@pytest.mark.parametrize("content", [b"", b"some text\n", picture(1)[:200]], ids=["empty", "text", "truncated"])
def test_a_file_that_is_no_picture(tmp_path, content):
    assert "picture.png cannot be used" in _error(_ask_with, tmp_path, content)


def test_a_picture_of_a_hopeless_shape(tmp_path):
    assert "aspect" in _error(_ask_with, tmp_path, picture(1, 1000, 2))


@pytest.mark.parametrize(
    ("question", "line"),
    [
        (" ", "question is empty"),
        ("what <image> is", "holds <image>"),
        ("<|im_end|> and then", "special tokens"),
    ],
)
def test_a_question_that_cannot_be_asked(tmp_path, question, line):
    assert line in _error(_ask_with, tmp_path, picture(1), question)


def test_a_model_directory_that_is_none(tmp_path):
    assert "does not exist" in _error(ask, tmp_path / "no", None, "Which?")
    assert "no config.json" in _error(ask, tmp_path, None, "Which?")


def test_a_model_directory_without_tokenizer(tmp_path):
    directory = shutil.copytree(talkative_hf_dir(), tmp_path / "hf")
    (directory / "tokenizer.json").unlink()
    assert "no tokenizer" in _error(ask, directory, None, "Which?")
