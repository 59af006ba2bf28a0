"""The FLOP count against torch's own counter, on a bin without padding."""

from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.utils.flop_counter import FlopCounterMode

from tests.helpers.bins import MIXED, ONE_IMAGE, TEXT_ONLY, TWO_IMAGES, Kind, make_samples
from tests.helpers.reference import load_reference, random_hf_dir, reference_inputs
from tests.helpers.tiers import tiered
from trainer.contract.adapter import ROLES, AdapterConfig
from trainer.contract.run import OptimConfig, PartConfig, TrainConfig
from trainer.data.flops import cost_model, model_flops, training_cost
from trainer.data.micro_batch import geometry_of, make_micro_batch
from trainer.model.adapters import adapted_layers
from trainer.model.registry import read_model
from trainer.model.shape import DecoderShape

pytestmark = pytest.mark.promise(
    "`athanor plan` counts parameters, FLOPs and what adapters and delta layers keep exactly, and GPU memory "
    "within 8% of measured peaks."
)


def after_last_attention(lm: DecoderShape) -> int:
    """FLOPs of a token in the last layer after its attention: its output projection and MLP."""
    attention, mlp = lm.layers[-1].halves
    return 2 * lm.hidden_size * (attention.num_heads * attention.head_dim + 3 * mlp.intermediate_size)


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
    ours_vision, ours_language = (f / 3 for f in model_flops(cost_model(sizes), batch).values())
    lm, v = sizes.language, sizes.vision
    # Theirs: attention counted without causality; the whole last layer at every token; the patch embedding over both
    # frames.
    causal_half = sum(layer.flops.squared * len(s.input_ids) ** 2 for layer in lm.layers for s in samples)
    head = 2 * lm.hidden_size * lm.vocab_size * batch.num_loss_tokens
    not_needed = after_last_attention(lm) * (batch.num_tokens - batch.num_loss_tokens)
    second_frame = 2 * 3 * v.patch_size**2 * v.hidden_size * sum(batch.image_patches)
    assert ours_language - head + causal_half + not_needed == language
    assert ours_vision + second_frame == vision


def of_training(**settings: object) -> TrainConfig:
    optim = OptimConfig(lr=1e-3, min_lr_fraction=0.1, warmup_steps=1, weight_decay=0.1)
    sizes = {"seed": 0, "num_steps": 9, "global_batch_size": 1, "precision": "float32", "heldout_interval": 9}
    return TrainConfig(**sizes, optim=optim, **settings)


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


@pytest.mark.parametrize("name", tiered(TRAININGS, ("everything", "adapters everywhere")))
def test_a_step_counts_what_torch_counts_forward_and_backward(name):
    settings, head_products = TRAININGS[name]
    train, hf_dir = of_training(**settings), random_hf_dir("first")
    family, sizes = read_model(hf_dir)
    reference = trained_reference(hf_dir, train)
    # A sample of text alone has gradients of its own in a bin with images, and by itself only those of its embeddings.
    texts = [TEXT_ONLY] if name in ("everything", "frozen vision") else []
    samples = make_samples([ONE_IMAGE, TWO_IMAGES, UNLIKE, *texts], geometry_of(sizes), range(20, 300))
    batch = make_micro_batch(samples, geometry_of(sizes), 512)  # padding is not counted
    theirs = 0
    for sample in samples:
        inputs = reference_inputs(sample, sizes.images.image_token_id)
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
    whole = training_cost(sizes, family, of_training())
    pixels = 2 * 3 * v.patch_size**2 * v.hidden_size
    expected = {name: 3 * flops for name, flops in forward.items()} | {"per_patch": 3 * forward["per_patch"] - pixels}
    assert {name: getattr(whole, name) for name in forward} == expected
    still = training_cost(sizes, family, of_training(vision=STILL, merger=STILL))
    assert (still.per_patch, still.per_patch_squared) == (forward["per_patch"], forward["per_patch_squared"])
    assert (still.per_token, still.per_loss_token) == (whole.per_token, whole.per_loss_token)
    tokens = training_cost(sizes, family, of_training(language=STILL))
    assert tokens.per_token == 2 * forward["per_token"] and tokens.per_patch == whole.per_patch
    adapter = AdapterConfig(rank=4, alpha=8, targets=("mlp",))
    adapted = training_cost(sizes, family, of_training(adapter=adapter))
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
