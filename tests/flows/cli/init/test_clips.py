"""`athanor init` recognises clips in every layout, says so, and proposes how many frames are read and how large."""

import json
from pathlib import Path

import pytest

from dataset_builders.videos.sampling import resized_frame
from flows.cli.main import main
from flows.pipeline.recipe import load_recipe
from stages.shared.chat_format.images import embedded_video_config
from stages.shared.inputs.config import EmbeddedModelConfig
from tests.helpers.clips import numbered_clip, numbered_pngs
from tests.helpers.json_rows import json_lines, write_file

pytestmark = pytest.mark.promise("Data of clips are recognised, and the recipe says how many of their frames are read.")

ROWS = 12


@pytest.fixture(scope="module")
def clips() -> list[bytes]:
    return [numbered_clip(40 + n, first=100 * n, audio=n == 0) for n in range(ROWS)]


def captions(data: Path, clips):
    for n, clip in enumerate(clips):
        write_file(data / f"{n}.mp4", clip)
        write_file(data / f"{n}.txt", f"Clip {n} moves.".encode())


def classes(data: Path, clips):
    for n, clip in enumerate(clips):
        write_file(data / ("left" if n % 2 else "right") / f"{n}.mp4", clip)


def messages(data: Path, clips):
    rows = []
    for n, clip in enumerate(clips):
        write_file(data / f"clips/{n}.mp4", clip)
        content = [{"type": "video", "video": f"{n}.mp4"}, {"type": "text", "text": "What?"}]
        rows.append({"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": f"It {n}."}]})
    write_file(data / "rows.jsonl", json_lines(rows))


def table(data: Path, clips):
    for n, clip in enumerate(clips):
        write_file(data / f"clips/{n}.mp4", clip)
    rows = [f"clips/{n}.mp4,What is {n}?,It {n},0.2" for n in range(len(clips))]
    write_file(data / "rows.csv", "\n".join(["video,question,answer,clip_start", *rows]).encode())


def lists_of_frames(data: Path, clips):
    for number, frame in enumerate(numbered_pngs(4 * ROWS)):
        write_file(data / f"frames/{number}.png", frame)
    names = [[f"frames/{4 * n + i}.png" for i in range(4)] for n in range(ROWS)]
    rows = [
        {"video": {"frames": names[n], "fps": 2}, "question": f"What is {n}?", "answer": f"It {n}"} for n in range(ROWS)
    ]
    write_file(data / "rows.jsonl", json_lines(rows))


ASKED = {"question": "question", "answer": "answer"}
LAYOUTS = {
    captions: ("image_folder", {"answer": "text_file", "question": "Describe the video."}),
    classes: ("image_folder", {"answer": "folder_name", "question": "What is in the video?"}),
    messages: ("openai_messages", {"image_root": "clips"}),
    table: ("table", {"image": None, **ASKED, "video": "video", "video_start": "clip_start"}),
    lists_of_frames: ("table", {"image": None, **ASKED, "video": "video"}),
}


@pytest.mark.parametrize("write", LAYOUTS, ids=lambda write: write.__name__)
def test_clips_are_recognised(write, clips, tmp_path, capsys):
    write(tmp_path / "data", clips)
    out = tmp_path / "my.yaml"
    status = main(["init", str(tmp_path / "data"), "--out", str(out), "--root", str(tmp_path / "root")])
    said = capsys.readouterr()
    assert status == 0, said.err
    config = load_recipe(str(out)).config
    builder, options = LAYOUTS[write]
    read = {name: config.convert.options[name] for name in options}
    assert config.convert.builder == builder and read == options, said.out
    assert f"{ROWS} of the {ROWS} rows that were read can be used" in said.out
    if write is lists_of_frames:
        assert f"{ROWS} videos in the samples that were read: 1.5 to 1.5 s, up to 4 frames, 96 x 64 px\n" in said.out
    else:
        frames = 46 if write is table else 51
        assert f"up to {frames} frames, 96 x 64 px; the sound of 1 is not read" in said.out
    assert "1 video\n" in said.out and "<video> " in said.out
    videos = config.tokenize.videos
    assert (videos.fps, videos.max_frames) == (2, 4 if write is lists_of_frames else 6)
    page = next((tmp_path / "root").rglob("init/*/report.html")).read_text()
    assert "frames of the first video of" in page and ("0.20, " if write is table else "0.00, ") in page


def test_a_table_of_frames_without_a_rate_is_told(tmp_path, capsys):
    lists_of_frames(tmp_path / "data", [])
    path = tmp_path / "data/rows.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_bytes(json_lines([row | {"video": row["video"]["frames"]} for row in rows]))
    status = main(["init", str(tmp_path / "data"), "--out", str(tmp_path / "my.yaml"), "--root", str(tmp_path)])
    assert status == 2 and "12 of 12 rows are no_times" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "is_told"),
    [("left/{clip}/frame_{n:03d}.png", True), ("{clip}/{n}.png", False), ("a/{clip}/{n}9.png", False)],
)
def test_folders_of_frames_are_told(name, is_told, tmp_path, capsys):
    for number, frame in enumerate(numbered_pngs(24)):
        write_file(tmp_path / "data" / name.format(clip=f"clip{number // 6}", n=number % 6), frame)
    main(["init", str(tmp_path / "data"), "--out", str(tmp_path / "recipe.yaml")])
    told = (
        "4 folders of numbered images, as left/clip0: each image is a sample of its own; if they are frames of videos"
    )
    assert (told in capsys.readouterr().out) == is_told


def test_columns_that_may_cut_the_clips_are_told(clips, tmp_path, capsys):
    table(tmp_path / "data", clips)
    path = tmp_path / "data/rows.csv"
    path.write_text(path.read_text().replace("clip_start", "start"))
    assert main(["init", str(tmp_path / "data"), "--out", str(tmp_path / "my.yaml"), "--root", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "look at: whole videos are shown: if 'start' cut them, set options.video_start and video_end" in said


def test_frames_keep_the_size_that_they_are_rounded_to(tmp_path):
    clips = [numbered_clip(20 + n, size=(48, 64)) for n in range(ROWS)]  # 48 is rounded to 64
    captions(tmp_path / "data", clips)
    assert main(["init", str(tmp_path / "data"), "--out", str(tmp_path / "my.yaml"), "--root", str(tmp_path)]) == 0
    videos = load_recipe(str(tmp_path / "my.yaml")).config.tokenize.videos
    config = embedded_video_config(EmbeddedModelConfig(min_pixels=1024, max_pixels=9216, seed=0), videos)
    assert resized_frame(videos.max_frames, 48, 64, config) == (64, 64)


def test_images_among_clips_are_not_asked_about_as_videos(clips, tmp_path, capsys):
    classes(tmp_path / "data", clips)
    for n, picture in enumerate(numbered_pngs(4)):
        write_file(tmp_path / f"data/left/{n}.png", picture)
    assert main(["init", str(tmp_path / "data"), "--out", str(tmp_path / "my.yaml"), "--root", str(tmp_path)]) == 0
    assert load_recipe(str(tmp_path / "my.yaml")).config.convert.options["question"] == "What is shown?"


@pytest.mark.parametrize(
    "name, why",
    [
        ("https://www.youtube.com/watch?v=abc", "addresses of the web are not fetched"),
        ("0", "write the name with its suffix"),
    ],
)
def test_a_column_of_videos_that_cannot_be_read_says_why(name, why, tmp_path, capsys):
    write_file(tmp_path / "data/rows.csv", f"video,question,answer\n{name},What?,It\n{name},Where?,There\n".encode())
    assert main(["init", str(tmp_path / "data"), "--root", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert "2 of 2 rows are image_not_found as table" in said and why in said
