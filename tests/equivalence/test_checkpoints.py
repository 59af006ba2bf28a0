"""Checkpoints written while training goes on: the same bits, and nothing lost whatever is killed or fails meanwhile."""

import json
import os
import random
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from megatron.core import dist_checkpointing
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from tests.helpers import world
from tests.helpers.held_writer import PLACES, is_held, release
from tests.helpers.patience import at_most
from tests.helpers.reference import random_hf_dir
from tests.helpers.run_dir import OPTIM, changed, log_of, metrics_of, result_of, write_job
from tests.helpers.single_rank import build_tiny, single_rank
from tests.helpers.started import Started
from tests.helpers.tiers import full, tiered
from tests.helpers.world import run_world
from trainer.checkpoint.directory import list_checkpoints
from trainer.checkpoint.save_and_load import random_states, restore_random_states
from trainer.checkpoint.saver import Checkpointer
from trainer.contract.names import EXIT_FAILED, EXIT_INPUT, EXIT_STOPPED
from trainer.contract.parallel import ParallelConfig
from trainer.contract.run import RunConfig
from trainer.families.qwen3_vl.family import FAMILY
from trainer.loop.optim import build_optimizer

pytestmark = pytest.mark.promise(
    "Saves change no bit of a training; a kill at any point of a save, or a full disk, costs that save alone; "
    "SIGTERM ends with one, and what was killed with -9 goes on to the bit."
)

STEPS, INTERVAL = 8, 3
UNCLIPPED = OPTIM.model_copy(update={"clip_grad_norm": 1e6})


def make_run(root: Path, num_steps: int = STEPS, optim=OPTIM, **checkpoint) -> RunConfig:
    """Saves every three steps and keeps everything, where nothing else is said."""
    run = write_job(root, num_steps=num_steps, optim=optim)
    settings = {"save_interval": INTERVAL, "keep_last": 100, "asynchronous": True, **checkpoint}
    return rewrite(run, checkpoint=run.execution.checkpoint.model_copy(update=settings))


def rewrite(run: RunConfig, **changes) -> RunConfig:
    other = changed(run, **changes)
    (other.output_dir / "run.json").write_text(other.model_dump_json())
    return other


def start(run: RunConfig, **options: object) -> Started:
    """One rank, by itself: its process is the one that trains."""
    return world.start("trainer", run.output_dir / "run.json", log=run.output_dir / "log.txt", **options)


def start_held(run: RunConfig, place: str = "file") -> Started:
    log = run.output_dir / "log.txt"
    return world.start("tests.helpers.held_writer", run.output_dir / "run.json", place, log=log)


def train_on(run: RunConfig, processes: int) -> None:
    """Train on so many ranks."""
    ranks = world.start_ranks("trainer", processes, run.output_dir / "run.json", log=run.output_dir / "log.txt")
    assert [rank.wait() for rank in ranks] == [0] * processes, log_of(run)


def wait_for(condition, run: RunConfig, process: Started, seconds: float = 120) -> None:
    stop = time.monotonic() + at_most(seconds)
    while not condition():
        assert time.monotonic() < stop and process.poll() is None, log_of(run)
        time.sleep(0.005)


def has_reached(run: RunConfig, step: int) -> bool:
    return any(row.step >= step for row in metrics_of(run))


def half_file(run: RunConfig, step: int) -> Path:
    return run.output_dir / f"checkpoints/saving-step-{step:06d}/__0_0.distcp"


def steps_of(run: RunConfig) -> list[int]:
    return [int(path.name[-6:]) for path in list_checkpoints(run.output_dir / "checkpoints")]


def rows_of(run: RunConfig) -> list[tuple]:
    names = ("step", "loss", "grad_norm", "param_norm", "heldout_loss", "tokens", "loss_tokens")
    return [tuple(getattr(row, name) for name in names) for row in metrics_of(run)]


def take(other: RunConfig, run: RunConfig, step: int) -> Path:
    """Copy a checkpoint of another run, from which this one goes on."""
    name = f"checkpoints/step-{step:06d}"
    return shutil.copytree(other.output_dir / name, run.output_dir / name)


def content_of(run: RunConfig, step: int) -> tuple[dict, dict]:
    """(every tensor, everything else but the RNG states) of a checkpoint."""
    directory = str(run.output_dir / f"checkpoints/step-{step:06d}")
    with single_rank():
        found = dist_checkpointing.load_plain_tensors(directory)
    tensors = {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}
    return tensors, {name: value for name, value in found.items() if name not in tensors}


def assert_same_content(ours: tuple[dict, dict], theirs: tuple[dict, dict]) -> None:
    assert ours[0].keys() == theirs[0].keys() and len(ours[0]) > 100
    different = [name for name, tensor in ours[0].items() if not torch.equal(tensor, theirs[0][name])]
    assert not different
    assert ours[1] == theirs[1] and ("optimizer" in ours[1] or ours[1]["num_updates"])


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> RunConfig:
    """Eight steps in one go, the files written before training goes on."""
    run = make_run(tmp_path_factory.mktemp("undisturbed"), asynchronous=False)
    assert start(run).wait(240) == 0, log_of(run)
    assert steps_of(run) == [3, 6, 8]
    return run


@pytest.mark.full
def test_files_of_a_training_are_their_owners_alone(undisturbed):
    """The trainer sets its own umask: on a cluster it has no flow as its parent."""
    of_the_test = ("run.json", "log.txt", "*.status")
    written = [path for path in undisturbed.output_dir.rglob("*") if not any(map(path.match, of_the_test))]
    assert len(written) > 20 and not [path for path in written if path.stat().st_mode & 0o077]


def test_what_is_written_late_is_the_state_at_the_step_of_the_save(undisturbed, tmp_path):
    run = make_run(tmp_path)
    process = start_held(run)
    wait_for(lambda: has_reached(run, 6), run, process)
    assert half_file(run, 3).is_file() and not steps_of(run)
    for step in (3, 6, 8):
        release(run, step)
    assert process.wait(120) == 0, log_of(run)
    assert steps_of(run) == [3, 6, 8]
    for step in (3, 6, 8):
        assert_same_content(content_of(run, step), content_of(undisturbed, step))
    assert rows_of(run) == rows_of(undisturbed)


@pytest.mark.parametrize("place", tiered(PLACES, ("publish",)))
def test_a_kill_at_any_point_of_a_save_costs_that_save_and_no_more(undisturbed, tmp_path, place):
    run = make_run(tmp_path, keep_last=1)
    if place != "delete":
        release(run, 3)
    process = start_held(run, place)
    wait_for(lambda: is_held(run, 3 if place == "delete" else 6), run, process)
    psutil.Process(process.pid).kill()
    process.wait(60)
    assert steps_of(run) == ([3, 6] if place == "delete" else [3])
    (run.output_dir / "checkpoints/step-000005").mkdir()
    assert start(run).wait(240) == 0, log_of(run)
    assert f"resumed at step {6 if place == 'delete' else 3}" in log_of(run)
    # It has no record. It is looked at where it is the newest.
    aside = "step-000005" if place == "delete" else "damaged-step-000005"
    assert sorted(path.name for path in (run.output_dir / "checkpoints").iterdir()) == [aside, "step-000008"]
    assert rows_of(run) == rows_of(undisturbed)
    assert_same_content(content_of(run, 8), content_of(undisturbed, 8))


@pytest.mark.parametrize("asynchronous", [True, full(False)])
def test_a_write_error_names_the_directory_and_the_reason(undisturbed, tmp_path, asynchronous):
    run = make_run(tmp_path, asynchronous=asynchronous)
    saved = take(undisturbed, run, 3)
    size = (saved / half_file(run, 3).name).stat().st_size
    assert start(run, max_file_bytes=size // 2).wait(240) == EXIT_FAILED, log_of(run)
    message = result_of(run).message
    assert str(half_file(run, 6).parent) in message and "File too large" in message and "\n" not in message
    assert steps_of(run) == [3]


@pytest.mark.parametrize(
    ("layout", "processes"),
    [
        full({}, 1),
        full({}, 2),
        full({"tp": 2}, 2),
        full({"pp": 2}, 2),
        full({"pp": 2, "vision": "dealt"}, 2),
        full({"vision": {"ranks": 1}}, 2),
        full({"sharding": "fsdp"}, 2),
    ],
    ids=str,
)
def test_saves_change_no_bit_of_a_training(tmp_path, layout, processes):
    runs = []
    for name, interval in (("without", 1000), ("with", 2)):
        run = write_job(tmp_path, num_steps=STEPS, parallel=ParallelConfig(**layout), save_interval=interval, name=name)
        run_world(run, processes, save=True)
        assert len(steps_of(run)) == (1 if name == "without" else 2)
        runs.append(run)
    assert rows_of(runs[0]) == rows_of(runs[1])
    assert_same_content(*(content_of(run, STEPS) for run in runs))


def test_sigterm_to_all_processes_of_a_job_finishes_the_save_that_runs(tmp_path):
    run = make_run(tmp_path, num_steps=2000, save_interval=2)
    release(run, 2)
    process = start_held(run)
    wait_for(lambda: half_file(run, 4).is_file(), run, process)
    os.killpg(process.pid, signal.SIGTERM)
    stopped_at = max(row.step for row in metrics_of(run))
    wait_for(lambda: has_reached(run, stopped_at + 1), run, process)
    assert steps_of(run) == [2]
    for step in range(4, 8):
        release(run, step)
    assert process.wait(120) == EXIT_STOPPED, log_of(run)
    result = result_of(run)
    assert result.status == "stopped" and result.step in (stopped_at, stopped_at + 1)
    assert result.step == metrics_of(run)[-1].step
    assert steps_of(run) == sorted({2, 4, result.step})
    assert Path(result.checkpoint).name == f"step-{result.step:06d}"


def start_two(run: RunConfig) -> list[Started]:
    """Two ranks, when the second step is done."""
    ranks = world.start_ranks("trainer", 2, run.output_dir / "run.json", log=run.output_dir / "log.txt")
    wait_for(lambda: has_reached(run, 2), run, ranks[0])
    return ranks


@pytest.mark.parametrize(
    "parallel", [full(ParallelConfig(), id="dp2"), pytest.param(ParallelConfig(vision={"ranks": 1}), id="images")]
)
def test_sigterm_to_one_rank_of_two_saves_once_and_ends_both(tmp_path, parallel):
    run = rewrite(make_run(tmp_path, num_steps=2000, save_interval=1000), parallel=parallel)
    ranks = start_two(run)
    ranks[1].send_signal(signal.SIGTERM)
    assert [process.wait(120) for process in ranks] == [EXIT_STOPPED, EXIT_STOPPED], log_of(run)
    assert steps_of(run) == [result_of(run).step]
    assert log_of(run).count("checkpoint: step-") == 1


@pytest.mark.full
def test_a_killed_rank_of_images_ends_the_job_with_its_name(tmp_path):
    run = make_run(tmp_path, num_steps=2000, save_interval=1000)
    language, images = start_two(rewrite(run, parallel=ParallelConfig(vision={"ranks": 1})))
    images.kill()
    killed = time.monotonic()
    assert language.wait(30) == EXIT_FAILED, log_of(run)
    assert time.monotonic() - killed < 30
    assert "lost rank 1 on " in result_of(run).message


@pytest.mark.full
def test_multiples_of_keep_every_stay_beside_the_newest(tmp_path):
    run = make_run(tmp_path, save_interval=1, keep_last=2, keep_every=3)
    assert start(run).wait(240) == 0, log_of(run)
    kept = sorted(path.name for path in (run.output_dir / "checkpoints").iterdir())
    assert kept == [f"step-00000{step}" for step in (3, 6, 7, 8)]


@pytest.mark.full
def test_a_checkpoint_of_another_shape_is_refused_in_one_line(undisturbed, tmp_path):
    run = rewrite(make_run(tmp_path), hf_dir=random_hf_dir("second"))
    take(undisturbed, run, 3)
    assert start(run).wait(240) == EXIT_INPUT, log_of(run)
    message = result_of(run).message
    assert "step-000003 does not fit this model" in message and "shape" in message and "\n" not in message
    assert "Traceback" not in log_of(run)


@pytest.fixture(scope="module")
def unclipped(tmp_path_factory) -> RunConfig:
    """Eight steps of one rank whose gradients are never scaled down (see the test)."""
    run = make_run(tmp_path_factory.mktemp("unclipped"), optim=UNCLIPPED)
    assert start(run).wait(240) == 0, log_of(run)
    return run


@pytest.mark.parametrize(("before", "after"), [full(2, 1), full(1, 2)])
def test_other_data_parallel_ranks_go_on_with_the_same_bits(unclipped, tmp_path, before, after):
    """Two bins a step: one addition for each gradient, and a + b is b + a. Only the norm adds in another order, and
    with it what clipping makes of the gradients, so nothing is clipped here."""
    run = make_run(tmp_path, optim=UNCLIPPED)
    train_on(run, before)
    for later in list_checkpoints(run.output_dir / "checkpoints")[1:]:
        shutil.rmtree(later)
    train_on(run, after)
    assert "resumed at step 3" in log_of(run)
    record = json.loads((run.output_dir / "checkpoints/step-000008/athanor.json").read_text())
    assert record["world_size"] == after and record["parallel"]["tp"] == 1
    for ours, theirs in zip(metrics_of(run), metrics_of(unclipped), strict=True):
        assert (ours.loss, ours.heldout_loss, ours.tokens) == (theirs.loss, theirs.heldout_loss, theirs.tokens)
        assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-6)
    assert_same_content(content_of(run, 8), content_of(unclipped, 8))


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory) -> RunConfig:
    """Eight steps of two pipeline ranks, which both hold the tied embeddings."""
    run = make_run(tmp_path_factory.mktemp("pipeline"))
    run = rewrite(run, parallel=ParallelConfig(pp=2))
    train_on(run, 2)
    return run


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.full
@pytest.mark.promise(
    "A checkpoint with a flipped bit, or a pickle that calls a function, is refused, and training continues "
    "from the one before."
)
@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("__1_0.distcp", flip),  # the first rank sees no damage in its own file
        ("athanor.json", Path.unlink),
        ("common.pt", Path.unlink),
        ("__0_0.distcp", lambda path: os.truncate(path, 1000)),
    ],
)
def test_a_damaged_newest_checkpoint_is_kept_aside_and_the_ranks_go_on_from_the_one_before(
    pipeline, tmp_path, name, damage
):
    shutil.copytree(pipeline.output_dir, tmp_path / "run")
    run = rewrite(pipeline, output_dir=tmp_path / "run")
    damage(run.output_dir / "checkpoints/step-000008" / name)
    kept = {path.name for path in (run.output_dir / "checkpoints/step-000008").iterdir()}
    before = log_of(run)
    train_on(run, 2)
    told = log_of(run).removeprefix(before)
    (line,) = [line for line in told.splitlines() if "damaged" in line]
    assert name in line and "is kept aside as damaged-step-000008, and the training resumes from step-000006" in line
    assert told.count("resumed at step 6") == 1
    assert {path.name for path in (run.output_dir / "checkpoints/damaged-step-000008").iterdir()} == kept
    assert rows_of(run) == rows_of(pipeline)
    assert_same_content(content_of(run, 8), content_of(pipeline, 8))


@pytest.mark.promise(
    "A checkpoint with a flipped bit, or a pickle that calls a function, is refused, and training continues "
    "from the one before."
)
def test_a_training_whose_checkpoints_are_all_damaged_begins_anew(undisturbed, tmp_path):
    run = make_run(tmp_path, asynchronous=False)
    shutil.copytree(undisturbed.output_dir / "checkpoints", run.output_dir / "checkpoints")
    for step in (3, 6, 8):
        flip(run.output_dir / f"checkpoints/step-{step:06d}/__0_0.distcp")
    (run.output_dir / "checkpoints/damaged-step-000008").mkdir()  # of an earlier start
    assert start(run).wait(240) == 0, log_of(run)
    lines = [line for line in log_of(run).splitlines() if "is kept aside as" in line]
    assert ["resumes from step-000006" in lines[0], "resumes from step-000003" in lines[1]] == [True, True]
    assert "and the training starts from the beginning, because there is no older one" in lines[2]
    assert "data state: fresh" in log_of(run)
    aside = sorted(path.name for path in (run.output_dir / "checkpoints").glob("damaged-*"))
    assert aside == [f"damaged-step-{name}" for name in ("000003", "000006", "000008", "000008-2")]
    assert rows_of(run) == rows_of(undisturbed)
    assert_same_content(content_of(run, 8), content_of(undisturbed, 8))


def test_parameters_with_a_bucket_of_their_own_are_saved_where_they_are(tmp_path):
    """Tied embeddings have this layout on pipeline ranks: 64 elements of padding precede them here."""
    run = make_run(tmp_path, asynchronous=False)
    with single_rank() as mesh:
        model = build_tiny(run.hf_dir, mesh)
        model.language.embedding.weight.shared_embedding = True
        config = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
        chunk = DistributedDataParallel(model.config, config, model)
        assert chunk.buffers[0].numel_unpadded < chunk.buffers[0].numel and len(chunk.buffers[0].buckets) == 3
        optimizer = build_optimizer([chunk], run.train, torch.float32, FAMILY)
        for param in model.parameters():
            param.main_grad.normal_()
        optimizer.step()
        Checkpointer([chunk], optimizer, run, mesh).save(1)
    tensors, _ = content_of(run, 1)
    prefix = "optimizer.state.param."
    main = {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
    assert "language.embedding.weight" in main and len(main) > 30
    assert not [name for name, value in main.items() if not torch.equal(value, tensors[name])]


def test_random_numbers_go_on_where_they_stopped_in_any_layout():
    def draw() -> tuple:
        tracker, drawn = get_cuda_rng_tracker(), {}
        for name in tracker.get_states():
            with tracker.fork(name):
                drawn[name] = torch.rand(1, device="cuda").item()
        return random.random(), np.random.rand(), torch.rand(1).item(), drawn

    with single_rank():
        draw()
        saved = random_states()
        first = draw()
        restore_random_states(saved, tp_rank=0)
        assert draw() == first
        restore_random_states(saved, tp_rank=1)
        other = draw()
    assert other[:3] == first[:3]
    different = [name for name, number in other[3].items() if number != first[3][name]]
    assert different == ["model-parallel-rng", "expert-parallel-rng"], "rank 0's numbers for another rank's slices"
