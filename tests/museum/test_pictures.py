"""Images on their way from a file to the layers that see them."""

import dataclasses
import io
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch.testing import assert_close
from transformers import AutoImageProcessor

from dataset_builders.contracts.sample import IMAGE_SLOT, Sample, SkipSample
from dataset_builders.contracts.tokenized import PixelStore, TokenizedSample
from dataset_builders.pictures.images import open_rgb
from dataset_builders.pictures.pixels import encode_image
from stages.shared.chat_format.chat import ChatEncoder
from stages.shared.chat_format.images import load_image_config
from stages.shared.chat_format.prompt import read_prompt_format
from stages.shared.inputs.model_directory import ModelDirectory
from stages.tokenize.config import TokenizeConfig
from stages.tokenize.shard import tokenize_sample
from tests.helpers.bins import MIXED, TEXT_ONLY, Kind, make_samples
from tests.helpers.reference import load_reference, random_hf_dir, reference_losses
from tests.helpers.samples import make_image, turns
from tests.helpers.single_rank import build_tiny, single_rank
from tests.helpers.tiny_model import tiny_hf_dir
from tests.museum.fault import fault_seen
from trainer.data.micro_batch import geometry_of, make_micro_batch
from trainer.data.slices import RankSlice

pytestmark = pytest.mark.promise(
    "athanor has none of the museum's published faults, and each test fails where the fault is put in."
)

SEQ_LEN = 96
TWINS = Kind(12, ((1, 4, 4), (1, 4, 4)))  # two images of one size, which only their order distinguishes
QUESTION = turns(f"{IMAGE_SLOT}Which digit is in the picture?", "7")


@pytest.fixture(scope="module")
def pair():
    """Return athanor's and transformers' Qwen3-VL with the same weights, and a sample with two images of one size."""
    with single_rank() as mesh:
        hf_dir = random_hf_dir("first")
        ours = build_tiny(hf_dir, mesh, SEQ_LEN)
        geometry = geometry_of(ours.shape)
        (sample,) = make_samples([TWINS], geometry, range(20, 300))
        yield SimpleNamespace(ours=ours, theirs=load_reference(hf_dir), geometry=geometry, sample=sample)


def check_losses(pair, sample: TokenizedSample | None = None) -> None:
    """Check that athanor's losses of a conversation are those of transformers."""
    with torch.no_grad():
        ours = pair.ours(make_micro_batch([sample or pair.sample], pair.geometry, SEQ_LEN))
        assert_close(ours, reference_losses(pair.theirs, pair.sample), atol=1e-4, rtol=0)


def test_pictures_stand_in_the_order_of_their_places(pair):
    """Images were ordered by their field or kind and not by their positions in the text, so they took the positions of
    other images.

    https://github.com/modelscope/evalscope/pull/1754 https://github.com/osaurus-ai/vmlx-swift/pull/404
    """
    check_losses(pair)
    halves = np.split(pair.sample.patches, 2)
    with fault_seen():
        check_losses(pair, dataclasses.replace(pair.sample, patches=np.concatenate(halves[::-1])))


def test_the_training_sees_the_pictures(pair, monkeypatch):
    """The images were lost between rollout and training, which continued with only the ids of their tokens.

    https://github.com/microsoft/agent-lightning/pull/560
    """
    check_losses(pair)
    forward = pair.ours.vision.forward
    monkeypatch.setattr(pair.ours.vision, "forward", lambda batch: torch.zeros_like(forward(batch)))
    with fault_seen():
        check_losses(pair)


def test_a_batch_without_a_picture_gives_the_encoder_gradients(pair, monkeypatch):
    """A rank whose batch had no image skipped the encoder, so the other ranks waited for its gradients for ever.

    https://github.com/huggingface/transformers/issues/37186 https://github.com/huggingface/trl/issues/6617
    """

    def check() -> None:
        pair.ours.zero_grad()
        batch = make_micro_batch(make_samples([TEXT_ONLY], pair.geometry, range(20, 300)), pair.geometry, SEQ_LEN)
        pair.ours(batch).sum().backward()
        assert all(param.grad is not None and not param.grad.any() for param in pair.ours.vision.parameters())

    check()
    rows = pair.ours.vision(make_micro_batch([pair.sample], pair.geometry, SEQ_LEN)).detach()[:1]
    monkeypatch.setattr(pair.ours.vision, "forward", lambda batch: rows)
    with fault_seen():
        check()


def test_a_picture_does_not_attend_to_the_padding_beside_it(pair, monkeypatch):
    """A boolean mask was added to the scores of attention, so what it forbids was only a little less likely.

    https://github.com/NVIDIA-NeMo/Automodel/pull/2116
    """
    sizes = [((1, 4, 6),), ((1, 4, 8),)]  # of lengths that are attended to together, with padding
    samples = make_samples([Kind(20, grids) for grids in sizes], pair.geometry, range(20, 300))

    def features(of: list[TokenizedSample]) -> torch.Tensor:
        return pair.ours.vision(make_micro_batch(of, pair.geometry, SEQ_LEN))

    def check() -> None:
        with torch.no_grad():
            assert_close(features(samples), torch.cat([features([sample]) for sample in samples]), atol=1e-5, rtol=1e-5)

    check()
    attend = F.scaled_dot_product_attention

    def adds(*given, attn_mask: torch.Tensor | None, **settings):
        return attend(*given, attn_mask=None if attn_mask is None else attn_mask.to(given[0].dtype), **settings)

    monkeypatch.setattr(F, "scaled_dot_product_attention", adds)
    with fault_seen():
        check()


def test_every_picture_of_an_uneven_batch_is_encoded_by_a_stage(pair, monkeypatch):
    """Images were divided among the micro batches of a pipeline without the remainder, so the last ones were dropped.

    https://github.com/NVIDIA-NeMo/Automodel/pull/2180
    """
    samples, stages = make_samples([*MIXED, TWINS], pair.geometry, range(20, 300)), 4
    patches = np.concatenate([sample.patches for sample in samples])

    def check() -> None:
        shares = [RankSlice(vision_shares=stages, vision_share=stage) for stage in range(stages)]
        batches = [make_micro_batch(samples, pair.geometry, SEQ_LEN, share) for share in shares]
        assert sum(batch.encoded_rows for batch in batches) == len(patches) // 4
        rows = sorted(bytes(row) for batch in batches for row in batch.patches.numpy())
        assert rows == sorted(bytes(row) for row in patches)

    check()

    def without_the_rest(counts: list[int], ranks: int) -> list[range]:
        each = len(counts) // ranks
        return [range(rank * each, (rank + 1) * each) for rank in range(ranks)]

    monkeypatch.setattr("trainer.data.slices.spread_images", without_the_rest)
    with fault_seen():
        check()


def test_pictures_are_scaled_to_the_models_own_patches():
    """Images were scaled to multiples of 28 for a model whose patches have 16 pixels, so it saw other sizes than in
    inference.

    https://github.com/EvolvingLMMs-Lab/lmms-engine/pull/132
    """
    data, config = make_image(100, 100), load_image_config(ModelDirectory(tiny_hf_dir()))
    processor = AutoImageProcessor.from_pretrained(tiny_hf_dir())
    expected = processor(images=[open_rgb(data)], return_tensors="pt")["image_grid_thw"][0].tolist()

    def check(read) -> None:
        assert encode_image(read(data), config)[1].tolist() == expected

    check(lambda image: image)

    def in_multiples_of_28(image: bytes) -> bytes:
        picture = open_rgb(image)
        return saved(picture.resize([28 * round(side / 28) for side in picture.size]), "PNG")

    with fault_seen():
        check(in_multiples_of_28)


@pytest.fixture(scope="module")
def chat() -> ChatEncoder:
    return ChatEncoder(ModelDirectory(tiny_hf_dir()))


def tokenized(chat: ChatEncoder, max_seq_len: int, is_cut: bool) -> TokenizedSample | None:
    """Return a sample with an image under a limit of tokens: athanor's, or one cut at the limit; None if it is left
    out."""
    config = load_image_config(ModelDirectory(tiny_hf_dir()))
    sample = Sample(key="a/0", messages=QUESTION, images=(make_image(160, 128),))
    limits = {"max_pixels": None, "max_skip_fraction": 1.0}
    settings = TokenizeConfig(max_seq_len=10_000 if is_cut else max_seq_len, **limits)
    (text,) = chat.tokenize([sample.messages])
    try:
        _, whole, _ = tokenize_sample(sample, text, chat, PixelStore(config=config, codec="u8"), settings)
    except SkipSample as skip:
        assert skip.reason == "over_length"
        return None
    cut = {name: getattr(whole, name)[:max_seq_len] for name in ("input_ids", "loss_mask")}
    return dataclasses.replace(whole, **cut) if is_cut else whole


def test_no_picture_is_cut(pair, chat):
    """Text was cut at the largest length in the middle of an image's tokens, while all of the image's features were
    kept.

    https://github.com/huggingface/trl/pull/5904 https://github.com/hiyouga/LlamaFactory/issues/6559
    """

    def check(is_cut: bool) -> None:
        for limit in (20, 30, 200):
            sample = tokenized(chat, limit, is_cut)
            places = 0 if sample is None else int((sample.input_ids == pair.geometry.image_token_id).sum())
            assert places == (0 if sample is None else sample.image_grid_thw.prod(-1).sum() // 4)

    check(is_cut=False)
    with fault_seen():
        check(is_cut=True)
    with pytest.raises(ValueError, match="image tokens, but its grids"):  # a trainer's last check of damaged data
        make_micro_batch([tokenized(chat, 20, is_cut=True)], pair.geometry, SEQ_LEN)


def saved(image: Image.Image, image_format: str, **settings: object) -> bytes:
    out = io.BytesIO()
    image.save(out, image_format, **settings)
    return out.getvalue()


def test_pictures_are_scaled_in_training_as_in_asking(tmp_path):
    """Training scaled images to other sizes than inference, which had its own limits of pixels.

    https://github.com/QwenLM/Qwen3-VL/issues/1409
    """
    data, limits = make_image(400, 300), {"min_pixels": 64 * 64, "max_pixels": 128 * 128}
    trained_on = encode_image(data, load_image_config(ModelDirectory(tiny_hf_dir()), **limits))[1].tolist()

    def check(prompt_format) -> None:
        assert encode_image(data, prompt_format(ModelDirectory(tiny_hf_dir())).pixels)[1].tolist() == trained_on

    check(partial(read_prompt_format, tokenized=limits))
    with fault_seen():
        check(read_prompt_format)


def test_every_picture_of_a_bin_is_its_samples_own(pair):
    """Images of the last sample of a batch were used for all of its samples.

    https://github.com/om-ai-lab/VLM-R1/issues/263
    """
    samples = make_samples([*MIXED, TWINS], pair.geometry, range(20, 300))

    def check(patches: torch.Tensor) -> None:
        assert torch.equal(patches, torch.from_numpy(np.concatenate([sample.patches for sample in samples])))

    patches = make_micro_batch(samples, pair.geometry, SEQ_LEN).patches
    check(patches)
    with fault_seen():
        check(patches[-len(samples[-1].patches) :].repeat(len(samples), 1))
