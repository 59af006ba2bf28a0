"""A message for a source that is not recognised: the nearest layout that can be read, with an example."""

import ast
import re
import shlex
import sys
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

from dataset_builders.readers.source_files import VIDEO_SUFFIXES, SourceFile
from dataset_builders.readers.text_files import CSV_SUFFIXES, JSON_SUFFIXES
from dataset_builders.recognise.exports import RUN, Rewrite, command, move_away
from dataset_builders.recognise.recognise import TABLE_SUFFIXES, TAR_SUFFIX, Recognised, Survey, Trial
from dataset_builders.storage.store import StorePath, is_local

_QUOTED = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"")  # as Python writes a text
_JSON = '{"image": "images/1.jpg", "question": "How many cats are there?", "answer": "two"}'
_TABLE = "columns image (a path or bytes), question and answer"
_DELIMITED = "a first line `image,question,answer` and rows like `images/1.jpg,How many cats are there?,two`"
_IMAGES = (
    "a text file with its caption beside each image or clip (1.jpg and 1.txt), a folder for each class (cat/1.jpg, "
    "dog/2.jpg), or captions.csv with a first line `image,caption` and rows like `1.jpg,Two cats.`"
)
# Suffixes that no builder reads -> the way out; {0} is the file, {1} the file without its suffix, both for a shell.
_UNREAD: dict[tuple[str, ...], str] = {
    (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz"): "is packed; run: {python} -m tarfile -e {0} {1}",
    (".zip",): "is packed; run: {python} -m zipfile -e {0} {1}",
    (".gz",): "is compressed; run: {python} -m gzip -d {0}",
    (".zst", ".bz2", ".xz", ".7z", ".rar", ".lz4"): "is compressed or packed; unpack it",
    (".xlsx", ".xls", ".ods", ".numbers"): "is a spreadsheet; save it as CSV UTF-8, beside the images that it names",
    (".pdf",): "is a PDF; draw its pages as images, for example by pdftoppm -r 150 -png {0} {1}",
    (".heic", ".heif", ".avif", ".jxl", ".svg"): "is an image of a format that is not read; save it as PNG",
    (".xml",): (
        "is XML, such as the boxes of Pascal VOC, which is not read; write it as COCO, for example with `supervision`: "
        "DetectionDataset.from_pascal_voc(...).as_coco(...)"
    ),
    (".docx", ".doc", ".pptx"): "is a document of an office program; save its pages as images and its text as rows",
    (".pkl", ".pickle", ".npy", ".npz", ".h5", ".hdf5", ".db", ".sqlite", ".tfrecord", ".lmdb", ".mdb"): (
        "is a file of a program; write its rows as parquet or JSON lines"
    ),
}
_TAR = 'members 1.jpg with 1.txt, or with 1.json as {"question": "How many cats are there?", "answer": "two"}'


def nearest_layout(source: StorePath, found: Recognised) -> str:
    """Return one line: what was found, why it is not enough, and the nearest layout with an example, or a command."""
    why = _why(source, found).removeprefix(f"{source.name}: ")  # a single file names itself
    names = found.survey.rows
    if RUN in why:
        return f"{source} is not recognised: {why}"
    if any(name.endswith(JSON_SUFFIXES) for name in names):
        layout = f"JSON lines like {_JSON} (docs/data-formats.md joins the files of VQAv2 to them)"
    elif any(name.endswith(CSV_SUFFIXES) for name in names):
        layout = _DELIMITED
    elif any(name.endswith(TABLE_SUFFIXES) for name in names):
        layout = _TABLE
    elif names:
        layout = f"a tar of {_TAR}"
    else:
        layout = _IMAGES if found.survey.images else f"JSON lines like {_JSON}, or images with {_IMAGES}"
    return f"{source} is not recognised: {why}; nearest layout: {layout}"


def unread(source: StorePath, others: Sequence[str]) -> list[str]:
    """Return a line for each kind of file that no builder reads, with the first such file and the way out."""
    lines = {}
    top = source.parent if source.is_file() else source
    for name in others:
        suffix = next((each for each in chain(*_UNREAD) if name.lower().endswith(each)), None)
        if suffix is not None and suffix not in lines:
            way_out = next(text for suffixes, text in _UNREAD.items() if suffix in suffixes)
            path = str(top / name)
            words = (shlex.quote(path), shlex.quote(path[: -len(suffix)]))
            lines[suffix] = f"{name} {way_out.format(*words, python=shlex.quote(sys.executable))}"
    return list(lines.values())


def _why(source: StorePath, found: Recognised) -> str:
    survey = found.survey
    if not any(trial.reasons for trial in found.trials) and (ways := [line for line in survey.problems if RUN in line]):
        return ways[0]
    for trial in found.trials:
        if trial.refused:
            return trial.refused + _without_it(source, trial, survey)
        if trial.reasons:
            reason, number = trial.reasons.most_common(1)[0]
            first = trial.details[reason]
            way_out = _where_images_are(source, first, survey) if reason == "image_not_found" else ""
            return f"{number} of {trial.tried} rows are {reason} as {trial.reading.builder}, {first}{way_out}"
    if (lines := unread(source, survey.others)) and not survey.rows:
        return lines[0]
    if survey.problems:
        return survey.problems[0]
    if survey.images:
        clips = sum(name.lower().endswith(VIDEO_SUFFIXES) for name in survey.images)
        what = f"{clips:,} clips" if clips == len(survey.images) else f"{len(survey.images):,} images"
        return f"{what} and nothing that says what to learn about them"
    if survey.others:
        return f"none of its files is read, for example {survey.others[0]}"
    return "it holds no file"


def _without_it(source: StorePath, trial: Trial, survey: Survey) -> str:
    """Return the command that moves away the one file that made a builder refuse the source, if others hold rows."""
    if not is_local(source) or source.is_file():
        return ""
    culprit = next((name for name in survey.rows if str(source / name) in trial.refused), None)
    if culprit is None or len(survey.rows) == 1:
        return ""
    return move_away([SourceFile(source / culprit, culprit)])


def _where_images_are(source: StorePath, detail: str, survey: Survey) -> str:
    """Return the command for rows that name images outside of the source, or by paths of another machine."""
    refs = _QUOTED.findall(detail)  # the path in the row, and the one that it leads to
    if not refs or not is_local(source):
        return ""
    top = source.parent if source.is_file() else source
    ref = ast.literal_eval(refs[-1 if "leads to" in detail else 0])
    path = Path(ref)
    for above in list(top.parents)[:2]:  # the rows must lie in a folder of the source, or directly in it
        if (above / path).is_file() and (above / path).is_relative_to(above):  # an absolute path stays as it is
            deep = max((name.count("/") for name in survey.rows), default=0)
            if above != above.parent and deep + len(top.relative_to(above).parts) <= 1:
                return f"; give the folder that holds rows and images{RUN}athanor init {shlex.quote(str(above))}"
    slashes = "/" + ref.replace("\\", "/").replace("?d=", "/")  # as on Windows, and in Label Studio's addresses
    tail = max((name for name in survey.images if slashes.endswith(f"/{name}")), key=len, default="")
    start = ref[: len(ref) - len(tail)]
    tables = [SourceFile(top / name, name) for name in survey.rows if name.endswith(TABLE_SUFFIXES)]
    if (not tail or not start) and "leads to" in detail:
        if len(tables) < len(survey.rows):
            return f"; copy them below {top}, and name them there"
        return f"; take them into the table{RUN}{command(Rewrite('images outside of the data', 'take_images'), tables)}"
    if not tail or not start:
        return ""
    rows = [SourceFile(top / name, name) for name in survey.rows if not name.endswith(TAR_SUFFIX)]
    if not rows:
        return ""
    way_out = command(Rewrite(f"names of images begin with {start!a}", "without", (start,)), rows)
    return f"; the data hold {tail}: name images by their paths there{RUN}{way_out}"
