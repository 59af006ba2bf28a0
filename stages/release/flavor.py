"""MLflow's flavor: the files that make a directory with hf/ a model of `mlflow.pyfunc`, written without MLflow.

    MLmodel  mlflow_model.py  requirements.txt  python_env.yaml  input_example.json  serving_input_example.json

The code, mlflow_model.py, is copied from beside this file and never imported here. The files contain no time and no
path, and lie beside hf/ and not in it, since a model directory with code is refused.
"""

import json
import platform
import shutil
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml

from dataset_builders.storage.files import write_json, write_text
from trainer.contract.names import HF_EXPORT

CODE, MLMODEL = "mlflow_model.py", "MLmodel"
FLAVOR_FILES = (
    *(MLMODEL, CODE, "requirements.txt", "python_env.yaml"),
    *("input_example.json", "serving_input_example.json"),
)
_PACKAGES = ("mlflow", "transformers", "torch", "pillow")
_LIMIT = "max_new_tokens"
_INPUTS = [
    {"type": "string", "name": "question", "required": True},
    {"type": "array", "items": {"type": "string"}, "name": "images", "required": False},
    {"type": "string", "name": "system", "required": False},
]


def installed_versions() -> dict[str, str]:
    """Return package -> version, without the build, of Python and of the packages that the model needs."""
    return {"python": platform.python_version()} | {name: version(name).partition("+")[0] for name in _PACKAGES}


def write_flavor(directory: Path, versions: Mapping[str, str], question: str, images: list[str], limit: int) -> None:
    """Write the files of the flavor.

    Args:
        directory: the parent of hf/.
        versions: see `installed_versions`.
        question, images: the input example; the images are files in base64.
        limit: maximal number of tokens of an answer, unless a request gives another.
    """
    shutil.copyfile(Path(__file__).with_name(CODE), directory / CODE)
    write_text(directory / "requirements.txt", "".join(f"{name}=={versions[name]}\n" for name in _PACKAGES))
    write_text(directory / "python_env.yaml", f"python: {versions['python']}\ndependencies:\n- -r requirements.txt\n")
    example = {"columns": ["question", "images"], "data": [[question, images]]}
    write_json(directory / "input_example.json", {"inputs": example, "params": {_LIMIT: limit}})
    write_json(directory / "serving_input_example.json", {"dataframe_split": example, "params": {_LIMIT: limit}})
    write_text(directory / MLMODEL, yaml.safe_dump(_mlmodel(versions, limit)))


def _mlmodel(versions: Mapping[str, str], limit: int) -> dict[str, Any]:
    flavor = {
        "artifacts": {"hf_dir": {"path": HF_EXPORT, "uri": HF_EXPORT}},
        "code": None,
        "env": {"virtualenv": "python_env.yaml"},
        "loader_module": "mlflow.pyfunc.loaders.code_model",
        "model_code_path": CODE,
        "python_version": versions["python"],
        "streamable": False,
    }
    outputs = [{"type": "string", "name": "answer", "required": True}]
    params = [{"name": _LIMIT, "type": "integer", "default": limit, "shape": None}]
    return {
        "flavors": {"python_function": flavor},
        "mlflow_version": versions["mlflow"],
        "saved_input_example_info": {
            "artifact_path": "input_example.json",
            "serving_input_path": "serving_input_example.json",
            "type": "dataframe",
            "pandas_orient": "split",
            "params": "true",
        },
        "signature": {
            "inputs": json.dumps(_INPUTS),
            "outputs": json.dumps(outputs),
            "params": json.dumps(params),
        },
    }
