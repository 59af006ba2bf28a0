"""The copy of a training's state in host memory."""

import pytest
import torch

from trainer.checkpoint import saver
from trainer.checkpoint.saver import HostMemory, available_memory, copied_one_by_one

pytestmark = pytest.mark.promise(
    "Saves change no bit of a training; a kill at any point of a save, or a full disk, costs that save alone; "
    "SIGTERM ends with one, and what was killed with -9 goes on to the bit."
)

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


def test_every_copy_takes_the_same_memory(monkeypatch):
    held = memory(1 << 30, monkeypatch)
    first = [copy.data_ptr() for copy in held.copy(tensors())]
    assert [copy.data_ptr() for copy in held.copy(tensors())] == first and len(set(first)) == len(first)


def test_a_copy_does_not_follow_its_tensor(monkeypatch):
    held, given = memory(1 << 30, monkeypatch), tensors()
    copies = held.copy(given)
    given[0].zero_()
    assert torch.equal(copies[0], tensors()[0])


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
