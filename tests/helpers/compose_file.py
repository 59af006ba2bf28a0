"""compose.yaml as `docker compose config` shows it, as far as athanor's file needs: variables filled in, merges
resolved."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

INFRA = Path(__file__).parents[2] / "infra"
_VARIABLE = re.compile(r"\$(?:(\$)|\{([A-Za-z_][A-Za-z0-9_]*)(?::(-|\?)([^}]*))?\})")


def fill_in(text: str, values: Mapping[str, str]) -> str:
    """Fill in variables: `${A:?why}` must have a value, `${A:-b}` is b without a value, `$$` is a dollar sign.

    Raises:
        KeyError: a variable that must be set is not set.
    """

    def one(found: re.Match[str]) -> str:
        dollar, name, kind, rest = found.groups()
        if dollar:
            return "$"
        if values.get(name):
            return values[name]
        if kind == "-":
            return rest
        raise KeyError(name)

    return _VARIABLE.sub(one, text)


def variables_of(text: str) -> dict[str, str]:
    """Return name -> "?" (must be set), "-" (has a default) or "" (neither) for every variable in a text."""
    return {name: kind or "" for _, name, kind, _ in _VARIABLE.findall(text) if name}


def load_compose(name: str, values: Mapping[str, str]) -> dict[str, Any]:
    """Load a compose file of infra/ with its variables filled in."""

    def walk(node: Any) -> Any:
        if isinstance(node, str):
            return fill_in(node, values)
        if isinstance(node, dict):
            return {key: walk(value) for key, value in node.items()}
        return [walk(value) for value in node] if isinstance(node, list) else node

    return walk(yaml.safe_load((INFRA / name).read_text()))


def read_env_file(path: Path) -> dict[str, tuple[str, bool]]:
    """Return name -> (value, whether its line is active) of an env file. A commented-out line has the form
    `#NAME=value`."""
    found = {}
    for line in path.read_text().splitlines():
        if match := re.match(r"(#?)([A-Z][A-Z0-9_]*|no_proxy)=(.*)$", line):
            found[match[2]] = (match[3], not match[1])
    return found
