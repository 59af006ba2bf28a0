"""A wrong command is refused at once, before any library that takes seconds to import is imported."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dataset_builders.errors import LONGEST_LINE, printable
from flows.cli.main import main
from flows.cli.terminal import PrintableStream, print_table
from tests.helpers.tiers import full
from tests.helpers.tiny_model import tiny_hf_dir

ROOT = Path(__file__).parents[3]
HEAVY = {"torch", "prefect", "mlflow", "transformers", "tokenizers", "scipy", "matplotlib", "webdataset"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        full(["run", "--set", "model=/nowhere"], "model '/nowhere' is not a directory here"),
        (["plan", "--set", "train.adapter={rank: 8, alpha: 8, targets: [q_proj]}"], r"nearest: .*\.q_proj"),
        full(["run", "--set", "train.optim.lr=abc"], "train.optim.lr='abc' should be a valid number"),
        full(["up", "--limit", "gpu"], "--limit gpu is not NAME=SLOTS"),
        full(["plan", "--set", "convert.options={turns: neither}"], "convert"),
        full(["sweep", "--grid", "train.optim.lr=[7]"], "train.optim.lr=7 should be less than or equal to 1"),
        full(
            ["ask", str(tiny_hf_dir()), "-", "Which digit?", "--adapter", "/nowhere"],
            "adapter /nowhere has no adapter_c",
        ),
    ],
)
def test_nothing_heavy_is_loaded(arguments, words, tmp_path):
    check_refusal(arguments, words, tmp_path)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        full(
            ["plan", "--set", "execution.modules=engine"],
            "execution.modules=engine: Transformer Engine needs an NVIDIA",
        ),
        (["plan", "--set", "train.precision=float8"], "train.precision=float8 needs a GPU of the Hopper generation"),
    ],
)
def test_what_this_host_cannot_train_is_refused_before_any_stage(arguments, words, tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    check_refusal(arguments, words, tmp_path)


def _write_template(hf_dir: Path) -> None:
    (hf_dir / "chat_template.jinja").write_text("{{ 'a' * 200000000 }}")


def _write_merge_size(hf_dir: Path) -> None:
    file = hf_dir / "preprocessor_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "merge_size": 0}))


@pytest.mark.parametrize(
    ("spoil", "words"),
    [full(_write_template, "the chat template writes 200,000,000 characters"), (_write_merge_size, "merge_size is 0")],
)
def test_a_model_that_cannot_be_asked_is_refused_before_any_stage(spoil, words, tmp_path):
    hf_dir = Path(shutil.copytree(tiny_hf_dir(), tmp_path / "model"))
    spoil(hf_dir)
    check_refusal(["run", "--set", f"model={hf_dir}"], words, tmp_path / "root")


def check_refusal(arguments: list[str], words: str, tmp_path: Path) -> None:
    """Check that the command prints one line with these words and imports no heavy library."""
    code = f"import sys\nfrom flows.cli.main import main\nstatus = main({[*arguments, '--root', str(tmp_path)]})\n"
    code += f"print(status, sorted({HEAVY} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "2 []"
    assert words in done.stderr and len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "prefect").exists()


LONG, DEEP = "x" * 5000, "[" * 5000
NO_USER = "there is no user ~nosuchuser on this machine"
CIRCLE = "a symbolic link that leads back to itself"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["plan", "deep.yaml"], "deep.yaml is nested too deeply to be read"),
        (["plan", "twice.yaml"], "twice.yaml is not YAML: name appears twice"),
        (["plan", "bytes.yaml"], "bytes.yaml cannot be read as text in UTF-8"),
        (["plan", LONG], "File name too long"),
        (["plan", "~nosuchuser/x"], NO_USER),
        (["run", "nope"], "no recipe 'nope'; give "),
        (["plan", "--set", f"train.num_steps={DEEP}"], "is nested too deeply to be read"),
        (["plan", "--set", f"train.num_steps={'9' * 5000}"], "quote a value that is a text"),
        (["plan", "--set", f"train.num_steps={LONG}"], "should be a valid integer"),
        (["plan", "--set", f"{LONG}=1"], "unknown key xxx"),
        (["plan", "--set", "train.num_steps=1:30"], "train.num_steps='1:30' should be a valid integer"),
        (["plan", "--set", "train.num_steps=1:30.5"], "train.num_steps='1:30.5' should be a valid integer"),
        (["plan", "--set", "train.optim.lr=010"], "train.optim.lr='010' should be less than or equal to 1"),
        (["plan", "--set", "convert.options={turns: all, turns: first}"], "turns appears twice"),
        (["plan", "--set", "model=~nosuchuser/x"], NO_USER),
        (["plan", "--set", "data=~nosuchuser/x"], NO_USER),
        (["plan", "--set", "model=circle"], "'circle' is not a directory here"),
        (["plan", "--set", "data=circle"], "circle does not exist"),
        (["plan", "--set", "data=/nowhere/raw"], "raw data directory /nowhere/raw does not exist"),
        (["plan", "--set", f"model=/{LONG}"], "File name too long"),
        (["plan", "--set", f"data=/{LONG}"], "File name too long"),
        full(["sweep", "--grid", f"train.seed={DEEP}"], "is nested too deeply to be read"),
        (["ask", "~nosuchuser/x", "-", "Which digit?"], NO_USER),
        (["ask", f"/{LONG}", "-", "Which digit?"], "File name too long"),
        (["preview", "~nosuchuser/x"], NO_USER),
        (["ask", "", "-", "Which digit?"], "the path is empty; give a directory"),
        (["init", ""], "the path is empty; give a directory"),
        (["plan", "--root", ""], "--root: the path is empty; give a directory"),
        (["init", "two\nlines"], "two lines does not exist; give a directory"),
        (["preview", "circle"], "circle is not an artifact"),
        (["preview", LONG], "File name too long"),
        (["plan", "--root", "~nosuchuser/x"], NO_USER),
        (["plan", "--root", "circle"], CIRCLE),
        (["run", "--root", "circle"], CIRCLE),
        (["run", "--root", f"/{LONG}"], "File name too long"),
    ],
)
def test_whatever_is_given_ends_in_one_short_line(arguments, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "deep.yaml").write_text(f"a: {DEEP}{']' * 5000}")
    (tmp_path / "twice.yaml").write_text("name: one\nname: two\n")
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "circle").symlink_to("circle")
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert words in said and len(said.splitlines()) == 1
    assert len(said) <= LONGEST_LINE + len("athanor: \n")


RAW = "\x1b[2J\x7f\x9b\u202e"


@pytest.mark.parametrize(
    "arguments",
    [
        ["run", f"{RAW}.yaml"],
        ["run", "--set", f"{RAW}=1"],
        ["ask", RAW, "-", "a"],
        ["init", RAW],
        ["preview", RAW, "--debug"],
        ["plan", "--root", f"s3://{RAW}"],
        [RAW],
    ],
)
def test_an_error_does_not_steer_the_terminal(arguments, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    try:
        status = main(arguments)
    except SystemExit as exit_:
        status = exit_.code
    said = capsys.readouterr().err
    assert status == 2 and printable(said) == said and "x1b" in said


def test_a_table_on_a_terminal_has_only_escapes_of_our_own(capsys):
    with contextlib.redirect_stdout(PrintableStream(sys.stdout)):
        print_table("Rows", ("name", "[/red]"), [(f"a{RAW}", "[red]1")], is_terminal=True)
        print(f"a{RAW}", "b", sep="\t")
    said = capsys.readouterr().out
    assert "[red]1" in said and printable(said) == said and r"a\x1b[2J\x7f\x9b\u202e" + "\tb\n" in said


def in_a_shell(words: str, directory: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(["/bin/sh", "-c", words], cwd=directory, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("closed", "status", "line"),
    [full(">&-", 0, ""), full("2>&-", 2, ""), ("<&- >&- 2>&-", 2, ""), ("2>&1 >&-", 2, "athanor: ")],
)
def test_a_closed_stream_is_the_null_device_and_no_file_of_ours(closed, status, line, tmp_path):
    (tmp_path / "circle").symlink_to("circle")
    root = "" if status == 0 else "--root circle"
    done = in_a_shell(f"{sys.executable} -m flows.cli.main recipes {root} {closed}", tmp_path)
    assert (done.returncode, done.stderr) == (status, "") and done.stdout.startswith(line)
    assert line or done.stdout == ""


def test_a_working_directory_that_is_gone_is_one_line(tmp_path):
    done = in_a_shell(f"mkdir gone; cd gone; rmdir ../gone; {sys.executable} -m flows.cli.main recipes", tmp_path)
    assert done.returncode == 2 and done.stderr.endswith("was deleted; cd to another one\n")
    assert len(done.stderr.splitlines()) == 1
