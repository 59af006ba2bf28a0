"""The families: HF `model_type` -> the module that describes it, imported when it is needed.

Another package adds a family by an entry point of the group "athanor.families", whose name is the model_type and whose
value is the place of its `Family`: see README.md.
"""

from importlib.metadata import entry_points
from pathlib import Path

from dataset_builders.errors import InputError, shown
from dataset_builders.storage.files import read_object
from trainer.contract.model_shape import ModelShape
from trainer.families.family import Family, load

FAMILIES = {
    "qwen3": "trainer.families.qwen3.family:FAMILY",
    "qwen3_vl": "trainer.families.qwen3_vl.family:FAMILY",
    "qwen3_5": "trainer.families.qwen3_5_vl.family:FAMILY",
}
EMBEDDED = "qwen3_vl"  # the family of the embedded recipes' model
ENTRY_POINTS = "athanor.families"


def get_family(model_type: object, path: Path | str = "config.json") -> Family:
    """The family of a `model_type`.

    Args:
        path: the file that has it, for messages.

    Raises:
        InputError: there is none.
    """
    places = FAMILIES
    if str(model_type) not in places:  # a search through the installed packages takes a while
        places = {point.name: point.value for point in entry_points(group=ENTRY_POINTS)} | FAMILIES
    if not isinstance(model_type, str) or model_type not in places:
        raise InputError(f"{path}: model_type is {shown(model_type)}; supported: {', '.join(sorted(places))}")
    return load(places[model_type])


def read_model(hf_dir: Path) -> tuple[Family, ModelShape]:
    """The family and the sizes of an HF directory.

    Raises:
        InputError: there is no config.json, its family is not supported, or one of its keys is not understood.
    """
    path = hf_dir / "config.json"
    if not path.is_file():
        raise InputError(f"{path} does not exist; give the HF directory of a model")
    config = read_object(path, "copy the model's own file again")
    family = get_family(config.get("model_type"), path)
    return family, family.read_shape(config, path)
