"""row_tables: every row in order for any number of rows, and no file from a writer that failed."""

import pyarrow as pa
import pytest

from stages.shared.artifacts.row_tables import read_columns, write_rows

SCHEMA = pa.schema([("number", pa.int64()), ("text", pa.string())])


@pytest.mark.parametrize("count", [0, 1, 2048, 5000])
def test_rows_come_back_in_order(tmp_path, count):
    write_rows(tmp_path / "rows.parquet", ({"number": i, "text": str(i)} for i in range(count)), SCHEMA)
    assert read_columns(tmp_path / "rows.parquet", ["number"]).schema == pa.schema([SCHEMA.field("number")])
    assert read_columns(tmp_path / "rows.parquet", ["number"])["number"].to_pylist() == list(range(count))


def test_a_failing_row_leaves_no_file(tmp_path):
    with pytest.raises(ZeroDivisionError):
        write_rows(tmp_path / "rows.parquet", ({"number": 1 // (3000 - i)} for i in range(5000)), SCHEMA)
    assert not list(tmp_path.iterdir())
