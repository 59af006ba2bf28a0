"""Clips, images and text, tokenized as a run tokenizes them and packed, against transformers: float32, CPU.

tests/parity/test_qwen3_vl.py, test_qwen3_5_vl.py and test_experts.py have videos of random pixels in all their bins.
"""

from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from dataset_builders.contracts.sample import IMAGE_SLOT, VIDEO_SLOT, Message, Sample, Video
from dataset_builders.contracts.tokenized import PixelStore, TokenizedSample
from stages.shared.chat_format.chat import ChatEncoder
from stages.shared.chat_format.config import VideoFormat
from stages.shared.chat_format.images import load_image_config, load_video_config
from stages.shared.inputs.model_directory import ModelDirectory
from stages.tokenize.config import TokenizeConfig
from stages.tokenize.shard import tokenize_sample
from tests.helpers import parity
from tests.helpers.clips import NTSC, numbered_clip, numbered_pngs
from tests.helpers.reference import random_hf_dir, reference_inputs
from tests.helpers.samples import make_image
from tests.helpers.single_rank import single_rank
from tests.helpers.tiers import tiered
from tests.helpers.tiny_experts_model import experts_hf_dir
from tests.helpers.tiny_hybrid_model import hybrid_hf_dir
from trainer.data.micro_batch import make_micro_batch

pytestmark = pytest.mark.promise(
    "Qwen3-VL, Qwen3.5, Qwen3 without images and models with experts give transformers' logits, and multi-token "
    "prediction its formula's, to 1e-4 and every gradient to 1e-4 relative, in float32."
)

LIMITS = VideoFormat(fps=2, min_pixels=1, max_pixels=10**9)
SLOW, FAST = Video(data=numbered_clip(50)), Video(data=numbered_clip(90, NTSC), start=1.0)
LISTED = Video(frames=numbered_pngs(3), timestamps=(0.0, 0.5, 4.0))
IMAGES = make_image(64, 64, seed=1), make_image(32, 96, seed=2)
# The questions of one conversation, its images and its videos.
CONVERSATIONS = [
    ([f"{VIDEO_SLOT}What moves?"], (), (SLOW,)),
    ([f"{IMAGE_SLOT}Which digit is in the picture?"], IMAGES[:1], ()),
    ([f"Look: {IMAGE_SLOT} and {VIDEO_SLOT}{VIDEO_SLOT}.", f"{IMAGE_SLOT}And here?"], IMAGES, (FAST, LISTED)),
    (["What is three plus four?"], (), ()),
]
MODELS = {
    "qwen3_vl": lambda: random_hf_dir("first"),
    "qwen3_5": lambda: hybrid_hf_dir("first"),
    "qwen3_vl_moe": lambda: experts_hf_dir("listed"),
    "qwen3_5_moe": lambda: experts_hf_dir("shared"),
}


def tokenized(hf_dir: Path) -> list[TokenizedSample]:
    model = ModelDirectory(hf_dir)
    chat, videos = ChatEncoder(model), load_video_config(model, LIMITS)
    pixels = PixelStore(codec="u8", config=load_image_config(model))
    config = TokenizeConfig(max_seq_len=4096, max_pixels=None, max_skip_fraction=0.0, videos=LIMITS)
    samples = []
    for number, (questions, images, clips) in enumerate(CONVERSATIONS):
        turns = [(Message(role="user", text=text), Message(role="assistant", text="seven")) for text in questions]
        sample = Sample(key=f"clips/{number:08d}", messages=sum(turns, ()), images=images, videos=clips)
        (text,) = chat.tokenize([sample.messages])
        samples.append(tokenize_sample(sample, text, chat, pixels, config, videos)[1])
    return samples


@pytest.fixture(scope="module", params=tiered(MODELS, ("qwen3_vl", "qwen3_5_moe")))
def pair(request):
    with single_rank() as mesh:
        samples = tokenized(MODELS[request.param]())
        seq_len = sum(len(sample.input_ids) for sample in samples) + 5
        pair = parity.Pair(MODELS[request.param](), mesh, [], seq_len)
        pair.samples = samples
        pair.batch = make_micro_batch(samples, pair.geometry, seq_len)
        yield pair


def test_positions_logits_losses_and_gradients_are_transformers(pair):
    # transformers is given t x h x w grids; two videos of the same size in a row are one.
    given = [reference_inputs(sample, pair.reference.config).get("video_grid_thw") for sample in pair.samples]
    assert [None if grids is None else grids[:, 0].tolist() for grids in given] == [[2], None, [4], None]
    parity.assert_positions_and_angles_equal(pair)
    parity.assert_logits_equal(pair)
    parity.assert_losses_and_gradients_equal(pair)


def test_the_second_frames_of_a_clip_change_its_own_sample_alone(pair):
    with torch.no_grad():
        before = pair.ours(pair.batch).split(pair.batch.loss_lengths)
        later = pair.samples[0].later_patches
        later[:] = 255 - later
        batch = make_micro_batch(pair.samples, pair.geometry, pair.seq_len)
        after = pair.ours(batch).split(batch.loss_lengths)
    assert (after[0] - before[0]).abs().max() > 1e-4
    for mine, others in zip(after[1:], before[1:], strict=True):
        assert_close(mine, others, atol=2e-6, rtol=0)  # experts round otherwise with other rows beside a row
