"""The speed and the memory of making sample shards from raw rows, in one process.

    rows     rows a second of the whole stage, both passes, with and without a decode of every image, against `datasets`
             (a map to base64 JPEG of Pillow's default quality, then parquet), where it is installed
    memory   peak memory of the stage's process by rows
    plan     seconds and peak memory of what lies between the passes, alone, by rows

Run: python -m tests.bench.bench_convert [rows|memory|plan] [--rows N] [--python PYTHON_WITH_DATASETS]

Rows are one JPEG of 0.5 megapixels and some 150 kB, as a photo at quality 90, and one question; every picture's bytes
are different. A second of CPU time is counted beside one of the clock: on a busy machine it is the one to compare.
"""

import io
import shutil
import struct
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from stages.convert.plan import Draw, make_plan
from stages.convert.scan import Scan
from stages.convert.stage import STAGE, ConvertConfig
from stages.embedded_data.digits import ROW_SCHEMA
from stages.shared.artifacts.artifact import External
from stages.shared.artifacts.run_stage import run_stage
from tests.bench.command import bench_folder, make_parser, table_head, table_row
from tests.bench.memory import alone

PICTURES = 100
SIDES = (860, 600)
SEED = 0
GROUP_ROWS = 100
ROUNDS = 2
PEER_ROWS = 1500  # its cost per row does not depend on the number of rows
PEER_NAME = "base64 JPEG and parquet"
CONFIG = {
    "builder": "the_cauldron",
    "subsets": (),
    "options": {"turns": "chat"},
    "heldout_fraction": 0.05,
    "seed": 0,
    "max_image_pixels": 10**7,
    "min_image_side": 8,
    "shard_size_mb": 200,
    "max_skip_fraction": 0,
}
# A short form of SkyRL's examples/train/sft/prepare_cauldron_vlm.py: PIL, RGB, JPEG as Pillow saves it, data URI.
PEER = """
import base64, io, sys, time
import datasets, PIL
from PIL import Image
datasets.disable_progress_bars()
source, out, limit = sys.argv[1], sys.argv[2], int(sys.argv[3])

def to_messages(row):
    content = []
    for image in row["images"]:
        buffer = io.BytesIO()
        image.convert("RGB").save(buffer, format="JPEG")
        uri = "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()
        content.append({"type": "image_url", "image_url": {"url": uri}})
    messages = []
    for text in row["texts"]:
        messages.append({"role": "user", "content": content + [{"type": "text", "text": text["user"]}]})
        messages.append({"role": "assistant", "content": [{"type": "text", "text": text["assistant"]}]})
        content = []
    return {"messages": messages}

rows = datasets.load_dataset("parquet", data_files=source + "/*/*.parquet", split="train", cache_dir=out)
rows = rows.select(range(limit)).cast_column("images", datasets.Sequence(datasets.Image()))
clock, cpu = time.perf_counter(), time.process_time()
rows.map(to_messages, remove_columns=rows.column_names).to_parquet(out + "/train.parquet")
print(time.perf_counter() - clock, time.process_time() - cpu, datasets.__version__, PIL.__version__)
"""


def jpegs() -> list[bytes]:
    """Return photo-like images: smooth colours with grain."""
    width, height = SIDES
    encoded = []
    for seed in range(PICTURES):
        rng = np.random.default_rng(seed)
        blocks = Image.fromarray(rng.integers(0, 256, (height // 20, width // 20, 3), np.uint8))
        smooth = np.asarray(blocks.resize(SIDES, Image.Resampling.BICUBIC)).astype(np.float64)
        grain = smooth + rng.normal(0, 4, (height, width, 1))
        out = io.BytesIO()
        Image.fromarray(grain.clip(0, 255).astype(np.uint8)).save(out, "JPEG", quality=90)
        encoded.append(out.getvalue())
    return encoded


def numbered(jpeg: bytes, number: int) -> bytes:
    """Return the image with a comment segment, so that no two files are the same."""
    return jpeg[:2] + b"\xff\xfe" + struct.pack(">HQ", 10, number) + jpeg[2:]


def write_source(source: Path, num_rows: int) -> float:
    """Write parquet in the_cauldron's schema. Return the mean bytes of an image."""
    (source / "photos").mkdir(parents=True)
    pictures = jpegs()
    with pq.ParquetWriter(source / "photos" / "train.parquet", ROW_SCHEMA) as writer:
        for begin in range(0, num_rows, GROUP_ROWS):
            rows = []
            for i in range(begin, min(num_rows, begin + GROUP_ROWS)):
                text = {"user": f"What is in picture {i}?", "assistant": f"grain, number {i}", "source": "bench"}
                rows.append({"images": [{"bytes": numbered(pictures[i % PICTURES], i), "path": None}], "texts": [text]})
            writer.write_table(pa.Table.from_pylist(rows, ROW_SCHEMA))
    return float(np.mean([len(picture) for picture in pictures]))


def convert(source: Path, root: Path, decode_check: str) -> tuple[float, float, int]:
    """Return (seconds, CPU seconds, samples) of the stage in this process."""
    config = ConvertConfig(**CONFIG, decode_check=decode_check)
    clock, cpu = time.perf_counter(), time.process_time()
    artifact = run_stage(STAGE, config, {"raw": External(source, "raw", "0" * 16)}, root).artifact
    return time.perf_counter() - clock, time.process_time() - cpu, artifact.manifest.num_samples


def bench_rows(directory: Path, num_rows: int, python: str) -> None:
    size = write_source(directory / "raw", num_rows)
    print(f"{num_rows:,} rows, JPEG of {SIDES[0]} x {SIDES[1]}, {size / 1000:.0f} kB; one process\n")
    print(table_head([""], ["rows/s", "rows a second of CPU", "times the peer", "by CPU"]))
    best: dict[str, tuple[float, float]] = {}
    absent, peer_rows = "", min(num_rows, PEER_ROWS)
    for _ in range(ROUNDS):  # in rotation, so that other work on the machine affects all of them equally
        for check in ("full", "header"):
            (seconds, cpu, samples), _, _ = alone(convert, directory / "raw", directory / "root", check)
            assert samples == num_rows, samples
            _keep(best, f"athanor, decode_check: {check}", seconds, cpu)
            shutil.rmtree(directory / "root")
        command = [python, "-c", PEER, str(directory / "raw"), str(directory / "peer"), str(peer_rows)]
        peer = subprocess.run(command, capture_output=True, text=True)
        if peer.returncode:
            absent = peer.stderr.strip().splitlines()[-1]
            continue
        seconds, cpu, datasets, pillow = peer.stdout.split()[-4:]
        _keep(
            best,
            f"{PEER_NAME} (datasets {datasets}, Pillow {pillow})",
            *(float(spent) * num_rows / peer_rows for spent in (seconds, cpu)),
        )
        shutil.rmtree(directory / "peer")
    base = next((times for name, times in best.items() if name.startswith(PEER_NAME)), (float("nan"),) * 2)
    for name, (seconds, cpu) in best.items():
        rates = [f"{num_rows / seconds:,.0f}", f"{num_rows / cpu:,.0f}"]
        print(table_row([name, *rates, f"{base[0] / seconds:.2f}", f"{base[1] / cpu:.2f}"]))
    if absent:
        print(f"\nthe peer did not run: {absent}")


def _keep(best: dict[str, tuple[float, float]], name: str, seconds: float, cpu: float) -> None:
    """Keep the smallest of each figure over the rounds."""
    old = best.get(name, (seconds, cpu))
    best[name] = (min(old[0], seconds), min(old[1], cpu))


def bench_memory(directory: Path, counts: list[int]) -> None:
    print(table_head([], ["rows", "peak memory of the stage, MB", "of it before the stage began"]))
    for count in counts:
        with bench_folder(directory) as inner:
            write_source(inner / "raw", count)
            _, before, peak = alone(convert, inner / "raw", inner / "root", "header")
        print(table_row([f"{count:,}", f"{peak / 1e6:,.0f}", f"{before / 1e6:,.0f}"]))


def synthetic_scan(num_rows: int, pictures_a_row: int = 2) -> Scan:
    """Return what the first pass would have found: two images per row, one of three seen before, one row of 50 a
    duplicate."""
    rng = np.random.default_rng(SEED)
    uses = rng.integers(0, num_rows * pictures_a_row * 2 // 3, num_rows * pictures_a_row)
    # neighbouring rows mostly share images, as in the images of a subset
    uses = np.sort(uses) + rng.integers(0, 3, len(uses))
    hashes = np.random.default_rng(1).bytes(32 * int(uses.max() + 1))
    hashes = np.frombuffer(hashes, "V32")[uses]
    digests = np.frombuffer(np.random.default_rng(2).bytes(32 * num_rows), "V32").copy()
    repeats = rng.choice(num_rows, num_rows // 50, replace=False)
    digests[repeats] = digests[repeats // 2]
    count = len(uses)
    fields = {
        "sha256": pa.FixedSizeBinaryArray.from_buffers(pa.binary(32), count, [None, pa.py_buffer(hashes.tobytes())]),
        "width": pa.array(rng.integers(200, 2000, count), pa.int32()),
        "height": pa.array(rng.integers(200, 2000, count), pa.int32()),
        "format": pa.array(["JPEG"] * count),
        "mode": pa.array(["RGB"] * count),
        "rotated": pa.array(np.zeros(count, bool)),
    }
    structs = pa.StructArray.from_arrays(list(fields.values()), list(fields))
    pictures = pa.ListArray.from_arrays(np.arange(0, count + 1, pictures_a_row, dtype=np.int32), structs)
    raw = pa.py_buffer(digests.tobytes())
    columns = {
        "key": pa.array([f"subset/{i:08d}" for i in range(num_rows)], pa.large_string()),
        "reason": pa.nulls(num_rows, pa.string()),
        "detail": pa.nulls(num_rows, pa.large_string()),
        "digest": pa.FixedSizeBinaryArray.from_buffers(pa.binary(32), num_rows, [None, raw]),
        "size": pa.array(rng.integers(2_000, 300_000, num_rows), pa.int64()),
        "pictures": pictures,
    }
    return Scan(pa.table(columns), np.append(np.arange(0, num_rows, 512), num_rows).astype(np.int64))


def plan_once(num_rows: int) -> tuple[float, int]:
    """Return (seconds, bytes of the scan)."""
    scan = synthetic_scan(num_rows)
    started = time.perf_counter()
    plan = make_plan(scan, [None] * (len(scan.starts) - 1), Draw(seed=0, heldout_fraction=0.05), 200_000_000)
    seconds = time.perf_counter() - started
    assert plan.kept.sum() > 0.9 * num_rows
    return seconds, scan.table.nbytes


def bench_plan(counts: list[int]) -> None:
    columns = ["rows", "pictures a row", "seconds", "scan in memory, bytes a row", "peak with Python and all, MB"]
    print(table_head([], columns))
    for count in counts:
        (seconds, size), _, peak = alone(plan_once, count)
        print(table_row([f"{count:,}", 2, f"{seconds:.1f}", f"{size / count:.0f}", f"{peak / 1e6:,.0f}"]))


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("what", nargs="?", choices=["rows", "memory", "plan"])
    parser.add_argument("--rows", type=int, nargs="*")
    parser.add_argument("--python", default=sys.executable, help="of an environment with `datasets`")
    parser.add_argument("--dir", default=None, help="where the gigabytes go")
    arguments = parser.parse_args()
    with bench_folder(arguments.dir) as folder:
        if arguments.what in (None, "rows"):
            bench_rows(folder, (arguments.rows or [8000])[0], arguments.python)
        if arguments.what in (None, "memory"):
            bench_memory(folder, arguments.rows or [1000, 5000, 20_000])
    if arguments.what in (None, "plan"):
        bench_plan(arguments.rows or [200_000, 1_880_000])


if __name__ == "__main__":
    main()
