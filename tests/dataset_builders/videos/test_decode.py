"""The frame at each time of a clip is the frame that was encoded; what is damaged, endless or no video is refused."""

import os
import signal
import subprocess
import sys
from collections import Counter
from fractions import Fraction

import numpy as np
import psutil
import pytest

from dataset_builders.contracts.sample import SkipSample, Video
from dataset_builders.pictures.images import pixels_png
from dataset_builders.videos import decode
from dataset_builders.videos.decode import VideoLimits, iter_frames, probe, read_frames
from tests.helpers.clips import NTSC, number_of, numbered_clip, numbered_frame, numbered_pngs

CODECS = {
    "H.264 in mp4": {},
    "H.264 with B frames": {"bf": "3", "g": "12"},
    "H.264 in mkv": {"container": "mkv"},
    "H.264 in a transport stream": {"container": "mpegts"},  # its clock does not begin at 0
    "H.265": {"codec": "libx265"},
    "VP9": {"codec": "libvpx-vp9", "container": "webm"},
    "AV1": {"codec": "libsvtav1", "container": "webm"},
    "MPEG-4 in mp4": {"codec": "mpeg4"},
    "MPEG-4 with B frames in avi": {"codec": "mpeg4", "container": "avi", "bf": "2"},
    "MPEG-2": {"codec": "mpeg2video", "container": "mpeg"},
    "Motion JPEG": {"codec": "mjpeg", "container": "avi"},
    "turned by 90": {"turned": 90},
    "turned by 180": {"turned": 180},
    "turned by 270": {"turned": 270},
    "with sound": {"audio": True},
    "VP9 with sound": {"codec": "libvpx-vp9", "container": "webm", "audio": True},
}


def numbers(video: Video) -> list[int]:
    """Return the number that each frame carries."""
    return [number_of(frame) for frame in iter_frames(video, range(len(probe(video).times)))]


def refused(data: bytes, limits: VideoLimits | None = None, **times: float) -> SkipSample:
    with pytest.raises(SkipSample) as caught:
        probe(Video(data=data, **times), limits)
    return caught.value


@pytest.mark.promise("Each frame of a video has its own time, whatever its rate, codec and container.")
@pytest.mark.parametrize("name", CODECS)
def test_every_frame_is_the_encoded_one_at_its_time(name):
    video = Video(data=numbered_clip(31, 25, **CODECS[name]))
    facts = probe(video)
    assert (facts.height, facts.width, facts.has_audio) == (64, 96, "sound" in name)
    np.testing.assert_allclose(facts.times, np.arange(31) / 25, atol=0.001)  # Matroska has milliseconds
    assert numbers(video) == list(range(31))
    assert probe(video, decode=False) == facts


@pytest.mark.parametrize("rate", [24, 25, NTSC, 30, 60], ids=float)
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 61])
def test_times_of_any_rate_and_number_of_frames(rate, count):
    video = Video(data=numbered_clip(count, rate))
    assert probe(video).times == tuple(float(Fraction(number) / Fraction(rate)) for number in range(count))
    assert numbers(video) == list(range(count))


def test_times_of_a_variable_rate_are_those_that_were_written():
    times = (0.0, 0.1, 0.15, 0.7, 1.9)
    video = Video(data=numbered_clip(5, times=times))
    assert probe(video).times == times  # a mean rate would give 0, 0.068, 0.136, ...
    assert number_of(read_frames(video, [3])[0]) == 3


@pytest.mark.parametrize("container", ["mp4", "mpegts"])
@pytest.mark.parametrize("start, end", [(0.2, 0.8), (None, 0.8), (12.0, 12.4), (15.01, None), (19.96, 20.0)])
def test_a_clip_of_start_and_end_has_the_frames_between(start, end, container):
    video = Video(data=numbered_clip(600, 30, g="45", bf="2", container=container), start=start, end=end)
    wanted = [n for n in range(600) if (start or 0) <= n / 30 <= (20 if end is None else end)]
    assert numbers(video) == wanted
    assert probe(video).times == tuple(number / 30 for number in wanted)
    assert number_of(read_frames(video, [1])[0]) == wanted[1] if len(wanted) > 1 else True


def test_frames_in_any_order():
    video = Video(data=numbered_clip(20))
    assert [number_of(frame) for frame in read_frames(video, [7, 3, 3, 19])] == [7, 3, 3, 19]
    assert [number_of(frame) for frame in read_frames(Video(data=numbered_clip(4)), [0])] == [0]
    with pytest.raises(SkipSample, match=r"no_frames: .*frame 20 is asked for, and there are 20"):
        read_frames(video, [3, 20])
    with pytest.raises(ValueError, match="indices must rise"):
        next(iter_frames(video, [3, 3]))


def test_a_list_of_frames_has_the_times_that_it_was_given():
    video = Video(frames=numbered_pngs(6), timestamps=(0, 0.5, 1.1, 1.6, 2.0, 9.5), start=0.5, end=2.0)
    facts = probe(video)
    assert (facts.times, facts.height, facts.width, facts.codec) == ((0.5, 1.1, 1.6, 2.0), 64, 96, "PNG")
    assert numbers(video) == [1, 2, 3, 4]
    assert read_frames(video, [1])[0].tobytes() == numbered_frame(2).tobytes()


@pytest.mark.parametrize(
    "video, reason",
    [
        (Video(), "empty"),
        (Video(data=b"x", frames=(b"y",)), "no_frames"),
        (Video(frames=numbered_pngs(3)), "no_times"),
        (Video(frames=numbered_pngs(3), timestamps=(0, 1)), "no_times"),
        (Video(frames=numbered_pngs(3), timestamps=(0, 1, 1)), "no_times"),
        (Video(frames=numbered_pngs(2), timestamps=(0, float("inf"))), "no_times"),
        (Video(frames=numbered_pngs(2), timestamps=(0, 1), start=3.0), "no_frames"),
        (Video(frames=numbered_pngs(2), timestamps=(0, 1), start=1.0, end=0.5), "no_frames"),
        (Video(frames=(*numbered_pngs(1), pixels_png(np.zeros((9, 9), np.uint8))), timestamps=(0, 1)), "decode_error"),
        (Video(frames=(*numbered_pngs(1), numbered_pngs(1)[0][:90]), timestamps=(0, 1)), "truncated_image"),
    ],
)
def test_lists_of_frames_that_are_refused(video, reason):
    with pytest.raises(SkipSample) as caught:
        probe(video)
    assert caught.value.reason == reason, caught.value


@pytest.mark.promise("A video that is damaged, cut, endless or hostile is left out, and harms no process of ours.")
@pytest.mark.parametrize("name", [name for name in CODECS if "transport" not in name])
def test_a_cut_file_is_refused(name):
    data = numbered_clip(31, 25, **CODECS[name])
    for share in (0.3, 0.6, 0.9):
        assert refused(data[: int(len(data) * share)]).reason == "truncated_image", share


def test_a_file_with_damaged_frames_is_refused():
    for options in ({"g": "5"}, {"codec": "mpeg4"}, {"codec": "mjpeg", "container": "avi"}):
        data = numbered_clip(60, 25, **options)
        place = data.index(b"mdat" if options.get("container") is None else b"movi") + 900
        damaged = data[:place] + np.random.default_rng(0).bytes(600) + data[place + 600 :]
        assert refused(damaged).reason == "decode_error", options


@pytest.mark.parametrize(
    "data, reason, detail",
    [
        (b"abc" * 1000, "decode_error", "3000 bytes: Invalid data found when processing input"),
        (pixels_png(np.zeros((9, 9), np.uint8)), "decode_error", "no video format"),
        (b"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\nfile:///etc/passwd\n", "decode_error", ""),
        (b"ffconcat version 1.0\nfile '/etc/passwd'\n", "decode_error", "no video format"),
        (numbered_clip(9, container="h264"), "no_times", "a frame without a time"),
        (numbered_clip(9, container="avi", bf="2"), "no_times", "do not rise"),  # which has no times for H.264's order
    ],
)
def test_what_is_no_video_is_refused(data, reason, detail):
    skip = refused(data)
    assert skip.reason == reason and detail in skip.detail, skip


def test_limits_of_pixels_and_frames():
    data = numbered_clip(31)
    assert refused(data, VideoLimits(max_pixels=64 * 96 - 1)).reason == "bomb"
    assert refused(data, VideoLimits(max_frames=30)).reason == "too_many_frames"
    assert len(probe(Video(data=data), VideoLimits(max_frames=31, max_pixels=64 * 96)).times) == 31
    assert len(probe(Video(data=data, end=0.4), VideoLimits(max_frames=11)).times) == 11
    with pytest.raises(SkipSample, match="too_many_frames"):
        probe(Video(frames=numbered_pngs(3), timestamps=(0, 1, 2)), VideoLimits(max_frames=2))


def test_frames_that_change_their_size_are_refused():
    # Two files of VP9 in one: their frames are in one stream of the container.
    small, large = (numbered_clip(3, codec="libvpx-vp9", container="ivf", size=size) for size in ((64, 64), (128, 128)))
    assert "change from (64, 64) to (128, 128)" in refused(small + large[32:]).detail


@pytest.fixture
def new_decoder():
    """Yield a function that ends the decoder's process, so that the next file starts one; it is called at the end."""
    decode._decoders.cache_clear()
    yield decode._decoders.cache_clear
    decode._decoders.cache_clear()


def test_an_endless_decode_is_ended_and_the_next_file_is_read(new_decoder, monkeypatch):
    data = numbered_clip(300, 60, size=(1080, 1920), preset="ultrafast")
    monkeypatch.setattr(decode, "CPU_SECONDS", 0.1)
    skip = refused(data)
    assert skip.reason == "bomb" and "over 0.1 s of CPU" in skip.detail, skip
    monkeypatch.undo()
    assert numbers(Video(data=numbered_clip(3))) == [0, 1, 2]


def test_memory_has_a_limit(new_decoder, monkeypatch):
    data = numbered_clip(3, size=(4000, 4000), preset="ultrafast")
    monkeypatch.setattr(decode, "MEMORY", 20 << 20)
    assert refused(data).reason in ("bomb", "decode_error")  # libraries do not always say that memory was short
    monkeypatch.undo()
    new_decoder()
    assert len(probe(Video(data=data)).times) == 3


def test_a_killed_decoder_leaves_one_video_out(new_decoder):
    video = Video(data=numbered_clip(200, size=(720, 1280), preset="ultrafast"))
    frames = iter_frames(video, range(200))
    next(frames)
    decoders = [child for child in psutil.Process().children() if "decode_process.py" in " ".join(child.cmdline())]
    os.kill(max(decoders, key=psutil.Process.create_time).pid, signal.SIGKILL)
    with pytest.raises(SkipSample, match=r"decode_error: decoding ends its process \(-9\)"):
        list(frames)
    assert numbers(Video(data=numbered_clip(3))) == [0, 1, 2]


def test_a_decoder_ends_by_itself_after_its_files(new_decoder, monkeypatch):
    monkeypatch.setattr(decode, "_FILES_OF_A_PROCESS", 2)
    monkeypatch.setattr(decode, "_END_SECONDS", 20)
    new_decoder()
    video, waiting = Video(data=numbered_clip(3)), decode._decoders(os.getpid())._waiting
    probe(video)
    ((process, _, _),) = waiting
    probe(video)
    assert waiting == [] and process.returncode == 0  # not killed


def test_two_videos_that_are_read_by_turns_do_not_mix():
    one, two = (iter_frames(Video(data=numbered_clip(9, first=first)), range(9)) for first in (0, 500))
    found = [(number_of(a), number_of(b)) for a, b in zip(one, two, strict=True)]
    assert found == [(number, 500 + number) for number in range(9)]


def test_frames_that_nobody_takes_do_not_reach_the_next_video():
    frames = iter_frames(Video(data=numbered_clip(60)), range(60))
    assert number_of(next(frames)) == 0
    frames.close()
    assert numbers(Video(data=numbered_clip(3, first=500))) == [500, 501, 502]


def test_memory_of_a_long_file_is_that_of_a_frame():
    code = (
        "import resource; from dataset_builders.contracts.sample import Video; "
        "from dataset_builders.videos.decode import iter_frames; from tests.helpers.clips import numbered_clip; "
        "data = numbered_clip(500, size=(480, 640), preset='ultrafast'); "
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss; "
        "print(sum(1 for _ in iter_frames(Video(data=data), range(500)))); "
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    count, grown = map(int, done.stdout.split())
    assert count == 500 and grown < 60_000, done.stdout  # kB; all frames are 460 MB


def test_a_frame_at_another_time_than_the_container_says_is_refused():
    video = Video(data=numbered_clip(10))
    assert [number_of(frame) for frame in iter_frames(video, (3, 7), (0.12, 0.28))] == [3, 7]
    with pytest.raises(SkipSample, match=r"no_times.*a frame at 0.28 s is at 0.32 s in the container"):
        list(iter_frames(video, (3, 7), (0.12, 0.32)))


@pytest.mark.full
def test_what_is_said_of_mutated_files_is_what_is_read_of_them():
    """Whatever bytes change, a file is refused with a reason, or all its frames are read; no decoder dies."""
    rng = np.random.default_rng(1)
    whole = [numbered_clip(20, **options) for options in CODECS.values()]
    reasons = Counter()
    for number in range(300):
        data = bytearray(whole[number % len(whole)])
        for _ in range(rng.integers(1, 6)):
            place, size = int(rng.integers(len(data))), int(rng.integers(1, 60))
            data[place : place + size * int(rng.integers(2))] = rng.bytes(size * int(rng.integers(2)))
        video = Video(data=bytes(data))
        try:
            facts = probe(video)
            frames = read_frames(video, range(len(facts.times)))
            assert frames.shape == (len(facts.times), facts.height, facts.width, 3)
        except SkipSample as skip:
            assert "ends its process" not in skip.detail, skip
            reasons[skip.reason] += 1
    assert {"decode_error", "truncated_image"} <= reasons.keys() and reasons.total() < 300, reasons
