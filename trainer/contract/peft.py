"""adapter_config.json of PEFT 0.21: how it is written, and the check of the adapter that a training starts from.

adapter_config.json  adapter_model.safetensors   the files of a PEFT directory
"""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dataset_builders.errors import InputError, shown
from dataset_builders.storage.files import read_object
from trainer.contract.adapter import AdapterConfig

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."  # every tensor's name begins with it
LORA_A, LORA_B, MAGNITUDE = ".lora_A.weight", ".lora_B.weight", ".lora_magnitude_vector"  # after a module's name
# Keys that change no number of the adapted model, or that are compared elsewhere (modules, by their tensors' names).
_UNIMPORTANT = {
    *("auto_mapping", "base_model_name_or_path", "inference_mode", "peft_type", "peft_version", "revision"),
    *("exclude_modules", "layers_to_transform", "modules_to_save", "target_modules", "target_parameters"),
    *("init_lora_weights", "lora_dropout", "megatron_config", "megatron_core", "qalora_group_size"),
    *("ephemeral_gpu_offload", "runtime_config", "task_type"),
}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < float("inf")


def _is_text(value: object) -> bool:
    return value is None or isinstance(value, str)


def _are_names(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) and name for name in value)


def _is_among(value: object, known: Sequence[object]) -> bool:
    """Whether `known` contains the value, where 1 differs from True and 0 from False."""
    return any(value == other and type(value) is type(other) for other in known)


def _is_switch(value: object) -> bool:
    return isinstance(value, bool)


# key -> test of whether its value is usable, and the expected kind of value for the message
_WANTED: dict[str, tuple[Callable[[object], bool], str]] = {
    "r": (lambda value: _is_number(value) and isinstance(value, int) and value > 0, "whole number above 0"),
    "lora_alpha": (lambda value: _is_number(value) and 0 < value <= 1e6, "number above 0 and up to a million"),
    "lora_dropout": (lambda value: _is_number(value) and 0 <= value < 1, "number from 0 up to 1"),
    "use_rslora": (_is_switch, "true or false"),
    "use_dora": (_is_switch, "true or false"),
    "inference_mode": (_is_switch, "true or false"),
    **dict.fromkeys(("rank_pattern", "alpha_pattern"), (lambda value: isinstance(value, dict), "object")),
    "exclude_modules": (lambda value: _is_text(value) or _are_names(value), "list of names"),
    **dict.fromkeys(
        ("modules_to_save", "target_parameters"), (lambda value: value is None or _are_names(value), "list of names")
    ),
    **dict.fromkeys(("base_model_name_or_path", "peft_version", "revision", "task_type"), (_is_text, "text")),
}
_REQUIRED = ("r", "lora_alpha")
_COMPUTED = {"r", "lora_alpha", "use_rslora", "use_dora"}
_OFF = (None, False, {}, [])
# Every other initialisation moves a part of the base weights into the adapter, which then needs a changed base model.
_KEEPS_BASE = (True, False, None, "gaussian", "orthogonal", "eva")


def peft_config(
    config: AdapterConfig, modules: Sequence[str], whole: Sequence[str], stacks: Sequence[str] = ()
) -> dict[str, object]:
    """Return the content of adapter_config.json; keys that are left out have PEFT's defaults.

    Args:
        modules: names of the adapted modules.
        whole: names of the modules that were trained whole.
        stacks: names of the adapted parameters that hold one matrix per expert.
    """
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None,  # a training does not know it
        "inference_mode": True,
        "r": config.rank,
        "lora_alpha": int(config.alpha) if config.alpha.is_integer() else config.alpha,  # PEFT expects a whole number
        "lora_dropout": config.dropout,
        "use_rslora": config.rslora,
        "use_dora": config.kind == "dora",
        "target_modules": list(modules),
        "target_parameters": list(stacks) or None,
        "modules_to_save": list(whole) or None,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "rank_pattern": {},
        "alpha_pattern": {},
    }


def read_peft_config(directory: Path, named: str) -> dict[str, Any]:
    """Return the content of adapter_config.json of a PEFT directory, after checking that this adapter is supported.

    Args:
        named: the directory's name in error messages.
    """
    for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
        if not (directory / name).is_file():
            raise InputError(f"{named} has no {name}; give a directory that PEFT or an export has written")
    path = directory / ADAPTER_CONFIG
    config = read_object(path, "save the adapter with PEFT again")
    if config.get("peft_type") != "LORA":
        raise InputError(f"{path}: peft_type is {shown(config.get('peft_type'))}; only LORA is computed (DoRA is one)")
    if not _is_among(start := config.get("init_lora_weights"), _KEEPS_BASE):
        raise InputError(
            f"{path}: init_lora_weights is {shown(start)}, which changes the base model; convert the adapter with "
            "PEFT's path_initial_model_for_weight_conversion"
        )
    for key, (fits, wanted) in _WANTED.items():
        if (key in config and not fits(config[key])) or (key not in config and key in _REQUIRED):
            raise InputError(f"{path}: {key} is {shown(config.get(key))}, no {wanted}; save it with PEFT again")
    for key in sorted(config.keys() - _UNIMPORTANT - _COMPUTED):
        if not _is_among(config[key], ("none",) if key == "bias" else _OFF):
            raise InputError(
                f"{path}: {key} is {shown(config[key])}, which is not computed here; merge the adapter into its model "
                "with PEFT's merge_and_unload, and give that model"
            )
    return config


def adapts(path: Path, config: Mapping[str, Any], module: str) -> bool:
    """Whether PEFT gives a module an adapter. PEFT ignores a file's tensors of the modules without one.

    Args:
        module: the name in PEFT of a linear layer, or of a module that holds one matrix per expert.
    """
    holders = [name.rpartition(".")[0] for name in config.get("target_parameters") or ()]
    if holders and _is_named(path, "target_parameters", holders, module.removesuffix(".base_layer")):
        return True
    layers, excluded = config.get("layers_to_transform"), config.get("exclude_modules")
    if not _is_named(path, "target_modules", config.get("target_modules"), module):
        return False
    if excluded and _is_named(path, "exclude_modules", excluded, module):
        return False
    if layers is None:
        return True
    layers = layers if isinstance(layers, list) else [layers]
    if not all(isinstance(layer, int) and not isinstance(layer, bool) for layer in layers):
        raise InputError(f"{path}: layers_to_transform is {shown(layers)}, no list of whole numbers")
    number = re.match(r".*\.[^.]*\.(\d+)\.", module)
    return number is not None and int(number[1]) in layers


def _is_named(path: Path, key: str, names: object, module: str) -> bool:
    """Whether a PEFT setting matches a module: by a regular expression, or by the end of the module's name."""
    if names == "all-linear":
        return True
    if isinstance(names, str):
        try:
            return re.fullmatch(names, module) is not None
        except re.error as error:
            raise InputError(f"{path}: {key} is {shown(names)}, no regular expression: {error}") from error
    if not _are_names(names):
        raise InputError(f"{path}: {key} is {shown(names)}, no list of names; save the adapter with PEFT again")
    return any(module == name or module.endswith(f".{name}") for name in names)


def check_start(directory: Path, config: AdapterConfig | None) -> None:
    """Check that a training can start from the adapter in a PEFT directory. Whether the adapter has the same modules is
    checked when its tensors are read."""
    if config is None:
        raise InputError(
            f"start_adapter={directory} is an adapter to go on from, and train.adapter is null; set train.adapter to "
            "its rank, alpha and kind, or start_adapter=null"
        )
    theirs = read_peft_config(directory, f"start_adapter={directory}")
    ours = {
        "r": ("rank", config.rank),
        "lora_alpha": ("alpha", config.alpha),
        "use_rslora": ("rslora", config.rslora),
        "use_dora": ("kind=dora", config.kind == "dora"),
    }
    for key, (field, value) in ours.items():
        if (saved := theirs.get(key, False)) != value:
            raise InputError(
                f"{directory / ADAPTER_CONFIG}: {key} is {saved!r}, and train.adapter says {value!r} ({field}); set "
                f"train.adapter.{field} as the adapter has it"
            )
