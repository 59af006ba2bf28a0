"""The FLOP count against torch's own counter, on a bin without padding."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.helpers.bins import MIXED, ONE_IMAGE, TEXT_ONLY, TWO_IMAGES, Kind, make_samples
from tests.helpers.reference import load_reference, random_hf_dir, reference_inputs
from trainer.contract.model_shape import DecoderShape
from trainer.data.micro_batch import make_micro_batch
from trainer.families.flops import model_flops
from trainer.families.geometry import geometry_of
from trainer.families.registry import read_model


def after_last_attention(lm: DecoderShape) -> int:
    """FLOPs of a token in the last layer after its attention: its output projection and MLP."""
    return 2 * lm.hidden_size * (lm.num_heads * lm.head_dim + 3 * lm.intermediate_size)


@pytest.mark.parametrize("shape", ["first", "second"])
def test_counts_equal_torchs_counter(shape):
    hf_dir = random_hf_dir(shape)
    sizes = read_model(hf_dir)[1]
    reference = load_reference(hf_dir, attention="eager")  # the counter does not see a CPU's fused attention
    samples = make_samples(MIXED, geometry_of(sizes), range(20, 300))
    batch = make_micro_batch(samples, geometry_of(sizes), 128)
    vision = language = 0
    for sample in samples:
        inputs = reference_inputs(sample, sizes.images.image_token_id)
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            reference(**inputs, use_cache=False)
        by_module = {k: sum(v.values()) for k, v in counter.get_flop_counts().items()}
        name = "Qwen3VLForConditionalGeneration"
        vision += by_module.get(f"{name}.model.visual", 0)
        language += by_module[f"{name}.model.language_model"]
    ours_vision, ours_language = (f / 3 for f in model_flops(sizes, batch).values())
    lm, v = sizes.language, sizes.vision
    # Theirs: attention counted without causality; the whole last layer at every token; the patch embedding over both
    # frames.
    causal_half = 2 * lm.num_layers * lm.num_heads * lm.head_dim * sum(len(s.input_ids) ** 2 for s in samples)
    head = 2 * lm.hidden_size * lm.vocab_size * batch.num_loss_tokens
    not_needed = after_last_attention(lm) * (batch.num_tokens - batch.num_loss_tokens)
    second_frame = 2 * 3 * v.patch_size**2 * v.hidden_size * sum(batch.image_patches)
    assert ours_language - head + causal_half + not_needed == language
    assert ours_vision + second_frame == vision


@pytest.mark.parametrize(
    "kinds",
    [[TEXT_ONLY], [ONE_IMAGE], [TWO_IMAGES], [Kind(9, ((1, 2, 2), (1, 12, 12), (1, 4, 4))), TEXT_ONLY]],
    ids=["text only", "one image", "two images", "three unlike images and a text"],
)
def test_a_step_counts_what_torch_counts_forward_and_backward(kinds):
    """Images of 4 to 144 patches in one sample: attention over all of a sample's patches at once would be seen."""
    hf_dir = random_hf_dir("first")
    sizes = read_model(hf_dir)[1]
    reference = load_reference(hf_dir, attention="eager")
    samples = make_samples(kinds, geometry_of(sizes), range(20, 300))
    batch = make_micro_batch(samples, geometry_of(sizes), 256)  # padding is not counted
    theirs = 0
    for sample in samples:
        inputs = reference_inputs(sample, sizes.images.image_token_id)
        # The logits that a loss needs: those before each token that is to be learnt.
        places = torch.from_numpy(sample.loss_mask[1:].nonzero()[0])
        with FlopCounterMode(display=False) as counter:
            reference(**inputs, use_cache=False, logits_to_keep=places).logits.sum().backward()
        theirs += counter.get_total_flops()
    lm, v = sizes.language, sizes.vision
    causal_half = 2 * lm.num_layers * lm.num_heads * lm.head_dim * sum(len(s.input_ids) ** 2 for s in samples)
    frame = 2 * 3 * v.patch_size**2 * v.hidden_size * sum(batch.image_patches)
    not_needed = after_last_attention(lm) * (batch.num_tokens - batch.num_loss_tokens)
    # Theirs: attention counted without causality; the whole last layer at every token; the patch embedding over both
    # frames, but no gradient of the pixels.
    ours = sum(model_flops(sizes, batch).values()) + 3 * (causal_half + not_needed) + 3 * frame - 2 * frame
    assert ours == pytest.approx(theirs, rel=0.01)


def test_an_encoder_whose_features_were_read_did_no_work():
    sizes = read_model(random_hf_dir("first"))[1]
    geometry = geometry_of(sizes)
    samples = make_samples(MIXED, geometry, range(20, 300))
    computed = model_flops(sizes, make_micro_batch(samples, geometry, 128))

    def features(images):
        return torch.zeros(sum(computed_tokens[image] for image in images), sizes.feature_width)

    computed_tokens = [patches // 4 for sample in samples for patches in sample.image_grid_thw.prod(1).tolist()]
    read = model_flops(sizes, make_micro_batch(samples, geometry, 128, features=features))
    assert read == computed | {"vision": 0} and computed["vision"] > 0
    text = make_samples([TEXT_ONLY], geometry, range(20, 300))
    assert model_flops(sizes, make_micro_batch(text, geometry, 128, features=features))["vision"] == 0
