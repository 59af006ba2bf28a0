"""The candidate readings of a source, from the names of its files and the beginnings of some files."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import Any

from dataset_builders.errors import InputError
from dataset_builders.readers.conversation import unread_of
from dataset_builders.readers.parts import NO_CLASSES, heldout_globs, words_of
from dataset_builders.readers.source_files import IMAGE_SUFFIXES, SourceFile, list_files, may_hold_rows, subset_files
from dataset_builders.readers.text_files import CSV_SUFFIXES, JSON_SUFFIXES
from dataset_builders.recognise.columns import CLASSIFY, DESCRIBE, find_columns, split_names
from dataset_builders.recognise.exports import is_turns, of_columns, of_rows
from dataset_builders.recognise.members import tar_options
from dataset_builders.recognise.peek import ROW_SUFFIXES, TAR_SUFFIX, peek_classes, peek_groups, peek_rows
from dataset_builders.recognise.reading import Reading
from dataset_builders.recognise.rewrite import RUN, Rewrite, advice, move_away, of_json, plain_names
from dataset_builders.storage.store import StorePath, is_local

CAPTION_SUFFIXES = ("txt", "caption")
_MADE_UP = "sample_submission.csv"  # of Kaggle: rows of the test set with answers that are all alike
_MOST_DIRS = 200
_MOST_PEEKED = 20  # files of a subset whose first rows are looked at; of a readable one, only small texts
_SMALL_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Survey:
    """The files of a source, and its candidate readings."""

    readings: list[Reading]  # the most likely first
    problems: list[str]  # one line for each file that was ignored, with the reason
    rows: list[str]  # names of the files that may hold rows, including tars
    images: list[str]  # names of the image files, in natural order
    others: list[str]  # names of all other files, which no builder reads, and of files of rows that lie too deep

    @property
    def image_dirs(self) -> list[str]:
        """Directories below the source that hold images, directly or in subdirectories; without the source itself."""
        dirs = {str(parent) for name in self.images for parent in PurePosixPath(name).parents} - {"."}
        return sorted(dirs, key=lambda name: (name.count("/"), name))[:_MOST_DIRS]


def survey(source: StorePath) -> Survey:
    """Find the files and the candidate readings of a directory, a file or a URL."""
    files = [file for file in list_files(source, ("*", "**/*")) if may_hold_rows(file.name)]
    problems = [f"{f.name} has made-up answers and is not read" for f in files if f.name.endswith(_MADE_UP)]
    files = [file for file in files if not file.name.endswith(_MADE_UP)]
    images = [file.name for file in files if _suffix(file.name) in IMAGE_SUFFIXES]
    rows = [file.name for file in files if file.name.endswith((*ROW_SUFFIXES, TAR_SUFFIX))]
    found = Survey([], problems, rows, images, [])
    found.readings.extend(_row_readings(source, files, found.problems))
    found.readings.extend(_tar_readings(files, found.problems))
    texts = [file.name for file in files if _suffix(file.name) in CAPTION_SUFFIXES]
    found.readings.extend(_image_readings(images, texts))
    read = {*images, *(texts if any(r.options.get("answer") == "text_file" for r in found.readings) else ())}
    near = {name for name in rows if name.count("/") <= 1}
    found.others.extend(file.name for file in files if file.name not in {*read, *near})
    return found


def _row_readings(source: StorePath, files: Sequence[SourceFile], problems: list[str]) -> Iterator[Reading]:
    """Yield a reading for each kind of rows; subsets whose first files have the same kind are read together."""
    if not any(file.name.endswith(ROW_SUFFIXES) for file in files):
        return
    kinds: dict[tuple, tuple[Reading, dict[str, list[str]]]] = {}  # the names of the files of each subset
    rewrites: dict[Rewrite, list[SourceFile]] = {}
    images = [file.name for file in files if _suffix(file.name) in IMAGE_SUFFIXES]
    names = {file.name for file in files}
    chosen = [
        (subset, [file for file in members if file.name in names])
        for subset, members in subset_files(source, (), ROW_SUFFIXES)
    ]
    for subset, members in chosen:
        if not members:
            continue
        first = _read_first(members[0], images)
        others = [file for file in members[1:_MOST_PEEKED] if not isinstance(first, Reading) or _is_small_text(file)]
        found = [(members[0], first), *((file, _read_first(file, images)) for file in others)]
        for file, each in found:
            if isinstance(each, Rewrite):
                rewrites.setdefault(each, []).append(file)
        if isinstance(first, Rewrite):
            rewrites[first].extend(members[_MOST_PEEKED:])
        reading = next((each for _, each in found if isinstance(each, Reading)), None)
        faults = [(file, each) for file, each in found if isinstance(each, str)]
        if reading is not None:  # what no command makes rows of is a leftover beside them
            boxes = [each for each in rewrites if not each.files]
            faults += [(file, f"{file.name}: {each.what}") for each in boxes for file in rewrites.pop(each)]
        if faults:
            problems.append(faults[0][1] + ("" if reading is None else move_away([file for file, _ in faults])))
        if reading is None:
            continue
        kind = (reading.builder, str(reading.options))
        kinds.setdefault(kind, (reading, {}))[1][subset] = [file.name for file in members]
    if rewrites:
        problems.insert(0, advice(rewrites))
    everything = len(kinds) == 1 and len(next(iter(kinds.values()))[1]) == len(chosen)
    for reading, subsets in kinds.values():
        decides = reading.builder == "cord_v2" or "split" in reading.options
        heldout = () if decides else heldout_globs([name for names in subsets.values() for name in names])
        yield replace(reading, subsets=() if everything else tuple(subsets), heldout_files=heldout)


def _is_small_text(file: SourceFile) -> bool:
    is_text = file.name.endswith((*CSV_SUFFIXES, *JSON_SUFFIXES)) and is_local(file.path)
    return is_text and file.path.stat().st_size <= _SMALL_BYTES


def _read_first(file: SourceFile, images: Sequence[str]) -> Reading | Rewrite | str:
    """Return the reading of a file from its first rows, how its rows are written anew, or why there is neither."""
    try:
        rows = peek_rows(file)
        reading = of_rows(rows, file.name) or _of_rows(rows, file.name)
        if isinstance(reading, str):
            reading = of_columns(rows) or reading
        if isinstance(reading, Reading) and reading.options.get("answer") in peek_classes(file):
            reading.options["class_names"] = True
    except InputError as error:
        rows, reading = [], str(error)
    if file.name.endswith(JSON_SUFFIXES) and (len(rows) == 1 or isinstance(reading, str)):
        return of_json(file, images) or reading
    return reading


def _of_rows(rows: Sequence[Mapping[str, Any]], name: str) -> Reading | str:
    """Return the reading of a file's rows, or the reason why there is none."""
    keys = {key for row in rows for key in row}
    is_table = name.endswith(".parquet")
    if not keys:
        return f"{name} has no row with fields"
    if any(_has_turns(row.get("messages"), "role") for row in rows):
        why = f"rows of {name} have `messages` with roles, OpenAI's form"
        return Reading(builder="openai_messages", why=why, unused=tuple(unread_of(rows)))
    if any(_has_turns(row.get("conversations"), "from") for row in rows):
        why = f"rows of {name} have `conversations` with from and value, LLaVA's form"
        return Reading(builder="llava", why=why, unused=tuple(unread_of(rows)))
    if is_table and {"images", "texts"} <= keys and any(_has_turns(row.get("texts"), "user") for row in rows):
        options = {"turns": "chat"}
        return Reading(
            builder="the_cauldron", options=options, why=f"{name} has the_cauldron's columns images and texts"
        )
    if is_table and {"image", "ground_truth"} <= keys and any("gt_parse" in str(row["ground_truth"]) for row in rows):
        return Reading(builder="cord_v2", why=f"{name} has CORD v2's columns image and ground_truth")
    columns = find_columns(rows)
    if isinstance(columns, str):
        return f"{name}: {columns}"
    return Reading(builder="table", options=columns.options, why=f"{name}: {columns.why}", unused=columns.unused)


def _has_turns(value: Any, field: str) -> bool:
    """Whether a value is a list of objects with this field, or JSON text of such a list."""
    if isinstance(value, str):
        return value.lstrip().startswith("[") and f'"{field}"' in value
    return is_turns(value, field)


def _tar_readings(files: Sequence[SourceFile], problems: list[str]) -> Iterator[Reading]:
    tars = [file for file in files if file.name.endswith(TAR_SUFFIX)]
    if not tars:
        return
    try:
        groups = peek_groups(tars[0])
        options = tar_options(groups)
    except InputError as error:
        groups, options = [], str(error)
    fields = {field for group in groups for field in group}
    if isinstance(options, str) and _are_parts_of_names(fields):
        example = min(fields)
        problems.append(
            f"{tars[0].name}: names of its members hold dots before their suffix, and a sample's name ends at the "
            f"first dot (its field here: {example!a}); write the tar anew{RUN}{plain_names(str(tars[0].path))}"
        )
        return
    if isinstance(options, str):
        problems.append(f"{tars[0].name}: {options}")
    else:
        where = options.get("messages") or f"question {options['question']}, answer {options['answer']}"
        heldout = heldout_globs([tar.name for tar in tars])
        why = f"{tars[0].name}: {where}"
        yield Reading(builder="webdataset_tars", options=options, why=why, heldout_files=heldout, tier=1)


def _are_parts_of_names(fields: Collection[str]) -> bool:
    """Whether the fields of a tar are parts of its members' names, and then their suffixes, unlike 0.png and 1.png,
    the fields of two images."""
    parts = [field.rpartition(".") for field in fields]
    known = (*IMAGE_SUFFIXES, *CAPTION_SUFFIXES, "json", "cls", "text")
    are_images = all(name.isdecimal() and suffix in IMAGE_SUFFIXES for name, _, suffix in parts)
    return bool(parts) and not are_images and all(dot and suffix in known for _, dot, suffix in parts)


def _image_readings(images: Sequence[str], texts: Sequence[str]) -> Iterator[Reading]:
    stems = {_stem(name) for name in images}
    splits = split_names(dict.fromkeys(name.partition("/")[0] for name in images if "/" in name))
    for suffix in CAPTION_SUFFIXES:
        paired = sum(_stem(name) in stems for name in texts if _suffix(name) == suffix)
        if paired >= 2:
            options = {"answer": "text_file", "question": DESCRIBE, **splits}
            options |= {} if suffix == "txt" else {"suffix": suffix}
            why = f"{paired} of {len(images)} images have a .{suffix} file of the same name beside them"
            yield Reading(builder="image_folder", options=options, why=why, tier=2)
    folders = {PurePosixPath(name).parent.name for name in images}
    if len(folders - {""}) >= 2 and not all(words_of(folder) <= NO_CLASSES for folder in folders):
        options = {"answer": "folder_name", "question": CLASSIFY, **splits}
        why = f"images in {len(folders)} folders, whose names are taken as answers"
        yield Reading(builder="image_folder", options=options, why=why, tier=3)


def _suffix(name: str) -> str:
    return name.rpartition(".")[2].lower() if "." in PurePosixPath(name).name else ""


def _stem(name: str) -> str:
    return name.rpartition(".")[0]
