"""The page of tokenized videos: a sheet of frame pairs with the times that the model reads."""

import json

import pytest

from dataset_builders.contracts.sample import IMAGE_SLOT, VIDEO_SLOT, Video
from stages.shared.inputs.model_directory import ModelDirectory
from stages.shared.preview.render import PreviewOptions, Target, render_preview
from tests.helpers.clips import numbered_clip, numbered_pngs
from tests.helpers.pages import parse_page
from tests.helpers.samples import make_image
from tests.helpers.tiny_model import tiny_hf_dir
from tests.stages.tokenize.test_tokenize_videos import sample_of, tokenize

pytestmark = pytest.mark.promise("A video's tokens stand beside its frames and the times that the model reads.")


@pytest.fixture(scope="module")
def tokenized(tmp_path_factory):
    videos = (Video(data=numbered_clip(50)), Video(frames=numbered_pngs(3), timestamps=(1.0, 2.5, 4.0)))
    question = f"{VIDEO_SLOT} or {IMAGE_SLOT} or {VIDEO_SLOT}?"
    sample = sample_of(0, *videos, question=question, images=[make_image(64, 64)])
    return tokenize([sample], tmp_path_factory.mktemp("root"))


def _page(tokenized, model):
    return parse_page(render_preview(Target(tokenized), PreviewOptions(model=model)))


def test_each_pair_of_frames_has_its_time_in_the_sheet_and_in_the_tokens(tokenized):
    page = _page(tokenized, ModelDirectory(tiny_hf_dir()))
    times = ["0.3", "1.6", "1.8", "4.0"]
    names = [f"frames at {time} seconds" for time in times]
    figures = page.find("figure", "pair")
    assert [figure.find("figcaption")[0].text for figure in figures] == names
    assert len({figure.find("img")[0].attributes["src"] for figure in figures}) == 4
    chips = [e.text for e in page.find("span", "chip")]
    assert chips == [*(f"{name}: 3 x 2 = 6 tokens" for name in names[:2]), "image 1: 2 x 2 = 4 tokens"] + [
        f"{name}: 3 x 2 = 6 tokens" for name in names[2:]
    ]
    assert "24 of frame pairs" in page.text and "4 frame pairs" in page.text and "1 image" in page.text
    summary = json.loads((tokenized.dir / "report.json").read_text())["summary"]
    assert (summary["images_and_frame_pairs"], summary["videos"][:2]) == (5, "2,") and "images" not in summary


def test_without_a_tokenizer_pairs_are_numbered(tokenized):
    captions = [figure.find("figcaption")[0].text for figure in _page(tokenized, None).find("figure", "pair")]
    assert captions == ["frames 1 and 2", "frames 3 and 4", "frames 5 and 6", "frames 7 and 8"]
