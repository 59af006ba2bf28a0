"""Rows of JSON, CSV and TSV files. A file is never completely in memory.

All are cut into parts by byte offsets in one pass over the file, so that workers can read in parallel. Blank lines are
not rows and have no number.

JSON is one object per line, or one array of objects. A file `.json` whose first character is `[` is an array; any other
file is JSON lines. A line may begin with a byte order mark, as in concatenated files, and may end in CRLF. A line that
is not JSON is one unusable row, and so is a row in which an object holds a key twice, because only one of the values
would be read. An array that is cut short or malformed is an InputError, because the start of the next row is unknown.

CSV and TSV are read as Python's csv module reads them. The first line that is not blank is the header and names the
columns; Excel's line `sep=;` may stand before it, and names the delimiter. The delimiter of a .tsv file is a tab. The
delimiter of a .csv file is a comma, a semicolon or a tab, whichever is most frequent in the header line. A cell in
double quotes may hold delimiters and line breaks. White space before a cell is ignored. Lines end in LF, CRLF or CR. A
row is skipped if its number of cells differs from the header, if text follows a closing quote, or if its bytes are not
UTF-8. A quote that is never closed is an InputError, because the start of the next row is unknown.
"""

import codecs
import csv
import io
import itertools
import json
import re
import shlex
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

from dataset_builders.contracts.sample import SkipSample
from dataset_builders.errors import InputError, one_line
from dataset_builders.readers.parts import Part
from dataset_builders.readers.source_files import SourceFile, became_shorter, open_at, span_parts, text_start
from dataset_builders.storage.store import StorePath

JSON_SUFFIXES = (".jsonl", ".json")
CSV_SUFFIXES = (".csv", ".tsv")
# A longer row is refused: as text, parsed, and with decoded images, it takes ten times as much memory.
MAX_ROW_BYTES = 64 << 20

_PART_ROWS = 512
_PART_BYTES = 64 << 20
_BLOCK = 1 << 20
_BOM, _BOM_BYTES = "\ufeff", b"\xef\xbb\xbf"
_SPACE = " \t\r\n"
_CONTENT = re.compile(rb"[^\s\xef\xbb\xbf]")  # a blank line has no such byte: only white space or byte order marks
_MAX_DIGITS = 4000  # Python refuses longer integers with an error that is not json's
_TAIL = 16  # an error this close to the end of the text read so far may come from the cut
_HEADER_BYTES = 1 << 16  # size of one request to an object store
_DELIMITERS = ",;\t"
# The bytes do not tell the encoding, and a wrong one gives wrong letters, so nothing is converted here.
_TO_UTF8 = (
    'not UTF-8; save the file again as UTF-8 (in Excel "CSV UTF-8"), or replace it by its conversion, for Latin-1 and '
    "Western Windows: iconv -f WINDOWS-1252 -t UTF-8 OLD.csv > NEW.csv"
)
_SEP_LINE = re.compile("sep=([,;\t|])[\r\n]")  # the first line of some of Excel's files
_NOT_UTF8 = re.compile("[\udc80-\udcff]")  # how Python decodes a byte that is not UTF-8

csv.field_size_limit(MAX_ROW_BYTES)  # the module's default limit, 128 KiB, is less than an image in base64

_MISSING = object()

Span = tuple[int, int, int]  # first byte, byte after the last, rows


def json_file_parts(file: SourceFile, subset: str) -> list[Part]:
    """Return the parts of one file, each of about 512 rows or 64 MiB. The file's first row is number 0."""
    if (
        file.name.endswith(".json")
        and text_start(file.path).removeprefix(_BOM_BYTES).split(b"\n", 1)[0].strip() == b"{"
    ):
        command = f"athanor init {shlex.quote(str(file.path))}"
        raise InputError(
            f"{file.path} is one object over several lines; `{command}` says how its rows are written alone"
        )
    if not _is_array(file.path):
        return span_parts(file, subset, _spans(0, _line_ends(file.path)))
    with open_at(file.path) as stream:
        window = _Window(file.path, stream, 0, _BORDERS)
        return span_parts(file, subset, _spans(window.open_array(), window.ends()))


def iter_json_rows(part: Part, rows: Container[int] | None = None) -> Iterator[tuple[int, dict[str, Any] | SkipSample]]:
    """Yield (row number in the subset, the object or the reason for skipping) of a part's rows, or only of `rows`."""
    read = _iter_array if _is_array(part.path) else _iter_lines
    for row, value in read(part, rows):
        if not isinstance(value, dict | SkipSample):
            value = SkipSample("schema_error", f"the row is {json_type(value)}, not an object")
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


@dataclass(frozen=True, slots=True)
class CsvHeader:
    """The header line of a file."""

    columns: tuple[str, ...]  # without white space around them, in order of the file
    delimiter: str
    end: int  # byte offset after the header


def csv_header(path: StorePath) -> CsvHeader:
    """Return the header of a file; InputError if it has none, or is not UTF-8 text."""
    start = text_start(path).decode("utf-8", "replace").removeprefix(_BOM).lstrip("\r\n ")
    line = re.split("[\r\n]", start, maxsplit=1)[0]
    sep_line = _SEP_LINE.match(start)
    delimiter = "\t" if path.name.endswith(".tsv") else max(_DELIMITERS, key=line.count)
    with open_at(path, size=_HEADER_BYTES) as file:
        records = _Records(path, file, 0, delimiter := sep_line[1] if sep_line else delimiter)
        cells = next(itertools.islice(records, bool(sep_line), None), None)
        if cells is None:
            raise InputError(f"{path} has no header line; write the names of the columns into its first line")
        if isinstance(cells, csv.Error):
            raise InputError(f"{path}: the header line is malformed: {one_line(cells)}; mend it")
        if any(_NOT_UTF8.search(cell) for cell in cells):
            raise InputError(f"{path}: the header is {_TO_UTF8}")
        return CsvHeader(tuple(cell.strip() for cell in cells), delimiter, records.byte)


def csv_file_parts(file: SourceFile, subset: str, header: CsvHeader) -> list[Part]:
    """Return the parts of one file, each of about 512 rows or 64 MiB. The file's first row is number 0."""
    with open_at(file.path, header.end) as stream:
        records = _Records(file.path, stream, header.end, header.delimiter)
        return span_parts(file, subset, _spans(header.end, ((records.byte, True) for _ in records)))


def iter_csv_rows(part: Part, rows: Container[int] | None = None) -> Iterator[tuple[int, dict[str, str] | SkipSample]]:
    """Yield (row number in the subset, column -> text or the reason for skipping) of a part's rows, or of `rows`."""
    header = csv_header(part.path)
    with open_at(part.path, part.span[0], part.span[1] - part.span[0]) as file:
        records = _Records(part.path, file, part.span[0], header.delimiter)
        for row, cells in _counted(part, iter(records), rows):
            fault = _fault(cells, header.columns, records.num_lines)
            yield row, SkipSample("schema_error", fault) if fault else dict(zip(header.columns, cells))


def _spans(start: int, ends: Iterable[tuple[int, bool]]) -> Iterator[Span]:
    """Yield the parts of a file from (byte after it, whether it is a row) of each row or blank line."""
    rows, end = 0, start
    for end, is_row in ends:
        rows += is_row
        if rows == _PART_ROWS or (rows and end - start >= _PART_BYTES):
            yield start, end, rows
            start, rows = end, 0
    if rows:
        yield start, end, rows


def _counted(part: Part, values: Iterator[Any], rows: Container[int] | None) -> Iterator[tuple[int, Any]]:
    """Yield (row number, value) of a part's rows, or only of `rows`; InputError if the file ends before the part."""
    for row in range(part.first_row, part.first_row + part.num_rows):
        value = next(values, _MISSING)
        if value is _MISSING:
            raise became_shorter(part, row)
        if rows is None or row in rows:
            yield row, value


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
    return path.name.endswith(".json") and start.removeprefix(_BOM_BYTES).lstrip().startswith(b"[")


def _line_ends(path: StorePath) -> Iterator[tuple[int, bool]]:
    base, is_row = 0, False  # the byte offset of the block; whether the unfinished line has content
    with open_at(path) as file:
        while block := file.read(_BLOCK):
            at = 0
            while (newline := block.find(b"\n", at)) >= 0:
                yield base + newline + 1, is_row or _has_content(block, at, newline)
                at, is_row = newline + 1, False
            is_row = is_row or _has_content(block, at, len(block))
            base += len(block)
    yield base, is_row


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


def _iter_array(part: Part, rows: Container[int] | None) -> Iterator[tuple[int, Any]]:
    with open_at(part.path, part.span[0], part.span[1] - part.span[0]) as file:
        values = (value for _, value in _Window(part.path, file, part.span[0], _DECODER).items())
        yield from _counted(part, values, rows)


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
        if self._next() == _BOM:
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

    def ends(self) -> Iterator[tuple[int, bool]]:
        """Yield (byte after it, True) for each element, that is, the start of the next one; InputError if anything but
        white space follows the closing bracket."""
        is_empty = True
        for start, _ in self.items():
            if not is_empty:
                yield start, True
            is_empty = False
        self._advance(self._at + 1)
        if char := self._next():
            raise self._broken(f"goes on with {char!r} after its array; it should be one array, or one object per line")
        if not is_empty:
            yield self.byte, True

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
        try:  # not by ijson, which gives no byte offsets at which parts could be cut
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


def _fault(cells: Sequence[str] | csv.Error, columns: Sequence[str], num_lines: int) -> str:
    """Return why a record is not a usable row; empty if it is usable."""
    lines = f"; it has {num_lines} lines, so a quote may be missing" if num_lines > 1 else ""
    if isinstance(cells, csv.Error):
        return f"the row is malformed: {one_line(cells)}{lines}"
    if len(cells) != len(columns):
        return f"the row has {len(cells)} cells, the header {len(columns)}{lines}"
    broken = (name for name, cell in zip(columns, cells) if not cell.isascii() and _NOT_UTF8.search(cell))
    name = next(broken, None)
    return "" if name is None else f"{name}: {_TO_UTF8}"


class _Records:
    """The records of a file from a byte offset on, without blank lines."""

    def __init__(self, path: StorePath, file: BinaryIO, byte: int, delimiter: str) -> None:
        self.byte, self.num_lines = byte, 0  # the offset after the last record, and its number of lines
        self._path, self._start, self._line, self._has_ended = path, byte, "", False
        self._text = io.TextIOWrapper(file, "utf-8", errors="surrogateescape", newline="")
        # strict: otherwise an unclosed quote joins rows, which may happen to have the right number of cells
        self._reader = csv.reader(self._lines(), delimiter=delimiter, skipinitialspace=True, strict=True)

    def __iter__(self) -> Iterator[list[str] | csv.Error]:
        """Yield the cells of each record, or the error in it."""
        while True:
            self._start, self.num_lines = self.byte, 0
            try:
                cells = next(self._reader, None)
            except csv.Error as error:
                if self._has_ended:
                    raise self._open_quote("the end of the file") from error
                yield error
                continue
            if cells is None:
                return
            if cells and not (len(cells) == 1 and self._line.isspace()):
                yield cells

    def _lines(self) -> Iterator[str]:
        while line := self._text.readline(MAX_ROW_BYTES + 1):
            is_first = self.byte == 0
            self.byte += len(line) if line.isascii() else len(line.encode("utf-8", "surrogateescape"))
            if self.byte - self._start > MAX_ROW_BYTES:
                raise self._open_quote(f"{MAX_ROW_BYTES} bytes on")
            self.num_lines += 1
            self._line = line
            yield line.removeprefix(_BOM) if is_first else line
        self._has_ended = True

    def _open_quote(self, where: str) -> InputError:
        return InputError(
            f"{self._path}: the row at byte {self._start} is not finished at {where}; close its quote, or put the cell "
            'in quotes and write each quote that belongs to its text twice ("")'
        )
