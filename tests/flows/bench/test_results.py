"""The files that lmms-eval 0.7.3 writes, as scores with intervals and gains."""

import json
from pathlib import Path

import pytest

from dataset_builders.errors import InputError
from flows.bench.results import bench_scores, read_results
from flows.tracking.config import Gate, refusals
from flows.tracking.record import BenchScore, with_benchmarks

pytestmark = pytest.mark.promise(
    "`athanor bench` gives lmms-eval, here a stand-in, our evaluation's questions; its scores reach the run's gates."
)

DATE = "20261126_140433"


def write(directory: Path, results: dict, samples: dict[str, list[dict]], ways: dict | None = None) -> Path:
    (directory / "model").mkdir(parents=True)
    document = {"results": results, "higher_is_better": ways or {}}
    (directory / "model" / f"{DATE}_results.json").write_text(json.dumps(document))
    for task, rows in samples.items():
        lines = "".join(json.dumps({"doc_id": number, **row}) + "\n" for number, row in enumerate(rows))
        (directory / "model" / f"{DATE}_samples_{task}.jsonl").write_text(lines)
    return directory


def written(directory: Path, scores: list[float], **others: object) -> Path:
    values = {"alias": "t", "acc,none": sum(scores) / len(scores), "acc_stderr,none": 0.1, **others}
    return write(directory, {"t": values}, {"t": [{"acc": score} for score in scores]}, {"t": {"acc": True}})


def test_a_mean_has_the_interval_of_its_questions_and_a_paired_gain(tmp_path):
    after = read_results(written(tmp_path / "a", [1.0] * 8 + [0.0] * 2))
    before = read_results(written(tmp_path / "b", [1.0] * 4 + [0.0] * 6))
    score = bench_scores(after, before)["bench/t/acc"]
    assert (score.value, score.before, score.questions) == (0.8, 0.4, 10)
    assert score.low == pytest.approx(0.5) and score.high == 1.0
    assert score.gain == pytest.approx(0.4) and 0.05 < score.gain_low < 0.15 and 0.65 < score.gain_high < 0.75
    grouped = bench_scores(after, before, {"t": ["x"] * 8 + ["y", "z"]})["bench/t/acc"]
    assert grouped.high - grouped.low > score.high - score.low  # answers of one sample are drawn together
    other = read_results(written(tmp_path / "c", [1.0] * 4 + [0.0] * 5))  # not the same questions: standard errors
    score = bench_scores(after, other)["bench/t/acc"]
    assert score.gain_high - score.gain == pytest.approx(1.96 * 0.1 * 2**0.5, rel=1e-4)


def test_other_metrics_take_the_standard_error_or_have_no_interval(tmp_path):
    more = {"acc,flexible": 0.5, "acc_stderr,flexible": "N/A", "mme,none": 1200.0, "mme_stderr,none": 30.0}
    more |= {"mme_stderr_clt,none": 31.0, "note,none": "text", "samples": 2}
    scores = bench_scores(read_results(written(tmp_path, [1.0, 0.0], **more)), None)
    assert set(scores) == {"bench/t/acc", "bench/t/acc-flexible", "bench/t/mme"}
    assert scores["bench/t/mme"].low == pytest.approx(1200 - 1.96 * 30, rel=1e-4)
    assert scores["bench/t/mme"].gain is None and scores["bench/t/mme"].questions == 0


def test_the_newest_results_count_and_none_is_an_error(tmp_path):
    with pytest.raises(InputError, match="lmms-eval wrote no results below"):
        read_results(tmp_path)
    written(tmp_path, [1.0])
    newer = {"results": {"t": {"acc,none": 0.25}}}
    (tmp_path / "model" / "20261126_150000_results.json").write_text(json.dumps(newer))
    assert read_results(tmp_path)["t"].scores == {"acc": 0.25}
    (tmp_path / "model" / "20261126_160000_results.json").write_text(json.dumps({"results": {"t": {"alias": "t"}}}))
    with pytest.raises(InputError, match="holds no score"):
        read_results(tmp_path)


def test_gates_read_benchmarks_beside_our_own_scores():
    gates = {"exact_match": Gate(min=0.5), "bench/t/wer": Gate(max=0.3, min_gain=0.0)}
    better = BenchScore(value=0.2, higher_is_better=False, gain=-0.3, gain_low=-0.4, gain_high=-0.1)
    assert refusals(gates, *with_benchmarks({"exact_match": 0.6}, None, {"bench/t/wer": better})) == []
    worse = better.model_copy(update={"gain_low": 0.1, "gain_high": 0.2})
    assert refusals(gates, *with_benchmarks({"exact_match": 0.6}, None, {"bench/t/wer": worse})) == [
        "the gain in bench/t/wer, -0.2000 to -0.1000, does not lie above 0"
    ]
    lines = refusals(gates, *with_benchmarks({"exact_match": 0.6}, None, {}))
    way_out = "`athanor bench MODEL --tasks t` measures it and then registers the model"
    assert lines == [f"bench/t/wer is not measured yet; {way_out}"] * 2
