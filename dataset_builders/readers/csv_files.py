"""Rows of CSV and TSV files, as Python's csv module reads them. A file is never completely in memory.

The first line that is not blank is the header and names the columns; Excel's line `sep=;` may stand before it, and
names the delimiter. The delimiter of a .tsv file is a tab. The delimiter of a .csv file is a comma, a semicolon or a
tab, whichever is most frequent in the header line. A cell in double quotes may hold delimiters and line breaks. White
space before a cell is ignored. Lines end in LF, CRLF or CR. Blank lines are not rows and have no number.

A file is cut into parts by byte offsets in one pass, so that workers can read in parallel. A row is skipped if its
number of cells differs from the header, if text follows a closing quote, or if its bytes are not UTF-8. A quote that is
never closed is an InputError, because the start of the next row is unknown.
"""

import csv
import io
import itertools
import re
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from typing import BinaryIO

from dataset_builders.errors import InputError, one_line
from dataset_builders.readers.file_patterns import SourceFile
from dataset_builders.readers.json_lines import MAX_ROW_BYTES
from dataset_builders.readers.parts import Part, SkippedRow
from dataset_builders.readers.row_files import became_shorter, open_at, span_parts, text_start
from dataset_builders.storage.store import StorePath

CSV_SUFFIXES = (".csv", ".tsv")

_PART_ROWS = 512
_PART_BYTES = 64 << 20
_HEADER_BYTES = 1 << 16  # size of one request to an object store
_DELIMITERS = ",;\t"
_BYTE_ORDER_MARK = "\ufeff"
# The bytes do not tell the encoding, and a wrong one gives wrong letters, so nothing is converted here.
_TO_UTF8 = (
    'not UTF-8; save the file again as UTF-8 (in Excel "CSV UTF-8"), or replace it by its conversion, for Latin-1 and '
    "Western Windows: iconv -f WINDOWS-1252 -t UTF-8 OLD.csv > NEW.csv"
)
_SEP_LINE = re.compile("sep=([,;\t|])[\r\n]")  # the first line of some of Excel's files
_NOT_UTF8 = re.compile("[\udc80-\udcff]")  # how Python decodes a byte that is not UTF-8

csv.field_size_limit(MAX_ROW_BYTES)  # the module's default limit, 128 KiB, is less than an image in base64


@dataclass(frozen=True, slots=True)
class CsvHeader:
    """The header line of a file."""

    columns: tuple[str, ...]  # without white space around them, in order of the file
    delimiter: str
    end: int  # byte offset after the header


def csv_header(path: StorePath) -> CsvHeader:
    """Return the header of a file; InputError if it has none, or is not UTF-8 text."""
    start = text_start(path).decode("utf-8", "replace").removeprefix(_BYTE_ORDER_MARK).lstrip("\r\n ")
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
    return span_parts(file, subset, _spans(file.path, header))


def iter_csv_rows(part: Part, rows: Container[int] | None = None) -> Iterator[tuple[int, dict[str, str] | SkippedRow]]:
    """Yield (row number in the subset, column -> text or the reason for skipping) of a part's rows, or of `rows`."""
    header = csv_header(part.path)
    columns = header.columns
    with open_at(part.path, part.span[0], part.span[1] - part.span[0]) as file:
        records = _Records(part.path, file, part.span[0], header.delimiter)
        found = iter(records)
        for row in range(part.first_row, part.first_row + part.num_rows):
            cells = next(found, None)
            if cells is None:
                raise became_shorter(part, row)
            if rows is None or row in rows:
                fault = _fault(cells, columns, records.num_lines)
                yield row, SkippedRow(part.key(row), "schema_error", fault) if fault else dict(zip(columns, cells))


def _spans(path: StorePath, header: CsvHeader) -> Iterator[tuple[int, int, int]]:
    """Yield (first byte, byte after the last, rows) for each part."""
    start, rows = header.end, 0
    with open_at(path, start) as file:
        records = _Records(path, file, start, header.delimiter)
        for _ in records:
            rows += 1
            if rows == _PART_ROWS or records.byte - start >= _PART_BYTES:
                yield start, records.byte, rows
                start, rows = records.byte, 0
    if rows:
        yield start, records.byte, rows


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
            yield line.removeprefix(_BYTE_ORDER_MARK) if is_first else line
        self._has_ended = True

    def _open_quote(self, where: str) -> InputError:
        return InputError(
            f"{self._path}: the row at byte {self._start} is not finished at {where}; close its quote, or put the cell "
            'in quotes and write each quote that belongs to its text twice ("")'
        )
