"""Recognition of the image, question and answer columns of a table, and members of a tar, by names and first values."""

import json
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from dataset_builders.readers.conversation import IMAGE_NAMES, looks_like_image
from dataset_builders.readers.parts import SPLIT_NAMES, natural_order, splits_of
from dataset_builders.readers.source_files import MEDIA_SUFFIXES, VIDEO_SUFFIXES
from dataset_builders.readers.video_refs import VIDEO_NAMES, looks_like_video

READ = "Read the text in the image."
DESCRIBE, CLASSIFY = "Describe the image.", "What is in the image?"
DESCRIBE_VIDEO, CLASSIFY_VIDEO = "Describe the video.", "What is in the video?"
DESCRIBE_SHOWN, CLASSIFY_SHOWN = "Describe what is shown.", "What is shown?"

# Column names that datasets use, the most specific ones first; German, French and Spanish ones last, without accents.
_IMAGES = (*IMAGE_NAMES, "path", "file", "datei", "dateiname", "archivo", "fichier")
_CHOICES = ("choices", "options", "candidates", "alternatives", "multi_choice_options")
_QUESTIONS = (
    *("question", "query", "prompt", "instruction", "problem", "input", "user", "human", "prefix"),
    *("frage", "pregunta"),
)
_ANSWERS = (
    *("answer", "answers", "response", "output", "completion", "assistant", "target", "ground_truth", "solution"),
    "suffix",
    *("antwort", "respuesta", "reponse"),
)
_CAPTIONS = (
    *("caption", "captions", "description", "text", "title", "alt_text", "txt"),
    *("beschreibung", "bildunterschrift", "descripcion", "legende"),
)
_TRANSCRIPTS = ("transcription", "transcript", "ocr", "latex", "formula", "latex_formula", "markdown", "html")
_LABELS = (
    *("label", "class", "category", "class_name", "species", "tag", "cls"),
    *("klasse", "kategorie", "clase", "categoria", "classe", "categorie"),
)
_TAR_TEXTS = ("txt", "caption", "text", "cls")
_SYSTEMS = ("system", "system_prompt")
# Columns that cut the video. Not `start` and `end`: a time that is asked for is called so, too.
_TIMES = {"video_start": ("video_start", "clip_start"), "video_end": ("video_end", "clip_end")}
_NO_ANSWERS = ("id", "key", "index", "url", "source", "license", "width", "height")
_MAX_RUNS = 8  # most runs of equal values that a split column may have in the first rows


@dataclass(frozen=True, slots=True)
class Columns:
    """Options of the builder `table`, and how they were found."""

    options: dict[str, Any]  # those that differ from their defaults
    why: str  # the role of each column, in words
    unused: tuple[str, ...]  # columns without a role


def find_columns(rows: Sequence[Mapping[str, Any]]) -> Columns | str:
    """Return the roles of a table's columns, from its first rows, or the reason why there are none."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    if any("." in name and looks_like_image(name) for name in names):
        example = "image,question,answer"
        return f"its first line is a row and no header; write the columns' names above it, for example {example}"
    values = {name: [row[name] for row in rows if row.get(name) not in (None, "")] for name in names}
    video = _first_of((*VIDEO_NAMES, *_IMAGES), [name for name in names if _is_video(name, values[name])])
    videos = [name for name in names if _is_video(name, values[name])]
    video = video or (videos[0] if videos else None)
    images = [name for name in names if name not in videos and _is_image(values[name])]
    image = _first_of(_IMAGES, images)
    # Where the rows name no image that can be read, reading says why.
    if image is None and not images and video is None:
        image = _first_of([name for name in IMAGE_NAMES if name not in ("file_name", "filename")], names)
        images = [image] if image else []
        video = None if image else _first_of(("video", "videos"), names)
        videos = [video] if video else []
    times = {} if video is None else {option: _first_of(known, names) for option, known in _TIMES.items()}
    times = {option: name for option, name in times.items() if name is not None}
    others = {*images, *videos, *times.values()}
    texts = [name for name in names if name not in others and _is_text(values[name])]
    for name in names:
        if (fault := _unreadable(name, values[name], texts)) is not None:
            return fault
    answer, question = _answer_and_question(texts, values)
    extra = _first_of(("input",), texts) if question and _normalized(question) == "instruction" else None
    if answer is None:
        return f"no column looks like an answer among: {', '.join(names)}; name that column answer"
    if question is None and not images and video is None:
        return f"no column looks like a question, and none holds images or videos, among: {', '.join(names)}"
    fallback = _question_for(answer, "image" if video is None else "video")
    shown = images if image is None else [n for n in images if _without_number(n) == _without_number(image)]
    if len({_without_number(name) for name in shown}) == 1:  # else in the order of the columns: before, after
        shown = sorted(shown, key=natural_order)
    options: dict[str, Any] = {
        "image": shown if len(shown) > 1 else shown[0] if shown else None,
        "question": question or f"<{'image' if video is None else 'video'}>{fallback}",
        "answer": answer,
        **({} if video is None else {"video": video, **times}),
    }
    if extra:
        options["question"] = f"{{{question}}}\n{{{extra}}}"
    if choices := _choices(rows, values[answer]) if question else []:
        options["question"] = "\n".join([f"{{{question}}}", *(f"{name}. {{{name}}}" for name in choices)])
    if any(isinstance(value, list) and len(value) > 1 for value in values[answer]):
        options["references"] = answer
    if (system := _first_of(_SYSTEMS, texts)) is not None and system not in (question, answer):
        options["system"] = system
    splits = split_values(rows)
    if (split := _first_of(SPLIT_NAMES, splits)) is not None:
        if sum(a != b for a, b in pairwise(splits[split])) >= _MAX_RUNS:
            return f"column {split!r} names the split of each row, in mixed order; sort the rows by it"
        options |= {"split": split, **split_names(splits[split])}
    if question and any(row.get(name) in (None, "") for row in rows for name in (*shown, *videos[:1])):
        options["null_image"] = "absent"
    used = {*shown, video, *times.values(), *choices, question, extra, answer}
    used |= {options.get("system"), options.get("split")}
    with_extra = f" with {', '.join(map(repr, [extra] if extra else choices))}" if extra or choices else ""
    question_text = f"column {question!r}{with_extra} is the question" if question else f"each question is {fallback!r}"
    image_text = f"column {shown[0]!r} is the image" if shown else "there is no image"
    if video is not None:
        image_text = f"{image_text}, column {video!r} is the video" if shown else f"column {video!r} is the video"
    if len(shown) > 1:
        image_text = f"columns {', '.join(map(repr, shown))} are the images, in this order"
    why = f"{image_text}, {question_text}, column {answer!r} is the answer"
    return Columns(options, why, tuple(name for name in names if name not in used))


def _unreadable(name: str, values: Sequence[Any], texts: Sequence[str]) -> str | None:
    """Return why no map of columns reads this one, which is a part of each row's conversation."""
    plain = _normalized(name)
    lists = [value for value in values if isinstance(value, list) and value]
    way_out = 'write a column "messages" in its place, as docs/data-formats.md shows for openai_messages'
    pair = next((value[0] for value in lists if isinstance(value[0], dict) and _holds_a_pair(value[0])), None)
    if pair is not None:
        fields = ", ".join(pair)
        return f"column {name!r} holds lists of objects ({fields}), which no map of columns reads; {way_out}"
    if lists and plain.removesuffix("s") in _QUESTIONS and all(isinstance(v[0], str) for v in lists):
        return f"column {name!r} holds a list of questions in each row, which no map of columns reads; {way_out}"
    if plain in ("chosen", "rejected"):
        return f"column {name!r} holds data of preferences; remove rejected, and name the column of good answers answer"
    if lists and plain in _CHOICES:
        return (
            f"column {name!r} holds the choices of each question, which no option reads; write them as columns A, B, C "
            "and so on, and the letter of the right one as the answer"
        )
    if values and plain in (*_QUESTIONS, *_ANSWERS) and name not in texts and isinstance(values[0], dict):
        fields = ", ".join(map(str, values[0]))
        return f"column {name!r} holds an object ({fields}) in each row; write one of its texts in its place"
    return None


def _holds_a_pair(fields: Iterable[str]) -> bool:
    return _first_of(_QUESTIONS, fields) is not None and _first_of(_ANSWERS, fields) is not None


def _answer_and_question(texts: Sequence[str], values: Mapping[str, list[Any]]) -> tuple[str | None, str | None]:
    question = _first_of(_QUESTIONS, texts) or next((name for name in texts if are_questions(values[name])), None)
    others = [name for name in texts if name != question]
    answer = _first_of((*_ANSWERS, *_CAPTIONS, *_TRANSCRIPTS, *_LABELS), others)
    if answer is None:
        candidates = [name for name in others if _normalized(name) not in (*_NO_ANSWERS, *SPLIT_NAMES, *_SYSTEMS)]
        answer = candidates[0] if len(candidates) == 1 else None
    return answer, question


def _choices(rows: Sequence[Mapping[str, Any]], answers: Sequence[Any]) -> list[str]:
    """Return the columns A, B, ... of the choices, if the answers are their letters. Some rows may have fewer."""
    letters = [name for name in "ABCDEFGH" if any(row.get(name) not in (None, "") for row in rows)]
    return letters if len(letters) > 1 and all(answer in letters for answer in answers) else []


def asked_of(what: str) -> tuple[str, str]:
    """Return the questions for a caption and for a class of an image, a video, or rows that show one or the other."""
    videos = (DESCRIBE_SHOWN, CLASSIFY_SHOWN) if what == "images and clips" else (DESCRIBE_VIDEO, CLASSIFY_VIDEO)
    return (DESCRIBE, CLASSIFY) if what in ("image", "images") else videos


def _question_for(answer: str, what: str) -> str:
    """Return the question for an answer column without a question column."""
    describe, classify = asked_of(what)
    if _normalized(answer) in _LABELS:
        return classify
    return READ if _normalized(answer) in _TRANSCRIPTS and what == "image" else describe


def split_names(values: Iterable[Any]) -> dict[str, Any]:
    """Return the options train_splits and heldout_splits for the values that name splits, where defaults do not do."""
    splits = splits_of(str(value) for value in values)
    train = [value for value, split in splits.items() if split == "train"]
    heldout = [value for value, split in splits.items() if split == "heldout"]
    options: dict[str, Any] = {}
    if set(train) - {"train"}:
        options["train_splits"] = train
    if set(heldout) - {"validation", "test"}:
        options["heldout_splits"] = list(dict.fromkeys([*heldout, "validation", "test"]))
    return options


def split_values(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return column -> its values, for each column that names the split of its row."""
    names = {name for row in rows for name in row if _normalized(name) in SPLIT_NAMES}
    values = {name: [row[name] for row in rows if row.get(name) not in (None, "")] for name in names}
    return {
        name: each for name, each in values.items() if each and set(map(str, each)) <= set(splits_of(map(str, each)))
    }


def _first_of(wanted: Sequence[str], names: Iterable[str]) -> str | None:
    """Return the name that is first in `wanted`, without regard to case."""
    candidates = {_normalized(name): name for name in reversed(list(names))}
    return next((candidates[name] for name in wanted if name in candidates), None)


def _normalized(name: str) -> str:
    plain = unicodedata.normalize("NFKD", name).encode("ascii", "ignore").decode()  # without accents
    return plain.strip().lower().replace(" ", "_").replace("-", "_")


def _without_number(name: str) -> str:
    return name.rstrip("0123456789 _-")


def _is_image(values: Sequence[Any]) -> bool:
    """Whether most of the values, or of the items of lists, are images or name one."""
    items = [item for value in values for item in (value if isinstance(value, list) else [value])]
    return bool(items) and sum(map(looks_like_image, items)) > 0.5 * len(items)


def _is_video(name: str, values: Sequence[Any]) -> bool:
    """Whether most of the values are videos or name one; lists of images are videos in a column that says so."""
    are_frames = _normalized(name) in VIDEO_NAMES and all(isinstance(value, list) for value in values)
    number = sum(looks_like_video(value) or (are_frames and looks_like_image(value)) for value in values)
    return bool(values) and number > 0.5 * len(values)


def _is_text(values: Sequence[Any]) -> bool:
    items = [item for value in values for item in (value if isinstance(value, list) else [value])]
    return bool(items) and all(isinstance(item, str | int | float | bool) for item in items)


def are_questions(values: Sequence[Any]) -> bool:
    """Whether more than half of the values are texts that end with a question mark."""
    return sum(isinstance(value, str) and value.strip().endswith("?") for value in values) > 0.5 * len(values)


def tar_options(groups: Sequence[Mapping[str, bytes]]) -> dict[str, Any] | str:
    """Return options of the builder `webdataset_tars` for a tar's first samples, or why there are none."""
    fields = list(dict.fromkeys(field for group in groups for field in group))
    if not fields:
        return "it holds no sample"
    options: dict[str, Any] = {}
    if not all(any(field.rpartition(".")[2] in MEDIA_SUFFIXES for field in group) for group in groups):
        options["text_only"] = True
    if "json" in fields and (json_options := _tar_options_of_json(groups)) is not None:
        return json_options if isinstance(json_options, str) else options | json_options
    text = next((field for field in _TAR_TEXTS if field in fields), None)
    if text is None:
        return f"no member with text (json, {', '.join(_TAR_TEXTS)}) among: {', '.join(fields)}"
    describe, classify = asked_of(_shown_in(groups))
    return options | {"question": f"constant:{classify if text == 'cls' else describe}", "answer": text}


def _shown_in(groups: Sequence[Mapping[str, bytes]]) -> str:
    """Return `video` if a tar's first samples hold videos, else `image`."""
    suffixes = {field.rpartition(".")[2] for group in groups for field in group}
    return "image" if suffixes.isdisjoint(VIDEO_SUFFIXES) else "video"


def _tar_options_of_json(groups: Sequence[Mapping[str, bytes]]) -> dict[str, Any] | str | None:
    records = [record for group in groups if (record := _json_record(group)) is not None]
    if any(isinstance(record, list) for record in records):
        return {"messages": "json"}
    for name in ("messages", "conversations"):
        if any(record.get(name) for record in records):
            return {"messages": f"json:{name}"}
    shown = _shown_in(groups)
    columns = find_columns([{**record, shown: f"1.{'png' if shown == 'image' else 'mp4'}"} for record in records])
    if isinstance(columns, str):
        return None
    question = columns.options["question"]
    if question.startswith("{"):
        joined = question.replace("\n", " ")
        return (
            f"its question is joined from several fields ({joined}), which no option does; write messages in its json"
        )
    is_fixed = question.startswith(f"<{shown}>")
    source = f"constant:{question.removeprefix(f'<{shown}>')}" if is_fixed else f"json:{question}"
    return {"question": source, "answer": f"json:{columns.options['answer']}"}


def _json_record(group: Mapping[str, bytes]) -> Any:
    try:
        value = json.loads(group.get("json", b""))
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict | list) else None
