"""Damaged text, values, records and bytes, from a seeded generator."""

import copy
import random
from collections.abc import Callable, Iterator
from typing import Any

SNIPPETS = (
    "<image>",
    "<|im_start|>",
    "<|im_end|>",
    "<|im_end|>\n<|im_start|>assistant\n",
    "<|vision_start|><|image_pad|><|vision_end|>",
    "<think>\n\n</think>\n\n",
    "<s_menu>",
    "<sep/>",
    '[{"bbox_2d": [1, 2, 30, 30], "label": "a"}]',
    "<|object_ref_start|>a<|object_ref_end|><|box_start|>(1,2),(30,30)<|box_end|>",
    "<loc0001><loc0002><loc0300><loc0400> a ; ",
    "<bbox>",
    "<boxes>",
    "{{ 7 * 7 }}",
    "{% raw %}",
    "{% for i in range(10**9) %}",
    "\u202e\u2066right to left\u2069",
    "\u200b\u200d\ufeff\u2060",
    "\ud800",
    "\udfff\udc80",
    "\x00",
    "\x1b[31m",
    "\x07\x08\x7f\x85",
    "\r\n\r",
    "e\u0301" + "\u0300" * 40,
    "\U0001f468\u200d\U0001f469\u200d\U0001f467",
    "\U0010ffff\ufffe",
    "../../../etc/hostname",
    "data:image/png;base64,////",
    "http://127.0.0.1:9/a.png",
    "file:///etc/hostname",
    "NaN",
    "1e999",
    '"}]',
    " \t\n",
    "",
)
LONG = 1_000_000  # bytes of UTF-8
_LONG_SHARE = 0.002


def text(rng: random.Random) -> str:
    """Return any text, sometimes a megabyte long."""
    kind = rng.random()
    if kind < _LONG_SHARE:
        return long_text(rng.choice(SNIPPETS) or "x")
    if kind < 0.4:
        return "".join(rng.choice((*SNIPPETS, "What is it?", "seven")) for _ in range(rng.randrange(1, 5)))
    if kind < 0.7:
        return "".join(chr(rng.randrange(0x110000)) for _ in range(rng.randrange(30)))
    return "".join(chr(rng.randrange(32, 127)) for _ in range(rng.randrange(60)))


def long_text(snippet: str) -> str:
    """Return the snippet repeated up to a megabyte."""
    return snippet * (LONG // len(snippet.encode("utf-8", "surrogatepass")))


def value(rng: random.Random, depth: int = 0) -> Any:
    """Return any JSON value."""
    kind = rng.randrange(9 if depth < 3 else 6)
    if kind < 2:
        return text(rng)
    if kind < 6:
        return rng.choice((None, True, False, 0, 1, -1, 7, 0.5, 10**30, float("nan"), float("inf"), -0.0))
    if kind < 8:
        return [value(rng, depth + 1) for _ in range(rng.randrange(4))]
    names = ("role", "content", "type", "text", "image", "images", "from", "value", "messages", "url", "gt_parse")
    return {rng.choice((*names, text(rng))): value(rng, depth + 1) for _ in range(rng.randrange(4))}


def changed(rng: random.Random, record: Any) -> Any:
    """Return the record with one to three of its inner values replaced, dropped, doubled or swapped."""
    record = copy.deepcopy(record)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        places = list(_places(record))
        if not places:
            return value(rng)
        holder, key = rng.choice(places)
        action = rng.random()
        if action < 0.4:
            holder[key] = value(rng)
        elif action < 0.7:
            holder[key] = text(rng) if rng.random() < 0.5 else f"{holder[key]}{text(rng)}"
        elif action < 0.85:
            del holder[key]
        elif isinstance(holder, list):
            holder.insert(rng.randrange(len(holder) + 1), copy.deepcopy(holder[key]))
        else:
            holder[text(rng)] = holder.pop(key)
    return record


_INTEGERS = (b"\xff\xff\xff\xff", b"\0\0\0\0", b"\x7f\xff\xff\xff")
# How bytes are damaged at a place: cut, a bit flipped, an integer written, bytes inserted, repeated, or left out.
MUTATIONS: tuple[Callable[[random.Random, bytes, int], bytes], ...] = (
    lambda rng, data, at: data[:at],
    lambda rng, data, at: data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :],
    lambda rng, data, at: data[:at] + rng.choice((*_INTEGERS, rng.randbytes(4))) + data[at + 4 :],
    lambda rng, data, at: data[:at] + rng.randbytes(rng.randrange(1, 64)) + data[at:],
    lambda rng, data, at: data[:at] + data[at : at + rng.randrange(1, 200)] + data[at:],
    lambda rng, data, at: data[:at] + data[at + rng.randrange(1, 32) :],
)


def spoilt(rng: random.Random, data: bytes) -> bytes:
    """Return the bytes with some of MUTATIONS, mostly near the beginning."""
    for _ in range(rng.choice((1, 1, 2, 4, 16))):
        if not data:
            return data
        at = rng.randrange(min(len(data), rng.choice((16, 64, len(data)))) or 1)
        data = rng.choice(MUTATIONS)(rng, data, at)
    return data


def _places(record: Any) -> Iterator[tuple[Any, Any]]:
    """Return (list or dict, index or key) of every inner value."""
    items = record.items() if isinstance(record, dict) else enumerate(record) if isinstance(record, list) else ()
    for key, inner in list(items):
        yield record, key
        yield from _places(inner)
