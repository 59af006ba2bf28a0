"""The speed and the memory of reading videos, beside transformers' video processor with PyAV.

    speed    frames and clips a second of convert and of tokenize on one core, and of transformers' load_video and
             processor, in rotation
    memory   peak memory of a ten-minute file: of the process that tokenizes, of its decoder, and of transformers' way
    tiny     tokenize of tiny clips, which shows what a file costs without its frames

Run: python -m tests.bench.bench_videos [speed|memory|tiny] [--clips N] [--rounds N]

Clips are drawn: 10 s of 640 x 360 pixels at 30 frames a second, H.264. Files lie in memory (/dev/shm). A frame is one
of the file, whether it is read or only passed over. transformers' pixels need torchvision
(tests/helpers/torchvision_reference.py); without it, its frames are resized and cut by our code, and the table says so.
"""

import functools
import io
import os
import resource
import shutil
import statistics
import time
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path
from pkgutil import resolve_name

import av
import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from dataset_builders.contracts.sample import VIDEO_SLOT, Sample, Video
from dataset_builders.contracts.shard_io import iter_records
from dataset_builders.contracts.tokenized import PixelStore
from dataset_builders.pictures.pixels import encode_frames, pixel_values
from dataset_builders.records.pixel_codecs import decode_sample
from dataset_builders.videos.sampling import resized_frame
from stages.convert.stage import STAGE, ConvertConfig
from stages.embedded_data.moves import ROW_SCHEMA
from stages.shared.artifacts.artifact import External
from stages.shared.artifacts.workers import StageResources
from stages.shared.chat_format.config import VideoFormat
from stages.shared.chat_format.images import load_image_config, load_video_config
from stages.shared.inputs.model_directory import ModelDirectory
from stages.tokenize.config import TokenizeConfig
from tests.bench.bench_tokenize import photo
from tests.bench.command import bench_folder, make_parser, table_head, table_row
from tests.bench.memory import alone, memory
from tests.helpers.clips import numbered_clip
from tests.helpers.samples import make_samples_artifact, turns
from tests.helpers.torchvision_reference import torchvision_version

TORCHVISION = torchvision_version()  # repaired if it does not load by itself, before transformers' models import it

from transformers.video_utils import load_video  # noqa: E402

from stages.tokenize import shard as tokenize_shard  # noqa: E402
from tests.helpers.tiny_model import tiny_hf_dir  # noqa: E402

HEIGHT, WIDTH, RATE, SECONDS = 360, 640, 30, 10
DRAWINGS = 8  # clips that are drawn; others are the same with other bytes behind them
REPEATS = 60  # of one clip in the long file
TINY = 500
NAME = "train/shard-00000.tar"
# The values in the video_preprocessor_config.json of Qwen3-VL.
FORMAT = VideoFormat(fps=2, min_pixels=4096, max_pixels=25_165_824)
CONVERT = {
    "builder": "openai_messages",
    "heldout_fraction": 0.0,
    "min_heldout": 0,
    "seed": 0,
    "max_image_pixels": 10**7,
    "min_image_side": 8,
    "shard_size_mb": 1000,
    "max_skip_fraction": 0,
}


def drawn_clip(seed: int, seconds: int = SECONDS, repeats: int = 1, **options: str) -> bytes:
    """Return an mp4 of a window that moves over a photo-like picture. `repeats` times in a row, encoded once."""
    rng = np.random.default_rng(seed)
    picture = photo(WIDTH + 300, HEIGHT + 300, rng)
    out = io.BytesIO()
    with av.open(out, "w", format="mp4") as file:
        stream = file.add_stream("libx264", rate=RATE, options=options)
        stream.pix_fmt, stream.width, stream.height = "yuv420p", WIDTH, HEIGHT
        stream.codec_context.time_base = Fraction(1, RATE)
        packets = []
        for number in range(seconds * RATE):
            x, y = (int(150 + 149 * np.sin(number / slow + seed)) for slow in (29, 47))
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(picture[y : y + HEIGHT, x : x + WIDTH]), "rgb24")
            frame.pts, frame.time_base = number, Fraction(1, RATE)
            packets += stream.encode(frame)
        packets += stream.encode(None)
        found = [(bytes(packet), packet.pts, packet.dts, packet.time_base, packet.is_keyframe) for packet in packets]
        for repeat in range(repeats):
            for data, pts, dts, base, is_keyframe in found:
                packet, later = av.Packet(data), int(repeat * seconds / base)
                packet.pts, packet.dts, packet.time_base = pts + later, dts + later, base
                packet.stream, packet.is_keyframe = stream, is_keyframe
                file.mux(packet)
    return out.getvalue()


def numbered(clip: bytes, number: int) -> bytes:
    """Return the file with a box that players skip, so that no two files are the same."""
    return clip + (16).to_bytes(4, "big") + b"free" + number.to_bytes(8, "big")


class Work:
    """One set of clips and all ways to read it.

    Args:
        root: a folder for everything that is written.
    """

    def __init__(self, root: Path, clips: Sequence[bytes], videos: VideoFormat = FORMAT) -> None:
        self.root, model = root, ModelDirectory(tiny_hf_dir())  # the model is not kept: it is not pickled
        self.videos = load_video_config(model, videos)
        self.pixels = PixelStore(codec="u8", config=load_image_config(model))
        self.paths = [root / f"{number}.mp4" for number in range(len(clips))]
        (root / "raw" / "clips").mkdir(parents=True)
        rows = []
        text = turns(f"{VIDEO_SLOT}What moves?", "the window")
        samples = []
        for number, (path, clip) in enumerate(zip(self.paths, clips)):
            path.write_bytes(clip)
            samples.append(Sample(key=f"clips/{number:08d}", messages=text, images=(), videos=(Video(data=clip),)))
            messages = [{"role": "user", "content": "<video>What moves?"}]
            messages.append({"role": "assistant", "content": f"window {number}"})
            rows.append({"messages": messages, "videos": [{"bytes": clip, "path": None}]})
        pq.write_table(pa.Table.from_pylist(rows, ROW_SCHEMA), root / "raw" / "clips" / "train.parquet")
        source = make_samples_artifact(root / "samples", {NAME: samples})
        self.task = tokenize_shard.ShardTask(
            samples=source.dir,
            shard=source.manifest.shards[0],
            directory=root / "tokenized",
            hf_dir=tiny_hf_dir(),
            processor_digest="bench",
            pixels=self.pixels,
            videos=self.videos,
            config=TokenizeConfig(max_seq_len=1 << 20, max_pixels=None, max_skip_fraction=0.0, videos=videos),
        )
        tokenize_shard.encoder_of(self.task.hf_dir, self.task.processor_digest, self.task.config)

    @functools.cached_property
    def processor(self) -> Callable[..., dict[str, torch.Tensor]]:
        """transformers' video processor with the same settings."""
        size = {"shortest_edge": self.videos.min_pixels, "longest_edge": self.videos.max_pixels}
        own = self.videos.model_dump(exclude={"min_pixels", "max_pixels", "patch_format"})
        made = resolve_name(ModelDirectory(tiny_hf_dir()).family.video_processor.reference)
        return made(size=size, **own, **self.videos.patch_format.model_dump())

    def convert(self, decode_check: str) -> None:
        """Run the stage without its page, which draws twelve contact sheets, whatever the number of clips."""
        inputs = {"raw": External(self.root / "raw", "raw", "0" * 16)}
        made = STAGE.run(
            ConvertConfig(**CONVERT, decode_check=decode_check), inputs, self.root / "out", StageResources()
        )
        assert sum(shard.num_samples for shard in made.shards) == len(self.paths), made.skips
        shutil.rmtree(self.root / "out")

    def tokenize(self) -> None:
        shutil.rmtree(self.task.directory, ignore_errors=True)
        tokenize_shard.tokenize_shard(self.task)

    def load(self, path: Path) -> tuple[np.ndarray, object]:
        """Return the frames that transformers' processor chooses, by its own PyAV loader, and their metadata."""
        choose = functools.partial(self.processor.sample_frames, fps=self.videos.fps)
        return load_video(str(path), backend="pyav", sample_indices_fn=lambda metadata, **_: choose(metadata))

    def process(self, path: Path) -> np.ndarray | None:
        """Return transformers' pixel values, or None without torchvision: then our code has resized and cut."""
        frames, metadata = self.load(path)
        if TORCHVISION is None:
            sides = resized_frame(len(frames), *frames.shape[1:3], self.videos)
            return list(encode_frames(frames, *sides, self.videos.patch_format)) and None
        planes = torch.from_numpy(frames).permute(0, 3, 1, 2)
        out = self.processor([planes], video_metadata=[metadata], do_sample_frames=False, return_tensors="pt")
        return out["pixel_values_videos"].numpy()

    def count_equal(self) -> int:
        """Return how many clips' stored pixels, as floats, are transformers' bit by bit."""
        equal = 0
        for path, (key, fields) in zip(self.paths, iter_records(self.task.directory / NAME), strict=True):
            stored, patch_format = decode_sample(key, fields, self.pixels), self.videos.patch_format
            first, later = (pixel_values(p, patch_format) for p in (stored.patches, stored.later_patches))
            # Both frames of a group in each: a frame stands twice in what `pixel_values` gives.
            shape = (len(first), 3, patch_format.temporal_patch_size, -1)
            both = np.stack([first.reshape(shape)[:, :, 0], later.reshape(shape)[:, :, 0]], 2)
            equal += np.array_equal(both.reshape(len(first), -1), self.process(path))
        return equal


def cpu_seconds() -> float:
    """Return the seconds of CPU of this process and of all that it started."""
    own, gone = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    living = [child.cpu_times() for child in psutil.Process().children(recursive=True)]
    return sum(used.ru_utime + used.ru_stime for used in (own, gone)) + sum(t.user + t.system for t in living)


def bench_speed(root: Path, num_clips: int, rounds: int) -> None:
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})  # the decoder is a process of its own, on the same core
    torch.set_num_threads(1)
    drawings = [drawn_clip(seed, preset="veryfast") for seed in range(DRAWINGS)]
    clips = [numbered(drawings[number % DRAWINGS], number) for number in range(num_clips)]
    work = Work(root, clips)
    theirs = "transformers: load_video by PyAV, then " + ("its processor" if TORCHVISION else "our resize and cut")
    ways: dict[str, Callable[[], object]] = {
        "athanor convert, decode_check: full": lambda: work.convert("full"),
        "athanor convert, decode_check: header": lambda: work.convert("header"),
        "athanor tokenize, u8": work.tokenize,
        "transformers: load_video by PyAV": lambda: [work.load(path) and None for path in work.paths],
        theirs: lambda: [work.process(path) is None for path in work.paths],
    }
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for turn in range(rounds + 1):  # the first one warms up
        for name, way in ways.items():
            clock, cpu = time.perf_counter(), cpu_seconds()
            way()
            if turn:
                found[name].append((time.perf_counter() - clock, cpu_seconds() - cpu))
    medians = {name: [statistics.median(column) for column in zip(*values)] for name, values in found.items()}
    size = statistics.mean(map(len, clips)) / 1000
    print(f"{num_clips} clips of {SECONDS} s, {WIDTH} x {HEIGHT} at {RATE}/s, H.264, {size:.0f} kB; one core\n")
    print(table_head([""], ["frames/s", "clips/s", "clips a second of CPU", "times transformers", "by CPU"]))
    for name, (clock, cpu) in medians.items():
        rates = [f"{num_clips * SECONDS * RATE / clock:,.0f}", f"{num_clips / clock:.2f}", f"{num_clips / cpu:.2f}"]
        print(table_row([name, *rates, *(f"{b / a:.2f}" for a, b in zip((clock, cpu), medians[theirs]))]))
    if TORCHVISION:
        print(f"\nbit-equal clips: {work.count_equal()} of {num_clips} (torchvision {TORCHVISION})")


def _tokenize_long(work: Work) -> int:
    """Return the peak memory of the decoder in bytes."""
    torch.set_num_threads(1)
    work.tokenize()
    children = [child for child in psutil.Process().children() if "decode_process" in " ".join(child.cmdline())]
    return max(memory(process=child.pid) for child in children)


def _process_long(work: Work, is_whole: bool) -> None:
    torch.set_num_threads(1)
    (work.process if is_whole else work.load)(work.paths[-1])


def bench_memory(root: Path) -> None:
    clip, small = drawn_clip(0, repeats=REPEATS, preset="ultrafast"), numbered_clip(8)
    first, second = (Work(root / name, clips) for name, clips in (("one", [clip]), ("two", [small, clip])))
    frames = REPEATS * SECONDS * RATE
    print(f"one file of {REPEATS * SECONDS} s, {frames:,} frames of {WIDTH} x {HEIGHT}, {len(clip) / 1e6:.0f} MB\n")
    print(table_head([""], ["before, MB", "at the peak, MB", "its decoder, MB"]))
    for name, work in (("athanor tokenize", second), ("the same, where the file is one that is checked", first)):
        decoder, before, peak = alone(_tokenize_long, work)
        print(table_row([name, *(f"{size / 1e6:,.0f}" for size in (before, peak, decoder))]), flush=True)
    for name, is_whole in (("transformers' load_video by PyAV", False), ("the same and its processor", True)):
        _, before, peak = alone(_process_long, first, is_whole)
        print(table_row([name, f"{before / 1e6:,.0f}", f"{peak / 1e6:,.0f}", ""]), flush=True)
    print(f"\nload_video of every frame was not tried: its array alone is {frames * WIDTH * HEIGHT * 3 / 1e9:.1f} GB")


def bench_tiny(root: Path, rounds: int) -> None:
    clips = [numbered(numbered_clip(8, 4, size=(64, 64)), number) for number in range(TINY)]
    work, found = Work(root, clips, VideoFormat(fps=4, min_pixels=1)), []
    torch.set_num_threads(1)
    for _ in range(rounds):
        clock, cpu = time.perf_counter(), cpu_seconds()
        work.tokenize()
        found.append(f"{time.perf_counter() - clock:.2f} ({cpu_seconds() - cpu:.2f})")
    print(f"tokenize of {TINY} clips of 8 frames, 64 x 64, seconds by the clock (of CPU): {', '.join(found)}")


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("what", nargs="?", choices=["speed", "memory", "tiny"])
    parser.add_argument("--clips", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--directory", default="/dev/shm" if Path("/dev/shm").is_dir() else None)
    args = parser.parse_args()
    with bench_folder(args.directory) as root:
        if args.what in (None, "memory"):
            bench_memory(root)
        if args.what in (None, "tiny"):
            bench_tiny(root / "tiny", args.rounds)
        if args.what in (None, "speed"):  # the last one, because it binds this process to a core
            bench_speed(root / "speed", args.clips, args.rounds)


if __name__ == "__main__":
    main()
