"""The form in the Prefect UI: PipelineConfig's schema with every field optional, in a shape that the form can draw.

The shape follows from the way in which the form (Prefect 3.8) treats a JSON schema:

- `anyOf` with null, which pydantic makes of an optional field, becomes tabs that hide the input. So a field has its
  plain type and no default. The form draws an empty box, which is left out of the request.
- A plain boolean becomes a switch that sends false if nobody touches it. So a boolean is a choice without a type.
- Bounds are not drawn, and the page drops bounds next to a type before it checks a value. So the bounds are put into
  `allOf`, which the page keeps and reports at the field. They are also in the description, with the recipes' values
  and the name for `--set`.
- A section is folded by `anyOf` of null and an object, with the properties outside of `anyOf`. If the properties were
  inside, Prefect's server would not name the field of a wrong value.
"""

import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import GetJsonSchemaHandler
from pydantic_core import CoreSchema

from dataset_builders.contracts.strict import EVERY_FIELD
from flows.pipeline.config import PipelineConfig
from flows.pipeline.recipe import NONE, known_recipes, load_recipe, whole_recipes
from flows.service.request import is_recipe_only

_AS_RECIPE = {"type": "null", "title": "as the recipe says"}
_CHANGE = {"type": "object", "title": "change"}
_SOURCE = {"type": "string", "title": "a directory, URL or hub name"}
_NO_VALUE = {"type": "string", "enum": [NONE], "title": NONE}
_ORDER = (
    *("train", "data", "model", "start_adapter", "convert", "contamination", "tokenize", "plan_bins"),
    *("encode_images", "evaluate", "compare", "verify", "execution", "name"),
)
_SOURCES = ("data", "model")  # sections that a request may replace by a directory, URL or name
_OPEN = ("train", "train.optim")  # sections that are not folded, since most runs change them
_BOUNDS = {
    "exclusiveMinimum": "over {}",
    "minimum": "at least {}",
    "exclusiveMaximum": "under {}",
    "maximum": "at most {}",
    "multipleOf": "a multiple of {}",
    "minLength": "at least {} character",
    "pattern": "of the form `{}`",
}
_SCHEMA_KEYS = ("type", "enum", "items", "additionalProperties")
_WORDS = {
    "lr": "learning rate",
    "num": "number of",
    "optim": "optimizer",
    "min": "minimum",
    "max": "maximum",
    "tp": "tensor parallel size",
    "pp": "pipeline parallel size",
    "cp": "context parallel size",
    "vpp": "virtual pipeline size",
    "mb": "in MB",
    "kv": "key and value",
    "seq": "sequence",
    "len": "length",
}
# Dotted name of a section -> its title, and a description that replaces the one of its class, which is for developers.
_SECTIONS = {
    "": ("overrides", ""),
    "train": ("Training", "Steps, batch, precision, learning rates."),
    "data": ("Data", "Settings of the embedded digits, or a source of your own."),
    "model": ("Model", "A model of random weights, or a Qwen3-VL, Qwen3.5 or Qwen3 to start from."),
    "convert": ("Raw rows", "Which rows are read, held out and left out."),
    "contamination": ("Contamination", "Which held-out images count as seen in train."),
    "tokenize": ("Tokens and patches", "How samples are encoded, and which answers are trained on."),
    "plan_bins": ("Bins", "How samples are packed, and how much of each subset an epoch takes."),
    "encode_images": (
        "Image features",
        "Whether a frozen vision encoder encodes each image once, before the training.",
    ),
    "evaluate": ("Evaluation", "How held-out samples are asked, and which metrics score the answers."),
    "compare": ("Before and after", "How sure a difference from the model before training has to be."),
    "verify": ("Other programs", "How many held-out questions transformers, PEFT and MLflow answer again."),
    "execution": ("Where and how it runs", "Processes, launcher, layout, checkpoints. Changes no result."),
}


@functools.cache
def form_schema() -> dict[str, Any]:
    """Return the JSON schema (draft 2020-12) of a request's overrides: nested as PipelineConfig, no field required."""
    whole = PipelineConfig.model_json_schema()
    values = {name: load_recipe(name).config.model_dump(mode="json", context=EVERY_FIELD) for name in whole_recipes()}
    form = _Form(whole["$defs"], values)
    return form.section(whole, ())


class _Form:
    """A converter of PipelineConfig's schema. `path` holds the keys of a dotted name."""

    def __init__(self, definitions: Mapping[str, Any], values: Mapping[str, Any]) -> None:
        self.definitions, self.values = definitions, values

    def section(self, schema: Mapping[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
        """Return the schema of a model with its fields. Its description is the field's, or else the class's."""
        properties = {name: self.field(each, (*path, name)) for name, each in schema["properties"].items()}
        shown = {name: each for name, each in properties.items() if each is not None}
        if not path:
            shown = {name: shown[name] for name in _ORDER if name in shown} | shown
        for position, each in enumerate(shown.values()):
            each["position"] = position  # the order of a JSON object does not survive a Postgres column
        return {
            "type": "object",
            "title": _title(path),
            "description": _about(schema, path),
            "properties": shown,
            "additionalProperties": False,
        }

    def field(self, schema: Mapping[str, Any], path: tuple[str, ...]) -> dict[str, Any] | None:
        """Return the schema of one field; None if a request may not set the field or any field of the section."""
        if is_recipe_only(".".join(path)):
            return None
        described = {"description": schema["description"]} if "description" in schema else {}
        alternatives = [self._resolved(each) for each in schema.get("anyOf", schema.get("oneOf", [schema]))]
        model = next((each for each in alternatives if "properties" in each), None)
        if model is not None:
            section = self.section({**model, **described}, path)
            # A text may replace the section: one of several names, or a source.
            texts = [
                {"enum": each["enum"], "title": "a name"} if "enum" in each else _SOURCE
                for each in alternatives
                if each.get("type") == "string"
            ]
            if not section["properties"] or ".".join(path) in _OPEN:
                return section if section["properties"] else None
            folded = {key: value for key, value in section.items() if key != "type"}
            return {**folded, "anyOf": [_AS_RECIPE, *texts, _CHANGE]}
        return self._leaf(schema, [each for each in alternatives if each.get("type") != "null"], path)

    def _leaf(self, schema: Mapping[str, Any], plain: list[dict[str, Any]], path: tuple[str, ...]) -> dict[str, Any]:
        is_nullable = any(each.get("type") == "null" for each in schema.get("anyOf", ()))
        # The form does not check a union of several plain types; the check of the whole configuration does.
        shape = (
            {key: self._inlined(plain[0][key]) for key in _SCHEMA_KEYS if key in plain[0]} if len(plain) == 1 else {}
        )
        bounds = {key: plain[0][key] for key in _BOUNDS if key in plain[0]} if shape else {}
        if shape.get("type") == "boolean":
            shape = {"enum": [True, False]}
        if is_nullable and "enum" in shape:
            shape = {"enum": [*shape["enum"], NONE]}
        elif is_nullable and shape.get("type") in ("integer", "number"):
            number = {"type": shape.pop("type"), "title": "a number", **bounds}
            shape |= {"anyOf": [number, _NO_VALUE], **bounds}
        elif bounds:
            shape["allOf"] = [bounds]
        limits = ", ".join(text.format(_number(plain[0][key])) for key, text in _BOUNDS.items() if key in plain[0])
        text = _described(schema.get("description", ""), limits, is_nullable)
        values = [f"`{'.'.join(path)}`", *self._recipe_values(path)]
        return {**shape, "title": _title(path), "description": f"{text} {'; '.join(values)}".strip()}

    def _resolved(self, schema: Mapping[str, Any]) -> dict[str, Any]:
        if "$ref" not in schema:
            return dict(schema)
        return {
            **self.definitions[schema["$ref"].rpartition("/")[2]],
            **{k: v for k, v in schema.items() if k[0] != "$"},
        }

    def _inlined(self, value: Any) -> Any:
        """Return the value with its references replaced by their definitions, since Prefect drops $defs."""
        if isinstance(value, dict):
            return {key: self._inlined(each) for key, each in self._resolved(value).items()}
        return [self._inlined(each) for each in value] if isinstance(value, list) else value

    def _recipe_values(self, path: tuple[str, ...]) -> list[str]:
        """Return the field's value in every recipe that has the field; "none" if its whole section is null."""
        texts = {}
        for name, place in self.values.items():
            for key in path:
                if isinstance(place, dict):
                    place = place.get(key, self)
                elif place is not None and path[0] in _SOURCES:  # a directory or name replaces the section
                    place = self
            if place is not self:
                texts[name] = NONE if place is None else place if isinstance(place, str) else json.dumps(place)
        return [f"recipe {name}: `{value}`" for name, value in texts.items()]


def _number(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:g}" if isinstance(value, float) else str(value)


def _described(text: str, bounds: str, is_nullable: bool) -> str:
    """Return a field's description in Markdown, with null under the name that the form uses."""
    if is_nullable:
        text = text.replace("null:", f"{NONE}:")
    text = text.replace("<", "&lt;").replace("*", "\\*")
    return f"{text} ({bounds})." if bounds else f"{text}." if text else ""


def _about(schema: Mapping[str, Any], path: tuple[str, ...]) -> str:
    """Return a section's description, without the prefixes that are only for developers."""
    if about := _SECTIONS.get(dotted := ".".join(path), ("", ""))[1]:
        return f"{about} `{dotted}`"
    text = schema.get("description", "")
    for prefix in ("Identity: ", "Execution: "):
        text = text.removeprefix(prefix)
    return _described(text[:1].upper() + text[1:].removesuffix("."), "", "null:" in text)


def _title(path: tuple[str, ...]) -> str:
    if (dotted := ".".join(path)) in _SECTIONS:
        return _SECTIONS[dotted][0]
    words = " ".join(_WORDS.get(word, word) for word in path[-1].split("_"))
    return words[0].upper() + words[1:]


@dataclass(frozen=True, slots=True)
class _Schema:
    """A JSON schema for a parameter, used by the form and by the checks of Prefect's server. The value stays plain."""

    make: Callable[[], dict[str, Any]]

    def __get_pydantic_json_schema__(self, _core: CoreSchema, _handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return self.make()


_GRID_SCHEMA = {"type": "object", "additionalProperties": {"type": "array", "minItems": 1}}  # drawn as a JSON editor
RecipeName = Annotated[str, _Schema(lambda: {"type": "string", "enum": known_recipes()})]
Overrides = Annotated[dict[str, Any], _Schema(form_schema)]
Grid = Annotated[dict[str, list[Any]], _Schema(lambda: dict(_GRID_SCHEMA))]
