"""The form in the Prefect UI: a recipe, a name, the settings that most runs change, and lines as of `--set` for others.

The shape of a setting follows from the way in which the form (Prefect 3.8) treats a JSON schema:

- `anyOf` with null, which pydantic makes of an optional field, becomes tabs that hide the input. So a setting has its
  plain type and no default. The form draws an empty box, which is left out of the request.
- Bounds are not drawn, and the page drops bounds next to a type before it checks a value. So the bounds are put into
  `allOf`, which the page keeps and reports at the field. They are also in the description.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import GetJsonSchemaHandler
from pydantic_core import CoreSchema

from dataset_builders.sources.registry import BUILDERS
from flows.pipeline.config import PipelineConfig
from flows.pipeline.recipe import known_recipes, submodels
from flows.tracking.notes import MAX_NAME

# Dotted name of a setting -> its title. The description and the bounds are those of PipelineConfig.
TITLES = {
    "data": "Data",
    "convert.builder": "Kind of data",
    "convert.heldout_fraction": "Share held out",
    "model": "Model",
    "tokenize.max_pixels": "Largest image, in pixels",
    "tokenize.max_seq_len": "Longest sample, in tokens",
    "plan_bins.seq_len": "Length of a bin, in tokens",
    "train.num_epochs": "Epochs",
    "train.num_steps": "Steps",
    "train.global_batch_size": "Batch size",
    "train.optim.lr": "Learning rate",
    "train.seed": "Seed",
}
_BOUNDS = {
    "exclusiveMinimum": "over {}",
    "minimum": "at least {}",
    "exclusiveMaximum": "under {}",
    "maximum": "at most {}",
    "multipleOf": "a multiple of {}",
}


@functools.cache
def settings_schema() -> dict[str, Any]:
    """Return the JSON schema (draft 2020-12) of the settings of TITLES, none of which is required."""
    # The position is there because the order of a JSON object does not survive a Postgres column.
    fields = {dotted: {**_field(dotted), "position": i} for i, dotted in enumerate(TITLES)}
    fields["convert.builder"]["enum"] = list(BUILDERS)
    about = "What most runs change. An empty field keeps the recipe's value."
    return {"type": "object", "description": about, "properties": fields, "additionalProperties": False}


def _field(dotted: str) -> dict[str, Any]:
    *sections, name = dotted.split(".")
    model = PipelineConfig
    for section in sections:
        (model,) = submodels(model.model_fields[section].annotation)
    schema = model.model_json_schema()["properties"][name]
    kinds = schema.get("anyOf", schema.get("oneOf", [schema]))
    plain = next(each for each in kinds if each.get("type") in ("string", "integer", "number"))
    bounds = {key: plain[key] for key in _BOUNDS if key in plain}
    text = plain.get("description", schema["description"]).partition("; null")[0]
    limits = ", ".join(words.format(f"{bounds[key]:,}") for key, words in _BOUNDS.items() if key in bounds)
    return {
        "type": plain["type"],
        "title": TITLES[dotted],
        "description": f"{text[0].upper()}{text[1:]}{limits and f' ({limits})'}. `{dotted}`",
        "allOf": [bounds],
    }


@dataclass(frozen=True, slots=True)
class _Schema:
    """A JSON schema for a parameter, used by the form and by the checks of Prefect's server. The value stays plain."""

    make: Callable[[], dict[str, Any]]

    def __get_pydantic_json_schema__(self, _core: CoreSchema, _handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return self.make()


_RECIPE = {"type": "string", "enum": known_recipes(), "description": "The recipe to start from."}
_NAME = {
    "type": "string",
    "allOf": [{"maxLength": MAX_NAME}],
    "description": "The name of the run, in MLflow too but for a sweep. Empty: the recipe and what differs from it.",
}
_LINES = {
    "type": "string",
    "allOf": [{"pattern": r"^\s*([^\s=]+ *=.*(\n\s*|$))*$"}],  # every line is empty or key=value
    "description": "All other settings, a line for each as in `--set` of `athanor run`: `train.optim.warmup_steps=100`",
}
_GRID = {  # drawn as a JSON editor
    "type": "object",
    "additionalProperties": {"type": "array", "minItems": 1},
    "description": 'Settings with the values to try: `{"train.optim.lr": [0.001, 0.003], "train.seed": [0, 1]}`',
}
RecipeName = Annotated[str, _Schema(lambda: dict(_RECIPE))]
RunName = Annotated[str, _Schema(lambda: dict(_NAME))]
Settings = Annotated[dict[str, Any], _Schema(settings_schema)]
Lines = Annotated[str, _Schema(lambda: dict(_LINES))]
Grid = Annotated[dict[str, list[Any]], _Schema(lambda: dict(_GRID))]
