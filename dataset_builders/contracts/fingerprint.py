"""Fingerprints: 16 hex digits that identify an artifact by its inputs. Also, the differences of two configs."""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import PurePath


def canonical_json(value: object) -> str:
    """Return the value as JSON with sorted keys and no spaces; the text is the same in every process."""

    def encode(item: object) -> object:
        if dataclasses.is_dataclass(item) and not isinstance(item, type):
            return {f.name: getattr(item, f.name) for f in dataclasses.fields(item)}
        if isinstance(item, PurePath):
            return str(item)
        # A callable or a default repr would put an address in memory into the text.
        raise TypeError(f"cannot fingerprint a {type(item).__name__}; use a str, number, list, mapping or dataclass")

    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False, default=encode)


def fingerprint(value: object) -> str:
    """Return 16 hex digits of the SHA-256 of the value's canonical JSON."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()[:16]


def describe_drift(old: Mapping[str, object], new: Mapping[str, object]) -> str:
    """Describe how two nested mappings differ, by dotted field: `optim.lr: 0.001 -> 0.002; seed: 1 -> 2`."""
    before, after = flatten(old), flatten(new)
    changed = sorted(k for k in before.keys() | after.keys() if before.get(k, None) != after.get(k, None))
    return "; ".join(f"{k}: {before.get(k, 'absent')!r} -> {after.get(k, 'absent')!r}" for k in changed)


def flatten(value: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """Return a nested mapping as one level of dotted keys; lists stay values."""
    flat: dict[str, object] = {}
    for key, item in value.items():
        if isinstance(item, Mapping) and item:
            flat |= flatten(item, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = item
    return flat
