"""Runs that train adapters over one loaded base, one after the other in one process, train as each does by itself."""

import gc
import signal
import time
import weakref
from collections.abc import Iterator

import pytest
import torch
from megatron.core import dist_checkpointing

from tests.equivalence.test_adapters import targets_of
from tests.helpers.run_dir import changed, log_of, result_of, write_job
from tests.helpers.single_rank import single_rank
from tests.helpers.tiers import full
from tests.helpers.world import start, start_ranks
from trainer.checkpoint.directory import list_checkpoints
from trainer.contract.adapter import AdapterConfig
from trainer.contract.answer import read_metrics
from trainer.contract.names import EXIT_INPUT, EXIT_STOPPED, HELDOUT_BASE_JSONL, HELDOUT_JSONL
from trainer.contract.parallel import ParallelConfig
from trainer.contract.run import RunConfig, SharedBaseRun
from trainer.loop import job
from trainer.loop import train as loop
from trainer.loop.interval import NotFinite
from trainer.loop.set_up import SharedBase, load_base
from trainer.parallel.mesh import seed_rank

pytestmark = pytest.mark.promise(
    "Runs of a sweep over one loaded base have the losses, adapters and moments of a process of their own, to the bit."
)

STEPS = 4
# Settings of the runs that share a base: kind, rank, dropout, rate, steps. Dropout draws random numbers.
RUNS = {
    "a": ("lora", 8, 0.3, 1e-2, STEPS),
    "b": ("dora", 4, 0.0, 1e-3, STEPS + 2),
    "c": ("lora", 16, 0.1, 3e-3, STEPS),
}


def jobs(
    directory, shape: str = "first", base: str = "train_precision", layout: dict | None = None, prefix: str = ""
) -> list[RunConfig]:
    """Write the run.json of RUNS, each below `directory`; other seeds, rates, targets and batches."""
    written = []
    for number, (name, (kind, rank, dropout, lr, steps)) in enumerate(RUNS.items()):
        kind, dropout = ("lora", 0.0) if shape.startswith("experts-") else (kind, dropout)
        run = write_job(
            directory, num_steps=steps, shape=shape, name=prefix + name, parallel=ParallelConfig(**layout or {})
        )
        targets = targets_of(shape)[: 1 + number] if number < 2 else targets_of(shape)
        adapter = AdapterConfig(kind=kind, rank=rank, alpha=16, dropout=dropout, targets=targets, base=base)
        train = run.train.model_copy(
            update={
                "adapter": adapter,
                "seed": number,
                "optim": run.train.optim.model_copy(update={"lr": lr}),
            }
        )
        written.append(rewrite(run.model_copy(update={"train": train, "fingerprint": f"{number:016d}"})))
    return written


def rewrite(run: RunConfig, **changes: object) -> RunConfig:
    other = changed(run, **changes)
    (other.output_dir / "run.json").write_text(other.model_dump_json())
    return other


def train_in_one(runs: list[RunConfig], processes: int = 1):
    """Start the trainer on these runs together."""
    path, log = runs[0].output_dir / "run.json", runs[0].output_dir / "log.txt"
    if len(runs) > 1:
        together = SharedBaseRun(runs=[run.output_dir / "run.json" for run in runs])
        path = runs[0].output_dir / "together.json"
        path.write_text(together.model_dump_json())
    return [start("trainer", path, log=log)] if processes == 1 else start_ranks("trainer", processes, path, log=log)


def outcome(run: RunConfig) -> dict[str, object]:
    """Return the results of a run: every number of its metrics but times and memory, losses of samples, and its newest
    checkpoint, which holds the adapters and their optimizer."""
    rows = [row.model_dump() for row in read_metrics(run.output_dir)]
    is_time = ("second", "tflops", "mfu", "memory", "time_ms")
    newest = list_checkpoints(run.output_dir / "checkpoints")[-1]
    with single_rank():
        state = dist_checkpointing.load_plain_tensors(str(newest))
    tensors = {f"{name}.{key}": t for name, inner in state.items() for key, t in _tensors(inner)}
    assert any("adapter" in name for name in tensors)
    return {
        "rows": [{k: v for k, v in row.items() if not any(word in k for word in is_time)} for row in rows],
        "files": {name: (run.output_dir / name).read_bytes() for name in (HELDOUT_JSONL, HELDOUT_BASE_JSONL)},
        "state": {name: tensor.tolist() for name, tensor in tensors.items()},
        "result": result_of(run).model_dump(),
    }


def _tensors(state: object, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(state, torch.Tensor):
        yield name, state
    for key, value in state.items() if isinstance(state, dict) else ():
        yield from _tensors(value, f"{name}.{key}")


@pytest.mark.parametrize(
    ("shape", "base", "layout", "processes"),
    [
        full("first", "train_precision", {}, 1),
        full("first", "float8", {}, 1),
        full("hybrid-first", "float8", {}, 1),
        full("experts-shared", "float8", {}, 1),
        full("experts-shared", "train_precision", {}, 1),
        full("text-second", "train_precision", {}, 1),
        full("first", "train_precision", {}, 2),
        full("first", "float8", {"tp": 2, "sequence_parallel": True}, 2),
        full("second", "train_precision", {"pp": 2}, 2),
    ],
)
def test_each_run_is_that_of_a_process_of_its_own_to_the_bit(tmp_path, shape, base, layout, processes):
    together = jobs(tmp_path, shape, base, layout)
    assert [process.wait() for process in train_in_one(together, processes)] == [0] * processes, log_of(together[0])
    alone = jobs(tmp_path, shape, base, layout, prefix="alone-")
    for ours, expected in zip(together, alone, strict=True):
        assert [process.wait() for process in train_in_one([expected], processes)] == [0] * processes, log_of(expected)
        of_ours, of_expected = outcome(ours), outcome(expected)
        for name in of_expected:
            assert of_ours[name] == of_expected[name], name
    assert len({str(outcome(run)["rows"][-1]["loss"]) for run in together}) == len(together)
    assert log_of(together[0]).count("parameters' tensors on this rank") == 1
    assert "step 6 loss" in (together[1].output_dir / "logs/trainer.log").read_text()


@pytest.mark.full
@pytest.mark.parametrize("base", ["train_precision", "float8"])
def test_a_run_leaves_the_base_as_it_was_and_no_memory(tmp_path, base, monkeypatch):
    runs, modules, real = jobs(tmp_path, base=base), [], loop.set_up

    def watched(*args):
        trainer = real(*args)
        modules.append(weakref.ref(trainer.chunks[0].module))
        return trainer

    monkeypatch.setattr(loop, "set_up", watched)
    before = signal.getsignal(signal.SIGTERM)
    with single_rank() as mesh:
        shared = load_base(runs[0], mesh)
        (held,) = shared.chunks
        tensors = {name: (tensor, tensor.clone()) for name, tensor in [*held.named_parameters(), *held.named_buffers()]}
        classes = [type(module) for module in held.modules()]
        for run in runs[:2]:
            seed_rank(run.train.seed)
            assert loop.train(run, mesh, shared).status == "finished"
        signal.signal(signal.SIGTERM, before)
        now = dict([*held.named_parameters(), *held.named_buffers()])
    assert now.keys() == tensors.keys() and classes == [type(module) for module in held.modules()]
    for name, (tensor, copy) in tensors.items():
        assert now[name] is tensor and torch.equal(tensor, copy) and not hasattr(tensor, "main_grad"), name
    gc.collect()
    assert [module() for module in modules] == [None, None]


def test_a_run_that_is_not_finite_does_not_end_the_others_and_another_failure_does(tmp_path, monkeypatch):
    runs, begun = jobs(tmp_path), []
    errors = [NotFinite(3, float("nan"), ["train/00000001"]), RuntimeError("a rank's own failure"), None]

    def fails(run, mesh, base):
        begun.append(run)
        raise errors[len(begun) - 1]

    monkeypatch.setattr(job, "load_base", lambda run, mesh: SharedBase([]))
    monkeypatch.setattr(job, "seed_rank", lambda seed: None)
    monkeypatch.setattr(job, "rank_mesh", lambda *_: single_rank())
    monkeypatch.setattr(job, "train", fails)
    results = job.run_together(runs)
    assert begun == runs[:2] and [result.step for result in results] == [3, 0]
    assert result_of(runs[0]).keys == ["train/00000001"] and "a rank's own failure" in result_of(runs[1]).message
    assert not (runs[2].output_dir / "result.json").exists()
    assert "gradient norm is nan" in (runs[0].output_dir / "result.json").read_text()


@pytest.mark.full
def test_sigterm_saves_the_run_that_trains_and_the_next_start_goes_on(tmp_path):
    runs = jobs(tmp_path)
    runs[1] = rewrite(runs[1], train=runs[1].train.model_copy(update={"num_steps": 60}))
    (process,) = train_in_one(runs)
    while len(read_metrics(runs[1].output_dir)) < 2:
        assert process.poll() is None, log_of(runs[0])
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    assert process.wait() == EXIT_STOPPED
    first, second = (result_of(run) for run in runs[:2])
    assert (first.status, second.status) == ("finished", "stopped") and 0 < second.step < 60
    assert not (runs[2].output_dir / "result.json").exists()
    train_in_one(runs[1:])[0].wait()
    assert [result_of(run).status for run in runs] == ["finished"] * 3
    assert f"resumed at step {second.step}" in log_of(runs[1])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"adapter": None}, "cannot share a base: train.adapter=null trains the weights themselves"),
        ({"precision": "bfloat16"}, "cannot share a base: they differ in the model, the bins"),
    ],
)
def test_runs_with_another_base_are_refused_before_it_is_loaded(tmp_path, change, words):
    runs = jobs(tmp_path)
    runs[1] = rewrite(runs[1], train=runs[1].train.model_copy(update=change))
    assert train_in_one(runs)[0].wait() == EXIT_INPUT
    assert words in result_of(runs[0]).message and "weights:" not in log_of(runs[0])
