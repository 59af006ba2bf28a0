"""An adapter in PEFT's directory, beside the model that it belongs to: checked and digested without torch.

adapter_config.json  adapter_model.safetensors
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dataset_builders.contracts.fingerprint import fingerprint
from dataset_builders.errors import InputError, in_ascii, shown
from dataset_builders.storage.files import read_object, sha256_file
from dataset_builders.storage.store import local_dir
from stages.artifacts.artifact import Artifact, External, Input
from stages.inputs.hf_directory import safetensors_header, weight_files
from trainer.contract.names import ADAPTER_EXPORT
from trainer.contract.peft import ADAPTER_CONFIG, ADAPTER_WEIGHTS

PREFIX = "base_model.model."
A, B, MAGNITUDE = ".lora_A.weight", ".lora_B.weight", ".lora_magnitude_vector"
# Features of PEFT that would change the answers and are not computed here.
_NOT_COMPUTED = (
    "rank_pattern",
    "alpha_pattern",
    "target_parameters",
    "fan_in_fan_out",
    "lora_bias",
    "trainable_token_indices",
)
_OFF = (None, False, "none", {}, [])


@dataclass(frozen=True, slots=True)
class AdapterDirectory:
    """An adapter that fits its model.

    Attributes:
        scaling: what the product of an adapter counts.
        modules: names of the adapted linear layers, which are transformers' own.
        whole: names of parameters that stand in the place of the model's.
    """

    path: Path
    scaling: float
    modules: tuple[str, ...]
    whole: tuple[str, ...]


def read_adapter_dir(path: Path, hf_dir: Path) -> AdapterDirectory:
    """What lies in a directory of PEFT's, checked against the model of `hf_dir`.

    Raises:
        InputError: a file is missing, the adapter is not one that we compute, or it belongs to another model.
    """
    for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
        if not (path / name).is_file():
            raise InputError(f"adapter {path} has no {name}; give a directory that PEFT or an export has written")
    config = read_object(path / ADAPTER_CONFIG, "save the adapter with PEFT again")
    _check_config(path / ADAPTER_CONFIG, config)
    header = {
        name.removeprefix(PREFIX): tuple(e["shape"]) for name, e in safetensors_header(path / ADAPTER_WEIGHTS).items()
    }
    base = {
        name: tuple(entry["shape"])
        for file in weight_files(hf_dir)
        for name, entry in safetensors_header(hf_dir / file).items()
    }
    modules = tuple(name.removesuffix(A) for name in header if name.endswith(A))
    whole = tuple(name for name in header if not name.endswith((A, B, MAGNITUDE)))
    for name, shape in header.items():
        _check_tensor(path, hf_dir, name, shape, base, config)
    rank = config["r"]
    scaling = config["lora_alpha"] / (math.sqrt(rank) if config.get("use_rslora") else rank)
    return AdapterDirectory(path, scaling, modules, whole)


def _check_config(path: Path, config: Mapping[str, Any]) -> None:
    if config.get("peft_type") != "LORA":
        raise InputError(f"{path}: peft_type is {shown(config.get('peft_type'))}; only LORA is computed (DoRA is one)")
    for key in ("r", "lora_alpha"):
        if not isinstance(config.get(key), int | float) or config[key] <= 0:
            raise InputError(f"{path}: {key} is {shown(config.get(key))}, no number above 0; save it with PEFT again")
    for key in _NOT_COMPUTED:
        if config.get(key) not in _OFF:
            raise InputError(
                f"{path}: {key} is {shown(config[key])}, which is not computed here; merge the adapter into its model "
                "with PEFT's merge_and_unload, and give that model"
            )
    if config.get("bias", "none") != "none":
        raise InputError(f"{path}: bias is {shown(config['bias'])}; only adapters with bias=none are computed")


def _check_tensor(
    path: Path,
    hf_dir: Path,
    name: str,
    shape: tuple[int, ...],
    base: Mapping[str, tuple[int, ...]],
    config: Mapping[str, Any],
) -> None:
    """See that a tensor of the adapter fits the weight that it belongs to."""
    kind = next((kind for kind in (A, B, MAGNITUDE) if name.endswith(kind)), "")
    weight = f"{name.removesuffix(kind)}.weight" if kind else name
    of_base = base.get(weight)
    if of_base is None:
        raise InputError(
            f"adapter {path} is of another model: {in_ascii(weight)} is no weight of {hf_dir}; give the model that it "
            f"was trained on ({in_ascii(config.get('base_model_name_or_path') or 'the adapter does not name it')})"
        )
    rank, (out, *width) = config["r"], of_base
    wanted = {A: (rank, *width), B: (out, rank), MAGNITUDE: (out,), "": of_base}[kind]
    if shape != wanted:
        raise InputError(
            f"adapter {path} is of another model: {in_ascii(name)} is {list(shape)}, and {in_ascii(weight)} of {hf_dir}"
            f" with r={rank} asks for {list(wanted)}; give the model that it was trained on"
        )


def adapter_input(path: Path) -> External:
    """An adapter of the user's, by the digests of its two files."""
    for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
        if not (path / name).is_file():
            raise InputError(f"adapter {path} has no {name}; give a directory that PEFT or an export has written")
    digests = {name: sha256_file(path / name) for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS)}
    return External(dir=path, name="adapter", digest=fingerprint(digests))


def adapter_dir_of(adapter: Input) -> Path:
    """PEFT's directory of an adapter on this machine: an external one itself, or `adapter/` of an export."""
    return local_dir(adapter.dir / ADAPTER_EXPORT if isinstance(adapter, Artifact) else adapter.dir)
