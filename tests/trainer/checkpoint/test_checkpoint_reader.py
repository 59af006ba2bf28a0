"""A checkpoint whose pickles call functions is refused, and nothing is called; one of ours is read as before."""

import functools
import io
import json
import pickle
import random
import shutil
import zipfile
from pathlib import Path

import pytest
import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.tensor_parallel import ColumnParallelLinear

from dataset_builders.errors import InputError
from tests.helpers.run_dir import write_job
from tests.helpers.single_rank import single_rank
from tests.helpers.tiers import full
from trainer.checkpoint import save_and_load as checkpoint
from trainer.checkpoint.directory import list_checkpoints
from trainer.checkpoint.reader import CheckpointNotTrusted, CommonState, MetadataReader, _MetadataUnpickler
from trainer.checkpoint.saver import Checkpointer
from trainer.contract.checkpoint import check_checkpoint, digest_of, write_checkpoint_record
from trainer.contract.run import RunConfig
from trainer.libraries.megatron_private import patch_torch_adam
from trainer.loop.set_up import apply_data_parallel, build_chunks
from trainer.model.registry import read_model

pytestmark = pytest.mark.promise(
    "A checkpoint with a flipped bit, or a pickle that calls a function, is refused, and training continues "
    "from the one before."
)

BYTES_OBJECT = "rng/shard_0_1"


class Touch:
    """Unpickled, it makes a file; `pathlib.Path.touch` stands for any function."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def make_parts(run: RunConfig, mesh):
    family, shape = read_model(run.hf_dir)
    return apply_data_parallel(build_chunks(run, family, shape, mesh, torch.float32), run, mesh, family)


def updated_parts(run: RunConfig, mesh):
    """Chunks and optimizer after one update."""
    chunks, optimizer = make_parts(run, mesh)
    for param in chunks[0].module.parameters():
        param.main_grad.normal_()
    optimizer.step()
    return chunks, optimizer


@pytest.fixture(scope="module", autouse=True)
def torch_adam():
    """The trainer's own mending of megatron-core, without its TorchFunctionMode, for these tests alone."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("_set_main_param_and_optimizer_states", "state_dict"):
            patch.setattr(DistributedOptimizer, name, getattr(DistributedOptimizer, name))
        if not torch.cuda.is_available():
            patch_torch_adam()
        yield


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> tuple[RunConfig, Path]:
    """A checkpoint of one rank, as the trainer writes it."""
    run = write_job(tmp_path_factory.mktemp("job"), num_steps=4)
    with single_rank() as mesh:
        writer = Checkpointer(*updated_parts(run, mesh), run, mesh)
        writer.save(1)
        writer.finish()
    (found,) = list_checkpoints(run.output_dir / "checkpoints")
    return run, found


@pytest.fixture
def copied(saved, tmp_path) -> Path:
    return Path(shutil.copytree(saved[1], tmp_path / saved[1].name))


def load(run: RunConfig, directory: Path) -> None:
    with single_rank() as mesh:
        chunks, optimizer = make_parts(run, mesh)
        checkpoint.load(chunks, optimizer, directory, mesh)


def sign(directory: Path) -> None:
    """The digests of the files as they are now, as one who spoils a checkpoint would leave it."""
    record = read_signed(directory / "athanor.json")
    write_checkpoint_record(directory, record)


def read_signed(path: Path) -> dict:
    return {key: value for key, value in json.loads(path.read_text()).items() if key not in ("digest", "digests")}


def spoil_metadata(directory: Path, touch: Touch) -> None:
    metadata = MetadataReader(directory).read_metadata()
    metadata.planner_data = touch
    (directory / ".metadata").write_bytes(pickle.dumps(metadata))


def spoil_common(directory: Path, touch: Touch) -> None:
    torch.save({"optimizer": touch}, directory / "common.pt")


def spoil_object(directory: Path, touch: Touch | None, name: str = BYTES_OBJECT, value: object = None) -> None:
    """Puts the object at the end of the file of tensors, and has .metadata say so."""
    metadata = MetadataReader(directory).read_metadata()
    (index,) = [index for index in metadata.storage_data if index.fqn == name]
    place = metadata.storage_data[index]
    stream = io.BytesIO()
    torch.save([touch] if value is None else value, stream)
    file = directory / place.relative_path
    place.offset, place.length = file.stat().st_size, len(stream.getvalue())
    file.write_bytes(file.read_bytes() + stream.getvalue())
    beside = file.with_name(f"{file.name}.xxh3")
    beside.write_text(json.dumps({**json.loads(beside.read_text()), place.offset: digest_of(stream.getvalue())}))
    (directory / ".metadata").write_bytes(pickle.dumps(metadata))


SPOILERS = {".metadata": spoil_metadata, "common.pt": spoil_common, "rng": spoil_object}


def test_what_we_wrote_is_loaded(saved):
    load(*saved)


@pytest.mark.parametrize("name", ["athanor.json", "__0_0.distcp.xxh3"])
def test_a_checkpoint_without_its_digests_is_damaged(saved, copied, name):
    check_checkpoint(copied)
    if name == "athanor.json":
        (copied / name).write_text(json.dumps(read_signed(copied / name)))
    else:
        (copied / name).unlink()
    for look in (check_checkpoint, lambda path: load(saved[0], path)):
        with pytest.raises(InputError, match=r"damaged .*delete it") as caught:
            look(copied)
        assert name in str(caught.value)


@pytest.mark.parametrize("change", [lambda data: data[:-1], lambda data: data + b"0", lambda data: b""])
def test_a_state_of_another_size_is_damaged(copied, change):
    (copied / "__0_0.distcp").write_bytes(change((copied / "__0_0.distcp").read_bytes()))
    with pytest.raises(InputError, match=r"damaged \(__0_0\.distcp: the .* are not what was written"):
        check_checkpoint(copied)


@pytest.mark.parametrize(
    "name",
    ["__0_0.distcp", *map(full, (".metadata", "common.pt", "metadata.json", "__0_0.distcp.xxh3", "athanor.json"))],
)
def test_one_flipped_bit_anywhere_is_refused_in_one_line(saved, tmp_path, name):
    copy = Path(shutil.copytree(saved[1], tmp_path / saved[1].name))
    data, draw = (copy / name).read_bytes(), random.Random(name)
    with single_rank() as mesh:
        chunks, optimizer = make_parts(saved[0], mesh)
        for _ in range(8):
            place, bit = draw.randrange(len(data)), draw.randrange(8)
            (copy / name).write_bytes(data[:place] + bytes([data[place] ^ (1 << bit)]) + data[place + 1 :])
            for look in (check_checkpoint, lambda path: checkpoint.load(chunks, optimizer, path, mesh)):
                with pytest.raises(InputError, match=r"damaged .*delete it") as caught:
                    look(copy)
            assert "\n" not in str(caught.value) and str(copy) in str(caught.value)


@pytest.mark.parametrize("name", SPOILERS)
@pytest.mark.parametrize("force", [full(""), "1"])
def test_a_pickle_that_calls_is_refused_and_calls_nothing(saved, copied, tmp_path, monkeypatch, name, force):
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", force)
    target = tmp_path / "touched"
    SPOILERS[name](copied, Touch(target))
    sign(copied)
    with pytest.raises(InputError, match=r"was not loaded: it asks for code to be run .*delete it$") as caught:
        load(saved[0], copied)
    assert "\n" not in str(caught.value) and str(copied) in str(caught.value)
    assert not target.exists()


def test_no_module_is_given_an_extra_state(saved, copied, monkeypatch):
    """Transformer Engine's modules unpickle theirs."""
    given = []
    monkeypatch.setattr(ColumnParallelLinear, "set_extra_state", lambda self, state: given.append(state))
    places = MetadataReader(copied).read_metadata().storage_data
    name = next(index.fqn for index in places if "mlp.linear_fc1._extra_state" in index.fqn)
    spoil_object(copied, None, name, [torch.tensor(list(pickle.dumps(Touch(copied / "touched"))), dtype=torch.uint8)])
    sign(copied)
    load(saved[0], copied)
    assert given and set(given) == {None}


@pytest.mark.parametrize("place", ["../step-000001/__0_0.distcp", "/etc/passwd", "a/b"])
def test_files_elsewhere_are_not_read(copied, place):
    metadata = MetadataReader(copied).read_metadata()
    next(iter(metadata.storage_data.values())).relative_path = place
    (copied / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointNotTrusted, match="which is elsewhere"):
        MetadataReader(copied).read_metadata()


@pytest.mark.parametrize("call", [functools.partial, eval, zipfile.ZipFile, torch.load, torch.hub.load, setattr])
def test_no_other_name_is_looked_up(copied, call):
    (copied / ".metadata").write_bytes(pickle.dumps(call))
    with pytest.raises(CheckpointNotTrusted, match=f"names .*{call.__name__}"):
        MetadataReader(copied).read_metadata()
    torch.save(call, copied / "common.pt")
    with pytest.raises(CheckpointNotTrusted, match=r"common\.pt is not plain data: .*Unsupported"):
        CommonState().load_common(copied)


def test_a_metadata_file_that_is_something_else(copied):
    (copied / ".metadata").write_bytes(pickle.dumps(torch.Size([1])))
    with pytest.raises(CheckpointNotTrusted, match="holds a Size"):
        MetadataReader(copied).read_metadata()


@pytest.mark.parametrize("kept", [None, 0, 1, 1000])
def test_a_spoilt_metadata_file_is_one_line(saved, copied, kept):
    data = (copied / ".metadata").read_bytes()
    (copied / ".metadata").unlink() if kept is None else (copied / ".metadata").write_bytes(data[:kept])
    sign(copied)
    with pytest.raises(InputError, match=r"is damaged \(\.metadata cannot be read: ") as caught:
        load(saved[0], copied)
    assert "\n" not in str(caught.value)


def by_getattr(module: str, kind: str, name: str) -> bytes:
    """A member of an enumeration, pickled as early versions of Python 3.11 do it."""
    return f"cbuiltins\ngetattr\n(c{module}\n{kind}\nV{name}\ntR.".encode()


def test_getattr_gives_members_of_enumerations_alone():
    member = by_getattr("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING", "TORCH_CONTIGUOUS_FORMAT")
    assert pickle.loads(member) is _MetadataUnpickler(io.BytesIO(member)).load()
    with pytest.raises(CheckpointNotTrusted, match="which is not an enumeration"):
        _MetadataUnpickler(io.BytesIO(by_getattr("torch", "Size", "count"))).load()
