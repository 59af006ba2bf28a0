"""Mutated model directories, with their config.json, index and safetensors headers; run_inputs.py runs them."""

import json
import random
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

from safetensors import safe_open

from dataset_builders.errors import InputError
from stages.shared.inputs.model_directory import WEIGHTS, WEIGHTS_INDEX, ModelDirectory, model_input
from tests.fuzz.hostile import changed, spoilt, value
from tests.helpers.tiny_model import tiny_hf_dir

SHARD = "model-00001-of-00001.safetensors"


def spoilt_json(rng: random.Random, data: bytes) -> bytes:
    """Return a JSON object as other JSON, as JSON that Python cannot hold, or as damaged text."""
    kind = rng.random()
    if kind < 0.6:
        return json.dumps(changed(rng, json.loads(data)), ensure_ascii=rng.random() < 0.5).encode(errors="replace")
    if kind < 0.7:
        return json.dumps(value(rng)).encode()
    if kind < 0.75:
        return rng.choice((b"[", b'{"a":')) * rng.choice((100, 1000, 100_000))
    if kind < 0.8:
        return data.replace(b": ", b": " + b"9" * 5000 + b" ", 1) if rng.random() < 0.5 else b"9" * 5000
    return spoilt(rng, data)


def spoil_header(rng: random.Random, file: Path) -> None:
    """Write other JSON before the same tensors, or a damaged header."""
    data = file.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header, tensors = data[8 : 8 + length], data[8 + length :]
    if rng.random() < 0.7:
        entries = json.loads(header)
        name = rng.choice([name for name in entries if name != "__metadata__"])
        if rng.random() < 0.6:
            _spoil_entry(rng, entries, name)
            header = json.dumps(entries).encode()
        else:
            header = spoilt_json(rng, header)
        file.write_bytes(struct.pack("<Q", len(header)) + header + tensors)
    else:
        file.write_bytes(spoilt(rng, data[: 8 + length]) + tensors)


def _spoil_entry(rng: random.Random, entries: dict, name: str) -> None:
    entry = entries[name]
    rng.choice(
        (
            lambda: entry.pop("data_offsets"),
            lambda: entry.update(shape=[-side for side in entry["shape"]]),
            lambda: entry.update(shape=[str(side) for side in entry["shape"]]),
            lambda: entry.update(shape=[*entry["shape"], 2]),
            lambda: entry.update(shape=entry["shape"][::-1]),
            lambda: entry.update(dtype=rng.choice(("F8_E4M3", "I32", "F64", "X", 7, None))),
            lambda: entry.update(data_offsets=[0, entry["data_offsets"][1] - entry["data_offsets"][0]]),
            lambda: entry.update(data_offsets=[-1, 2**64]),
            lambda: entries.pop(name),
            lambda: entries.update({name: "text"}),
            lambda: entries.update({name: None}),
            lambda: entries.update({name + "x": entries.pop(name)}),
        )
    )()


def spoil_file(rng: random.Random, file: Path) -> None:
    file.write_bytes(spoilt_json(rng, file.read_bytes()))


def spoil_index(rng: random.Random, hf_dir: Path) -> None:
    """Write one weight file with a damaged index."""
    with safe_open(hf_dir / WEIGHTS, "np") as file:
        weight_map = dict.fromkeys(file.keys(), SHARD)
    (hf_dir / WEIGHTS).rename(hf_dir / SHARD)
    (hf_dir / WEIGHTS_INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
    spoil_file(rng, hf_dir / WEIGHTS_INDEX)


# What is damaged -> the function that damages it in a directory.
SPOIL: dict[str, Callable[[random.Random, Path], None]] = {
    "config": lambda rng, hf_dir: spoil_file(rng, hf_dir / "config.json"),
    "index": spoil_index,
    "header": lambda rng, hf_dir: spoil_header(rng, hf_dir / WEIGHTS),
}
OUTCOMES = {f"{kind}: {end}" for kind in SPOIL for end in ("taken", "refused")}


def outcome(hf_dir: Path) -> str:
    """Return the outcome of a directory. A directory that is accepted must be completely readable."""
    try:
        model = ModelDirectory(hf_dir)
        model.check_weights()
    except InputError as error:
        line = str(error)
        assert "\n" not in line and str(hf_dir) in line and len(line) < 1500, line[:3000]
        return "refused"
    assert len(model_input(model).digest) == 16
    assert sum(model.count_parameters().values()) > 0
    for path in {tensor.file for tensor in model.tensors.values()}:
        with safe_open(path, "np") as file:
            names = file.keys()
            assert all(file.get_tensor(tensor).size >= 0 for tensor in names)
    return "taken"


def model_inputs(rng: random.Random, count: int, directory: Path) -> Iterator[str]:
    whole = tiny_hf_dir()  # made here, before the watch measures time
    return (model_outcome(rng, whole, directory / "model", number) for number in range(count))


def model_outcome(rng: random.Random, whole: Path, hf_dir: Path, number: int) -> str:
    shutil.rmtree(hf_dir, ignore_errors=True)
    shutil.copytree(whole, hf_dir)
    name = list(SPOIL)[number % len(SPOIL)]
    SPOIL[name](rng, hf_dir)
    return f"{name}: {outcome(hf_dir)}"
