"""Conversion of a Sample to the members of a sample shard, and back.

train/shard-00000.tar
    ai2d/00001234.json    {"messages": [{"role", "text", "is_learnt", "reasoning", "references"}],
                           "images": [{"name", "sha256"}], "digest"}
    ai2d/00001234.0.png   the original bytes, untouched

`is_learnt` is written only if it is false; `reasoning` and `references` are written only if they are not empty.
"""

import json
from collections.abc import Mapping, Sequence

from dataset_builders.contracts.sample import Message, Sample, image_digests

_MAGIC = {b"\x89PNG": "png", b"\xff\xd8\xff": "jpg", b"GIF8": "gif", b"II*\x00": "tif", b"MM\x00*": "tif", b"BM": "bmp"}


def to_fields(sample: Sample, digests: Sequence[str] | None = None) -> dict[str, bytes]:
    """Return field name -> bytes. A field name is the member's name without the key and the dot after it. A caller that
    has `image_digests(sample)` gives them."""
    digests = image_digests(sample) if digests is None else digests
    names = [f"{i}.{_extension(image)}" for i, image in enumerate(sample.images)]
    record = {
        "messages": [_message_record(message) for message in sample.messages],
        "images": [{"name": name, "sha256": digest} for name, digest in zip(names, digests, strict=True)],
        "digest": sample.digest(digests),
    }
    text = json.dumps(record, ensure_ascii=False, sort_keys=True)
    return {"json": text.encode(), **dict(zip(names, sample.images))}


def from_fields(key: str, fields: Mapping[str, bytes | memoryview]) -> Sample:
    """Return the sample of these fields. Inverse of `to_fields`."""
    record = json.loads(bytes(fields["json"]))
    messages = [{**message, "references": tuple(message.get("references", ()))} for message in record["messages"]]
    return Sample(
        key=key,
        messages=tuple(Message(**message) for message in messages),
        images=tuple(bytes(fields[image["name"]]) for image in record["images"]),
    )


def _message_record(message: Message) -> dict[str, object]:
    record: dict[str, object] = {"role": message.role, "text": message.text}
    if not message.is_learnt:
        record["is_learnt"] = False
    if message.reasoning:
        record["reasoning"] = message.reasoning
    if message.references:
        record["references"] = list(message.references)
    return record


def _extension(image: bytes) -> str:
    if image[:4] == b"RIFF" and image[8:12] == b"WEBP":
        return "webp"
    return next((ext for magic, ext in _MAGIC.items() if image.startswith(magic)), "bin")
