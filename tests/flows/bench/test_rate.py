"""`athanor rate`: a whole card on a CPU, the rates of counted steps, and refusals before a training starts."""

import json

import pytest

from flows.bench.rate import HEADS
from flows.cli.main import main
from stages.rate.measure import rates_of
from stages.rate.random_model import config_of
from tests.helpers.fake_trainer import metrics_row

pytestmark = pytest.mark.promise("`athanor rate` makes a card of the training speed of a tiny model on a CPU.")


@pytest.mark.full
def test_a_card_of_a_tiny_model(tmp_path, capsys):
    out = tmp_path / "card.md"
    words = ["rate", "qwen3_vl_tiny", "--steps", "1", "--set", "global_batch_size=1", "--set", "seq_len=128"]
    assert main([*words, "--out", str(out), "--root", str(tmp_path)]) == 0
    card, text = json.loads(out.with_suffix(".json").read_text()), out.read_text()
    row = card["row"]
    assert set(row) == set(HEADS) and row["#-GPUs"] == row["MBS"] == row["TP"] == row["EP"] == row["GA"] == 1
    assert row["Sequence Length"] == 128 and row["GBS"] == 1 and row["Precision"] == "float32" and row["FSDP"] == 0
    assert row["Tokens / sec / GPU"] > 0 and row["Model TFLOP / sec / GPU"] > 0 and row["Memory, GB"] > 0
    assert card["command"] == "athanor rate qwen3_vl_tiny --set global_batch_size=1 --set seq_len=128 --steps 1"
    assert {"torch", "megatron-core", "transformers"} <= set(card["versions"]) and len(card["source"]["commit"]) == 40
    lines = text.splitlines()
    head = lines.index(f"| {' | '.join(HEADS)} |")
    assert lines[head + 2].startswith("| qwen3_vl_tiny | 1 | CPU, ") and f"    {card['command']}" in lines
    assert text in capsys.readouterr().out and [path.name for path in (tmp_path / "rates").iterdir()] == []


def test_rates_are_sums_over_wall_clock_time():
    rows = [metrics_row(step, time_ms=1000 * step, step_seconds=0.5, data_seconds=0.1) for step in (1, 2, 3)]
    rows = [row.model_copy(update={"tokens_per_second": 150.0 + row.step}) for row in rows]
    for row in rows:
        row.model_extra.update(language_tflops=3.0, vision_tflops=1.0)
    rates = rates_of(rows, 2)
    assert (rates.tokens, rates.loss_tokens, rates.tokens_a_step) == (50, 5, 100)
    assert (rates.slowest, rates.fastest) == (76, 76.5) and rates.wall_seconds == 1 and rates.step_seconds == 0.5
    assert rates.tflops == pytest.approx(4 * 0.5 * 2 / 2 / 2) and rates.data_share == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["qwen3_vl_8b"], "qwen3_vl_8b needs about 245 GB in the fullest process, and this machine gives a process "),
        (["qwen3_vl_7b"], "model 'qwen3_vl_7b' is no variant and no directory; did you mean 'qwen3_vl_8b'?; var"),
        (["qwen3_vl_tiny", "--set", "parallel.tp=2"], "--gpus=1 is not a multiple of tp=2"),
        (["qwen3_vl_tiny", "--set", "precision=float8"], "athanor: precision=float8 needs a GPU of the Hopper"),
        (["qwen3_vl_tiny", "--set", "parallel.ep=2"], "athanor: parallel.ep is 2, and the model has no experts"),
        (["qwen3_vl_tiny", "--out", "/nowhere/card.md"], "--out /nowhere/card.md: no file can be written in /nowhere;"),
        (["qwen3_vl_tiny", "--set", "seqlen=64"], "--set: unknown key seqlen; did you mean seq_len?"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(arguments, words, tmp_path, capsys):
    assert main(["rate", *arguments, "--root", str(tmp_path / "root")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line and not (tmp_path / "root").exists()


@pytest.mark.full
def test_a_trainer_that_ends_early_says_why(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("flows.bench.rate.write_random_model", _without_weights)
    assert main(["rate", "qwen3_vl_tiny", "--steps", "1", "--root", str(tmp_path)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("athanor: the trainer ended after 0 of 2 steps: ")


def _without_weights(directory, model) -> None:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config_of(model)))
