"""A save: the checks before it, the copy in host memory, the optimizer's tensors, and the outcome where it fails."""

import importlib.util
import json
import logging
import math
import random
import threading
from types import SimpleNamespace

import pytest
import torch
from megatron.core.optimizer import distrib_optimizer

from dataset_builders.errors import InputError
from tests.helpers.patience import at_most
from tests.helpers.run_dir import changed, write_job
from tests.helpers.single_rank import single_rank
from tests.trainer.checkpoint.test_checkpoint_reader import make_parts, torch_adam, updated_parts  # noqa: F401, a fixture
from trainer.checkpoint import directory, optimizer_state, saver
from trainer.checkpoint import save_and_load as checkpoint
from trainer.checkpoint.directory import list_checkpoints
from trainer.checkpoint.optimizer_state import rectangles
from trainer.checkpoint.saver import Checkpointer, HostMemory, RankFile, available_memory, copied_one_by_one
from trainer.model.registry import read_model
from trainer.plan.estimate import estimate_saved

pytestmark = pytest.mark.promise(
    "Saves change no bit of a training; a kill at any point of a save, or a full disk, costs that save alone; "
    "SIGTERM ends with one, and what was killed with -9 goes on to the bit."
)

STEPS, INTERVAL = 20, 2


@pytest.fixture(scope="module")
def updated(tmp_path_factory, torch_adam):  # noqa: F811
    """(run, mesh, chunks, optimizer) after one update. No save changes them."""
    run = write_job(tmp_path_factory.mktemp("job"), num_steps=STEPS)
    with single_rank() as mesh:
        yield run, mesh, *updated_parts(run, mesh)


@pytest.fixture
def parts(updated, tmp_path):
    """Return them with a directory of the test's own for the checkpoints."""
    run, *others = updated
    (tmp_path / "run").mkdir()
    return changed(run, output_dir=tmp_path / "run"), *others


def make(parts, step: int = 0, **checkpoint) -> Checkpointer:
    run, mesh, chunks, optimizer = parts
    settings = run.execution.checkpoint.model_copy(update={"save_interval": INTERVAL, **checkpoint})
    return Checkpointer(chunks, optimizer, changed(run, checkpoint=settings), mesh, step)


def save(made: Checkpointer, step: int) -> None:
    made.save(step)
    made.finish()


def names(parts) -> list[str]:
    return sorted(path.name for path in (parts[0].output_dir / "checkpoints").iterdir())


def size_of(parts) -> int:
    with make(parts) as made:
        return made._size


def have_free(monkeypatch, free: int) -> None:
    monkeypatch.setattr(directory.shutil, "disk_usage", lambda path: SimpleNamespace(free=free))


def test_the_size_is_known_before_the_first_save(parts):
    with make(parts) as made:
        shape = read_model(parts[0].hf_dir)[1]
        parallel, whole = parts[0].execution.parallel, [range(shape.language.num_layers)]
        assert made._size == estimate_saved(shape, parallel, parts[0].train, pieces=whole, dp=1)
        save(made, 2)
        (file,) = (parts[0].output_dir / "checkpoints/step-000002").glob("*.distcp")
        assert 0.7 < made._size / file.stat().st_size <= 1  # small tensors' headers count here


@pytest.mark.parametrize(
    ("settings", "copies"),
    [
        ({"keep_last": 2}, 3),
        ({"keep_last": 5}, 6),
        ({"keep_last": 50}, 10),  # the whole run saves no more
        ({"keep_last": 1, "keep_every": 6}, 2 + 3),
        ({"save_interval": 100}, 1),
    ],
)
def test_a_run_without_room_for_its_checkpoints_is_refused_before_its_first_step(parts, settings, copies, monkeypatch):
    size = size_of(parts)
    have_free(monkeypatch, copies * size)
    with make(parts, **settings):
        pass
    have_free(monkeypatch, copies * size - 1)
    with pytest.raises(InputError, match=r"GB are wanted .* GB are free; free space") as caught:
        make(parts, **settings)
    assert f"{copies * size / 1e9:,.3f} GB" in str(caught.value) and "\n" not in str(caught.value)


def test_checkpoints_that_are_there_count(parts, monkeypatch):
    with make(parts) as made:
        save(made, 2)
        save(made, 4)
    size = size_of(parts)
    have_free(monkeypatch, size)
    with make(parts, step=4):
        pass
    have_free(monkeypatch, size - 1)
    with pytest.raises(InputError):
        make(parts, step=4)


def test_a_save_without_room_ends_in_one_line_and_leaves_the_others(parts, monkeypatch):
    with make(parts) as made:
        save(made, 2)
        have_free(monkeypatch, 1000)
        with pytest.raises(RuntimeError, match=r"step-000004.*GB are wanted.*earlier ones are whole") as caught:
            made.save(4)
    assert "\n" not in str(caught.value) and names(parts) == ["step-000002"]


def test_a_disk_that_is_full_in_the_middle_leaves_the_others_and_no_scratch(parts, monkeypatch):
    with make(parts) as made:
        save(made, 2)
        full = OSError(28, "No space left on device")
        monkeypatch.setattr(RankFile, "write", lambda *_: (_ for _ in ()).throw(full))
        made.save(4)
        with pytest.raises(RuntimeError, match=r"step-000004.*rank 0: .*No space left on device") as caught:
            made.finish()
    assert "\n" not in str(caught.value) and names(parts) == ["step-000002"]


def test_without_memory_for_the_copy_a_save_blocks_and_says_so(parts, monkeypatch, caplog):
    monkeypatch.setattr(saver, "available_memory", lambda: 1000)
    with caplog.at_level(logging.WARNING), make(parts) as made:
        assert "saves will stop the training" in caplog.text and "0.0 GB are free" in caplog.text
        made.save(2)
        assert names(parts) == ["step-000002"]  # there before `save` returns


@pytest.mark.parametrize("settings", [{"asynchronous": False}, {"save_interval": STEPS}])
def test_no_memory_is_taken_where_nothing_is_gained(parts, settings):
    with make(parts, **settings) as made:
        assert made._memory is None


def test_one_save_at_a_time_and_the_second_says_how_long_it_waited(parts, monkeypatch, caplog):
    write, may_go, running = RankFile.write, threading.Event(), []

    def slow(*args):
        running.append(args)
        assert may_go.wait(at_most(60))
        return write(*args)

    monkeypatch.setattr(RankFile, "write", slow)
    with caplog.at_level(logging.INFO, "athanor.trainer"), make(parts) as made:
        made.save(2)
        assert made.is_writing and not list_checkpoints(parts[0].output_dir / "checkpoints")
        threading.Timer(0.3, may_go.set).start()
        made.save(4)
        assert names(parts)[-1] == "step-000002" and "waited" in caplog.text
        made.finish()
        assert not made.is_writing
    assert names(parts) == ["step-000002", "step-000004"]


def test_what_is_not_to_be_finished_ends_soon(parts, monkeypatch):
    may_go, written, copy = threading.Event(), [], saver.HostMemory.copy

    def late(*args):
        for tensor in copy(*args):
            assert may_go.wait(at_most(60))
            written.append(tensor)
            yield tensor

    monkeypatch.setattr(saver.HostMemory, "copy", late)
    with pytest.raises(KeyError), make(parts) as made:
        made.save(2)
        threading.Timer(0.5, may_go.set).start()
        raise KeyError("another error of the training")
    assert len(written) <= 1  # of more than three hundred
    assert names(parts) == ["saving-step-000002"]
    with make(parts):
        assert names(parts) == []


def test_the_record_says_what_was_written(parts):
    with make(parts) as made:
        save(made, 2)
    record = json.loads((parts[0].output_dir / "checkpoints/step-000002/athanor.json").read_text())
    assert set(record["digests"]) == {".metadata", "__0_0.distcp.xxh3", "common.pt", "metadata.json"}


# The copy in host memory


CPU = torch.device("cpu")


def tensors() -> list[torch.Tensor]:
    base = torch.arange(3000, dtype=torch.float32)
    return [base[5:1005].view(10, 100), base[2000:].bfloat16(), torch.tensor(3.0), base[:1000].view(50, 20)]


def memory(block: int, monkeypatch) -> HostMemory:
    monkeypatch.setattr(saver, "_BLOCK", block)
    return HostMemory([tensor.nbytes for tensor in tensors()], CPU)


@pytest.mark.parametrize("block", [1, 6000, 1 << 30])
def test_copies_are_equal_in_any_order_and_own_their_storage(block, monkeypatch):
    held = memory(block, monkeypatch)
    for given in (tensors(), tensors()[::-1]):
        for copy, tensor in zip(held.copy(given), given, strict=True):
            assert torch.equal(copy, tensor) and copy.dtype == tensor.dtype
            assert copy.untyped_storage().nbytes() == tensor.nbytes  # torch.save writes the whole storage


def test_every_copy_takes_the_same_memory_and_does_not_follow_its_tensor(monkeypatch):
    held, given = memory(1 << 30, monkeypatch), tensors()
    copies = list(held.copy(given))
    given[0].zero_()
    assert torch.equal(copies[0], tensors()[0])
    first = [copy.data_ptr() for copy in copies]
    assert [copy.data_ptr() for copy in held.copy(tensors())] == first and len(set(first)) == len(first)


def test_memory_that_cannot_be_had_is_an_error_where_it_is_used(monkeypatch):
    monkeypatch.setattr(saver.mmap, "mmap", lambda *_: (_ for _ in ()).throw(OSError("Cannot allocate memory")))
    with pytest.raises(OSError, match="Cannot allocate"):
        HostMemory([8], CPU).copy([torch.zeros(2)])


def test_one_by_one_they_own_their_storage_too():
    for copy, tensor in zip(copied_one_by_one(tensors()), tensors(), strict=True):
        assert torch.equal(copy, tensor) and copy.untyped_storage().nbytes() == tensor.nbytes
    assert list(copied_one_by_one([])) == []


def test_the_limit_of_a_control_group_counts(tmp_path, monkeypatch):
    for name, text in (("memory.max", "5000000\n"), ("memory.current", "4000000\n")):
        (tmp_path / name).write_text(text)
    (tmp_path / "memory.stat").write_text("anon 1000000\ninactive_file 2000000\nactive_file 500000\n")
    assert available_memory() > 5_000_000
    monkeypatch.setattr(saver, "_CGROUPS", tmp_path)
    assert available_memory() == 3_500_000
    (tmp_path / "memory.max").write_text("max\n")
    assert available_memory() > 5_000_000


# The optimizer's tensors


def test_rectangles_cover_any_run_of_numbers_once_and_in_order():
    draw = random.Random(0)
    for _ in range(2000):
        shape = [draw.randint(1, 4) for _ in range(draw.randint(1, 4))]
        first = draw.randrange(math.prod(shape))
        last = draw.randint(first + 1, math.prod(shape))
        numbers = torch.arange(math.prod(shape)).view(shape)
        found = [
            numbers[tuple(slice(a, a + n) for a, n in zip(offset, size, strict=True))].flatten()
            for offset, size in rectangles(shape, first, last)
        ]
        assert torch.equal(torch.cat(found), torch.arange(first, last)), (shape, first, last)
    assert list(rectangles((3, 4, 5), 0, 60)) == [((0, 0, 0), (3, 4, 5))]


def megatrons_own():
    """The function that `install` replaces, from a second copy of its module."""
    spec = importlib.util.spec_from_file_location("distrib_optimizer_as_it_was", distrib_optimizer.__file__)
    spec.submodule_search_locations = None
    module = importlib.util.module_from_spec(spec)
    module.__package__ = distrib_optimizer.__package__
    spec.loader.exec_module(module)
    return module.DistributedOptimizer.sharded_param_state_fully_reshardable


@pytest.mark.full
@pytest.mark.parametrize("writer", ["megatron-core", "athanor"])
def test_a_checkpoint_of_before_is_loaded_as_one_of_today(parts, writer, monkeypatch):
    with make(parts) as made, monkeypatch.context() as patch:
        if writer == "megatron-core":
            cls = distrib_optimizer.DistributedOptimizer
            patch.setattr(optimizer_state, "install", lambda: None)
            patch.setattr(cls, "sharded_param_state_fully_reshardable", megatrons_own())
        save(made, 1)
    run, mesh, _, optimizer = parts
    expected = tensors_of(optimizer)
    others, empty = make_parts(run, mesh)
    checkpoint.load(others, empty, list_checkpoints(run.output_dir / "checkpoints")[0], mesh)
    assert len(expected) > 100
    for ours, theirs in zip(tensors_of(empty), expected, strict=True):
        assert torch.equal(ours, theirs)


def tensors_of(optimizer) -> list[torch.Tensor]:
    (part,) = optimizer.chained_optimizers
    params = [param for group in part.optimizer.param_groups for param in group["params"]]
    return [tensor for p in params for tensor in (p, *part.optimizer.state[p].values())]
