"""HF directories of any size, written as fast as the disk allows, by repeating the numbers of one block."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import torch
import transformers

from trainer.model.registry import get_family

FILE_BYTES = 4 << 30  # approximate size of one file, the most that a reader that maps complete files has in memory
BLOCK = 1 << 25  # numbers that differ from each other
_ALIGN = 8


def write_large_model(directory: Path, config: Mapping[str, Any]) -> int:
    """Write config.json and bfloat16 safetensors. Norms are one; all other weights are normally distributed with
    deviation 0.02.

    Args:
        config: config.json.

    Returns:
        the number of parameters.
    """
    directory.mkdir(parents=True)
    with torch.device("meta"):
        model = resolve_name(get_family(config["model_type"]).reference)(transformers.AutoConfig.for_model(**config))
    (directory / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    # A tied weight is stored once, under its first name.
    shapes = {name: tuple(param.shape) for name, param in model.named_parameters()}
    block = torch.empty(BLOCK).normal_(0, 0.02, generator=torch.Generator().manual_seed(0)).bfloat16()
    numbers, ones = memoryview(block.view(torch.uint8).numpy()), torch.ones(1 << 16, dtype=torch.bfloat16)
    ones, weight_map = memoryview(ones.view(torch.uint8).numpy()), {}
    files = list(_files(shapes))
    for number, names in enumerate(files):
        path = directory / f"model-{number + 1:05d}-of-{len(files):05d}.safetensors"
        weight_map |= dict.fromkeys(names, path.name)
        with path.open("wb", buffering=0) as file:
            file.write(_header({name: shapes[name] for name in names}))
            for name in names:
                left = 2 * torch.Size(shapes[name]).numel()
                source = ones if "norm" in name and name.endswith("weight") else numbers
                while left:
                    left -= file.write(source[: min(left, len(source))])
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return sum(torch.Size(shape).numel() for shape in shapes.values())


def _files(shapes: Mapping[str, tuple[int, ...]]) -> Iterator[list[str]]:
    """Return the names of the tensors in each file, in order."""
    names, size = [], 0
    for name, shape in shapes.items():
        names.append(name)
        size += 2 * torch.Size(shape).numel()
        if size >= FILE_BYTES * 3 // 4:
            yield names
            names, size = [], 0
    if names:
        yield names


def _header(shapes: Mapping[str, tuple[int, ...]]) -> bytes:
    entries, start = {"__metadata__": {"format": "pt"}}, 0
    for name, shape in shapes.items():
        stop = start + 2 * torch.Size(shape).numel()
        entries[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % _ALIGN)
    return len(text).to_bytes(8, "little") + text
