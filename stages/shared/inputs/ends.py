"""The tokens at which programs end an answer of a model directory, read without transformers."""

from pathlib import Path
from typing import Any

from dataset_builders.errors import InputError
from dataset_builders.storage.files import write_json
from stages.shared.inputs.model_directory import read_json

_GENERATION = "generation_config.json"
_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def end_ids(hf_dir: Path) -> list[int]:
    """Return the ids of the tokens that end an answer where the directory is served; [] if it names none."""
    file = hf_dir / (_GENERATION if (hf_dir / _GENERATION).is_file() else "config.json")
    eos = _generation(hf_dir).get("eos_token_id")
    ids = [] if eos is None else eos if isinstance(eos, list) else [eos]
    if any(type(each) is not int or each < 0 for each in ids):
        raise InputError(f"{file}: eos_token_id is {str(eos)[:80]}; give the id of a token, or a list of ids")
    return ids


def add_end(hf_dir: Path, end: int) -> bool:
    """Add a token to those that end an answer, and keep the others; return whether it was missing."""
    ids = end_ids(hf_dir)
    if end in ids:
        return False
    write_json(hf_dir / _GENERATION, {**_generation(hf_dir), "eos_token_id": [*ids, end]})
    return True


def _generation(hf_dir: Path) -> dict[str, Any]:
    """Return generation_config.json, or else what transformers derives from config.json, as far as it names tokens."""
    if (hf_dir / _GENERATION).is_file():
        return read_json(hf_dir / _GENERATION)
    whole = read_json(hf_dir / "config.json")
    text = whole.get("text_config") or {}
    found = {name: text.get(name) if whole.get(name) is None else whole[name] for name in _IDS}
    return {name: value for name, value in found.items() if value is not None}
