"""The answer stage: grouping of questions, contents of its file, and independence of kills and number of workers."""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

import stages.answer.parts as answer_parts
import stages.answer.worker as answer_worker
from dataset_builders.contracts.sample import Sample
from dataset_builders.contracts.shard_io import read_record
from dataset_builders.errors import InputError
from stages.answer.heldout import (
    ANSWERS_JSONL,
    GeneratedAnswer,
    SkippedSample,
    heldout_samples,
    in_order_of_samples,
    read_answers,
    to_line,
)
from stages.answer.parts import PLAN_JSONL, AnswerJob, Question, cut_groups, cut_parts, plan_questions, write_plan
from stages.answer.stage import AnswerConfig
from stages.answer.transformers_engine import Generator
from stages.shared.artifacts.workers import StageResources
from stages.shared.chat_format.chat import ChatEncoder
from stages.shared.chat_format.prompt import read_prompt_format
from stages.shared.inputs.model_directory import ModelDirectory, model_input
from stages.shared.launchers.config import ClusterConfig
from stages.shared.launchers.job import Handle, JobFailed
from tests.helpers.evaluation import (
    answered,
    conversation,
    hf_artifact,
    mixed_samples,
    picture,
    samples_artifact,
    talkative_hf_dir,
)
from tests.helpers.samples import turns
from tests.helpers.tiers import full
from trainer.contract.names import EXIT_INPUT

pytestmark = pytest.mark.promise(
    "A batch whose rows come and go gives the tokens that transformers gives each prompt alone, also after kill -9."
)

CONFIG = AnswerConfig(max_new_tokens=6, part_size=4, batch_size=8)
BROKEN = Sample(key="digits/00000001", messages=turns("<image>Which?", "7"), images=(b"no image",))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Return answers to mixed samples in five parts, and their inputs."""
    root = tmp_path_factory.mktemp("answer")
    train = [conversation("single/00000999", [("<image>Which digit?", "9")], [picture(999)])]
    inputs = _inputs(root, mixed_samples(14), train)
    return inputs, answered(CONFIG, inputs, root / "root")


def _bytes(artifact):
    return (artifact.dir / ANSWERS_JSONL).read_bytes()


def _inputs(tmp_path, heldout, train=()):
    samples = samples_artifact(tmp_path / "s", heldout, train)
    return {"hf": hf_artifact(tmp_path / "e", talkative_hf_dir()), "samples": samples}


def test_each_turn_is_a_line_in_the_order_of_the_samples_with_the_answer_to_its_prompt_alone(made):
    generator, alone = Generator(ModelDirectory(talkative_hf_dir())), []
    for sample in mixed_samples(14):
        images = generator.encode_images(sample.images)
        for place in range(1, len(sample.messages), 2):
            prompt = generator.encode_prompt(sample.messages[:place], images)
            (said,) = generator.generate([prompt], CONFIG.max_new_tokens)
            alone.append((sample.key, place // 2, said.text, said.stopped, said.ids))
    lines = list(read_answers(made[1].dir / ANSWERS_JSONL))
    assert [(line.key, line.turn, line.answer, line.stopped, line.ids) for line in lines] == alone
    assert json.loads(_bytes(made[1]).split(b"\n")[0]).keys() == {"key", "turn", "answer", "stopped", "ids"}


def test_the_artifact_holds_the_answers_and_what_they_cost_and_its_manifest_no_time(made, tmp_path):
    again = answered(CONFIG, made[0], tmp_path)
    assert (again.dir / "manifest.json").read_bytes() == (made[1].dir / "manifest.json").read_bytes()
    assert sorted(p.name for p in made[1].dir.iterdir()) == [
        *(ANSWERS_JSONL, "manifest.json", "report.html", "report.json", "speed.json")
    ]
    counts = made[1].manifest.stats["counts"]
    assert (counts["samples"], counts["answers"]) == (14, 20)
    cost = json.loads((made[1].dir / "speed.json").read_text())
    summary = json.loads((made[1].dir / "report.json").read_text())["summary"]
    expected = cost["num_tokens"] / cost["seconds"]
    assert summary["tokens per second of a worker"] == pytest.approx(expected, abs=0.01) and expected > 0


@pytest.mark.parametrize(
    "change", [full({"part_size": 1}), {"part_size": 100}, full({"batch_size": 1}), {"batch_tokens": 100}]
)
def test_how_it_is_cut_changes_no_answer_in_float32(made, tmp_path, change):
    assert _bytes(answered(CONFIG.model_copy(update=change), made[0], tmp_path)) == _bytes(made[1])


def test_a_model_directory_of_the_users_is_answered_too(made, tmp_path):
    inputs = {"hf": model_input(ModelDirectory(talkative_hf_dir())), "samples": made[0]["samples"]}
    assert _bytes(answered(CONFIG, inputs, tmp_path)) == _bytes(made[1])


def test_a_sample_that_cannot_be_asked_is_left_out_and_counted(tmp_path):
    whole = picture(1)
    cut = Sample(key="digits/00000002", messages=BROKEN.messages, images=(whole[: len(whole) // 2],))
    special = conversation("digits/00000003", [("<|im_end|>?", "7")])
    samples = [conversation("digits/00000000", [("Which digit?", "7")]), BROKEN, cut, special]
    artifact = answered(CONFIG, _inputs(tmp_path, samples), tmp_path / "root")
    assert sum(artifact.manifest.skips.values()) == 3
    lines = list(read_answers(artifact.dir / ANSWERS_JSONL))
    assert [line.key for line in lines] == [sample.key for sample in samples]
    assert [line.skip for line in lines[1:]] == ["decode_error", "truncated_image", "special_token_in_text"]
    assert json.loads((artifact.dir / "report.json").read_text())["summary"]["left out"] == artifact.manifest.skips


def test_one_turn_that_cannot_be_asked_takes_its_sample_with_it():
    said = [GeneratedAnswer(key="a/1", turn=t, answer="x", stopped=True, ids=[5]) for t in range(2)]
    other = GeneratedAnswer(key="a/0", turn=0, answer="y", stopped=True, ids=[5])
    gone = [SkippedSample(key="a/1", skip="decode_error", detail=d) for d in "pq"]
    assert in_order_of_samples([(4, gone[1]), (3, said[1]), (2, gone[0]), (1, said[0]), (0, other)]) == [other, gone[0]]


def test_any_characters_come_back_from_a_line(tmp_path):
    line = GeneratedAnswer(key="a/0", turn=0, answer="a\u2028b\x85c\nd\te \ufffd \U0001f600", stopped=True, ids=[3, 1])
    (tmp_path / "x").write_text(to_line(line) * 2, encoding="utf-8")
    assert list(read_answers(tmp_path / "x")) == [line, line]


def test_the_plan_knows_every_length_and_record(made):
    model, samples = ModelDirectory(talkative_hf_dir()), made[0]["samples"]
    generator = Generator(model)
    by_key = {sample.key: sample for sample in mixed_samples(14)}
    for question in plan_questions(samples, ChatEncoder(model), read_prompt_format(model), None):
        sample = by_key[question.key]
        before = sample.messages[: question.place]
        images = generator.encode_images(sample.images[: question.num_images])
        assert question.num_tokens == len(generator.encode_prompt(before, images).input_ids)
        shard, place = samples.dir / question.shard, (question.offset, question.size)
        fields = read_record(shard, *place, checksum=question.checksum)
        assert [value for name, value in sorted(fields.items()) if name != "json"] == list(sample.images)


def _questions(lengths):
    return [
        Question(f"a/{i:08d}", 0, 1, 0, 0, n, "s", 0, 0, 0, "" if n else "decode_error") for i, n in enumerate(lengths)
    ]


def test_parts_and_groups_hold_like_lengths_and_keep_their_limits():
    assert cut_parts(_questions([5, 900, 0, 7, 300, 6, 300]), 2) == [[1, 4], [6, 3], [5, 0]]
    assert cut_parts([], 2) == []
    assert cut_groups([900, 300, 299, 7, 6, 5, 5], 12, 4000) == [[0], [1, 2, 3], [4, 5, 6]]
    assert cut_groups([300, 299, 298, 7], 400, 2400) == [[0, 1], [2, 3]]
    assert cut_groups([2000], 4, 1000) == [[0]]
    assert cut_groups([2, 1], 1, 1000) == [[0], [1]]
    assert cut_groups([], 4, 1000) == []


def test_what_comes_next_is_prepared_meanwhile_and_in_order():
    begun = []
    with ThreadPoolExecutor(2) as executor:
        coming = answer_parts.ahead(executor, lambda i: begun.append(i) or i, range(9), 3)
        assert next(coming) == 0
        executor.submit(lambda: None).result()
        assert set(begun) <= set(range(4)), "no more than it was told to"
        assert list(coming) == list(range(1, 9))


@pytest.mark.full  # covered in the core tier by a rerun that keeps existing parts
def test_killed_at_any_moment_it_gives_the_same_answers(tmp_path):
    command = [sys.executable, "-m", "tests.helpers.kill_answer", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["kills"] >= 5 and result["differing"] == {}


@pytest.mark.full
def test_two_workers_give_the_bytes_of_one(made, tmp_path):
    seen, two = [], ClusterConfig(processes=2, num_threads=1)
    resources = StageResources(cluster=two, on_progress=lambda *now: seen.append(now))
    artifact = answered(CONFIG, made[0], tmp_path, resources)
    assert _bytes(artifact) == _bytes(made[1])
    logs = "".join(path.read_text() for path in (artifact.dir / "job" / "logs").iterdir())
    assert logs.count("worker 0 of 2: 4 more") == 3 and logs.count("worker 1 of 2: 4 more") == 2
    assert seen[-1] == (20, 20) and seen == sorted(seen)


def _job(directory, hf_dir, **config):
    config, prompt = CONFIG.model_copy(update=config), read_prompt_format(ModelDirectory(talkative_hf_dir()))
    return AnswerJob(config=config, hf_dir=hf_dir, prompt=prompt, samples_dir=directory, work_dir=directory)


def _worker_job(directory, hf_dir, **config):
    """Write the job.json of a worker whose plan holds one question."""
    directory.mkdir()
    job = _job(directory, hf_dir, **config)
    write_plan(directory / PLAN_JSONL, _questions([5]))
    (directory / "job.json").write_text(job.model_dump_json())
    return directory / "job.json"


def test_what_a_worker_refuses_is_left_for_the_stage_in_one_line(tmp_path, capsys):
    hf_dir = hf_artifact(tmp_path / "e", talkative_hf_dir()).dir / "hf"
    (hf_dir / "generation_config.json").write_text('{"eos_token_id": "end"}')
    path = _worker_job(tmp_path / "job", hf_dir)
    assert answer_worker.main([str(path)]) == EXIT_INPUT
    said = (path.parent / answer_worker.REFUSED).read_text()
    assert "eos_token_id is end; give the id" in said and "\n" not in said
    assert capsys.readouterr().err == said + "\n"


@pytest.mark.parametrize("refused", ["the model is none", None])
def test_the_stage_says_what_a_worker_refused(tmp_path, monkeypatch, refused):
    def run_job(launcher, asked, on_poll):
        if refused:
            (tmp_path / "job" / answer_worker.REFUSED).write_text(refused)
        raise JobFailed("exit status 2", Handle(job=asked, command=["x"]), 2)

    monkeypatch.setattr(answer_worker, "run_job", run_job)
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / answer_worker.REFUSED).write_text("of an earlier try")
    with pytest.raises(InputError if refused else JobFailed, match=refused or "exit status 2"):
        answer_worker.run_workers(_job(tmp_path, tmp_path), ClusterConfig(processes=2), lambda line: None, lambda: None)


def test_a_worker_with_nothing_to_do_loads_no_model(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert answer_worker.main([str(_worker_job(tmp_path / "job", tmp_path / "no model"))]) == 0


def test_a_rerun_keeps_the_parts_that_are_there_and_counts_them(made, tmp_path, monkeypatch):
    seen, written, real = [], [], answer_parts._write_part

    def failing(path, *rest):
        if path.name == "00002.jsonl" and len(written) == 2:
            raise RuntimeError("stop here")
        written.append(path.name)
        real(path, *rest)

    monkeypatch.setattr(answer_parts, "_write_part", failing)
    with pytest.raises(RuntimeError, match="stop here"):
        answered(CONFIG, made[0], tmp_path)
    written.append("stopped")
    again = answered(CONFIG, made[0], tmp_path, StageResources(on_progress=lambda *now: seen.append(now)))
    parts = [f"{n:05d}.jsonl" for n in range(5)]
    assert written == [*parts[:2], "stopped", *parts[2:]]
    assert seen == sorted(seen) and seen[0] == (8, 20) and seen[-1] == (20, 20)
    assert _bytes(again) == _bytes(made[1])


@pytest.mark.parametrize("name", [PLAN_JSONL, "parts/00001.jsonl", "parts/00001.json"])
@pytest.mark.parametrize("kept", [pytest.param(slice(-1), id="a line less"), full(slice(0), id="empty")])
def test_a_rerun_does_not_lose_answers_of_a_damaged_part(made, tmp_path, monkeypatch, name, kept):
    def stop(*_):
        raise RuntimeError("stop here")

    monkeypatch.setattr("stages.answer.stage._gather", stop)
    with pytest.raises(RuntimeError, match="stop here"):
        answered(CONFIG, made[0], tmp_path)
    monkeypatch.undo()
    (path,) = tmp_path.glob(f"scratch/*/{name}")
    path.write_text("".join(path.read_text().splitlines(keepends=True)[kept]))
    assert _bytes(answered(CONFIG, made[0], tmp_path)) == _bytes(made[1])


def test_max_samples_per_subset_draws_them_of_each(made, tmp_path):
    config = AnswerConfig(max_new_tokens=1, max_samples_per_subset=2)
    lines = read_answers(answered(config, made[0], tmp_path).dir / ANSWERS_JSONL)
    assert {line.key for line in lines} == {
        *("text/00000000", "text/00000004", "single/00000001", "single/00000005"),
        *("pair/00000006", "pair/00000010", "multi/00000003", "multi/00000011"),
    }


def test_a_draw_is_spread_over_the_subset_and_a_part_of_a_larger_one(tmp_path):
    one = [picture(0)]
    samples = [conversation(f"q/{i:08d}", [(f"<image>{i}?", "7")], one if i < 30 else [picture(i)]) for i in range(60)]
    artifact = samples_artifact(tmp_path / "s", samples)
    small, large = ([sample.key for sample in heldout_samples(artifact, None, number)] for number in (20, 40))
    assert len(small) == 20 and set(small) < set(large) and small == sorted(small)
    assert sum(int(key[2:]) >= 30 for key in small) >= 7  # the first 20 show one picture
    assert [sample.key for sample in heldout_samples(artifact, None, 61)] == [sample.key for sample in samples]


@pytest.mark.parametrize(
    ("heldout", "words"),
    [([], "no held-out samples"), ([BROKEN], r"none of 1 held-out samples can be asked \({'decode_error': 1}\)")],
    ids=["none", "none that can be asked"],
)
def test_that_there_is_nothing_to_ask_is_said(tmp_path, heldout, words):
    with pytest.raises(InputError, match=words):
        answered(CONFIG, _inputs(tmp_path, heldout, mixed_samples(1)), tmp_path / "root")


def flip_the_last_bit(file):
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


@pytest.mark.promise(
    "A damaged record, shard, index, plan, manifest or exported weight is not used, and one line names it."
)
@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda file: file.unlink(), "model.safetensors is missing; delete"),
        (flip_the_last_bit, "model.safetensors is damaged: .*; delete .*/e and run the same"),
    ],
    ids=["missing", "a bit"],
)
def test_damaged_weights_of_an_export_are_noticed_before_it_answers(made, tmp_path, damage, words):
    export = hf_artifact(tmp_path / "e", talkative_hf_dir())
    damage(export.dir / "hf" / "model.safetensors")
    with pytest.raises(InputError, match=words):
        answered(CONFIG, {**made[0], "hf": export}, tmp_path / "root")
