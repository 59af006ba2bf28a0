"""The bench of videos: its clips are what they should be, and each side reads them."""

from dataset_builders.contracts.sample import Video
from dataset_builders.videos.decode import probe
from dataset_builders.videos.sampling import constant_rate
from tests.bench.bench_videos import Work, drawn_clip, numbered


def test_both_sides_read_the_clips_of_the_bench(tmp_path):
    clip = drawn_clip(0, seconds=1, repeats=2, preset="ultrafast")
    facts = probe(Video(data=clip))
    assert (len(facts.times), constant_rate(facts.times), facts.height, facts.width) == (60, 30, 360, 640)
    assert probe(Video(data=numbered(clip, 7))) == facts and numbered(clip, 7) != numbered(clip, 8)
    work = Work(tmp_path, [numbered(clip, 7), numbered(clip, 8)])
    work.convert("header")  # it asserts that no clip is left out
    work.tokenize()
    frames, metadata = work.load(work.paths[0])
    assert frames.shape == (4, 360, 640, 3) and list(metadata.frames_indices) == [0, 20, 39, 59]
