"""A message for a source that is not recognised: the nearest layout that can be read, with an example."""

from dataset_builders.readers.csv_files import CSV_SUFFIXES
from dataset_builders.readers.json_lines import JSON_SUFFIXES
from dataset_builders.recognise.peek import TABLE_SUFFIXES
from dataset_builders.recognise.recognise import Recognised
from dataset_builders.storage.store import StorePath

_JSON = '{"image": "images/1.jpg", "question": "How many cats are there?", "answer": "two"}'
_TABLE = "columns image (a path or bytes), question and answer"
_DELIMITED = "a first line `image,question,answer` and rows like `images/1.jpg,How many cats are there?,two`"
_IMAGES = (
    "a text file with its caption beside each image (1.jpg and 1.txt), a folder for each class (cat/1.jpg, dog/2.jpg), "
    "or captions.csv with a first line `image,caption` and rows like `1.jpg,Two cats.`"
)
_PACKED = (".gz", ".tgz", ".zst", ".bz2", ".xz", ".zip", ".7z", ".rar")
_TAR = 'members 1.jpg with 1.txt, or with 1.json as {"question": "How many cats are there?", "answer": "two"}'


def nearest_layout(source: StorePath, found: Recognised) -> str:
    """Return one line: what was found, why it is not enough, and the nearest layout with an example."""
    why = _why(found).removeprefix(f"{source.name}: ")  # a single file names itself
    names = found.survey.rows
    if any(name.endswith(JSON_SUFFIXES) for name in names):
        layout = f"JSON lines like {_JSON} (docs/data-formats.md joins the files of COCO and VQAv2 to them)"
    elif any(name.endswith(CSV_SUFFIXES) for name in names):
        layout = _DELIMITED
    elif any(name.endswith(TABLE_SUFFIXES) for name in names):
        layout = _TABLE
    elif names:
        layout = f"a tar of {_TAR}"
    else:
        layout = _IMAGES if found.survey.images else f"JSON lines like {_JSON}, or images with {_IMAGES}"
    return f"{source} is not recognised: {why}; nearest layout: {layout}"


def _why(found: Recognised) -> str:
    for trial in found.trials:
        if trial.refused:
            return trial.refused
        if trial.reasons:
            reason, number = trial.reasons.most_common(1)[0]
            return f"{number} of {trial.tried} rows are {reason} as {trial.reading.builder}, {trial.details[reason]}"
    packed = [name for name in found.survey.others if name.endswith(_PACKED)]
    if packed and not found.survey.rows:
        return f"{packed[0]} is compressed or packed; unpack it"
    if found.survey.problems:
        return found.survey.problems[0]
    if found.survey.images:
        return f"{len(found.survey.images):,} images and nothing that says what to learn about them"
    if found.survey.others:
        return f"none of its files is read, for example {found.survey.others[0]}"
    return "it holds no file"
