"""The registry of families: HF `model_type` -> the module that describes the family, imported when needed.

Another package adds a family by an entry point of the group "athanor.families". Its name is the model_type and its
value is "module:name" of the `Family`: see README.md.
"""

from collections.abc import Mapping
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from dataset_builders.errors import InputError, shown
from dataset_builders.storage.files import read_object
from trainer.contract.run import TrainConfig
from trainer.model.family import Family
from trainer.model.shape import ModelShape

FAMILIES = {
    "qwen3": "trainer.families.qwen3.family:FAMILY",
    "qwen3_vl": "trainer.families.qwen3_vl.family:FAMILY",
    "qwen3_vl_moe": "trainer.families.qwen3_vl_moe.family:FAMILY",
    "qwen3_5": "trainer.families.qwen3_5_vl.family:FAMILY",
    "qwen3_5_moe": "trainer.families.qwen3_5_moe.family:FAMILY",
}
# Model types that a user of our families may have, and why they are not supported.
_UNSUPPORTED = {
    "qwen4_exp": ", whose sparse attention, gated residual streams and n-gram embeddings are not implemented",
}
EMBEDDED = "qwen3_vl"  # the family of a model with random weights, if the recipe names none
ENTRY_POINTS = "athanor.families"


def get_family(model_type: object, path: Path | str = "config.json") -> Family:
    """Return the family of a `model_type`."""
    # Search the installed packages only if needed: it is slow.
    places = FAMILIES if str(model_type) in FAMILIES else _all_places()
    if not isinstance(model_type, str) or model_type not in places:
        why = _UNSUPPORTED.get(model_type, "") if isinstance(model_type, str) else ""
        raise InputError(f"{path}: model_type is {shown(model_type)}{why}; supported: {', '.join(sorted(places))}")
    return resolve_name(places[model_type])


@cache  # an installation does not change while a process runs, and reading its metadata takes 40 ms
def _all_places() -> dict[str, str]:
    return {point.name: point.value for point in entry_points(group=ENTRY_POINTS)} | FAMILIES


def get_variant(name: object) -> tuple[str, Mapping[str, Any]]:
    """Return the model_type and the sizes of a variant."""
    known = {}
    for model_type in _all_places():
        known |= {variant: (model_type, sizes) for variant, sizes in get_family(model_type).variants.items()}
    if not isinstance(name, str) or name not in known:
        raise InputError(f"variant={shown(name)} is not known; known: {', '.join(known)}")
    return known[name]


def get_variants(model_type: object) -> Mapping[str, Mapping[str, Any]]:
    """Return the variants of a family."""
    families = {name: get_family(name).variants for name in _all_places()}
    having = [name for name, variants in families.items() if variants]
    if not isinstance(model_type, str) or model_type not in having:
        raise InputError(f"family={shown(model_type)} has no random weights; try {' or '.join(having)}")
    return families[model_type]


def read_model(hf_dir: Path, train: TrainConfig | None = None) -> tuple[Family, ModelShape]:
    """Return the family and the sizes of the model in an HF directory.

    Args:
        train: the training whose shape is returned, see `ModelShape.for_training`; None: the model alone.
    """
    family, shape = model_of(read_config(hf_dir), hf_dir)
    return family, shape if train is None else shape.for_training(train)


def read_config(hf_dir: Path) -> dict[str, Any]:
    """Return the content of config.json of an HF directory."""
    path = hf_dir / "config.json"
    if not path.is_file():
        raise InputError(f"{path} does not exist; give the HF directory of a model")
    return read_object(path, "copy the model's own file again")


def model_of(config: Mapping[str, Any], hf_dir: Path) -> tuple[Family, ModelShape]:
    """Return the family and the sizes that the content of a directory's config.json describes."""
    path = hf_dir / "config.json"
    family = get_family(config.get("model_type"), path)
    return family, family.read_shape(config, path)
