"""An adapter in a PEFT directory: checked against its model and digested, without torch.

adapter_config.json  adapter_model.safetensors
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dataset_builders.contracts.manifest import fingerprint
from dataset_builders.errors import InputError, in_ascii
from dataset_builders.storage.store import local_dir
from stages.shared.artifacts.artifact import Artifact, External, Input
from stages.shared.artifacts.verify import check_written, digest_once, state_of
from stages.shared.inputs.model_directory import ModelDirectory, safetensors_header
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

_FINITE = {"F32": ("<u4", 0x7F800000), "BF16": ("<u2", 0x7F80), "F16": ("<u2", 0x7C00)}  # bits, exponent mask


class AdapterDirectory:
    """A PEFT directory that is open: its settings were read and its tensors checked, once, without a base model.

    Attributes:
        path: the directory, on this machine.
        config: the content of adapter_config.json.
        tensors: name, without PEFT's prefix -> shape.

    Raises:
        InputError: a file is missing or damaged, or its adapter is not one that is computed here.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = read_peft_config(path, f"adapter {path}")
        self.tensors = _read_header(path, self.config)

    @property
    def scaling(self) -> float:
        """The factor applied to the product B A."""
        rank = self.config["r"]
        return self.config["lora_alpha"] / (math.sqrt(rank) if self.config.get("use_rslora") else rank)

    @property
    def modules(self) -> list[str]:
        """The names of the adapted linear layers, as in transformers."""
        return [name.removesuffix(LORA_A) for name in self.tensors if name.endswith(LORA_A)]

    @property
    def whole(self) -> list[str]:
        """The names of the parameters that replace the model's."""
        return [name for name in self.tensors if not name.endswith((LORA_A, LORA_B, MAGNITUDE))]

    def check_base(self, model: ModelDirectory) -> None:
        """Check that the adapter is one of a model, and that it can answer there without being merged."""
        file = self.path / ADAPTER_CONFIG
        if stacks := self.config.get("target_parameters"):
            raise InputError(
                f"{file}: target_parameters names {stacks[0]}, and adapters of experts do not answer unmerged here; "
                "merge the adapter into its model with PEFT's merge_and_unload, and give that model"
            )
        weights = {name for rule in model.family.weight_rules(model.shape) if rule.sizes for name in rule.hf}
        linear = {name.removesuffix(".weight") for name in weights}
        for name, shape in self.tensors.items():
            kind = next((kind for kind in (LORA_A, LORA_B, MAGNITUDE) if name.endswith(kind)), "")
            weight = f"{name.removesuffix(kind)}.weight" if kind else name
            of_base = model.tensors.get(weight)
            if of_base is None:
                trained_on = in_ascii(self.config.get("base_model_name_or_path") or "the adapter does not name it")
                raise InputError(
                    f"adapter {self.path} is of another model: {in_ascii(weight)} is no weight of {model.path}; give "
                    f"the model that it was trained on ({trained_on})"
                )
            rank, (out, *width) = self.config["r"], of_base.shape
            wanted = {LORA_A: (rank, *width), LORA_B: (out, rank), MAGNITUDE: (out,), "": tuple(of_base.shape)}[kind]
            if shape != wanted:
                raise InputError(
                    f"adapter {self.path} is of another model: {in_ascii(name)} is {list(shape)}, and "
                    f"{in_ascii(weight)} of {model.path} with r={rank} asks for {list(wanted)}; give the model that it "
                    "was trained on"
                )
        if others := sorted(set(self.modules) - linear - {"lm_head"}):
            raise InputError(
                f"{self.path / ADAPTER_WEIGHTS}: {others[0]} is no linear layer, and only these have adapters here"
            )
        lacking = sorted(name for name in linear - set(self.modules) if adapts(file, self.config, name))
        if lacking:
            raise InputError(
                f"{self.path / ADAPTER_WEIGHTS} has no adapter of {lacking[0]} and {len(lacking) - 1} others that "
                "target_modules names; save the adapter with PEFT again"
            )


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


def adapter_input(adapter: AdapterDirectory) -> External:
    """Return the user's adapter as an input, identified by the digests of its two files."""
    path = adapter.path
    check_written(path)
    states = {path / name: state_of(path / name) for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS)}
    digests = {name: digest_once(path / name) for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS)}
    return External(dir=path, name="adapter", digest=fingerprint(digests), states=states, opened=adapter)


def opened_adapter(adapter: Input) -> AdapterDirectory:
    """Return the open directory of an adapter input: an external one, or `adapter/` of an export."""
    found = adapter.opened if isinstance(adapter, External) else None
    if isinstance(found, AdapterDirectory):
        return found
    return AdapterDirectory(local_dir(adapter.dir / ADAPTER_EXPORT if isinstance(adapter, Artifact) else adapter.dir))


def open_model_to_answer(
    hf_dir: Path, adapter_dir: Path | None, code_sha256: str | None = None
) -> tuple[ModelDirectory, AdapterDirectory | None]:
    """Open a model, and the adapter that it answers with, and check that they can be loaded.

    Raises:
        InputError: the model cannot answer, or the adapter is of another model.
    """
    model = ModelDirectory(hf_dir)
    model.check_weights(code_sha256)
    if adapter_dir is None:
        return model, None
    adapter = AdapterDirectory(adapter_dir)
    adapter.check_base(model)
    return model, adapter
