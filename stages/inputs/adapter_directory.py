"""An adapter in a PEFT directory: checked against its model and digested, without torch.

adapter_config.json  adapter_model.safetensors
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dataset_builders.contracts.fingerprint import fingerprint
from dataset_builders.errors import InputError, in_ascii
from dataset_builders.storage.store import local_dir
from stages.artifacts.artifact import Artifact, External, Input
from stages.artifacts.intact import check_written
from stages.artifacts.unchanged import digest_once
from stages.inputs.hf_directory import safetensors_header, weight_files
from trainer.contract.names import ADAPTER_EXPORT
from trainer.contract.peft import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    LORA_A,
    LORA_B,
    MAGNITUDE,
    PREFIX,
    adapts,
    read_peft_config,
)
from trainer.model.registry import read_model

_FINITE = {"F32": ("<u4", 0x7F800000), "BF16": ("<u2", 0x7F80), "F16": ("<u2", 0x7C00)}  # bits, exponent mask


@dataclass(frozen=True, slots=True)
class AdapterDirectory:
    """An adapter that matches its model."""

    path: Path
    scaling: float  # the factor applied to the product B A
    modules: tuple[str, ...]  # names of the adapted linear layers, as in transformers
    whole: tuple[str, ...]  # names of parameters that replace the model's parameters


def read_adapter_dir(path: Path, hf_dir: Path) -> AdapterDirectory:
    """Read a PEFT directory, and check it against the model of `hf_dir`."""
    config = read_peft_config(path, f"adapter {path}")
    header = _read_header(path, config)
    if stacks := config.get("target_parameters"):
        raise InputError(
            f"{path / ADAPTER_CONFIG}: target_parameters names {stacks[0]}, and adapters of experts do not answer "
            "unmerged here; merge the adapter into its model with PEFT's merge_and_unload, and give that model"
        )
    family, model = read_model(hf_dir)
    weights = {name for rule in family.weight_rules(model) if rule.sizes for name in rule.hf}
    linear = {name.removesuffix(".weight") for name in weights}
    base = {
        name: tuple(entry["shape"])
        for file in weight_files(hf_dir)
        for name, entry in safetensors_header(hf_dir / file).items()
    }
    modules = tuple(name.removesuffix(LORA_A) for name in header if name.endswith(LORA_A))
    whole = tuple(name for name in header if not name.endswith((LORA_A, LORA_B, MAGNITUDE)))
    for name, shape in header.items():
        _check_tensor(path, hf_dir, name, shape, base, config)
    if others := sorted(set(modules) - linear - {"lm_head"}):
        raise InputError(f"{path / ADAPTER_WEIGHTS}: {others[0]} is no linear layer, and only these have adapters here")
    lacking = sorted(name for name in linear - set(modules) if adapts(path / ADAPTER_CONFIG, config, name))
    if lacking:
        raise InputError(
            f"{path / ADAPTER_WEIGHTS} has no adapter of {lacking[0]} and {len(lacking) - 1} others that "
            "target_modules names; save the adapter with PEFT again"
        )
    rank = config["r"]
    scaling = config["lora_alpha"] / (math.sqrt(rank) if config.get("use_rslora") else rank)
    return AdapterDirectory(path, scaling, modules, whole)


def _read_header(path: Path, config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return tensor name, without PEFT's prefix -> shape, after all checks that need no base model: pairs, dtypes,
    finite numbers, and the modules that the settings name."""
    file, shapes = path / ADAPTER_WEIGHTS, {}
    for name, entry in safetensors_header(file).items():
        if not name.startswith(PREFIX):
            raise InputError(f"{file}: {in_ascii(name)} does not begin with {PREFIX}; save the adapter with PEFT again")
        if entry["dtype"] not in _FINITE:
            raise InputError(
                f"{file}: {in_ascii(name)} is of dtype {entry['dtype']}; an adapter's are {', '.join(_FINITE)}"
            )
        shapes[name.removeprefix(PREFIX)] = tuple(entry["shape"])
    modules = {name.removesuffix(end) for name in shapes for end in (LORA_A, LORA_B, MAGNITUDE) if name.endswith(end)}
    wanted = (LORA_A, LORA_B, MAGNITUDE) if config.get("use_dora") else (LORA_A, LORA_B)
    for module in sorted(modules):
        for end in (LORA_A, LORA_B, MAGNITUDE):
            if (module + end in shapes) != (end in wanted):
                what = "lacks" if end in wanted else "without use_dora holds"
                raise InputError(f"{file} {what} {in_ascii(module + end)}; save the adapter with PEFT again")
    for module in sorted(modules):
        if not adapts(path / ADAPTER_CONFIG, config, module):
            raise InputError(
                f"{path / ADAPTER_CONFIG}: target_modules leaves out {in_ascii(module)}, which has an adapter; save "
                "the adapter with PEFT again"
            )
    digest_once(file, _check_finite)
    return shapes


def _check_finite(file: Path) -> str:
    """Check that every number in a safetensors file is finite: not all bits of its exponent are 1."""
    data = np.memmap(file, mode="r")
    end = 8 + int.from_bytes(data[:8].tobytes(), "little")
    for name, entry in json.loads(data[8:end].tobytes()).items():
        if name == "__metadata__":
            continue
        kind, exponent = _FINITE[entry["dtype"]]
        first, last = entry["data_offsets"]
        bits = np.frombuffer(data[end + first : end + last].tobytes(), kind)
        if count := int(((bits & exponent) == exponent).sum()):
            raise InputError(
                f"{file}: {in_ascii(name)} holds {count} numbers that are infinite or NaN; the adapter's training "
                "diverged or the file is damaged: give another one"
            )
    return "finite"


def _check_tensor(
    path: Path,
    hf_dir: Path,
    name: str,
    shape: tuple[int, ...],
    base: Mapping[str, tuple[int, ...]],
    config: Mapping[str, Any],
) -> None:
    """Check that a tensor of the adapter fits the model's weight that it belongs to."""
    kind = next((kind for kind in (LORA_A, LORA_B, MAGNITUDE) if name.endswith(kind)), "")
    weight = f"{name.removesuffix(kind)}.weight" if kind else name
    of_base = base.get(weight)
    if of_base is None:
        raise InputError(
            f"adapter {path} is of another model: {in_ascii(weight)} is no weight of {hf_dir}; give the model that it "
            f"was trained on ({in_ascii(config.get('base_model_name_or_path') or 'the adapter does not name it')})"
        )
    rank, (out, *width) = config["r"], of_base
    wanted = {LORA_A: (rank, *width), LORA_B: (out, rank), MAGNITUDE: (out,), "": of_base}[kind]
    if shape != wanted:
        raise InputError(
            f"adapter {path} is of another model: {in_ascii(name)} is {list(shape)}, and {in_ascii(weight)} of {hf_dir}"
            f" with r={rank} asks for {list(wanted)}; give the model that it was trained on"
        )


def adapter_input(path: Path) -> External:
    """Return the user's adapter as an input, identified by the digests of its two files."""
    config = read_peft_config(path, f"adapter {path}")
    check_written(path)
    _read_header(path, config)
    digests = {name: digest_once(path / name) for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS)}
    return External(dir=path, name="adapter", digest=fingerprint(digests))


def adapter_dir_of(adapter: Input) -> Path:
    """Return the local PEFT directory of an adapter: an external directory itself, or `adapter/` of an export."""
    return local_dir(adapter.dir / ADAPTER_EXPORT if isinstance(adapter, Artifact) else adapter.dir)
