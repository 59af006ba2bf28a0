"""Videos in the rows of every form: files, parts of files and lists of frames, with the times that the row says."""

import io
import json
import os
import tarfile

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dataset_builders.contracts.sample import Message, Sample, SkipSample, Video, from_fields, to_fields
from dataset_builders.readers import video_refs
from tests.helpers.clips import numbered_clip, numbered_pngs
from tests.helpers.json_rows import data_uri, read_source, reasons, turns, write_file

pytestmark = pytest.mark.promise(
    "Videos are read from messages, LLaVA's rows, tables, tars and folders, with the times that the rows say; a list "
    "of frames without a rate is left out."
)

CLIP, OTHER = numbered_clip(5), numbered_clip(7, codec="libvpx-vp9", container="webm")
FRAMES = numbered_pngs(3)
ANSWER = {"role": "assistant", "content": "It moves."}


def read_rows(tmp_path, builder, rows, **options):
    write_file(tmp_path / "s.jsonl", "".join(json.dumps(row) + "\n" for row in rows).encode())
    write_file(tmp_path / "clips/1.mp4", CLIP)
    write_file(tmp_path / "clips/2.webm", OTHER)
    write_file(tmp_path / "clips/empty.mp4", b"")
    for number, frame in enumerate(FRAMES):
        write_file(tmp_path / f"frames/{number}.png", frame)
    return read_source(builder, tmp_path, **options)


def video_of(tmp_path, value, **options) -> Video | tuple[str, str]:
    """Return the video of a row with this field, or the reason and the detail of what was left out."""
    (item,) = read_rows(tmp_path, "openai_messages", [asked("<video>What?", videos=[value])], **options)
    return item.videos[0] if isinstance(item, Sample) else (item.reason, item.detail)


def asked(content, **fields):
    return {"messages": [{"role": "user", "content": content}, ANSWER], **fields}


def frames_at(*timestamps):
    return Video(frames=FRAMES, timestamps=timestamps)


NAMES = [f"frames/{number}.png" for number in range(3)]
VALUES = {
    "a path": ("clips/1.mp4", Video(data=CLIP)),
    "an object": ({"path": "clips/1.mp4"}, Video(data=CLIP)),
    "a data URI": (data_uri(CLIP).replace("image/png", "video/mp4"), Video(data=CLIP)),
    "a part of a file": ({"path": "clips/1.mp4", "start": 0.04, "end": 1}, Video(data=CLIP, start=0.04, end=1.0)),
    "Qwen's names": (
        {"video": "clips/1.mp4", "video_start": 1, "fps": 2, "max_pixels": 9},
        Video(data=CLIP, start=1.0),
    ),
    "a URL in an object": ({"video_url": {"url": "clips/2.webm"}, "end": 2}, Video(data=OTHER, end=2.0)),
    "frames with a rate": ({"frames": NAMES, "fps": 4}, frames_at(0.0, 0.25, 0.5)),
    "a list in video": ({"video": NAMES, "fps": 4}, frames_at(0.0, 0.25, 0.5)),
    "the rate of sampling": (
        {"video": NAMES, "sample_fps": 1, "fps": 4},
        Video(frames=FRAMES, timestamps=(0.0, 1.0, 2.0)),
    ),
    "frames from a start": ({"frames": NAMES, "fps": 2, "start": 8}, frames_at(8.0, 8.5, 9.0)),
    "frames with times": (
        {"frames": NAMES, "timestamps": [0, 4.5, 5]},
        Video(frames=FRAMES, timestamps=(0.0, 4.5, 5.0)),
    ),
    "frames in a part": (
        {"frames": NAMES, "timestamps": [0, 4.5, 5], "start": 1, "end": 4.5},
        Video(frames=FRAMES[1:2], timestamps=(4.5,)),
    ),
}


@pytest.mark.parametrize("name", VALUES)
def test_every_form_of_a_video(name, tmp_path):
    value, expected = VALUES[name]
    assert video_of(tmp_path, value) == expected


def test_a_path_as_qwens_tools_write_it(tmp_path):
    assert video_of(tmp_path, f"file://{tmp_path}/clips/1.mp4") == Video(data=CLIP)
    reason, detail = video_of(tmp_path, "file:///etc/hostname.mp4")
    assert reason == "image_not_found" and "/etc/hostname.mp4" in detail


def test_a_gif_in_a_list_of_videos_is_a_file(tmp_path):
    write_file(tmp_path / "clips/3.gif", OTHER)  # what the file holds is seen later
    rows = [asked("<video>What?", videos=["clips/3.gif"])]
    (sample,) = read_rows(tmp_path, "openai_messages", rows)
    assert sample.videos == (Video(data=OTHER),)


REFUSED = {
    "frames without a rate": (NAMES, "no_times", "options.frame_rate"),
    "frames at 0 a second": ({"frames": NAMES, "fps": 0}, "no_times", "fps 0"),
    "an end before the last frame": (
        {"frames": NAMES, "fps": 1, "start": 2, "end": 3},
        "no_times",
        "from 2 s to 4 s, and end is 3 s; give timestamps",
    ),
    "a rate that is a text": ({"frames": NAMES, "fps": "2"}, "no_times", "fps '2'"),
    "fewer times than frames": ({"frames": NAMES, "timestamps": [0, 1]}, "no_times", "3 frames and 2 timestamps"),
    "times that do not rise": ({"frames": NAMES, "timestamps": [0, 2, 1]}, "no_times", "must rise"),
    "times that are no numbers": ({"frames": NAMES, "timestamps": ["0", "1", "2"]}, "schema_error", "timestamps"),
    "no frames": ({"frames": [], "fps": 2}, "no_frames", "empty list"),
    "no frame in the part": ({"frames": NAMES, "timestamps": [0, 1, 2], "start": 9}, "no_frames", "between 9 s"),
    "an end before the start": ({"path": "clips/1.mp4", "start": 3, "end": 1}, "no_frames", "ends at 1"),
    "a start that is no number": ({"path": "clips/1.mp4", "start": "0:03"}, "schema_error", "start is '0:03'"),
    "a file and frames": ({"path": "clips/1.mp4", "frames": NAMES}, "schema_error", "both 'frames' and 'path'"),
    "a key that is not read": ({"path": "clips/1.mp4", "speed": 2}, "schema_error", "'speed'"),
    "no file": ({"path": None}, "schema_error", "names no video"),
    "a missing file": ("clips/3.mp4", "image_not_found", "clips/3.mp4"),
    "a path out of the source": ("../1.mp4", "image_not_found", ""),
    "an address of the web": ("https://example.org/1.mp4", "image_not_found", "not fetched"),
    "a missing frame": ({"frames": [*NAMES, "frames/9.png"], "fps": 2}, "image_not_found", "frames/9.png"),
    "an empty file": ("clips/empty.mp4", "empty", "zero bytes"),
    "a number": (7, "schema_error", "a number where a file's name"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_left_out(name, tmp_path):
    value, reason, detail = REFUSED[name]
    found = video_of(tmp_path, value)
    assert found[0] == reason and detail in found[1], found


def test_links_and_devices_are_left_out(tmp_path):
    (tmp_path / "s/clips").mkdir(parents=True)
    write_file(tmp_path / "outside.mp4", CLIP)
    os.symlink(tmp_path / "outside.mp4", tmp_path / "s/clips/link.mp4")
    os.mkfifo(tmp_path / "s/clips/pipe.mp4")
    os.symlink("/dev/zero", tmp_path / "s/clips/zero.mp4")
    for name in ("link", "pipe", "zero"):
        assert video_of(tmp_path / "s", f"clips/{name}.mp4")[0] == "image_not_found", name


def test_a_video_over_the_limit_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(video_refs, "MAX_VIDEO_BYTES", len(CLIP) - 1)
    assert video_of(tmp_path, "clips/1.mp4")[0] == "bomb"


def test_the_rate_of_lists_of_frames_may_be_an_option(tmp_path):
    assert video_of(tmp_path, NAMES, frame_rate=2).timestamps == (0.0, 0.5, 1.0)
    assert video_of(tmp_path, {"frames": NAMES, "fps": 4}, frame_rate=2).timestamps == (0.0, 0.25, 0.5)


def test_content_parts_of_messages(tmp_path):
    parts = [
        {"type": "text", "text": "Compare "},
        {"type": "video", "video": "clips/1.mp4", "fps": 2.0, "nframes": None},
        {"type": "text", "text": " with "},
        {"type": "video_url", "video_url": {"url": "clips/2.webm"}},
        {"type": "image_url", "image_url": {"url": "frames/0.png"}},
        {"type": "video", "video": NAMES, "fps": 2},
    ]
    (sample,) = read_rows(tmp_path, "openai_messages", [asked(parts)])
    assert turns(sample)[0] == ("user", "Compare <video> with <video><image><video>")
    assert sample.images == FRAMES[:1]
    assert sample.videos == (Video(data=CLIP), Video(data=OTHER), Video(frames=FRAMES, timestamps=(0.0, 0.5, 1.0)))
    assert from_fields(sample.key, to_fields(sample)) == sample


def test_parts_without_a_name_take_the_videos_of_the_row(tmp_path):
    parts = [{"type": "video"}, {"type": "text", "text": "What?"}]
    rows = [asked(parts, videos=["clips/2.webm"]), asked(parts, videos=["clips/2.webm", "clips/1.mp4"]), asked(parts)]
    one, two, none = read_rows(tmp_path, "openai_messages", rows)
    assert one.videos == (Video(data=OTHER),) and turns(one)[0] == ("user", "<video>What?")
    assert (two.reason, none.reason) == ("video_count_mismatch",) * 2


def test_rows_of_ms_swift(tmp_path):
    rows = [
        asked("Is <video> like <video>?", videos=["clips/1.mp4", "clips/2.webm"]),
        asked("What is <image> in <video>?", videos=["clips/1.mp4"], images=["frames/0.png"]),
        asked("What?", videos=["clips/1.mp4"], images=["frames/0.png"]),
        asked("<video>What?", videos=[{"frames": NAMES, "fps": 1}, "clips/1.mp4"]),
        asked("<video> What?", images=["frames/0.png"]),
        asked("<video> What?"),
        asked("What?", audios=["1.wav"], videos=["clips/1.mp4"]),
    ]
    two, both, unmarked, *bad = read_rows(tmp_path, "openai_messages", rows)
    assert [video.data for video in two.videos] == [CLIP, OTHER]
    assert turns(both)[0] == ("user", "What is <image> in <video>?") and both.images == FRAMES[:1]
    assert turns(unmarked)[0] == ("user", "<image><video>What?")
    assert reasons(bad) == ["video_count_mismatch", "image_count_mismatch", "special_token_in_text", "schema_error"]


def test_other_names_of_the_field_count_where_they_hold_a_video(tmp_path):
    rows = [
        asked("What?", clip="clips/1.mp4"),
        asked("What?", clips=[{"frames": NAMES, "fps": 2}]),
        asked("What?", movie="Metropolis", clip=""),
        asked("What?", video_path="clips/1.mp4", clip="clips/2.webm"),
        asked("What?", video="clips/1.mp4", video_path="clips/1.mp4"),
    ]
    one, frames, title, two, named = read_rows(tmp_path, "openai_messages", rows)
    assert one.videos[0].data == named.videos[0].data == CLIP and frames.videos[0].frames == FRAMES
    assert title.videos == () and turns(title)[0] == ("user", "What?")
    assert two.reason == "schema_error" and "which are the row's videos?" in two.detail


def test_a_video_that_no_option_reads_leaves_the_row_of_a_table_out(tmp_path):
    rows = [{"clip": "clips/1.mp4", "q": "a?", "a": "b"}, {"clip": "an old one", "q": "a?", "a": "b"}]
    items = read_rows(tmp_path, "table", rows, image=None, question="q", answer="a")
    assert reasons(items) == ["schema_error", None] and "'clip', and no video is read" in items[0].detail


def test_rows_of_llava(tmp_path):
    def row(text, **fields):
        said = [{"from": "human", "value": text}, {"from": "gpt", "value": "It moves."}]
        return {"id": 1, "conversations": said, **fields}

    rows = [
        row("<image>\nWhat?", video="clips/1.mp4", data_source="academic"),
        row("<video>\nWhat?", video="clips/2.webm"),
        row("What?", video="clips/1.mp4"),
        row("<image>\n<image>What?", video="clips/1.mp4"),
        row("<image>\nWhat?", video="clips/1.mp4", image="frames/0.png"),
        row("<image>\nWhat?", video=NAMES),
    ]
    image, video, plain, *bad = read_rows(tmp_path, "llava", rows)
    assert [turns(sample)[0][1] for sample in (image, video, plain)] == ["<video>\nWhat?"] * 2 + ["<video>What?"]
    assert [sample.videos[0].data for sample in (image, video, plain)] == [CLIP, OTHER, CLIP]
    assert reasons(bad) == ["video_count_mismatch", "video_count_mismatch", "no_times"]


def test_placeholders_that_are_not_understood_are_refused_as_before(tmp_path):
    rows = [asked(f"{mark}What?", videos=["clips/1.mp4"]) for mark in ("<video 1>", "<|video_pad|>", "<audio>")]
    rows += [
        asked("<video>What?", videos=["clips/1.mp4"]) | {"messages": [{"role": "user", "content": "<video>What?"}]}
    ]
    rows[3]["messages"].append({"role": "assistant", "content": "See <video>."})
    assert reasons(read_rows(tmp_path, "openai_messages", rows)) == ["special_token_in_text"] * 4


def test_a_table_of_clips(tmp_path):
    rows = [
        {"clip": {"bytes": CLIP, "path": "1.mp4"}, "q": "What?", "a": "left", "from": 0.04, "to": None},
        {"clip": {"bytes": None, "path": "clips/2.webm"}, "q": "See <video>.", "a": "right", "from": None, "to": 1.5},
        {"clip": None, "q": "What?", "a": "up", "from": None, "to": None},
    ]
    for name, data in (("1.mp4", CLIP), ("2.webm", OTHER)):
        write_file(tmp_path / "clips" / name, data)
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "t.parquet")
    options = {"image": None, "video": "clip", "question": "q", "answer": "a", "video_start": "from", "video_end": "to"}
    one, two, none = read_source("table", tmp_path, **options)
    assert one.videos == (Video(data=CLIP, start=0.04),) and turns(one)[0] == ("user", "<video>What?")
    assert two.videos == (Video(data=OTHER, end=1.5),) and turns(two)[0] == ("user", "See <video>.")
    assert none.reason == "schema_error"
    *_, absent = read_source("table", tmp_path, **options, null_image="absent")
    assert absent.videos == () and turns(absent)[0] == ("user", "What?")


def test_a_csv_of_clips(tmp_path):
    rows = [b"clips/1.mp4,What?,left,%s\n" % start for start in (b"0.08", b"soon", b"-1", b"nan")]
    write_file(tmp_path / "t.csv", b"clip,q,a,from\n" + b"".join(rows))
    write_file(tmp_path / "clips/1.mp4", CLIP)
    options = {"image": None, "video": "clip", "question": "<video>Say: {q}", "answer": "a", "video_start": "from"}
    one, *bad = read_source("table", tmp_path, **options)
    assert one.videos == (Video(data=CLIP, start=0.08),) and turns(one)[0] == ("user", "<video>Say: What?")
    starts = ["from is 'soon', no number of seconds from 0 on", "from is '-1', no number", "from is 'nan', no number"]
    assert len(bad) == 3 and all(each.reason == "schema_error" for each in bad)
    assert all(start in each.detail for each, start in zip(bad, starts)), bad


def test_clips_in_tars(tmp_path):
    members = {
        "1.mp4": CLIP,
        "1.txt": b"It moves.",
        "2.webm": OTHER,
        "2.jpg": FRAMES[0],
        "2.txt": b"So",
        "3.txt": b"No",
    }
    with tarfile.open(tmp_path / "c-0000.tar", "w") as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
        link = tarfile.TarInfo("4.mp4")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
        text = tarfile.TarInfo("4.txt")
        text.size = 1
        tar.addfile(text, io.BytesIO(b"x"))
    one, both, none, link = read_source("webdataset_tars", tmp_path, question="constant:What?", answer="txt")
    assert one.videos == (Video(data=CLIP),) and turns(one) == [("user", "<video>What?"), ("assistant", "It moves.")]
    assert both.videos == (Video(data=OTHER),) and turns(both)[0] == ("user", "<image><video>What?")
    assert (none.reason, link.reason) == ("image_not_found", "schema_error")


def test_a_folder_of_clips_with_captions(tmp_path):
    write_file(tmp_path / "train/1.mp4", CLIP)
    write_file(tmp_path / "train/1.txt", b"It moves.")
    write_file(tmp_path / "val/2.WEBM", OTHER)
    write_file(tmp_path / "val/2.txt", b"See <video>.")
    write_file(tmp_path / "val/3.png", FRAMES[0])
    write_file(tmp_path / "val/3.txt", b"It rests.")
    write_file(tmp_path / "val/4.mp4", b"")
    write_file(tmp_path / "val/4.txt", b"It is empty.")
    options = {"answer": "text_file", "question": "<image>What?"}
    clip, bad, picture, empty = read_source("image_folder", tmp_path, **options)
    assert clip.videos == (Video(data=CLIP),) and turns(clip) == [("user", "<video>What?"), ("assistant", "It moves.")]
    assert empty.reason == "empty" and "val/4.mp4" in empty.detail
    assert bad.reason == "special_token_in_text" and picture.images == FRAMES[:1] and picture.videos == ()


def test_the_digest_of_a_sample_knows_its_videos():
    def digest(*videos):
        return Sample(key="s/00000000", messages=(), images=(), videos=videos).digest()

    same = [Video(data=CLIP), Video(data=OTHER), Video(data=CLIP, start=1.0), Video(data=CLIP, end=1.0)]
    same += [Video(frames=FRAMES, timestamps=times) for times in ((0, 1, 2), (0, 1, 3))]
    assert len({digest(), *(digest(video) for video in same), digest(same[0], same[0])}) == len(same) + 2
    assert digest(Video(data=CLIP)) == digest(Video(data=bytes(CLIP)))
    messages = (Message(role="user", text="What?"), Message(role="assistant", text="It moves."))
    with pytest.raises(SkipSample, match="video_count_mismatch"):
        Sample(key="s/00000000", messages=messages, images=(), videos=(Video(data=CLIP),)).check()
