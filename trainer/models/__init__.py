"""The models: HF `model_type` -> the module that builds it."""

import importlib
import json
from pathlib import Path
from types import ModuleType

from dataset_builders.contracts.errors import InputError

MODELS = {"qwen3_vl": "trainer.models.qwen3_vl.model"}


def read_model_type(hf_dir: Path) -> str:
    """`model_type` of `hf_dir/config.json`."""
    return json.loads((hf_dir / "config.json").read_text(encoding="utf-8"))["model_type"]


def get_model_module(model_type: str) -> ModuleType:
    """The module of a model, with `read_config` and `build`.

    Raises:
        InputError: not a supported architecture.
    """
    if model_type not in MODELS:
        raise InputError(f"model_type {model_type!r} is not supported; supported: {', '.join(sorted(MODELS))}")
    return importlib.import_module(MODELS[model_type])
