"""Tokenization: images per second and core from file bytes to stored record and back, against transformers' processor.

    python -m tests.bench.bench_tokenize [--pictures 200] [--rounds 3] [--directory /dev/shm]

Shards are written to memory (/dev/shm) and read from it, so that no disk is measured. Prints one markdown table. The
comparison with transformers needs torchvision (tests/helpers/torchvision_reference.py describes how to install it for
one
run). Without it that part is left out, and the table says so.
"""

import io
import multiprocessing
import platform
import shutil
import statistics
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw

from dataset_builders.contracts.sample import IMAGE_SLOT, Sample
from dataset_builders.contracts.shard_io import ShardWriter, iter_records, read_record
from dataset_builders.contracts.tokenized import PatchFormat, PixelConfig, PixelStore
from dataset_builders.pictures.images import open_rgb, read_rgb
from dataset_builders.pictures.pixels import encode_image, encode_rgb, pixel_values
from dataset_builders.records.pixel_codecs import decode_sample, encode_sample
from stages.shared.artifacts.artifact import Artifact
from stages.shared.chat_format.chat import ChatEncoder
from stages.shared.inputs.model_directory import ModelDirectory
from stages.tokenize.config import TokenizeConfig
from tests.bench.command import bench_folder, make_parser, table_head, table_row
from tests.helpers.samples import make_samples_artifact, turns
from tests.helpers.torchvision_reference import image_processor, torchvision_version

TORCHVISION = torchvision_version()  # repaired if it does not load by itself, before transformers' models import it

from stages.tokenize import shard as tokenize_shard  # noqa: E402
from tests.helpers.tiny_model import tiny_hf_dir  # noqa: E402

# The values in the preprocessor_config.json of Qwen3-VL.
CONFIG = PixelConfig(
    min_pixels=65_536,
    max_pixels=16_777_216,
    patch_format=PatchFormat(
        patch_size=16, temporal_patch_size=2, merge_size=2, image_mean=(0.5,) * 3, image_std=(0.5,) * 3
    ),
)
TOKENIZE = TokenizeConfig(max_seq_len=1 << 20, max_pixels=None, max_skip_fraction=1.0)
CODECS = ("u8", "u8_zstd", "original")
NAME = "train/shard-00000.tar"
_SHARD = 50  # number of images
_CHUNK = 10  # number of images that each side does in one go, so that both run under the same conditions


def photo(width: int, height: int, rng: np.random.Generator) -> np.ndarray:
    """Return (height, width, 3) uint8: shapes of three sizes and a sensor's noise."""
    picture = np.zeros((height, width, 3))
    for step, weight in ((96, 0.5), (24, 0.3), (6, 0.2)):
        coarse = rng.integers(0, 256, (height // step + 2, width // step + 2, 3), np.uint8)
        picture += weight * np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC))
    return (picture + rng.normal(0, 5, picture.shape)).clip(0, 255).astype(np.uint8)


def document(width: int, height: int, rng: np.random.Generator) -> np.ndarray:
    """Return (height, width, 3) uint8: lines of dark text and a table on white."""
    image = Image.new("RGB", (width, height), "white")
    draw = ImageDraw.Draw(image)
    for top in range(12, height - 14, 15):
        words = ["".join(chr(97 + c) for c in rng.integers(0, 26, rng.integers(2, 10))) for _ in range(width // 52)]
        draw.text((12, top), " ".join(words), fill="black")
    for left in range(0, width, 120):
        draw.line((left, height // 2, left, height), fill=(90, 90, 90))
    return np.asarray(image)


def make_pictures(number: int) -> list[bytes]:
    """Return JPEG files at quality 92, 448 to 1,000 pixels a side. Every fourth is a document."""
    rng = np.random.default_rng(0)
    files = []
    for i in range(number):
        width, height = (int(n) for n in rng.integers(448, 1001, 2))
        out = io.BytesIO()
        Image.fromarray((document if i % 4 == 3 else photo)(width, height, rng)).save(out, "JPEG", quality=92)
        files.append(out.getvalue())
    return files


def make_sample(number: int, picture: bytes) -> Sample:
    """Return a sample with one question about one image."""
    text = turns(
        f"{IMAGE_SLOT}What does picture {number} show? Answer in one short sentence.", f"It is number {number}."
    )
    return Sample(key=f"bench/{number:08d}", messages=text, images=(picture,))


def rate(function: Callable[[], object], number: int, rounds: int) -> float:
    """Return calls per second: the median of `rounds` after one warm-up round."""
    function()
    seconds = []
    for _ in range(rounds):
        started = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - started)
    return number / statistics.median(seconds)


def each(function: Callable[..., object], items: Sequence[object]) -> Callable[[], None]:
    return lambda: [function(item) for item in items] and None


class Recorder:
    """The work of a worker on a sample: file bytes -> record in a shard.

    Args:
        shard_samples: number of samples after which a shard is committed and the next one begins; 0 means one shard. A
            file in memory that only grows would measure how fast a virtual machine gets memory, 10 us a page where this
            was found.
    """

    def __init__(self, directory: Path, codec: str, chat: ChatEncoder, shard_samples: int = 0) -> None:
        self.pixels = PixelStore(codec=codec, config=CONFIG)
        self.chat = chat
        self._directory, self._shard_samples = directory, shard_samples
        self.writer = ShardWriter(directory, NAME)

    def __call__(self, sample: Sample) -> None:
        if self._shard_samples and len(self.writer.ranges) == self._shard_samples:
            self.writer.commit("train")
            self.writer = ShardWriter(self._directory, NAME)
        (text,) = self.chat.tokenize([sample.messages])
        kept, tokenized, _ = tokenize_shard.tokenize_sample(sample, text, self.chat, self.pixels, TOKENIZE)
        self.writer.write(sample.key, encode_sample(tokenized, self.pixels.codec, {"0.jpg": kept.images[0]}))


def compare_end_to_end(samples: Sequence[Sample], root: Path, rounds: int) -> list[tuple[str, str]]:
    """Compare athanor with transformers, in rotation, with one thread each."""
    chat = ChatEncoder(ModelDirectory(tiny_hf_dir()))
    recorder, processor = Recorder(root / "end_to_end", "u8", chat, _SHARD), image_processor(CONFIG)

    def theirs(sample: Sample) -> None:
        processor(images=[Image.open(io.BytesIO(sample.images[0])).convert("RGB")], return_tensors="pt")

    seconds: dict[Callable[[Sample], None], list[float]] = {recorder: [], theirs: []}
    for _ in range(rounds + 1):
        spent = dict.fromkeys(seconds, 0.0)
        for start in range(0, len(samples), _CHUNK):
            for side in seconds:
                started = time.perf_counter()
                for sample in samples[start : start + _CHUNK]:
                    side(sample)
                spent[side] += time.perf_counter() - started
        for side, value in spent.items():
            seconds[side].append(value)
    ours_rate, their_rate = (len(samples) / statistics.median(values[1:]) for values in seconds.values())
    equal = sum(_is_equal(sample.images[0], processor) for sample in samples)
    return [
        ("ours: JPEG bytes -> record in a shard, images/s", f"{ours_rate:,.0f}"),
        ("transformers' torchvision processor: JPEG bytes -> pixel_values, images/s", f"{their_rate:,.0f}"),
        ("ours / transformers' (at least 1.2)", f"{ours_rate / their_rate:.2f}"),
        ("bit-equal pictures", f"{equal} of {len(samples)}"),
    ]


def _is_equal(data: bytes, processor: Callable[..., dict[str, torch.Tensor]]) -> bool:
    out = processor(images=[Image.open(io.BytesIO(data)).convert("RGB")], return_tensors="pt")
    patches, grid = encode_image(data, CONFIG)
    is_same_grid = out["image_grid_thw"][0].tolist() == grid.tolist()
    return is_same_grid and np.array_equal(pixel_values(patches, CONFIG.patch_format), out["pixel_values"].numpy())


def measure_parts(samples: Sequence[Sample], rounds: int) -> list[tuple[str, str]]:
    """Measure the steps of the way one by one."""
    files = [sample.images[0] for sample in samples]
    decoded = [read_rgb(data) for data in files]
    chat = ChatEncoder(ModelDirectory(tiny_hf_dir()))
    conversations = [sample.messages for sample in samples]
    parts = {
        "decode by Pillow": each(lambda data: np.asarray(open_rgb(data)), files),
        "decode, fast where it is equal": each(read_rgb, files),
        "scale and cut into patches": each(lambda pixels: encode_rgb(pixels, CONFIG), decoded),
        "text, one call each": each(lambda messages: chat.tokenize([messages]), conversations),
        "text, 200 in one call": lambda: chat.tokenize(conversations),
    }
    return [(f"{name}, /s", f"{rate(part, len(samples), rounds):,.0f}") for name, part in parts.items()]


def measure_codec(codec: str, samples: Sequence[Sample], root: Path, rounds: int) -> list[tuple[str, str]]:
    """Return bytes, write rate and read rates of one codec."""
    recorder = Recorder(root / codec, codec, ChatEncoder(ModelDirectory(tiny_hf_dir())))
    started = time.perf_counter()
    with recorder.writer:
        for sample in samples:
            recorder(sample)
        written = len(samples) / (time.perf_counter() - started)
        recorder.writer.commit("train")
    path, ranges = root / codec / NAME, recorder.writer.ranges
    order = np.random.default_rng(1).permutation(len(ranges)).tolist()
    sizes = np.array([at.size for at in ranges])
    is_document = np.arange(len(sizes)) % 4 == 3
    pixels, out = recorder.pixels, np.empty((8192, 1536), np.float32)

    def at_random(use: Callable[[np.ndarray], object] = len) -> None:
        for at in (ranges[i] for i in order):
            use(decode_sample(at.key, read_record(path, at.offset, at.size), pixels).patches)

    def in_order(use: Callable[[np.ndarray], object] = len) -> None:
        for key, fields in iter_records(path):
            use(decode_sample(key, fields, pixels).patches)

    def to_float(patches: np.ndarray) -> None:
        pixel_values(patches, CONFIG.patch_format, out)

    rows = [
        ("bytes a sample (photo / document)", f"{sizes[~is_document].mean():,.0f} / {sizes[is_document].mean():,.0f}"),
        ("bytes a sample, all", f"{sizes.mean():,.0f}"),
        ("JPEG bytes -> record, images/s", f"{written:,.0f}"),
    ]
    reads = {
        "read at random, uint8 patches, images/s": at_random,
        "read in order, uint8 patches, images/s": in_order,
        "read at random, float32 pixel values, images/s": lambda: at_random(to_float),
        "read in order, float32 pixel values, images/s": lambda: in_order(to_float),
    }
    few = rounds if codec != "original" else 1
    rows += [(name, f"{rate(read, len(samples), few):,.0f}") for name, read in reads.items()]
    return [(f"{codec}: {name}", value) for name, value in rows]


def _work(source: Artifact, directory: Path, barrier: object, times: object) -> None:
    """Run a worker of `measure_processes` on one shard, measured after everything is loaded."""
    torch.set_num_threads(1)
    task = _task(source, directory)
    tokenize_shard.encoder_of(task.hf_dir, task.processor_digest, task.config)
    tokenize_shard.tokenize_shard(task)
    shutil.rmtree(directory)
    barrier.wait()
    started = time.time()
    tokenize_shard.tokenize_shard(task)
    times.put((started, time.time()))


def _task(source: Artifact, directory: Path) -> tokenize_shard.ShardTask:
    return tokenize_shard.ShardTask(
        samples=source.dir,
        shard=source.manifest.shards[0],
        directory=directory,
        hf_dir=tiny_hf_dir(),
        processor_digest="bench",
        pixels=PixelStore(codec="u8", config=CONFIG),
        config=TOKENIZE,
    )


def measure_processes(samples: Sequence[Sample], root: Path, rounds: int) -> list[tuple[str, str]]:
    """Measure one process with one shard, and two processes with one shard each, all warm."""
    source = make_samples_artifact(root / "samples", {NAME: samples})
    tiny_hf_dir()  # made here, once
    context = multiprocessing.get_context("spawn")
    rates: dict[int, list[float]] = {1: [], 2: []}
    for turn in range(rounds):
        for number, found in rates.items():
            barrier, times = context.Barrier(number), context.Queue()
            arguments = [(source, root / f"p{turn}-{number}-{i}", barrier, times) for i in range(number)]
            workers = [context.Process(target=_work, args=args) for args in arguments]
            for worker in workers:
                worker.start()
            spans = [times.get() for _ in workers]
            for worker in workers:
                worker.join()
            found.append(number * len(samples) / (max(end for _, end in spans) - min(start for start, _ in spans)))
            for _, directory, *_ in arguments:
                shutil.rmtree(directory)
    one, two = (statistics.median(found) for found in rates.values())
    return [
        ("whole stage's work on a shard, one process, images/s", f"{one:,.0f}"),
        ("the same, two processes, images/s", f"{two:,.0f}"),
        ("two processes / one (at least 1.8)", f"{two / one:.2f}"),
    ]


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--pictures", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--directory", default="/dev/shm" if Path("/dev/shm").is_dir() else None)
    args = parser.parse_args()
    torch.set_num_threads(1)
    samples = [make_sample(i, data) for i, data in enumerate(make_pictures(args.pictures))]
    mean_mpix = statistics.mean(np.prod(read_rgb(s.images[0]).shape[:2]) for s in samples) / 1e6
    mean_bytes = statistics.mean(len(s.images[0]) for s in samples)
    rows = [("pictures", f"{len(samples)}, {mean_mpix:.3f} Mpix and {mean_bytes:,.0f} bytes on average")]
    with bench_folder(args.directory) as root:
        if TORCHVISION is None:
            rows.append(("transformers' torchvision processor", "not compared: torchvision does not import"))
        else:
            rows += compare_end_to_end(samples, root, args.rounds)
        rows += measure_parts(samples, args.rounds)
        for codec in CODECS:
            rows += measure_codec(codec, samples, root, args.rounds)
        rows += measure_processes(samples, root, args.rounds)
    names = ("torch", "transformers", "pillow", "simplejpeg", "pyarrow", "numpy")
    versions = {"python": platform.python_version(), "torchvision": TORCHVISION, **{n: version(n) for n in names}}
    print(", ".join(f"{name} {value}" for name, value in versions.items()))
    print()
    print("\n".join([table_head(["one core, one thread"], ["figure"]), *map(table_row, rows)]))


if __name__ == "__main__":
    main()
