"""The FLOP count against torch's own counter, on bins without padding, and against the sizes of matrices."""

import dataclasses
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.utils.flop_counter import FlopCounterMode

from tests.helpers.bins import MIXED, ONE_IMAGE, TEXT_ONLY, TWO_IMAGES, Kind, make_samples
from tests.helpers.reference import load_reference, random_hf_dir, reference_inputs
from tests.helpers.single_rank import build_tiny, single_rank
from tests.helpers.tiers import tiered
from tests.helpers.tiny_hybrid_model import hybrid_hf_dir
from tests.trainer.train_config import train_config
from trainer.contract.adapter import ROLES, AdapterConfig
from trainer.contract.run import PartConfig, TrainConfig
from trainer.data.flops import cost_model, model_flops, training_cost
from trainer.data.micro_batch import geometry_of, make_micro_batch
from trainer.data.packed_chunks import CHUNK, PackedChunks
from trainer.model.adapters import adapted_layers
from trainer.model.registry import read_model
from trainer.parts.delta.rule import plain

pytestmark = pytest.mark.promise(
    "`athanor plan` counts parameters, FLOPs and what adapters and delta layers keep exactly, and GPU memory "
    "within 8% of measured peaks."
)

STILL = PartConfig(frozen=True)
# name -> (training, products with the matrix of the logits)
TRAININGS = {
    "everything": ({}, 3),
    "frozen vision": ({"vision": STILL}, 3),
    "frozen vision and mergers": ({"vision": STILL, "merger": STILL}, 3),
    "only the mergers": ({"vision": STILL, "language": STILL}, 2),
    "adapters everywhere": ({"adapter": AdapterConfig(rank=4, alpha=8, targets=ROLES[:2] + ROLES[3:])}, 2),
    "adapters of attention": ({"adapter": AdapterConfig(rank=4, alpha=8, targets=("attention",))}, 2),
}


def trained_reference(hf_dir: Path, train: TrainConfig) -> torch.nn.Module:
    """transformers' model, of which the same is trained."""
    reference = load_reference(hf_dir, attention="eager")
    family, sizes = read_model(hf_dir)
    rules = family.weight_rules(sizes)
    if train.adapter is not None:
        names = [name for layer in adapted_layers(rules, train.adapter) for name in layer.modules]
        return get_peft_model(reference, LoraConfig(r=train.adapter.rank, target_modules=names))
    parts = {name: family.part_of(rule.ours) for rule in rules for name in rule.hf}
    for name, param in reference.named_parameters():
        param.requires_grad = parts[name] not in train.frozen
    return reference


# Images of 4 to 144 patches in one sample: attention over all of a sample's patches at once would be seen.
UNLIKE = Kind(9, ((1, 2, 2), (1, 12, 12), (1, 4, 4)))
# Attention over all temporal groups of a video at once would be seen too.
FRAMES = Kind(9, videos=((5, 4, 6),))


CASES = [*(("first", name) for name in TRAININGS), ("second", "everything")]


@pytest.mark.parametrize(("shape", "name"), tiered(CASES, (("first", "adapters everywhere"), ("second", "everything"))))
def test_a_step_counts_what_torch_counts_forward_and_backward(shape, name):
    settings, head_products = TRAININGS[name]
    train, hf_dir = train_config(**settings), random_hf_dir(shape)
    family, sizes = read_model(hf_dir)
    reference = trained_reference(hf_dir, train)
    # A sample of text alone has gradients of its own in a bin with images, and by itself only those of its embeddings.
    texts = [TEXT_ONLY] if name in ("everything", "frozen vision") else []
    samples = make_samples([ONE_IMAGE, TWO_IMAGES, UNLIKE, FRAMES, *texts], geometry_of(sizes), range(20, 300))
    batch = make_micro_batch(samples, geometry_of(sizes), 512)  # padding is not counted
    theirs = 0
    for sample in samples:
        inputs = reference_inputs(sample, sizes.images)
        # The logits that a loss needs: those before each token that is to be learnt.
        places = torch.from_numpy(sample.loss_mask[1:].nonzero()[0])
        with FlopCounterMode(display=False) as counter:
            reference(**inputs, use_cache=False, logits_to_keep=places).logits.sum().backward()
        theirs += counter.get_total_flops()
    cost, lm, v = training_cost(sizes, family, train), sizes.language, sizes.vision
    # Theirs: attention counted without causality; the whole last layer at every token; the patch embedding over both
    # frames.
    not_needed = batch.num_tokens - batch.num_loss_tokens
    causal_half = cost.per_token_squared * sum(len(s.input_ids) ** 2 for s in samples)
    last_layer = (cost.per_loss_token - head_products * 2 * lm.hidden_size * lm.vocab_size) * not_needed
    frame = 2 * 3 * v.patch_size**2 * v.hidden_size * sum(batch.image_patches)
    frames = frame * (2 if train.adapter is None and "vision" not in train.frozen else 1)
    ours = sum(model_flops(cost, batch).values()) + causal_half + last_layer + frames
    assert ours == theirs


def test_what_a_training_counts_by_hand():
    """One number of each kind of work."""
    family, sizes = read_model(random_hf_dir("first"))
    lm, v, forward = sizes.language, sizes.vision, sizes.forward_flops
    whole, planned = training_cost(sizes, family, train_config()), cost_model(sizes)
    pixels = 2 * 3 * v.patch_size**2 * v.hidden_size
    assert planned.per_token == 3 * forward["per_token"]
    assert whole == dataclasses.replace(planned, per_patch=planned.per_patch - pixels)
    still = training_cost(sizes, family, train_config(vision=STILL, merger=STILL))
    assert (still.per_patch, still.per_patch_squared) == (forward["per_patch"], forward["per_patch_squared"])
    assert (still.per_token, still.per_loss_token) == (whole.per_token, whole.per_loss_token)
    tokens = training_cost(sizes, family, train_config(language=STILL))
    assert tokens.per_token == 2 * forward["per_token"] and tokens.per_patch == whole.per_patch
    adapter = AdapterConfig(rank=4, alpha=8, targets=("mlp",))
    adapted = training_cost(sizes, family, train_config(adapter=adapter))
    # Nothing goes back through the first layer's attention, and of its MLP only through the second product.
    attention, mlp = lm.layers[0].halves
    width, inner, heads = lm.hidden_size, mlp.intermediate_size, attention.num_heads * attention.head_dim
    before, after, squared = lm.layers[0].flops
    first = 3 * 2 * width * inner + before + 2 * width * heads + 2 * width * inner
    first += 2 * 4 * (2 * (2 * width + 3 * inner) + 3 * inner + 3 * width)
    other = 2 * (before + after) + 2 * 4 * (2 * (3 * width + 3 * inner) + 3 * inner + 3 * width)
    assert lm.num_layers > 2
    assert adapted.per_token == first + (lm.num_layers - 2) * other + 2 * before
    assert adapted.per_token_squared == squared * (1 + 3 * (lm.num_layers - 1))
    assert adapted.per_patch == forward["per_patch"]


def test_an_encoder_whose_features_were_read_did_no_work():
    sizes = read_model(random_hf_dir("first"))[1]
    geometry = geometry_of(sizes)
    samples = make_samples(MIXED, geometry, range(20, 300))
    computed = model_flops(cost_model(sizes), make_micro_batch(samples, geometry, 128))

    def features(images):
        return torch.zeros(sum(computed_tokens[image] for image in images), sizes.feature_width)

    computed_tokens = [patches // 4 for sample in samples for patches in sample.image_grid_thw.prod(1).tolist()]
    read = model_flops(cost_model(sizes), make_micro_batch(samples, geometry, 128, features=features))
    assert read == computed | {"vision": 0} and computed["vision"] > 0
    text = make_samples([TEXT_ONLY], geometry, range(20, 300))
    assert model_flops(cost_model(sizes), make_micro_batch(text, geometry, 128, features=features))["vision"] == 0


def counted_rule(tokens: int, key_heads: int, value_heads: int, dim: int) -> int:
    """Return torch's count for the plain rule: every product, but not the solution of the triangular systems."""
    q, k = (torch.randn(tokens, key_heads, dim) for _ in range(2))
    v = torch.randn(tokens, value_heads, dim)
    g, beta = -torch.rand(tokens, value_heads), torch.rand(tokens, value_heads)
    with FlopCounterMode(display=False) as counter:
        plain.gated_delta_rule(q, k, v, g, beta, PackedChunks.of((0, tokens)))
    return counter.get_total_flops()


def test_a_delta_layer_counts_its_products_and_nothing_that_grows_with_a_sample():
    shape = read_model(hybrid_hf_dir("second"))[1].language
    part = shape.layers[0].mixer
    heads, dim = part.value_heads, part.head_dim
    before, after, squared = shape.layers[0].flops
    with single_rank() as mesh:
        layer = build_tiny(hybrid_hf_dir("second"), mesh).language.decoder.layers[0]
    delta = layer.self_attention
    tokens = 4 * CHUNK
    rule = counted_rule(tokens, part.key_heads, heads, dim) // tokens + heads * 2 * CHUNK * dim
    assert before == 2 * delta.in_proj.weight.numel() + 2 * delta.conv_weight.numel() + rule
    assert after == 2 * sum(linear.weight.numel() for linear in (delta.linear_proj, *layer.mlp.children()))
    assert squared == 0
    assert counted_rule(2 * tokens, part.key_heads, heads, dim) == 2 * counted_rule(tokens, part.key_heads, heads, dim)


def test_a_layer_of_gated_attention_counts_its_gates():
    shape = read_model(hybrid_hf_dir("second"))[1].language
    with single_rank() as mesh:
        layer = build_tiny(hybrid_hf_dir("second"), mesh).language.decoder.layers[1]
    before, after, squared = shape.layers[1].flops
    attention = layer.self_attention
    assert before == 2 * attention.linear_qkv.weight.numel()
    assert after == 2 * sum(linear.weight.numel() for linear in (attention.linear_proj, *layer.mlp.children()))
    part = shape.layers[1].mixer
    assert squared == 2 * part.num_heads * part.head_dim
    assert sum(param.numel() for param in layer.parameters()) == shape.layers[1].parameters
