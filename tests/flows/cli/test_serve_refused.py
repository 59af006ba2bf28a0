"""A wrong `athanor serve` is refused in one line, before a model is loaded."""

import pytest

from flows.cli.main import main
from tests.helpers.evaluation import talkative_hf_dir


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["no-such-model"], "is not a directory here"),
        (["{model}", "{model}", "{model}"], "3 models are too many"),
        (["{model}", "--host", "example.com"], "is not an IP address"),
        (["{model}", "--port", "99999"], "--port 99999 of 127.0.0.1 cannot be listened on"),
        (["{model}", "--engine", "vllm"], "install vLLM, or leave out --engine"),
        (["{model}", "--engine", "vllm", "--adapter", "x"], "takes no unmerged adapter"),
        (["{model}", "--votes", "/proc/no/votes"], "--votes /proc/no/votes cannot be written"),
    ],
)
def test_a_wrong_command_is_one_line(options, line, tmp_path, capsys):
    words = [word.format(model=talkative_hf_dir()) for word in options]
    assert main(["serve", *words, "--root", str(tmp_path / "root")]) == 2
    printed = capsys.readouterr().err
    assert line in printed and printed.count("\n") == 1
