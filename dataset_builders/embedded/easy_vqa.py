"""The data set easy-VQA as raw rows, read from the Python package that publishes it.

The package `easy-vqa` holds pictures of 64 x 64 pixels, each with one coloured shape, and questions about them with 13
different answers: 4,000 pictures with 38,575 questions to train on, and 1,000 with 9,673 questions to test on. A row is
one picture with all its questions, in the schema of the_cauldron:

    {"images": [{"bytes": b"\\x89PNG...", "path": None}],
     "texts": [{"user": "what is the blue shape?", "assistant": "rectangle", "source": "easy-vqa"},
               {"user": "is there a triangle in the image?", "assistant": "no", "source": "easy-vqa"}]}
"""

import importlib
from collections.abc import Iterator
from pathlib import Path

from dataset_builders.embedded.digits import Row
from dataset_builders.errors import InputError
from dataset_builders.known_version import installed_version

PACKAGE = "easy-vqa"
SPLITS = ("train", "test")  # as the package has them


def check_installed(version: str) -> None:
    """Check that the package is installed in this version."""
    found = installed_version(PACKAGE)
    if found != version:
        state = f"{found} is installed" if found else "it is not installed"
        raise InputError(
            f"data.kind=easy_vqa reads the package {PACKAGE} {version}, and {state}: pip install -e '.[easy-vqa]'"
        )


def iter_easy_vqa_rows(split: str) -> Iterator[Row]:
    """Yield the rows of a split in the order of the pictures' numbers; the questions of a picture keep their order."""
    package = importlib.import_module("easy_vqa")  # it is optional
    asked: dict[int, list[tuple[str, str]]] = {}
    for question, answer, number in zip(*getattr(package, f"get_{split}_questions")()):
        asked.setdefault(number, []).append((question, answer))
    paths = getattr(package, f"get_{split}_image_paths")()
    if sorted(paths) != sorted(asked) or sorted(paths) != list(range(len(paths))):
        raise InputError(
            f"the package {PACKAGE} in {Path(str(package.__file__)).parent} is incomplete: its {split} split has "
            f"{len(paths)} pictures, and questions about {len(asked)}; install it again"
        )
    for number in sorted(paths):
        texts = [{"user": question, "assistant": answer, "source": PACKAGE} for question, answer in asked[number]]
        yield {"images": [{"bytes": Path(paths[number]).read_bytes(), "path": None}], "texts": texts}
