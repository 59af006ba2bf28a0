"""The frames of a contact sheet are those at the times that are told beside it."""

import io

import numpy as np
import pytest
from PIL import Image

from dataset_builders.contracts.sample import Message, Sample, SkipSample, Video
from dataset_builders.videos.sheet import contact_sheet
from stages.shared.pages.report import Picture
from tests.helpers.clips import HEIGHT, WIDTH, number_of, numbered_clip, numbered_pngs

_GAP = 4


def numbers(png: bytes) -> list[int]:
    """Return the numbers of the frames of a sheet that are not shrunk."""
    sheet = np.asarray(Image.open(io.BytesIO(png)))
    count = (sheet.shape[1] + _GAP) // (WIDTH + _GAP)
    assert sheet.shape[:2] == (HEIGHT, count * (WIDTH + _GAP) - _GAP)
    return [number_of(sheet[:, i * (WIDTH + _GAP) :][:, :WIDTH]) for i in range(count)]


@pytest.mark.parametrize("count, shown", [(1, [0]), (3, [0, 1, 2]), (31, [0, 10, 20, 30])])
def test_the_frames_of_a_sheet_are_spread_from_the_first_to_the_last(count, shown):
    png, times, facts = contact_sheet(Video(data=numbered_clip(count)), WIDTH)
    assert numbers(png) == shown and times == tuple(number / 25 for number in shown) and len(facts.times) == count


def test_a_sheet_of_a_part_and_of_a_list():
    png, times, _ = contact_sheet(Video(data=numbered_clip(31), start=0.4, end=0.8), WIDTH)
    assert numbers(png)[0] == 10 and numbers(png)[-1] == 20 and (times[0], times[-1]) == (0.4, 0.8)
    png, times, _ = contact_sheet(Video(frames=numbered_pngs(2), timestamps=(3.0, 7.5)), WIDTH)
    assert numbers(png) == [0, 1] and times == (3.0, 7.5)
    with pytest.raises(SkipSample, match="decode_error"):
        contact_sheet(Video(data=b"none"), WIDTH)


def test_a_page_shows_a_sample_of_videos_by_frames_of_the_first():
    messages = (Message(role="user", text="<video><video>What?"), Message(role="assistant", text="It."))
    videos = (Video(data=numbered_clip(31)), Video(data=numbered_clip(5, first=500)))
    sample = Sample(key="s/00000000", messages=messages, images=(), videos=videos)
    picture = Picture.of_sample(sample, 2 * WIDTH, "a caption")
    assert numbers(picture.image) == [0, 10, 20, 30]
    assert picture.shows.endswith("s/00000000 at 0.00, 0.40, 0.80, 1.20 s")
