"""Whether the cost per row depends on the number of rows: CPU seconds and memory of convert and tokenize.

    python -m tests.bench.bench_rows [--rows 20000 50000 200000] [--directory DIR]

One row in five is only text. The others have one JPEG of 64 x 48 each, with bytes and pixels of its own. The figures
are
of one process, including its template process.
"""

import argparse
import io
import resource
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from stages.artifacts.artifact import Artifact, External
from stages.artifacts.run_stage import run_stage
from stages.convert.stage import STAGE as CONVERT
from stages.convert.stage import ConvertConfig
from stages.inputs.digits import ROW_SCHEMA
from stages.inputs.hf_directory import processor_input
from stages.tokenize.config import TokenizeConfig
from stages.tokenize.stage import STAGE as TOKENIZE
from tests.bench.bench_convert import CONFIG, in_child
from tests.bench.host import describe
from tests.helpers.tiny_model import tiny_hf_dir

GROUP_ROWS = 1000
WORDS = ("price", "of", "the", "blue", "bar", "in", "year", "seven", "rose", "and", "fell", "again")


def write_source(source: Path, num_rows: int) -> None:
    """Write parquet in the_cauldron's schema."""
    (source / "rows").mkdir(parents=True)
    with pq.ParquetWriter(source / "rows" / "train.parquet", ROW_SCHEMA) as writer:
        for begin in range(0, num_rows, GROUP_ROWS):
            rows = [_row(number) for number in range(begin, min(num_rows, begin + GROUP_ROWS))]
            writer.write_table(pa.Table.from_pylist(rows, ROW_SCHEMA))


def _row(number: int) -> dict[str, list]:
    rng = np.random.default_rng(number)
    text = {"user": f"Question {number}?", "assistant": " ".join(rng.choice(WORDS, 12)), "source": "bench"}
    if number % 5 == 0:
        return {"images": [], "texts": [text]}
    out = io.BytesIO()
    blocks = rng.integers(0, 256, (6, 8, 3), np.uint8).repeat(8, 0).repeat(8, 1)
    Image.fromarray(blocks).save(out, "JPEG", quality=90)
    return {"images": [{"bytes": out.getvalue(), "path": None}], "texts": [text]}


def convert(source: Path, root: Path) -> tuple[Path, float]:
    """Return (artifact's directory, CPU seconds) of the stage convert in this process."""
    before = cpu_seconds()
    config = ConvertConfig(**{**CONFIG, "decode_check": "full"})
    artifact = run_stage(CONVERT, config, {"raw": External(source, "raw", "0" * 16)}, root).artifact
    return artifact.dir, cpu_seconds() - before


def tokenize(samples: Path, hf_dir: Path, root: Path) -> tuple[Path, float]:
    """Return (artifact's directory, CPU seconds) of the stage tokenize in this process."""
    before = cpu_seconds()
    config = TokenizeConfig(max_seq_len=4096, max_pixels=None, max_skip_fraction=0)
    inputs = {"samples": Artifact.load(samples), "processor": processor_input(hf_dir)}
    artifact = run_stage(TOKENIZE, config, inputs, root).artifact
    return artifact.dir, cpu_seconds() - before


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and of its children that have ended."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + ended.ru_utime + ended.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[20_000, 50_000, 200_000])
    parser.add_argument("--directory", type=Path, default=None)
    arguments = parser.parse_args()
    print(" | ".join(describe()), "\n")
    print("| rows | convert, CPU us a row | its peak, MB | tokenize, CPU us a row | its peak, MB |")
    print("| ---: | ---: | ---: | ---: | ---: |", flush=True)
    for count in arguments.rows:
        with tempfile.TemporaryDirectory(dir=arguments.directory) as name:
            root = Path(name)
            write_source(root / "raw", count)
            (samples, converting), _, convert_peak = in_child(convert, root / "raw", root / "root")
            (_, tokenizing), _, tokenize_peak = in_child(tokenize, samples, tiny_hf_dir(), root / "root")
            cells = [converting / count * 1e6, convert_peak, tokenizing / count * 1e6, tokenize_peak]
            print(f"| {count:,} | " + " | ".join(f"{cell:,.0f}" for cell in cells) + " |", flush=True)


if __name__ == "__main__":
    main()
