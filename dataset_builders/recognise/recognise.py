"""Recognise raw data: which builder reads a source, and with which options.

1. `survey` finds the files of the source and the candidate readings, from the names of the files and the first rows.
2. `try_reading` lets the builder of each candidate read the first rows, and counts usable rows and faults.
3. `recognise` chooses the reading with the most samples.
"""

import contextlib
import itertools
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath
from typing import Any

from dataset_builders.contracts.sample import Sample, SkipSample
from dataset_builders.errors import InputError
from dataset_builders.pictures.images import ImageLimits, check_image
from dataset_builders.readers.annotations import Layout
from dataset_builders.readers.box_texts import is_bare
from dataset_builders.readers.conversation import unread_of
from dataset_builders.readers.parts import NO_CLASSES, Part, SkippedRow, heldout_globs, parts_of, words_of
from dataset_builders.readers.source_files import (
    MEDIA_SUFFIXES,
    VIDEO_SUFFIXES,
    SourceFile,
    list_files,
    may_hold_rows,
    subset_files,
)
from dataset_builders.readers.table_files import (
    ARROW_SUFFIXES,
    class_names,
    iter_table_rows,
    list_table_parts,
    table_facts,
    value_of,
)
from dataset_builders.readers.tar_files import iter_groups, list_group_spans
from dataset_builders.readers.text_files import (
    CSV_SUFFIXES,
    JSON_SUFFIXES,
    MAX_ROW_BYTES,
    csv_file_parts,
    csv_header,
    iter_csv_rows,
    iter_json_rows,
    json_file_parts,
)
from dataset_builders.recognise.boxes import convention_of, json_layouts, words_of_layout, yolo_options
from dataset_builders.recognise.columns import asked_of, find_columns, split_names, tar_options
from dataset_builders.recognise.exports import (
    RUN,
    Rewrite,
    advice,
    command,
    is_turns,
    move_away,
    of_columns,
    of_json,
    of_rows,
)
from dataset_builders.sources.registry import get_builder
from dataset_builders.storage.store import StorePath, is_local
from dataset_builders.videos.decode import VideoFacts, VideoLimits, probe

ENOUGH = 0.5  # share of usable rows at which a reading of a lower tier is preferred
MAX_ROWS = 200
TABLE_SUFFIXES = (".parquet", *ARROW_SUFFIXES)
ROW_SUFFIXES = (*TABLE_SUFFIXES, *CSV_SUFFIXES, *JSON_SUFFIXES)
TAR_SUFFIX = ".tar"
CAPTION_SUFFIXES = ("txt", "caption")

_MADE_UP = "sample_submission.csv"  # of Kaggle: rows of the test set with answers that are all alike
_MOST_DIRS = 200
_MOST_PEEKED = 20  # files of a subset whose first rows are looked at; of a readable one, only small texts
_PEEKED_ROWS = 40
_SMALL_BYTES = 1 << 20
_MAX_PARTS = 8  # most parts that are opened, for a source of many files
_MAX_FILES = 32  # most files for each of which a directory of images is searched
_ROOT_ROWS = 10  # number of rows on which each possible image_root is tried


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """A builder with options that may fit a source."""

    builder: str  # a name in sources/registry.py
    options: dict[str, Any] = field(default_factory=dict)  # those that differ from their defaults
    subsets: tuple[str, ...] = ()  # names of the subsets to read; none means all
    # Globs of the files whose rows are held out; none if the names of the files do not decide it; None if nobody has
    # looked at the names.
    heldout_files: tuple[str, ...] | None = ()
    why: str  # the evidence in the source, in words for the user
    unused: tuple[str, ...] = ()  # columns without a role
    tier: int = 0  # 0: files of rows; 1: tars; 2: images with text files; 3: only images. A lower tier is preferred.


@dataclass(frozen=True, slots=True)
class Survey:
    """The files of a source, and its candidate readings."""

    readings: list[Reading]  # the most likely first
    problems: list[str]  # one line for each file that was ignored, with the reason
    rows: list[str]  # names of the files that may hold rows, including tars
    images: list[str]  # names of the image and video files, in natural order
    others: list[str]  # names of all other files, which no builder reads, and of files of rows that lie too deep

    @property
    def image_dirs(self) -> list[str]:
        """Directories below the source that hold images or videos, directly or in subdirectories; without the source
        itself."""
        dirs = {str(parent) for name in self.images for parent in PurePosixPath(name).parents} - {"."}
        return sorted(dirs, key=lambda name: (name.count("/"), name))[:_MOST_DIRS]


@dataclass(slots=True)
class Trial:
    """The result of reading a source's first rows with a builder."""

    reading: Reading
    rows: int = 0  # in the whole source; 0 if the builder refuses it
    tried: int = 0  # number of rows that were read
    samples: list[Sample] = field(default_factory=list)  # of the usable rows
    sizes: list[tuple[int, int]] = field(default_factory=list)  # (width, height) of each image of the samples
    videos: list[VideoFacts] = field(default_factory=list)  # of each video of the samples, from its container
    reasons: Counter[str] = field(default_factory=Counter)  # skip reason -> number of rows
    details: dict[str, str] = field(default_factory=dict)  # skip reason -> the first such row's key and the fault
    duplicates: int = 0  # samples that equal an earlier one
    turned: int = 0  # samples with boxes of an image that EXIF turns
    not_read: Counter[str] = field(default_factory=Counter)  # what is left out within rows, in words -> how often
    refused: str = ""  # why the builder refuses the source; empty if it reads it
    subsets: Counter[str] = field(default_factory=Counter)  # subset -> number of rows
    splits: bool = False  # whether the source specifies which rows are held out
    heldout: int = 0  # number of rows that the source itself holds out

    @property
    def usable(self) -> float:
        """The share of the tried rows that are samples."""
        return len(self.samples) / self.tried if self.tried else 0.0


@dataclass(frozen=True, slots=True)
class Recognised:
    """The result of recognising a source."""

    survey: Survey
    best: Trial | None  # of the best reading; None if no reading gives a sample
    trials: list[Trial]  # of all readings, in order


def recognise(source: StorePath, limits: ImageLimits) -> Recognised:
    """Find the candidate readings of a source and try each one."""
    found = survey(source)
    trials = [_with_image_root(source, reading, found, limits) for reading in found.readings]
    trials = [_with_convention(source, trial, limits) for trial in trials]
    usable = [trial for trial in trials if trial.samples]
    good = [trial for trial in usable if trial.usable >= ENOUGH]
    best = min(good, key=lambda t: (t.reading.tier, -t.usable * t.rows), default=None)
    return Recognised(found, best or max(usable, key=lambda t: t.usable * t.rows, default=None), trials)


def _with_image_root(source: StorePath, reading: Reading, found: Survey, limits: ImageLimits) -> Trial:
    """Try a reading; where images are not found, choose for each file the directory that its paths are relative to."""
    trial = try_reading(source, reading, limits=limits)
    has_root = "image_root" in get_builder(reading.builder).options.model_fields
    has_root = has_root and reading.options.get("layout") != "yolo"
    if not has_root or not trial.reasons["image_not_found"]:
        return trial
    chosen: dict[str, str] = {}
    for name, usable in try_image_roots(source, reading, ("", ".", *found.image_dirs)).items():
        fits = [root for root, share in usable.items() if share == max(usable.values())]
        root = fits[0] if fits[0] == "" or len(fits) == 1 else _named_alike(name, fits)
        if root is None:
            which = f"its images are found in {fits[0]} and in {fits[1]}, which may differ"
            return Trial(reading, refused=f"{name}: {which}; write the folder into each path of its rows")
        chosen[name] = root
    image_root = chosen if len(set(chosen.values())) > 1 else next(iter(chosen.values()), "")
    if not image_root:
        return trial
    return try_reading(source, replace(reading, options={**reading.options, "image_root": image_root}), limits=limits)


def _with_convention(source: StorePath, trial: Trial, limits: ImageLimits) -> Trial:
    """Return the trial with the option that says what the numbers of boxes in texts are, by their largest ones."""
    reading = trial.reading
    if not trial.reasons["undeclared_boxes"]:
        answers = [m.text for s in trial.samples if s.images for m in s.messages if m.role == "assistant"]
        if not (bare := sum(map(is_bare, answers))):
            return trial
        told = f"{bare} of {len(answers)} answers are four numbers and stay text; if they are boxes, set options.boxes"
        return replace(trial, reading=replace(reading, why=f"{reading.why}; {told}"))
    as_text = try_reading(source, replace(reading, options={**reading.options, "boxes": "literal"}))
    convention, why = convention_of(as_text.samples)
    if convention is None:
        trial.details["undeclared_boxes"] += f"; no value fits: {why}"
        return trial
    options, told = {**reading.options, "boxes": convention}, f"{reading.why}; boxes are {convention}: {why}"
    return try_reading(source, replace(reading, options=options, why=told), limits=limits)


def _named_alike(name: str, roots: Sequence[str]) -> str | None:
    """Return the only one of the directories that has the most words in common with a file's name; None if none has."""
    common = {root: len(words_of(root) & words_of(name.rpartition(".")[0])) for root in roots}
    best = [root for root, number in common.items() if number and number == max(common.values())]
    return best[0] if len(best) == 1 else None


def try_reading(source: StorePath, reading: Reading, limit: int = MAX_ROWS, limits: ImageLimits | None = None) -> Trial:
    """Read up to `limit` rows, from the beginnings of up to eight parts spread over the source. With `limits`, images
    are decoded and checked, and the headers and times of videos."""
    trial, builder = Trial(reading), get_builder(reading.builder)
    digests: set[str] = set()
    try:
        options = builder.options.model_validate(reading.options)
        parts = parts_of(builder, source, reading.subsets, options, reading.heldout_files)
        trial.rows = sum(part.num_rows for part in parts)
        trial.splits = any(part.split is not None for part in parts)
        trial.heldout = sum(part.num_rows for part in parts if part.split == "heldout")
        for part in parts:
            trial.subsets[part.subset] += part.num_rows
            trial.not_read.update(builder.not_read(part, options) if builder.not_read else {})
        for item in _rows(parts, reading, options, limit):
            trial.tried += 1
            if (skip := _check(item, trial, limits)) is not None:
                trial.reasons[skip[0]] += 1
                trial.details.setdefault(skip[0], f"{item.key}: {skip[1]}")
                continue
            trial.duplicates += item.digest() in digests
            digests.add(item.digest())
            trial.samples.append(item)
    except (InputError, ValueError) as error:  # ValueError: invalid options
        trial.refused = str(error)
    return trial


def try_image_roots(source: StorePath, reading: Reading, roots: Sequence[str]) -> dict[str, dict[str, float]]:
    """Return file -> directory below the source -> share of the file's first rows whose images are found there.

    Of a source with many files, some files stand for all.
    """
    builder = get_builder(reading.builder)
    options = {root: builder.options.model_validate({**reading.options, "image_root": root}) for root in roots}
    parts = parts_of(builder, source, reading.subsets, options[roots[0]], reading.heldout_files)
    first = list({part.name: part for part in reversed(parts)}.values())
    shares: dict[str, dict[str, float]] = {}
    for part in first if len(first) <= _MAX_FILES else first[:: len(first) // _MAX_PARTS]:
        rows = range(part.first_row, part.first_row + min(_ROOT_ROWS, part.num_rows))
        for root in roots:
            items = list(itertools.islice(builder.iter_part(part, options[root], rows), 4 * _ROOT_ROWS))
            lost = sum(isinstance(item, SkippedRow) and item.reason == "image_not_found" for item in items)
            shares.setdefault(part.name, {})[root] = 1 - lost / max(1, len(items))
    return shares


def _rows(parts: list[Part], reading: Reading, options: object, limit: int) -> Iterator[Sample | SkippedRow]:
    chosen = parts if len(parts) <= _MAX_PARTS else [parts[i * len(parts) // _MAX_PARTS] for i in range(_MAX_PARTS)]
    for i, part in enumerate(chosen):
        share = -(-(limit * (i + 1)) // len(chosen)) - -(-(limit * i) // len(chosen))
        rows = range(part.first_row, part.first_row + min(share, part.num_rows))
        # A row may become several samples, of which a few are enough.
        yield from itertools.islice(get_builder(reading.builder).iter_part(part, options, rows), 4 * share)


def _check(item: Sample | SkippedRow, trial: Trial, limits: ImageLimits | None) -> tuple[str, str] | None:
    """Return the skip reason and the detail of a row that cannot be used; None for a sample."""
    if isinstance(item, SkippedRow):
        return item.reason, item.detail
    if limits is not None:
        try:
            infos = [check_image(data, limits, True) for data in item.images]
            of_videos = VideoLimits(max_pixels=limits.max_pixels, min_side=limits.min_side)
            videos = [probe(video, of_videos, decode=False) for video in item.videos]
        except SkipSample as skip:
            return skip.reason, skip.detail
        trial.sizes += [(info.width, info.height) for info in infos]
        trial.videos += videos
        boxed = {place.image for message in item.messages for place in message.boxes}
        trial.turned += any(infos[image].orientation != 1 for image in boxed)
    return None


def survey(source: StorePath) -> Survey:
    """Find the files and the candidate readings of a directory, a file or a URL."""
    files = [file for file in list_files(source, ("*", "**/*")) if may_hold_rows(file.name)]
    problems = [f"{f.name} has made-up answers and is not read" for f in files if f.name.endswith(_MADE_UP)]
    files = [file for file in files if not file.name.endswith(_MADE_UP)]
    images = [file.name for file in files if _suffix(file.name) in MEDIA_SUFFIXES]
    rows = [file.name for file in files if file.name.endswith((*ROW_SUFFIXES, TAR_SUFFIX))]
    found = Survey([], problems, rows, images, [])
    boxed, other_boxes = json_layouts(files)
    found.readings.extend(_box_readings(files, boxed, found.problems))
    if other_boxes:
        names = ", ".join(file.name for file in other_boxes)
        found.problems.append(f"{names}: boxes beside those of instances, which are not read")
    of_boxes = {file.name for own in (*boxed.values(), other_boxes) for file in own}
    found.readings.extend(_row_readings(source, [f for f in files if f.name not in of_boxes], found.problems))
    found.readings.extend(_tar_readings(files, found.problems))
    texts = [file.name for file in files if _suffix(file.name) in CAPTION_SUFFIXES]
    yolo = yolo_options(files, images)
    if yolo is None:
        found.readings.extend(_image_readings(images, texts))
    else:
        found.readings.append(Reading(builder="detection", options=yolo[0], why=yolo[1], tier=2))
    read = {*images, *(texts if any(r.options.get("answer") == "text_file" for r in found.readings) else ())}
    read |= set() if yolo is None else yolo[2]
    near = {name for name in rows if name.count("/") <= 1}
    found.others.extend(file.name for file in files if file.name not in {*read, *near})
    return found


def _box_readings(
    files: Sequence[SourceFile], layouts: Mapping[Layout, Sequence[SourceFile]], problems: list[str]
) -> Iterator[Reading]:
    """Yield a reading for each layout of JSON files of boxes."""
    all_json = [file.name for file in files if file.name.endswith(".json") and file.name.count("/") <= 1]
    for layout, own in layouts.items():
        names = [file.name for file in own]
        options = {"layout": layout} | ({"annotations": names} if len(names) < len(all_json) else {})
        try:
            why = words_of_layout(layout, own[0])
        except InputError as error:
            problems.append(str(error))
            continue
        yield Reading(builder="detection", options=options, why=why, heldout_files=heldout_globs(names))


def _row_readings(source: StorePath, files: Sequence[SourceFile], problems: list[str]) -> Iterator[Reading]:
    """Yield a reading for each kind of rows; subsets whose first files have the same kind are read together."""
    if not any(file.name.endswith(ROW_SUFFIXES) for file in files):
        return
    kinds: dict[tuple, tuple[Reading, dict[str, list[str]]]] = {}  # the names of the files of each subset
    rewrites: dict[Rewrite, list[SourceFile]] = {}
    images = [file.name for file in files if _suffix(file.name) in MEDIA_SUFFIXES]
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
            boxes = [each for each in rewrites if not each.form]
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
        classes = class_names(file.path) if file.name.endswith(TABLE_SUFFIXES) else {}
        if isinstance(reading, Reading) and reading.options.get("answer") in classes:
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
        way_out = command(Rewrite("names with dots", "tar_names"), tars[:1])
        problems.append(
            f"{tars[0].name}: names of its members hold dots before their suffix, and a sample's name ends at the "
            f"first dot (its field here: {example!a}); write the tar anew{RUN}{way_out}"
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
    the fields of two images or videos."""
    parts = [field.rpartition(".") for field in fields]
    known = (*MEDIA_SUFFIXES, *CAPTION_SUFFIXES, "json", "cls", "text")
    are_images = all(name.isdecimal() and suffix in MEDIA_SUFFIXES for name, _, suffix in parts)
    return bool(parts) and not are_images and all(dot and suffix in known for _, dot, suffix in parts)


def _image_readings(images: Sequence[str], texts: Sequence[str]) -> Iterator[Reading]:
    stems = {_stem(name) for name in images}
    clips = sum(_suffix(name) in VIDEO_SUFFIXES for name in images)
    what = "images" if not clips else "clips" if clips == len(images) else "images and clips"
    describe, classify = asked_of(what)
    splits = split_names(dict.fromkeys(name.partition("/")[0] for name in images if "/" in name))
    for suffix in CAPTION_SUFFIXES:
        paired = sum(_stem(name) in stems for name in texts if _suffix(name) == suffix)
        if paired >= 2:
            options = {"answer": "text_file", "question": describe, **splits}
            options |= {} if suffix == "txt" else {"suffix": suffix}
            why = f"{paired} of {len(images)} {what} have a .{suffix} file of the same name beside them"
            yield Reading(builder="image_folder", options=options, why=why, tier=2)
    folders = {PurePosixPath(name).parent.name for name in images}
    if len(folders - {""}) >= 2 and not all(words_of(folder) <= NO_CLASSES for folder in folders):
        options = {"answer": "folder_name", "question": classify, **splits}
        why = f"{what} in {len(folders)} folders, whose names are taken as answers"
        yield Reading(builder="image_folder", options=options, why=why, tier=3)


def _suffix(name: str) -> str:
    return name.rpartition(".")[2].lower() if "." in PurePosixPath(name).name else ""


def _stem(name: str) -> str:
    return name.rpartition(".")[0]


def peek_rows(file: SourceFile) -> list[Mapping[str, Any]]:
    """Return the first 40 rows as name -> value, without rows that cannot be read."""
    if file.name.endswith((*CSV_SUFFIXES, *JSON_SUFFIXES)):
        is_csv = file.name.endswith(CSV_SUFFIXES)
        parts = csv_file_parts(file, "", csv_header(file.path)) if is_csv else json_file_parts(file, "")
        read = iter_csv_rows if is_csv else iter_json_rows
        rows = [row for _, row in itertools.islice(read(parts[0]), _PEEKED_ROWS)] if parts else []
        records = [row for row in rows if not isinstance(row, SkipSample)]
        if rows and not records:
            raise InputError(f"{file.name}: its first rows cannot be read; row 0: {rows[0].reason}: {rows[0].detail}")
        return records
    (facts,) = table_facts([file.path])
    parts = list_table_parts([file], "", None, lambda *_: None)
    names = [name for name in facts.schema.names if facts.schema.names.count(name) == 1]
    if not parts:
        return [dict.fromkeys(names)]
    return [
        {name: _value_or_none(record, name) for name in names}
        for _, record in iter_table_rows(parts[0], names, range(_PEEKED_ROWS))
    ]


def peek_groups(file: SourceFile) -> list[dict[str, bytes]]:
    """Return field -> content for each of a tar's first samples; only JSON is read, other fields are empty."""
    spans = list(itertools.islice(list_group_spans(file.path), 1))
    found: list[dict[str, bytes]] = []
    for group in itertools.islice(iter_groups(file.path, spans[0][:2]), _PEEKED_ROWS) if spans else ():
        found.append(dict.fromkeys(group.fields, b""))
        if "json" in group.fields:
            with contextlib.suppress(SkipSample):  # it is a link, or too large
                found[-1]["json"] = group.read("json", MAX_ROW_BYTES, "schema_error")
    return found


def _value_or_none(record: Any, name: str) -> Any:
    try:
        return value_of(record, name)
    except SkipSample:
        return None
