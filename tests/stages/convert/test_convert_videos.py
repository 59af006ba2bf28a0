"""convert with videos: files untouched, alike ones in one split, damaged and endless ones left out and counted."""

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from dataset_builders.contracts.sample import SPLITS, file_digests
from tests.helpers.clips import numbered_clip, numbered_pngs
from tests.helpers.json_rows import json_lines, write_file
from tests.helpers.raw_rows import png
from tests.stages.convert.test_convert import all_samples, convert, quarantine, samples_of

pytestmark = pytest.mark.promise(
    "Videos are kept as they are, split and deduplicated by their content, and left out with a reason where they are "
    "damaged, empty, too long or too large; sound is counted and not read."
)

NUM_CLIPS = 12


def row(videos: list, question: str = "What moves?", **fields) -> dict:
    messages = [{"role": "user", "content": f"{'<video>' * len(videos)}{question}"}]
    return {"messages": [*messages, {"role": "assistant", "content": "It does."}], "videos": videos, **fields}


def source_of(path: Path, rows: list, **files: bytes) -> Path:
    write_file(path / "s.jsonl", json_lines(rows))
    for name, data in files.items():
        write_file(path / name.replace("_", "."), data)
    return path


def run(root: Path, source: Path, **changes):
    settings = {"builder": "openai_messages", "options": {}, "max_skip_fraction": 0.9}
    return convert(root, source, **settings | changes)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Return converted clips, each in two rows with different questions, beside lists of frames, images and texts."""
    path = tmp_path_factory.mktemp("clips")
    frames = numbered_pngs(4, first=900)
    files = {f"clip{n}_mp4": numbered_clip(9, first=20 * n, audio=n < 2) for n in range(NUM_CLIPS)}
    files |= {f"frame{n}_png": frame for n, frame in enumerate(frames)} | {"image_png": png(1)}
    rows = [row([f"clip{n}.mp4"], question) for question in ("What moves?", "Where?") for n in range(NUM_CLIPS)]
    rows.append(row([{"frames": [f"frame{n}.png" for n in range(4)], "fps": 2}]))
    rows.append(row([{"frames": ["frame0.png", "frame1.png"], "timestamps": [0, 9]}], "Where?"))
    rows.append(row(["clip0.mp4"]))  # a duplicate
    rows.append(row([{"path": "clip0.mp4", "start": 0.1}]))  # none: a part of the same file
    rows.append(row(["clip1.mp4", "clip2.mp4"], images=["image.png"]) | {"images": ["image.png"]})
    rows[-1]["messages"][0]["content"] += "<image>"
    return run(path / "root", source_of(path / "raw", rows, **files), heldout_fraction=0.4), files


def test_files_are_untouched(made):
    artifact, files = made
    samples = {sample.key: sample for sample in all_samples(artifact)}
    assert len(samples) == 2 * NUM_CLIPS + 4
    assert [samples[f"s/{n:08d}"].videos[0].data for n in range(NUM_CLIPS)] == list(files.values())[:NUM_CLIPS]
    frames = samples[f"s/{2 * NUM_CLIPS:08d}"].videos[0]
    assert frames.frames == numbered_pngs(4, first=900) and frames.timestamps == (0.0, 0.5, 1.0, 1.5)
    assert samples[f"s/{2 * NUM_CLIPS + 3:08d}"].videos[0].start == 0.1
    assert [len(samples[f"s/{2 * NUM_CLIPS + 4:08d}"].files)] == [3]


def test_a_file_or_frame_is_never_in_both_splits(made):
    artifact, _ = made
    digests = [{digest for s in samples_of(artifact, split) for digest in file_digests(s)} for split in SPLITS]
    assert all(digests) and not digests[0] & digests[1]
    splits = {sample.key: split for split in SPLITS for sample in samples_of(artifact, split)}
    for n in range(NUM_CLIPS):
        assert splits[f"s/{n:08d}"] == splits[f"s/{n + NUM_CLIPS:08d}"]


def test_duplicates_are_left_out_and_counts_told(made):
    artifact, _ = made
    assert artifact.manifest.skips == {"duplicate_sample": 1}
    stats = artifact.manifest.stats
    assert stats["videos"] == {
        "shown": 2 * NUM_CLIPS + 2 + 1 + 2,
        "frames": 9 * (2 * NUM_CLIPS + 2) + 6 + 6,  # a part from 0.1 s on lacks three
        "lists_of_frames": 2,
        "with_audio_that_is_not_read": 6,
    }
    assert stats["picture_formats"] == {"PNG": 5, "h264": NUM_CLIPS} and stats["picture_modes"] == {"RGB": 5}
    table = pq.read_table(artifact.dir / "pictures.parquet").to_pylist()
    assert len(table) == NUM_CLIPS + 5 and {(r["width"], r["height"]) for r in table if r["format"] == "h264"} == {
        (96, 64)
    }
    report = json.loads((artifact.dir / "report.json").read_text())
    assert "Frames of a video" in json.dumps(report)


def test_what_is_left_out_has_its_reason(tmp_path):
    whole = numbered_clip(30)
    webm = numbered_clip(30, codec="libvpx-vp9", container="webm")
    files = {
        "cut_webm": webm[: len(webm) // 2],
        "text_mp4": b"no video",
        "empty_mp4": b"",
        "long_mp4": numbered_clip(41),
        "large_mp4": numbered_clip(2, size=(1002, 1000)),
        "small_mp4": numbered_clip(2, size=(6, 64)),
        "whole_mp4": whole,
        "a_png": numbered_pngs(1)[0],
        "b_png": png(1),
        "c_png": numbered_pngs(1)[0][:80],
    }
    values = {
        "cut.webm": "truncated_image",
        "text.mp4": "decode_error",
        "empty.mp4": "empty",
        "long.mp4": "too_many_frames",
        "large.mp4": "bomb",
        "small.mp4": "too_small",
        "none.mp4": "image_not_found",
    }
    others = [
        ({"path": "whole.mp4", "start": 60}, "no_frames"),
        ({"frames": ["a.png", "b.png"], "fps": 2}, "decode_error"),  # of different sizes
        ({"frames": ["a.png", "c.png"], "fps": 2}, "truncated_image"),
        ({"frames": ["a.png"], "fps": 0}, "no_times"),
    ]
    rows = [
        row([value])
        for value in (*values, *(value for value, _ in others), "whole.mp4", {"path": "long.mp4", "end": 1})
    ]
    made = run(tmp_path / "root", source_of(tmp_path / "raw", rows, **files), max_video_frames=40)
    found = [line["reason"] for line in quarantine(made.dir)]
    assert found == [*values.values(), *(reason for _, reason in others)]
    assert made.manifest.num_samples == 2
    assert all(line["detail"].startswith("video 0: ") for line in quarantine(made.dir)[3:6])


def test_without_decoding_damage_after_the_header_passes(tmp_path):
    data = numbered_clip(600, codec="mpeg4")  # whose parser reads no data of frames
    place = data.index(b"moov") - 1000
    damaged = data[:place] + bytes(900) + data[place + 900 :]
    source = source_of(tmp_path / "raw", [row(["a.mp4"]), row(["b.mp4"])], a_mp4=damaged, b_mp4=data)
    assert run(tmp_path / "full", source).manifest.skips == {"decode_error": 1}
    header = run(tmp_path / "header", source, decode_check="header")
    assert header.manifest.skips == {} and header.manifest.stats["videos"]["frames"] == 1200
