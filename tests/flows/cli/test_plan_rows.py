"""`athanor plan` on rows that are not converted yet: their figures, what a run would refuse, and what fits a GPU."""

import re

import pytest

from flows.cli.main import main
from tests.helpers.json_rows import json_lines, write_file
from tests.helpers.own_data import csv_paths, draw_rows
from tests.helpers.raw_rows import png
from tests.helpers.tiny_model import tiny_hf_dir

pytestmark = pytest.mark.promise(
    "`athanor plan` tells figures of the first rows and what fits a GPU, and refuses what `athanor run` would refuse."
)

SETTINGS = ("convert.builder=openai_messages", "convert.options={}")
TABLE = ("convert.builder=table", "convert.options={image: image, question: question, answer: answer}")


def chat(number: int, text: str = "What is it?") -> dict:
    content = [{"type": "image_url", "image_url": {"url": f"{number % 4}.png"}}, {"type": "text", "text": text}]
    return {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": f"a {number}"}]}


def sets(*settings: str) -> list[str]:
    return [f"--set={each}" for each in settings]


def plan(tmp_path, capsys, rows, *settings: str, more: tuple[str, ...] = ()) -> tuple[int, dict[str, str], str]:
    """Return the exit status, the lines of the tables by their first words, and stderr."""
    for number in range(4):
        write_file(tmp_path / f"raw/{number}.png", png(number, 64, 64))
    write_file(tmp_path / "raw/chats.jsonl", json_lines(rows))
    overrides = sets(f"data={tmp_path / 'raw'}", *SETTINGS, *settings)
    status = main(["plan", *overrides, *more, "--root", str(tmp_path / "root")])
    out, err = capsys.readouterr()
    lines = dict(re.split(r"\s{2,}", line.strip(), maxsplit=1) for line in out.splitlines() if "  " in line.strip())
    return status, lines, err


def test_the_first_rows_tell_images_tokens_bins_epochs_and_disk(tmp_path, capsys):
    rows = [chat(number) for number in range(60)] + [chat(60, "long " * 2000), {"messages": []}]
    model = f"model={tiny_hf_dir()}"
    settings = ("tokenize.max_pixels=4096", "train.num_steps=null", "train.num_epochs=4")
    status, lines, _ = plan(tmp_path, capsys, rows, model, *settings)
    assert status == 0
    assert lines["rows"] == "62, of which 62 were read"
    assert lines["usable"] == "61; left out: no_text 1" and lines["no_text"].startswith("chats/00000061: ")
    assert lines["images"] == "1 a sample"
    assert lines["too long"].startswith("1 samples are longer than tokenize.max_seq_len=1024")
    assert re.fullmatch(r"about \d of 1,024 tokens to train on", lines["train bins"])
    assert re.fullmatch(r"4 epochs are about \d+ steps", lines["length"])
    assert lines["held out"] == "about 11 rows, those of convert.heldout_fraction=0.18 of the images"
    assert " are free" in lines["disk"]


def test_tokens_are_those_of_the_models_tokenizer(tmp_path, capsys):
    _, lines, _ = plan(tmp_path, capsys, [chat(n) for n in range(40)], f"model={tiny_hf_dir()}")
    mean = float(lines["tokens"].split()[1])
    # An image of 64 x 64 is 4 tokens and 2 around it. There are 2 turns of 5 tokens, and texts of about 10 tokens.
    assert 6 + 10 + 4 < mean < 6 + 10 + 20


BAD, ROWS = [{"messages": []}], [chat(number) for number in range(30)]


@pytest.mark.parametrize(
    ("rows", "settings", "words"),
    [
        (BAD * 10 + ROWS, (), "10 of 40 samples of .* cannot be used .no_text 10.*max_skip_fraction=0.05"),
        (ROWS[:12], (), "convert.min_heldout=10: of 12 usable samples only 6 can be held out"),
        (ROWS, ("convert.subsets=[other]",), "no subset 'other'"),
        ([], (), "hold no rows"),
        (
            ROWS,
            ("plan_bins.mixture={chat: {weight: 2}}",),
            "mixture.chat: no training sample is of 'chat', only of chats; did you mean",
        ),
    ],
    ids=["too many are bad", "too few to hold out", "another subset", "none", "a mixture of another subset"],
)
def test_what_a_run_would_refuse_is_refused(tmp_path, capsys, rows, settings, words):
    status, _, err = plan(tmp_path, capsys, rows, *settings)
    assert status == 2 and re.search(words, err), err
    assert err.count("\n") == 1


def test_what_fits_a_gpu(tmp_path, capsys):
    sizes = (
        "model={variant: qwen3_vl_8b, seed: 0}",
        "plan_bins.seq_len=6144",
        "plan_bins.max_patches=24576",
        "tokenize.max_pixels=1048576",
    )
    _, lines, _ = plan(tmp_path, capsys, ROWS, *sizes, more=("--gpu-memory", "24"))
    assert re.fullmatch(r"2\d\d GB\s+no", lines["the whole model"])
    smallest = "LoRA of rank 16 beside a base in float8, layers computed again in backward"
    assert re.fullmatch(r"15\.5 GB\s+yes", lines[smallest])


def test_a_source_without_splits_needs_a_share_to_hold_out(tmp_path, capsys):
    csv_paths(tmp_path / "raw", draw_rows(1, 30))
    settings = sets(f"data={tmp_path / 'raw'}", *TABLE, "convert.heldout_fraction=0")
    status = main(["plan", *settings, "--root", str(tmp_path / "root")])
    err = capsys.readouterr().err
    assert status == 2 and "to evaluate on; try convert.heldout_fraction=0.1" in err and err.count("\n") == 1


def own(tmp_path, capsys, *settings: str) -> tuple[str, list[str]]:
    """Return what `athanor plan` prints about tmp_path/raw with init's recipe, and its lines that begin `look at:`."""
    (tmp_path / "my.yaml").unlink(missing_ok=True)
    names = ("--out", str(tmp_path / "my.yaml"), "--root", str(tmp_path / "root"))
    assert main(["init", str(tmp_path / "raw"), "--model", str(tiny_hf_dir()), *names]) == 0
    capsys.readouterr()
    assert main(["plan", str(tmp_path / "my.yaml"), *sets(*settings), *names[2:]]) == 0
    out = capsys.readouterr().out
    return out, [line.removeprefix("look at: ") for line in out.splitlines() if line.startswith("look at: ")]


def test_what_init_warns_of_and_the_held_out_rows_of_the_source_are_in_the_plan(tmp_path, capsys):
    csv_paths(tmp_path / "raw" / "train", draw_rows(1, 30))
    csv_paths(tmp_path / "raw" / "test", draw_rows(2, 12))
    write_file(tmp_path / "raw/notes.pdf", b"x")
    out, warnings = own(tmp_path, capsys)
    assert re.search(r"held out +12 rows, by the names of their files", out)
    assert "columns that are not used: id" in warnings and any("notes.pdf is a PDF" in line for line in warnings)
    _, warnings = own(tmp_path, capsys, "convert.options.question='{question} {id}'")
    assert "columns that are not used: id" not in warnings


def test_epochs_that_are_few_steps_are_warned_of_and_the_setting_of_the_warning_is_enough(tmp_path, capsys):
    csv_paths(tmp_path / "raw", draw_rows(1, 30))
    out, warnings = own(tmp_path, capsys, "train.num_epochs=1")
    assert re.search(r"length +1 epochs are about 1 step\n", out)
    (line,) = [line for line in warnings if "too few to learn from" in line]
    setting = re.search(r"--set (\S+),", line)[1]
    assert not any("too few" in line for line in own(tmp_path, capsys, setting)[1])
    assert not any("too few" in line for line in own(tmp_path, capsys)[1])  # init's own epochs


@pytest.mark.parametrize("number", [2, 19])
def test_the_recipe_of_few_rows_holds_out_half_and_is_planned(tmp_path, capsys, number):
    csv_paths(tmp_path / "raw", draw_rows(1, number))
    out, warnings = own(tmp_path, capsys)
    assert re.search(rf"held out +about {number // 2} rows", out)
    assert any(line.startswith(f"convert.min_heldout={number // 2}: ") for line in warnings)


@pytest.mark.parametrize("number", [1, 12])
def test_rows_that_stay_together_are_refused_by_init_and_plan(tmp_path, capsys, number):
    csv_paths(tmp_path / "raw", draw_rows(1, 1))
    lines = [f"{i},imgs/0000.png,Question {i}?,a" for i in range(number)]
    (tmp_path / "raw" / "data.csv").write_text("\n".join(["id,image,question,answer", *lines]))
    names = ("--out", str(tmp_path / "my.yaml"), "--root", str(tmp_path / "root"))
    assert main(["init", str(tmp_path / "raw"), *names]) == 2
    words = f"its {number} usable rows are one sample, or share pictures"
    assert words in capsys.readouterr().err and not (tmp_path / "my.yaml").exists()
    assert main(["plan", *sets(f"data={tmp_path / 'raw'}", *TABLE), *names[2:]]) == 2
    assert words in capsys.readouterr().err
