"""Keys of a row that no option reads: most do no harm and are only named, but some would change what is trained.

A row is left out, with the key and the way out in its reason, where one that is not read holds

    an image                          {"messages": [...], "thumbnail_image": "1.png"} where no image is read
    a mark that it is not to train    {"trainable": false}, {"label": false}, {"rejected": true}
    the other half of a preference    {"rejected": "A worse answer."}
    places in the image               {"objects": {"bbox": [[1, 2, 3, 4]]}}
    what else the model would get     tools, videos, audio

The marks of single answers are read here, too. Sample.check refuses placeholders in texts.
"""

import re
from collections.abc import Container, Iterable, Mapping
from functools import lru_cache
from typing import Any

from dataset_builders.contracts.sample import SkipSample
from dataset_builders.readers.heldout_names import SPLIT_NAMES

# Files of the last ones may be refused, each with its name.
IMAGE_SUFFIXES = ("jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff", "jfif", "jpe", "avif", "jp2")
# Names that people and tools give to a row's image or images, the most usual ones first.
IMAGE_NAMES = (
    *("image", "images", "img", "imgs", "picture", "pictures", "photo", "photos", "image_path", "image_paths"),
    *("img_path", "img_paths", "image_file", "image_files", "image_url", "image_urls", "file_name", "filename"),
    *("bild", "bilder", "foto", "imagen"),
)
_IMAGE_WORDS = frozenset(("image", "images", "img", "imgs", "picture", "pictures", "pic", "pics", "photo", "photos"))
_IMAGE_WORDS |= {"bild", "bilder", "foto", "fotos", "imagen", "imagenes"}
_NOTHING = (None, "", [], {}, "[]")  # "[]": LLaMA-Factory's tools are a text
_NO_PART = ("tools", "functions", "videos", "video", "audios", "audio", "objects")  # of the model's input, when read
# Words of keys that say whether to train, by true or false.
_OF_TRAINING = frozenset(
    ("train", "training", "trainable", "learn", "learnable", "loss", "weight", "supervise", "supervised")
)
_GOOD = _OF_TRAINING | {"label", "correct", "accepted", "approved", "good", "valid", "keep"}
_BAD = frozenset(("masked", "mask", "ignore", "ignored", "skip", "skipped", "exclude", "excluded", "wrong", "bad"))
_BAD |= {"invalid", "flagged", "deleted", "rejected", "corrupt", "corrupted"}
_OF_LISTS = _OF_TRAINING | {"weights"}  # a list has a mark for each message
_OF_NUMBERS = _OF_TRAINING | {"masked"}  # 1 and 0 say true and false
_WATCHED = _IMAGE_WORDS | _OF_LISTS | _GOOD | _BAD | {"chosen"}


@lru_cache(1024)
def words_of_key(name: str) -> frozenset[str]:
    """Return the words of a key in lower case: trainOnTurn and train_on_turn both have three."""
    return frozenset(word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+", name))


def check_unread(row: Mapping[str, Any], read: Container[str], has_images: bool) -> None:
    """Raise SkipSample (schema_error) if a key of a row that is not in `read` would change what is trained."""
    for name, value in row.items():
        if name in read or _is_nothing(value):
            continue
        plain, words = name.lower(), words_of_key(name)
        if plain in _NO_PART and value is not False:
            raise SkipSample(
                "schema_error", f"the row has {name!r}, which is not read; remove it if its answers do not need it"
            )
        # Where an image of the row is read, another key often names the same image.
        if not has_images and (plain in IMAGE_NAMES or (words & _IMAGE_WORDS and looks_like_image(value))):
            raise SkipSample("schema_error", f"the row has {name!r}, and no image is read; name it image, or remove it")
        if words & {"chosen", "rejected"} and not isinstance(value, bool):
            raise SkipSample(
                "schema_error",
                f"the row has {name!r}, data of preferences; remove it, and name the better answer as the answer",
            )
        if (isinstance(value, list) and words & _OF_LISTS) or _trains(name, value) is False:
            raise SkipSample(
                "schema_error",
                f"{name!r} is {repr(value)[:40]}, so not all of the row is to be trained on; remove key or row",
            )


def is_watched(name: str) -> bool:
    """Whether `check_unread` may refuse a row for a key of this name."""
    return name.lower() in (*IMAGE_NAMES, *_NO_PART, *SPLIT_NAMES) or bool(words_of_key(name) & _WATCHED)


def looks_like_image(value: Any) -> bool:
    """Whether a value is an image, the name or address of one, or a list of these."""
    if isinstance(value, list):
        return bool(value) and all(map(looks_like_image, value))
    if isinstance(value, dict):
        return isinstance(value.get("bytes"), bytes) or looks_like_image(value.get("path") or value.get("url"))
    if isinstance(value, str):
        text = value.strip().lower().partition("?")[0]
        return text.startswith("data:image/") or text.rpartition(".")[2] in IMAGE_SUFFIXES
    return isinstance(value, bytes)


def unread_keys(rows: Iterable[Mapping[str, Any]], read: Container[str]) -> list[str]:
    """Return the keys of rows that hold something and are not read, each once, in order."""
    return list(dict.fromkeys(name for row in rows for name in row if name not in read and not _is_nothing(row[name])))


def is_learnt(turn: Mapping[str, Any], where: str) -> bool:
    """Return whether an answer is trained on, by the marks that tools write beside it: OpenAI's `weight`, ms-swift's
    `loss`, Axolotl's `train` and `training`, and all other keys with a word of _OF_TRAINING, _GOOD or _BAD."""
    marks = {name: value for name, value in turn.items() if value is not None}
    for name, value in marks.items():
        # `mask` means opposite things in different tools.
        if name == "mask" or (_trains(name, value) is None and words_of_key(name) & _OF_NUMBERS):
            raise SkipSample(
                "schema_error", f"{where}.{name} is {str(value)[:40]!r}, neither 0 nor 1; write loss: true or false"
            )
    return not any(_trains(name, value) is False for name, value in marks.items())


def _is_nothing(value: Any) -> bool:
    return isinstance(value, (str, list, dict, type(None))) and value in _NOTHING


def _trains(name: str, value: Any) -> bool | None:
    """Return whether a key and its value say that something is trained on; None if they do not speak of it."""
    words = words_of_key(name)
    is_mask = {"loss", "mask"} <= words  # of what counts, in all tools
    is_good, is_bad = bool(words & _GOOD), bool(words & _BAD) and not is_mask
    if not is_good and not is_bad:
        return None
    if isinstance(value, str) and value.strip().lower() in ("true", "false"):
        value = value.strip().lower() == "true"
    is_number = isinstance(value, int | float) and value in (0, 1) and bool(words & _OF_NUMBERS)
    if not isinstance(value, bool) and not is_number:
        return None
    return bool(value) != (is_bad or bool(words & {"no", "not"}))
