"""Random weights of named sizes: what a name stands for, and what is refused."""

import json

import pytest

from dataset_builders.contracts.strict import EVERY_FIELD
from dataset_builders.errors import InputError
from flows.pipeline.recipe import load_recipe
from stages.shared.inputs.config import EmbeddedModelConfig
from trainer.model.registry import FAMILIES, get_family
from trainer.parts.delta.part import DeltaNet

# Millions of parameters: language model, and encoder with its mergers. Qwen3-VL as its cards have them (2.1, 4.4, 8.8
# and 33.4 thousand together), Qwen3.5 by arithmetic from its published sizes.
PARAMETERS = {
    "qwen3_vl_100m": (77.1, 50.3),
    "qwen3_vl_2b": (1720.6, 406.9),
    "qwen3_vl_4b": (4022.5, 415.3),
    "qwen3_vl_8b": (8190.7, 576.4),
    "qwen3_vl_32b": (32762.1, 595.3),
    "qwen3_5_0_8b": (752.4, 100.6),
    "qwen3_5_2b": (1881.8, 331.4),
    "qwen3_5_4b": (4205.8, 333.5),
    "qwen3_5_9b": (8953.8, 456.0),
    "qwen3_5_27b": (26896.0, 460.7),
    "qwen3_vl_30b_a3b": (30532.1, 538.6),
    "qwen3_vl_235b_a22b": (235093.6, 576.4),
    "qwen3_5_moe_proxy": (3349.1, 456.0),
    "qwen3_5_35b_a3b": (34660.6, 446.6),
    "qwen3_5_122b_a10b": (122111.5, 451.3),
    "qwen3_5_397b_a17b": (396346.4, 456.0),
}
NAMES = [name for model_type in FAMILIES for name in get_family(model_type).variants]
# Pictures that the bins of the embedded recipe hold, whatever the published limits are.
SMALL_PICTURES = "tokenize.max_pixels=524288"


@pytest.mark.parametrize("name", NAMES)
def test_a_variant_has_the_published_number_of_parameters(name):
    config = EmbeddedModelConfig(seed=0, variant=name)
    parameters = config.shape.parameters
    if name.endswith("_tiny"):
        assert sum(parameters.values()) < 1e6
    else:
        found = parameters["language"] / 1e6, (parameters["vision"] + parameters["merger"]) / 1e6
        assert found == pytest.approx(PARAMETERS[name], abs=0.1)
    again = EmbeddedModelConfig.model_validate(config.model_dump(mode="json"))
    assert again.model_dump() == config.model_dump() and again.shape == config.shape


def test_a_name_stands_for_its_sizes():
    """The artifact is the same whether sizes are named or written out."""
    named = load_recipe(overrides=["model.variant=qwen3_5_2b", "model.num_layers=8", SMALL_PICTURES]).config.model
    assert (
        named.num_layers == 8
        and named.delta.value_heads == 16
        and isinstance(named.shape.language.layers[2].mixer, DeltaNet)
    )
    whole = json.dumps({"kind": "random", **named.model_dump(mode="json")})
    assert load_recipe(overrides=[f"model={whole}", SMALL_PICTURES]).config.model.model_dump() == named.model_dump()
    assert not {"kind", "variant"} & named.model_dump().keys()


def test_the_embedded_recipes_model_is_that_of_before_there_were_variants():
    """Its fingerprint, and that of all that follows, is unchanged: sizes of other families are not among its fields."""
    sizes = load_recipe().config.identity()["model"]
    assert {"family", "dtype", "rotary_fraction", "delta", "experts"}.isdisjoint(sizes)
    assert (sizes["hidden_size"], sizes["num_layers"], sizes["deepstack_indexes"]) == (64, 3, [0, 1])
    shown = load_recipe().config.model_dump(context=EVERY_FIELD)["model"]
    assert shown["family"] == "qwen3_vl" and shown["delta"] is None


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["model.variant=qwen3_5_3b"], "model: variant='qwen3_5_3b' is not known; known: qwen3_vl_tiny, qwen3_vl_100m"),
        (["model.variant=[1]"], "model: variant=[1] is not known"),
        (["model.family=qwen3"], "model: family='qwen3' has no random weights; try qwen3_vl or qwen3_vl_moe"),
        (["model.family=[1]"], "model: family=[1] has no random weights"),
        (["model.family=qwen3_5", "model.variant=qwen3_vl_2b"], "variant=qwen3_vl_2b is of qwen3_vl, not of family="),
        (["model.family=qwen3_5", "model.deepstack_indexes=[0]"], "family=qwen3_5 has no deepstack; leave out"),
        (["model.family=qwen3_5", "model.delta=null"], "family=qwen3_5 needs delta"),
        (["model.family=qwen3_5", "model.delta={key_heads: 3}"], "value_heads=4 is not a multiple of key_heads=3"),
        (["model.family=qwen3_5", "model.rotary_fraction=0.1"], "head_dim=32 x rotary_fraction=0.1 is no even number"),
        (["model.rotary_fraction=0.5"], "family=qwen3_vl has no rotary_fraction; leave it out, or try family=qwen3_5"),
        (["model.kind=real"], "model.kind='real' should be 'random'"),
        (["model.variant=qwen3_5_2b"], "try plan_bins.max_patches=65536 or tokenize.max_pixels=524288"),
    ],
)
def test_what_a_model_of_random_weights_cannot_be_is_one_line(overrides, words):
    with pytest.raises(InputError) as caught:
        load_recipe(overrides=overrides)
    assert words in str(caught.value) and "\n" not in str(caught.value)
