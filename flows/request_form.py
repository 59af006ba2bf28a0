"""The form in the Prefect UI: PipelineConfig's own schema with every field optional, in the shape that the form draws.

What the form (Prefect 3.8) does with a JSON schema decides that shape:

- `anyOf` with null, pydantic's way to say optional, becomes tabs that hide the input. So a field is its plain type
  without a default: an empty box, which is left out of the request.
- A plain boolean is drawn as a switch that sends false when nobody touches it. So it is a choice without a type.
- Bounds are not drawn, and the page forgets those that stand beside a type before it asks whether a value is right. So
  they stand in `allOf`, which it keeps and shows the refusal at the field, and in the description, with the recipes'
  values and the name for `--set`.
- A section is folded by `anyOf` of null and an object, with its properties beside them: Prefect's server then still
  refuses a wrong value with the path of the field, which it would not if they stood inside.
"""

import functools
import json
from collections.abc import Mapping
from typing import Any

from flows.pipeline_config import PipelineConfig
from flows.recipe import known_recipes, load_recipe
from flows.request_paths import is_recipe_only

NONE = "none"  # what a person chooses for null, as null itself means "as the recipe says"
_AS_RECIPE = {"type": "null", "title": "as the recipe says"}
_CHANGE = {"type": "object", "title": "change"}
_SOURCE = {"type": "string", "title": "a directory, URL or hub name"}
_NO_VALUE = {"type": "string", "enum": [NONE], "title": NONE}
_ORDER = (
    *("train", "data", "model", "convert", "contamination", "tokenize", "plan_bins", "evaluate", "compare"),
    *("execution", "name"),
)
_OPEN = ("train", "train.optim")  # what most runs change
_BOUNDS = {
    "exclusiveMinimum": "over {}",
    "minimum": "at least {}",
    "exclusiveMaximum": "under {}",
    "maximum": "at most {}",
    "multipleOf": "a multiple of {}",
    "minLength": "at least {} character",
    "pattern": "of the form `{}`",
}
_KEPT = ("type", "enum", "items", "additionalProperties")
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
# Dotted name of a section -> its title, and what a person wants to know of it where its class says something else.
_SECTIONS = {
    "": ("overrides", ""),
    "train": ("Training", "Steps, batch, precision, learning rates."),
    "data": ("Data", "The embedded digits with other counts, or a source of your own."),
    "model": ("Model", "A tiny model with random weights, or a Qwen3-VL to start from."),
    "convert": ("Raw rows", "Which rows are read, which are held out, which are left out."),
    "contamination": ("Contamination", "What counts as a held-out picture that occurs in train."),
    "tokenize": ("Tokens and patches", "How samples are encoded, and which answers are learnt."),
    "plan_bins": ("Bins", "How samples are packed, and how much of each subset an epoch takes."),
    "evaluate": ("Evaluation", "How held-out samples are asked, and what their answers are scored by."),
    "compare": ("Before and after", "How sure a difference from the model before training has to be."),
    "execution": ("Where and how it runs", "Processes, launcher, layout, checkpoints. Changes no result."),
}


@functools.cache
def form_schema() -> dict[str, Any]:
    """JSON schema (draft 2020-12) of a request's overrides: nested as PipelineConfig, nothing required."""
    whole = PipelineConfig.model_json_schema()
    values = {name: load_recipe(name).config.model_dump(mode="json") for name in known_recipes()}
    form = _Form(whole["$defs"], values)
    return form.section(whole, ())


def recipe_schema() -> dict[str, Any]:
    """JSON schema of a request's recipe: one of the known names."""
    return {"type": "string", "enum": known_recipes()}


class _Form:
    """Walks PipelineConfig's schema; `path` is the dotted name so far, in parts."""

    def __init__(self, definitions: Mapping[str, Any], values: Mapping[str, Any]) -> None:
        self.definitions, self.values = definitions, values

    def section(self, schema: Mapping[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
        """A model with its fields; its description is that of the field or else of the model."""
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
        """One field; None for a section without fields, and for what a request may not say."""
        if is_recipe_only(".".join(path)):
            return None
        described = {"description": schema["description"]} if "description" in schema else {}
        alternatives = [self._resolved(each) for each in schema.get("anyOf", schema.get("oneOf", [schema]))]
        model = next((each for each in alternatives if "properties" in each), None)
        if model is not None:
            is_union = any(each.get("type") == "string" for each in alternatives)
            section = self.section({**model, **described}, path)
            return _fold(section, path, is_union) if section["properties"] else None
        return self._leaf(schema, [each for each in alternatives if each.get("type") != "null"], path)

    def _leaf(self, schema: Mapping[str, Any], plain: list[dict[str, Any]], path: tuple[str, ...]) -> dict[str, Any]:
        is_nullable = any(each.get("type") == "null" for each in schema.get("anyOf", ()))
        # A union of several plain types is left to the check of the whole configuration.
        shape = {key: self._inlined(plain[0][key]) for key in _KEPT if key in plain[0]} if len(plain) == 1 else {}
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
        text = _described(schema.get("description", ""), _bounds(plain[0]), is_nullable)
        says = [f"`{'.'.join(path)}`", *self._says(path)]
        return {**shape, "title": _title(path), "description": f"{text} {'; '.join(says)}".strip()}

    def _resolved(self, schema: Mapping[str, Any]) -> dict[str, Any]:
        if "$ref" not in schema:
            return dict(schema)
        return {
            **self.definitions[schema["$ref"].rpartition("/")[2]],
            **{k: v for k, v in schema.items() if k[0] != "$"},
        }

    def _inlined(self, value: Any) -> Any:
        """Prefect keeps no $defs of a parameter's own: what refers to them is written out."""
        if isinstance(value, dict):
            return {key: self._inlined(each) for key, each in self._resolved(value).items()}
        return [self._inlined(each) for each in value] if isinstance(value, list) else value

    def _says(self, path: tuple[str, ...]) -> list[str]:
        """The values of the recipes that have the field; none where its whole section is null."""
        said = {}
        for name, place in self.values.items():
            for key in path:
                if place is not None:
                    place = place.get(key, self) if isinstance(place, dict) else self
            if place is not self:
                said[name] = NONE if place is None else place if isinstance(place, str) else json.dumps(place)
        return [f"recipe {name}: `{value}`" for name, value in said.items()]


def _fold(section: dict[str, Any], path: tuple[str, ...], is_union: bool) -> dict[str, Any]:
    if ".".join(path) in _OPEN:
        return section
    folded = {key: value for key, value in section.items() if key != "type"}
    return {**folded, "anyOf": [_AS_RECIPE, *([_SOURCE] if is_union else []), _CHANGE]}


def _bounds(schema: Mapping[str, Any]) -> str:
    return ", ".join(text.format(_number(schema[key])) for key, text in _BOUNDS.items() if key in schema)


def _number(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:g}" if isinstance(value, float) else str(value)


def _described(text: str, bounds: str, is_nullable: bool) -> str:
    """A field's description, which the form reads as Markdown; null is called by its name there."""
    if is_nullable:
        text = text.replace("null:", f"{NONE}:")
    text = text.replace("<", "&lt;").replace("*", "\\*")
    return f"{text} ({bounds})." if bounds else f"{text}." if text else ""


def _about(schema: Mapping[str, Any], path: tuple[str, ...]) -> str:
    """A section's description, without what only a reader of the code wants to know."""
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
