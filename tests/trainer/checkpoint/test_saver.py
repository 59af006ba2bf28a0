"""The checks before a save, and the outcome where a file is missing."""

import json
import logging
import threading
from types import SimpleNamespace

import pytest

from dataset_builders.errors import InputError
from tests.helpers.patience import at_most
from tests.helpers.run_dir import changed, write_job
from tests.helpers.single_rank import single_rank
from tests.trainer.checkpoint.test_checkpoint_reader import make_parts, torch_adam  # noqa: F401, a fixture
from trainer.checkpoint import directory, saver
from trainer.checkpoint.directory import list_checkpoints
from trainer.checkpoint.saver import Checkpointer, RankFile
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
        chunks, optimizer = make_parts(run, mesh)
        for param in chunks[0].module.parameters():
            param.main_grad.normal_()
        optimizer.step()
        yield run, mesh, chunks, optimizer


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
        made.save(2)
        made.finish()
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
        for step in (2, 4):
            made.save(step)
            made.finish()
    size = size_of(parts)
    have_free(monkeypatch, size)
    with make(parts, step=4):
        pass
    have_free(monkeypatch, size - 1)
    with pytest.raises(InputError):
        make(parts, step=4)


def test_a_save_without_room_ends_in_one_line_and_leaves_the_others(parts, monkeypatch):
    with make(parts) as made:
        made.save(2)
        made.finish()
        have_free(monkeypatch, 1000)
        with pytest.raises(RuntimeError, match=r"step-000004.*GB are wanted.*earlier ones are whole") as caught:
            made.save(4)
    assert "\n" not in str(caught.value) and names(parts) == ["step-000002"]


def test_a_disk_that_is_full_in_the_middle_leaves_the_others_and_no_scratch(parts, monkeypatch):
    with make(parts) as made:
        made.save(2)
        made.finish()
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
        made.save(2)
        made.finish()
    record = json.loads((parts[0].output_dir / "checkpoints/step-000002/athanor.json").read_text())
    assert set(record["digests"]) == {".metadata", "__0_0.distcp.xxh3", "common.pt", "metadata.json"}
