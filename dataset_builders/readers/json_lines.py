"""Rows of JSON files: one object per line, or one array of objects. A file is never completely in memory.

A file `.json` whose first character is `[` is an array; any other file is JSON lines. Both are cut into parts by byte
offsets in one pass over the file, so that workers can read in parallel. Blank lines are not rows and have no number. A
line may begin with a byte order mark, as in concatenated files, and may end in CRLF.

A line that is not JSON is one unusable row, and so is a row in which an object holds a key twice, because only one of
the values would be read. An array that is cut short or malformed is an InputError, because the start of the next row is
unknown.
"""

import codecs
import json
import re
import shlex
from collections import Counter
from collections.abc import Container, Iterator
from typing import Any, BinaryIO

from dataset_builders.contracts.sample import SkipSample
from dataset_builders.errors import InputError, one_line
from dataset_builders.readers.file_patterns import SourceFile
from dataset_builders.readers.parts import Part, SkippedRow
from dataset_builders.readers.row_files import became_shorter, open_at, span_parts, text_start
from dataset_builders.storage.store import StorePath

JSON_SUFFIXES = (".jsonl", ".json")
# A longer row is refused: as text, parsed, and with decoded images, it takes ten times as much memory.
MAX_ROW_BYTES = 64 << 20

_PART_ROWS = 512
_PART_BYTES = 64 << 20
_BLOCK = 1 << 20
_BOM = b"\xef\xbb\xbf"
_SPACE = " \t\r\n"
_CONTENT = re.compile(rb"[^\s\xef\xbb\xbf]")  # a blank line has no such byte: only white space or byte order marks
_MAX_DIGITS = 4000  # Python refuses longer integers with an error that is not json's
_TAIL = 16  # an error this close to the end of the text read so far may come from the cut

_MISSING = object()

Span = tuple[int, int, int]  # first byte, byte after the last, rows


def json_file_parts(file: SourceFile, subset: str) -> list[Part]:
    """Return the parts of one file, each of about 512 rows or 64 MiB. The file's first row is number 0."""
    if file.name.endswith(".json") and text_start(file.path).removeprefix(_BOM).split(b"\n", 1)[0].strip() == b"{":
        command = f"athanor init {shlex.quote(str(file.path))}"
        raise InputError(
            f"{file.path} is one object over several lines; `{command}` says how its rows are written alone"
        )
    return span_parts(file, subset, _array_spans(file.path) if _is_array(file.path) else _line_spans(file.path))


def iter_json_rows(part: Part, rows: Container[int] | None = None) -> Iterator[tuple[int, dict[str, Any] | SkippedRow]]:
    """Yield (row number in the subset, the object or the reason for skipping) of a part's rows, or only of `rows`."""
    read = _iter_array if _is_array(part.path) else _iter_lines
    for row, value in read(part, rows):
        if isinstance(value, SkipSample):
            yield row, SkippedRow(part.key(row), value.reason, value.detail)
        elif not isinstance(value, dict):
            yield row, SkippedRow(part.key(row), "schema_error", f"the row is {json_type(value)}, not an object")
        else:
            yield row, value


def parse_json(text: str) -> Any:
    """Return the value of a JSON text; SkipSample (json_parse_error) if it has none."""
    try:
        return _DECODER.decode(text)
    except RecursionError:
        raise SkipSample("json_parse_error", "nested too deeply") from None
    except ValueError as error:
        raise SkipSample("json_parse_error", one_line(error)) from None


def json_type(value: object) -> str:
    """Return JSON's name for the type of a parsed value."""
    names = {dict: "an object", list: "an array", str: "text", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


def _integer(digits: str) -> int | float:
    return int(digits) if len(digits) < _MAX_DIGITS else float("inf")


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise SkipSample("json_parse_error", f"an object holds the key {twice[:100]!r} twice; remove one of them")
    return values


_DECODER = json.JSONDecoder(parse_int=_integer, object_pairs_hook=_distinct)
_BORDERS = json.JSONDecoder(parse_int=_integer)  # only finds where rows end


def _is_array(path: StorePath) -> bool:
    start = text_start(path)
    return path.name.endswith(".json") and start.removeprefix(_BOM).lstrip().startswith(b"[")


def _line_spans(path: StorePath) -> Iterator[Span]:
    start = base = rows = 0  # base: byte offset of the block
    is_row = False  # whether the unfinished line has content
    with open_at(path) as file:
        while block := file.read(_BLOCK):
            at = 0
            while (newline := block.find(b"\n", at)) >= 0:
                rows += is_row or _has_content(block, at, newline)
                at, is_row = newline + 1, False
                if rows == _PART_ROWS or (rows and base + at - start >= _PART_BYTES):
                    yield start, base + at, rows
                    start, rows = base + at, 0
            is_row = is_row or _has_content(block, at, len(block))
            base += len(block)
    if rows + is_row:
        yield start, base, rows + is_row


def _iter_lines(part: Part, rows: Container[int] | None) -> Iterator[tuple[int, Any]]:
    at, end = part.span
    row = part.first_row
    with open_at(part.path, at, end - at) as file:
        while at < end:
            line = file.readline(MAX_ROW_BYTES)
            size, is_row = len(line), _has_content(line, 0, len(line))
            while line[-1:] != b"\n" and (rest := file.readline(_BLOCK)):  # the rest of a line that is over the limit
                size, line, is_row = size + len(rest), rest, is_row or _has_content(rest, 0, len(rest))
            if not size:
                raise became_shorter(part, row)
            if is_row and (rows is None or row in rows):
                yield row, _line_value(line, size)
            at, row = at + size, row + is_row


def _has_content(data: bytes, start: int, end: int) -> bool:
    return _CONTENT.search(data, start, end) is not None


def _line_value(line: bytes, size: int) -> Any:
    """Return the line's value, or the reason why it has none."""
    if size > MAX_ROW_BYTES:
        return SkipSample("json_parse_error", f"a line of {size} bytes; the limit is {MAX_ROW_BYTES}")
    try:
        return parse_json(line.decode("utf-8-sig").strip(_SPACE))
    except UnicodeDecodeError as error:
        return SkipSample("json_parse_error", f"not UTF-8: {error.reason} at byte {error.start} of the line")
    except SkipSample as skip:
        return skip


def _array_spans(path: StorePath) -> Iterator[Span]:
    with open_at(path) as file:
        window = _Window(path, file, 0, _BORDERS)
        first, rows = window.open_array(), 0
        for start, _ in window.items():
            if rows == _PART_ROWS or (rows and start - first >= _PART_BYTES):
                yield first, start, rows
                first, rows = start, 0
            rows += 1
        window.check_end()
        if rows:
            yield first, window.byte, rows


def _iter_array(part: Part, rows: Container[int] | None) -> Iterator[tuple[int, Any]]:
    with open_at(part.path, part.span[0], part.span[1] - part.span[0]) as file:
        items = _Window(part.path, file, part.span[0], _DECODER).items()
        for row in range(part.first_row, part.first_row + part.num_rows):
            _, value = next(items, (0, _MISSING))
            if value is _MISSING:
                raise became_shorter(part, row)
            if rows is None or row in rows:
                yield row, value


class _Window:
    """The text of an array that was read but not parsed yet, and its byte offset in the file."""

    def __init__(self, path: StorePath, file: BinaryIO, byte: int, decoder: json.JSONDecoder) -> None:
        self.path, self.byte, self._json = path, byte, decoder
        self._file = file
        # Bytes that are not UTF-8 become lone surrogates, which no text may hold: the row is refused, not the file.
        self._decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
        self._text, self._at, self._has_ended = "", 0, False

    def open_array(self) -> int:
        """Move past the opening bracket, and return the byte offset there."""
        if self._next() == "\ufeff":
            self._advance(self._at + 1)
        assert self._next() == "["
        self._advance(self._at + 1)
        return self.byte

    def items(self) -> Iterator[tuple[int, Any]]:
        """Yield (first byte, value) of the elements up to the closing bracket."""
        while (char := self._next()) != "]":
            if not char:
                raise self._broken("ends within the array; download it again")
            start = self.byte
            yield start, self._value()
            char = self._next()
            if char == ",":
                self._advance(self._at + 1)
            elif char != "]":
                raise self._broken(f"has {char!r} where ',' or ']' should be" if char else "ends within the array")

    def check_end(self) -> None:
        """Raise InputError if anything but white space follows the closing bracket."""
        self._advance(self._at + 1)
        if char := self._next():
            raise self._broken(f"goes on with {char!r} after its array; it should be one array, or one object per line")

    def _value(self) -> Any:
        size = _BLOCK
        while True:
            try:
                value, end = self._parsed()
                if end < len(self._text) or self._has_ended:  # a number at the end of the text could continue
                    self._advance(end)
                    return value
            except RecursionError:
                raise self._broken("is nested too deeply") from None
            except json.JSONDecodeError as error:
                is_cut = error.msg.startswith("Unterminated string") or error.pos >= len(self._text) - _TAIL
                if self._has_ended or not is_cut:
                    raise self._broken(f"is malformed ({error.msg})") from None
            if len(self._text) - self._at > MAX_ROW_BYTES:
                raise self._broken(f"has a row of over {MAX_ROW_BYTES} bytes there")
            self._read(size)
            size *= 2

    def _parsed(self) -> tuple[Any, int]:
        """Return the value at the present place, or the reason why it is unusable, and its end in the text."""
        try:
            return self._json.raw_decode(self._text, self._at)
        except SkipSample as skip:
            return skip, _BORDERS.raw_decode(self._text, self._at)[1]

    def _next(self) -> str:
        """Return the next character that is not white space, without consuming it; "" at the end of the file."""
        while True:
            text, at = self._text, self._at
            while at < len(text) and text[at] in _SPACE:
                at += 1
            self._advance(at)
            if at < len(text):
                return text[at]
            if self._has_ended:
                return ""
            self._read(_BLOCK)

    def _advance(self, at: int) -> None:
        passed = self._text[self._at : at]
        self.byte += len(passed) if passed.isascii() else len(passed.encode("utf-8", "surrogateescape"))
        self._at = at

    def _read(self, size: int) -> None:
        block = self._file.read(size)
        self._has_ended = not block
        self._text = self._text[self._at :] + self._decoder.decode(block, final=not block)
        self._at = 0

    def _broken(self, what: str) -> InputError:
        return InputError(f"{self.path} {what}, at byte {self.byte}; mend it, or convert it to one object per line")
