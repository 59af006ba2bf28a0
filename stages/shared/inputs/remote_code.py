"""Code in a model's directory ("remote code" in transformers): never run, and refused unless the recipe allows it.

transformers can import Python files of a directory if a config's `auto_map` names them. athanor does not need them: the
models that it supports are transformers' own classes, and athanor never passes `trust_remote_code`. A directory with
code is refused nevertheless, because somebody may load it, or an export of it, with other programs. A user who has read
the code gives its hash in the recipe (`execution.model_code_sha256`). The files still remain unused, and an export
omits them and `auto_map`.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

from dataset_builders.errors import InputError
from dataset_builders.storage.files import sha256_file, write_json

FIELD = "execution.model_code_sha256"
_AUTO_MAP = "auto_map"
_CONFIGS = "*config*.json"  # config.json, tokenizer_config.json, config.4.0.0.json, ...
_CODE = (".py", ".pyc", ".pyd", ".so")  # suffixes of files that Python can import


def check_remote_code(hf_dir: Path, allowed_sha256: str | None = None) -> None:
    """Check that a directory has no code, or only the code that the recipe allows: `allowed_sha256` is the SHA-256 over
    names and bytes of its code and over its `auto_map` entries."""
    auto_maps = [(file.name, _auto_maps(file)) for file in sorted(hf_dir.glob(_CONFIGS)) if file.is_file()]
    code = [(name, hashlib.sha256(entries.encode()).hexdigest()) for name, entries in auto_maps if entries]
    files = sorted(file for file in hf_dir.rglob("*") if file.suffix.lower() in _CODE and file.is_file())
    code += [(file.relative_to(hf_dir).as_posix(), sha256_file(file)) for file in files]
    digest = hashlib.sha256("".join(f"{name}\0{sha256}\n" for name, sha256 in code).encode()).hexdigest()
    if not code or digest == allowed_sha256:
        return
    name, _ = code[0]
    what = f"names code to be run ({_AUTO_MAP})" if name.endswith(".json") else "is code"
    changed = "" if allowed_sha256 is None else f", and not the code of {FIELD}={allowed_sha256}"
    raise InputError(
        f"{hf_dir / name} {what}{changed}; athanor needs none: copy the directory without it, or read it and then say "
        f"{FIELD}={digest} (it is not run then either)"
    )


def drop_auto_maps(hf_dir: Path) -> None:
    """Remove `auto_map` from the configs of a directory to which the named code was not copied."""

    def without(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: without(inner) for key, inner in value.items() if key != _AUTO_MAP}
        return [without(inner) for inner in value] if isinstance(value, list) else value

    for file in hf_dir.glob(_CONFIGS):
        if _auto_maps(file):
            write_json(file, without(json.loads(file.read_bytes())))


def _auto_maps(file: Path) -> str:
    """Return the `auto_map` entries of a JSON file as text, or ""; of a repeated key, all entries."""
    entries: list[Any] = []

    def look(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        entries.extend(value for key, value in pairs if key == _AUTO_MAP and value)
        return dict(pairs)

    try:
        json.loads(file.read_bytes(), object_pairs_hook=look)
    except (ValueError, RecursionError):  # any reader of the file reports that it cannot be read
        return ""
    return json.dumps(entries, sort_keys=True) if entries else ""
