"""Parameters counted from a shape equal those of the directory that is made from the shape."""

import pytest

from flows.pipeline.recipe import load_recipe
from stages.shared.inputs.model_directory import ModelDirectory
from tests.helpers.shapes import QWEN_2B
from tests.helpers.tiny_hybrid_model import hybrid_config
from tests.helpers.tiny_model import FIRST, SECOND, tiny_hf_dir
from trainer.contract.adapter import AdapterConfig
from trainer.contract.parallel import ParallelConfig
from trainer.contract.run import OptimConfig, PartConfig, TrainConfig
from trainer.families.qwen3_5_vl.family import read_shape
from trainer.model.adapters import adapter_sizes
from trainer.model.registry import get_family, read_model
from trainer.model.shape import Work
from trainer.plan.estimate import RESERVE, estimate_memory, estimate_saved, estimate_vision_rank
from trainer.plan.pieces import pipeline_pieces

pytestmark = pytest.mark.promise(
    "`athanor plan` counts parameters, FLOPs and what adapters and delta layers keep exactly, and GPU memory "
    "within 8% of measured peaks."
)

TOKENS_ALONE = Work(1024, 0, 0, 0, 0)  # layers of one kind cost the same: equal pieces
LANGUAGE, PARAMETERS = QWEN_2B.language, sum(QWEN_2B.parameters.values())
VISION = QWEN_2B.parameters["vision"] + QWEN_2B.parameters["merger"]
EMBEDDINGS = LANGUAGE.vocab_size * LANGUAGE.hidden_size
LOGITS = 2 * 1024 * LANGUAGE.vocab_size  # bytes, of the 1,024 tokens of `memory`
ENCODER_LAYER = 512 * 2 * 11 * QWEN_2B.vision.hidden_size  # bytes of activations, of the 512 patches of `memory`


def training(bins: int = 8, precision: str = "bfloat16", moments: str = "float32") -> TrainConfig:
    optim = OptimConfig(lr=1e-3, min_lr_fraction=0, warmup_steps=1, weight_decay=0, moments=moments)
    return TrainConfig(
        seed=0, num_steps=9, global_batch_size=bins, precision=precision, heldout_interval=9, optim=optim
    )


BFLOAT16, SHORT = training(), training(moments="bfloat16")


def memory(
    shape=QWEN_2B, *, dp=1, num_micro_batches=8, seq_len=1024, max_patches=512, train=None, adapters=None, **layout
):
    parallel = ParallelConfig(**layout)
    return estimate_memory(
        shape,
        parallel,
        train or training(num_micro_batches * dp),
        pieces=pipeline_pieces(shape, parallel, TOKENS_ALONE),
        dp=dp,
        seq_len=seq_len,
        max_patches=max_patches,
        adapters=adapters,
    )


def saved(*, dp: int = 1, train: TrainConfig = BFLOAT16, pieces=None, adapters=None, **layout) -> int:
    """Return the bytes that a process writes."""
    parallel = ParallelConfig(**layout)
    pieces = pieces or pipeline_pieces(QWEN_2B, parallel, TOKENS_ALONE)
    return estimate_saved(QWEN_2B, parallel, train, pieces=pieces, dp=dp, adapters=adapters)


@pytest.mark.parametrize(("name", "config"), [("first", FIRST), ("second", SECOND)])
def test_counts_are_exact(name, config):
    hf_dir = tiny_hf_dir(name)
    counted = ModelDirectory(hf_dir).count_parameters()
    assert config.shape.parameters == read_model(hf_dir)[1].parameters == counted


def test_a_published_model_has_the_size_it_is_known_for():
    assert QWEN_2B.parameters["language"] == 1_720_574_976  # Qwen3-1.7B
    assert 2.1e9 < PARAMETERS < 2.15e9


def test_memory_counts_weights_gradients_and_moments():
    shape = FIRST.shape
    parameters = sum(shape.parameters.values())
    single, half = (memory(shape, train=training(precision=precision)) for precision in ("float32", "bfloat16"))
    assert single["weights"] + single["gradients"] + single["optimizer"] == 16 * parameters
    assert half["weights"] + half["gradients"] + half["optimizer"] == 18 * parameters
    assert half["activations"] < single["activations"]
    longer = memory(shape, seq_len=2048, train=training(precision="float32"))
    assert longer["activations"] > single["activations"] and longer["weights"] == single["weights"]
    short = memory(shape, train=training(moments="bfloat16"))
    assert short == half | {"optimizer": 4 * parameters}
    assert memory(shape, num_micro_batches=1) == half  # without a pipeline one micro batch is in flight


def test_data_parallel_ranks_divide_optimizer_states_and_with_fsdp_weights_too():
    one, four, cp = memory(), memory(dp=4), memory(dp=2, cp=2)
    assert four["weights"] == (2 + 4 / 4) * PARAMETERS and four["gradients"] == 4 * PARAMETERS
    assert four["optimizer"] == one["optimizer"] / 4 and four["activations"] == one["activations"]
    assert cp == four | {"activations": one["activations"] / 2, "reserve": round(one["activations"] / 20)}
    whole = memory(dp=4, sharding="fsdp")
    assert [whole[part] for part in ("weights", "gradients", "optimizer")] == [PARAMETERS, PARAMETERS, 2 * PARAMETERS]


def test_what_a_process_writes():
    assert (saved(), saved(train=training(precision="float32"))) == (14 * PARAMETERS, 16 * PARAMETERS)
    assert saved(dp=2, cp=2) == (2 + 12 / 4) * PARAMETERS
    assert saved(dp=4, sharding="fsdp") == 3 * PARAMETERS
    assert saved(pp=2) < 14 * PARAMETERS
    assert (saved(train=SHORT), saved(dp=2, train=SHORT)) == (10 * PARAMETERS, 6 * PARAMETERS)


def test_tensor_parallel_divides_the_language_model_and_vision_only_when_told():
    language = QWEN_2B.parameters["language"]
    assert memory(tp=2)["gradients"] == 4 * (language / 2 + VISION)
    assert memory(tp=2, vision_split="tensor_parallel")["gradients"] == 4 * (language + VISION) / 2
    one, two = memory(max_patches=0)["activations"], memory(tp=2, max_patches=0)["activations"]
    cut = memory(tp=2, sequence_parallel=True, max_patches=0)["activations"]
    assert cut == one / 2
    assert (two - LOGITS / 2) / (one - LOGITS) == pytest.approx((6 + 22 / 2) / 28)


def test_the_fullest_rank_of_a_pipeline_is_shown():
    layer = (QWEN_2B.parameters["language"] - EMBEDDINGS - LANGUAGE.hidden_size) // LANGUAGE.num_layers
    first = memory(pp=4, first_pipeline_layers=4)  # vision and few layers
    assert first["gradients"] == 4 * (4 * layer + EMBEDDINGS + VISION)
    last = memory(pp=4, first_pipeline_layers=4, seq_len=32768, max_patches=4, num_micro_batches=1)  # twice the layers
    assert last["gradients"] == 4 * (8 * layer + EMBEDDINGS + LANGUAGE.hidden_size)
    pieces, sizes = (range(4), range(4, 24), range(24, 28)), {"dp": 1, "seq_len": 8192, "max_patches": 16}
    between = estimate_memory(QWEN_2B, ParallelConfig(pp=3), training(4), pieces=pieces, **sizes)
    assert between["gradients"] == 4 * 20 * layer and saved(pp=3, pieces=pieces) == 14 * 20 * layer


def test_layers_of_two_kinds_keep_what_each_kind_keeps():
    """The model has three delta layers with 2 key heads and 6 value heads of 16, and two gated attentions with 6 heads
    of 32 and 2 of keys and values, all with MLPs of 128."""
    shape = read_shape(hybrid_config("second"))
    width, logits = 48, 2 * 1024 * 512
    delta, gated = 4 * 32 + 5 * 96 + 6 * 6, 2 * (6 + 2 + 2) * 32 + 6 * 32 + 2 * 6 * 32
    others = 3 * width + 2 * 128
    kept = 3 * (others + delta) + 2 * (others + gated)
    assert memory(shape, max_patches=0)["activations"] == 1024 * 2 * kept + logits
    inside = 2 * 32 + 2 * 96 + 4 * 6  # outputs of the convolution and the rule, and decay and beta in float32
    selective = memory(shape, max_patches=0, recompute="selective")["activations"]
    assert selective == 1024 * 2 * (kept - 3 * inside) + logits
    full = memory(shape, max_patches=0, recompute="full")["activations"]
    assert full == 1024 * 2 * (5 * width + others + gated) + logits  # each layer's input, and the largest layer


def test_micro_batches_in_flight_and_recomputation():
    pipeline = {"pp": 2, "max_patches": 4096}
    # The first of two ranks keeps two micro batches; interleaved, 5 passes through half of its layers instead of 4.
    alone, two, many = (memory(num_micro_batches=n, **pipeline)["activations"] for n in (1, 2, 9))
    assert two == many == 2 * alone
    interleaved = memory(vpp=2, **pipeline | {"max_patches": 0}, seq_len=64)
    plain = memory(**pipeline | {"max_patches": 0}, seq_len=64)
    assert interleaved["activations"] / plain["activations"] == pytest.approx(5 / 4)
    token = 2 * 1024 * LANGUAGE.hidden_size  # bytes of one activation
    assert memory(recompute="full", max_patches=0)["activations"] == (LANGUAGE.num_layers + 14) * token + LOGITS
    patch = 2 * 512 * QWEN_2B.vision.hidden_size
    less = memory()["activations"] - memory(recompute_vision=True)["activations"]
    assert less == (11 * QWEN_2B.vision.num_layers - (QWEN_2B.vision.num_layers + 11)) * patch


def frozen(*parts: str, **settings: str) -> TrainConfig:
    return training(**settings).model_copy(update={part: PartConfig(frozen=True) for part in parts})


def test_where_vision_is_dealt_every_rank_has_a_copy_of_it():
    """The second of two ranks is the fullest: it has 26 of 28 layers. Copies have no moments."""
    pieces, sizes = (range(2), range(2, 28)), {"dp": 2, "seq_len": 1024, "max_patches": 0}

    def of(vision: str, train: TrainConfig = BFLOAT16, **changes: int) -> dict[str, int]:
        return estimate_memory(QWEN_2B, ParallelConfig(pp=2, vision=vision), train, pieces=pieces, **sizes | changes)

    first, dealt = of("first_rank"), of("dealt")
    patches = of("dealt", max_patches=64)["activations"] - dealt["activations"]
    assert patches == 4 * 32 * 2 * 11 * QWEN_2B.vision.num_layers * QWEN_2B.vision.hidden_size
    added = {"weights": 2 * VISION, "gradients": 4 * VISION, "optimizer": 0, "activations": 0, "reserve": 0}
    assert dealt == {name: value + added[name] for name, value in first.items()}
    single = training(precision="float32")
    assert of("dealt", single)["weights"] - of("first_rank", single)["weights"] == 4 * VISION
    still = frozen("vision", "merger")
    assert of("dealt", still)["gradients"] == of("first_rank", still)["gradients"]
    only_merger = of("dealt", frozen("vision"))["gradients"] - of("first_rank", still)["gradients"]
    assert only_merger == 4 * QWEN_2B.parameters["merger"]


def test_dealt_images_are_encoded_ahead_and_in_parts():
    """A dealt rank keeps a quarter of the images of eight micro batches, or of twelve with virtual stages. With
    `first_rank` the first rank keeps the images of four whole micro batches, or of seven with virtual stages."""
    sizes = {"pp": 4, "num_micro_batches": 32, "seq_len": 64}

    def of(**layout: object) -> int:
        with_images, without = (memory(max_patches=n, **sizes, **layout)["activations"] for n in (1 << 16, 0))
        return with_images - without

    patches = (1 << 16) * 2 * 11 * QWEN_2B.vision.num_layers * QWEN_2B.vision.hidden_size
    assert of() == pytest.approx(4 * patches, rel=1e-3) and of(vpp=2) == pytest.approx(7 * patches, rel=1e-3)
    assert of(vision="dealt") == pytest.approx(8 / 4 * patches, rel=1e-3)
    assert of(vision="dealt", vpp=2) == pytest.approx(12 / 4 * patches, rel=1e-3)
    assert of(vision="dealt", tp=2, cp=2) == pytest.approx(8 / 16 * patches, rel=1e-3)
    sizes["num_micro_batches"] = 3
    assert of(vision="dealt") == pytest.approx(3 / 4 * patches, rel=1e-3)


def test_what_is_frozen_has_weights_alone():
    trained, whole = QWEN_2B.parameters["language"], memory()
    still = memory(train=frozen("vision", "merger"))
    assert still["weights"] == 2 * PARAMETERS + 4 * trained
    assert still["gradients"] == 4 * trained and still["optimizer"] == 8 * trained
    assert whole["activations"] - still["activations"] == QWEN_2B.vision.num_layers * ENCODER_LAYER
    few = memory(train=frozen("vision", "merger"), seq_len=1)
    assert few["activations"] == ENCODER_LAYER  # it runs before the language model keeps anything
    assert saved(train=frozen("vision", "merger")) == 2 * VISION + 14 * trained
    language = memory(train=frozen("language"))
    assert language["gradients"] == 4 * VISION and language["activations"] == whole["activations"]


def test_a_rank_of_vision_alone():
    sizes = {"patches": 512, "in_flight": 3, "tp": 1}
    one = estimate_vision_rank(QWEN_2B, BFLOAT16, recompute=False, **sizes)
    kept = 3 * QWEN_2B.vision.num_layers * ENCODER_LAYER
    parts = {"weights": 2 * VISION, "gradients": 4 * VISION, "activations": kept}
    assert one == parts | {"reserve": round(RESERVE * kept)}
    still = estimate_vision_rank(QWEN_2B, frozen("vision", "merger"), recompute=False, **sizes)
    few = {"activations": ENCODER_LAYER, "reserve": round(RESERVE * ENCODER_LAYER)}
    assert still == {"weights": 2 * VISION, "gradients": 0, **few}
    again = estimate_vision_rank(QWEN_2B, BFLOAT16, recompute=True, **sizes)
    assert again["activations"] == kept / 11 + ENCODER_LAYER
    two = estimate_vision_rank(QWEN_2B, BFLOAT16, recompute=False, **sizes | {"tp": 2})
    half = round(kept * (6 + 16 / 2) / 22)
    assert two == {"weights": VISION, "gradients": 2 * VISION, "activations": half, "reserve": round(RESERVE * half)}


def test_fsdp_holds_some_weights_whole_for_a_moment():
    """These are the embeddings, two layers, and the embeddings' gradient in two dtypes; with adapters the base has
    none."""
    positions = QWEN_2B.vision.num_positions * QWEN_2B.vision.hidden_size
    outside = EMBEDDINGS + positions + QWEN_2B.parameters["merger"]
    layers = 2 * LANGUAGE.layers[0].parameters
    assert memory(dp=8, sharding="fsdp")["gathered"] == 2 * (outside + layers) + (2 + 4) * outside
    train, sizes = adapted("attention")
    assert memory(dp=8, sharding="fsdp", train=train, adapters=sizes)["gathered"] == 2 * (outside + layers)
    assert "gathered" not in memory(dp=8)


def test_a_start_that_takes_more_than_the_training_is_shown():
    """On many ranks with short bins, the weights twice plus the gradients exceed the memory of a step."""
    short = {"seq_len": 64, "max_patches": 4}
    assert "start" not in memory(dp=1, **short) and "start" not in memory(dp=64, seq_len=8192)
    many = memory(dp=64, num_micro_batches=1, **short)
    assert sum(many.values()) == pytest.approx((2 + 2 + 4) * PARAMETERS, abs=2)
    train, sizes = adapted("attention", "mlp", base="float8")
    packed = memory(train=train, adapters=sizes, **short)
    matrix = 2 * LANGUAGE.layers[0].feed_forward.intermediate_size * LANGUAGE.hidden_size
    weights = packed["weights"] - 4 * sizes.parameters
    assert sum(packed.values()) >= weights + 3 * 2 * matrix - 2


def test_the_recipe_of_a_real_model_fits_a_gpu_of_80_gb():
    """An H100 has 85.0e9 bytes, of which CUDA takes 2.6e9."""
    bins = load_recipe("cauldron").config.plan_bins
    room = 85.0e9 - 2.6e9
    assert sum(memory(seq_len=bins.seq_len, max_patches=bins.max_patches).values()) < room / 1.05


def test_the_logits_of_one_chunk_are_held_however_long_the_bin():
    long, longer = (memory(seq_len=n, max_patches=0)["activations"] for n in (8192, 16384))
    assert longer - 4 * LOGITS == 2 * (long - 4 * LOGITS)  # of 4,096 tokens


def adapted(*targets: str, base: str = "train_precision", rank: int = 16, **parts: PartConfig):
    """Return a training with adapters, and the sizes that they add to the 2B model."""
    config = AdapterConfig(rank=rank, alpha=32, targets=targets, base=base)
    train = BFLOAT16.model_copy(update={"adapter": config, **parts})
    return train, adapter_sizes(train, get_family("qwen3_vl"), QWEN_2B)


def test_with_adapters_the_base_is_weights_alone():
    """Computed by hand: rank 16 over seven modules of 28 layers is 17,432,576 parameters, as PEFT counts them."""
    train, sizes = adapted("attention", "mlp")
    assert sizes.parameters == 17_432_576
    half = memory(train=train, adapters=sizes)
    assert half["weights"] == 2 * PARAMETERS + (2 + 4) * sizes.parameters
    assert half["gradients"] == 4 * sizes.parameters and half["optimizer"] == 8 * sizes.parameters
    single = memory(train=train.model_copy(update={"precision": "float32"}), adapters=sizes)
    assert single["weights"] == 4 * PARAMETERS + 4 * sizes.parameters
    four = memory(train=train, adapters=sizes, dp=4)
    assert four["optimizer"] == 2 * sizes.parameters and four["weights"] == 2 * PARAMETERS + 3 * sizes.parameters
    assert saved(train=train, adapters=sizes) == (2 + 12) * sizes.parameters


def test_tensor_parallel_ranks_divide_a_part_of_each_adapter():
    """The A of column-parallel layers and the B of row-parallel layers are whole on every rank."""
    train, sizes = adapted("attention", "mlp")
    layer = 3 * 2048 + 2 * 2048 + 2048 + 2048  # columns of q, k, v, gate, up; rows of o and down
    whole = 16 * 28 * layer
    two = memory(train=train, adapters=sizes, tp=2)
    assert two["gradients"] == 4 * ((sizes.parameters - whole) / 2 + whole)


def test_a_base_in_float8():
    """Each value of the language layers' matrices takes one byte less; embeddings, norms and vision are unchanged. One
    matrix is unpacked at a time. The layers' CUDA graphs share no memory with the logits; recomputed layers do."""
    train, sizes = adapted("attention", "mlp", base="float8")
    matrices = 28 * (2048 * 4096 + 2048 * 2048 + 3 * 2048 * 6144)
    whole = memory(train=train, adapters=adapted("attention", "mlp")[1])
    packed = memory(train=train, adapters=sizes)
    assert whole["weights"] - packed["weights"] == matrices
    assert packed["activations"] - whole["activations"] == 2 * (2 * 6144 * 2048)
    again = {"train": train, "recompute": "full"}
    whole, packed = (memory(adapters=a, **again) for a in (adapted("attention", "mlp")[1], sizes))
    assert packed["activations"] == whole["activations"]


def test_a_vision_encoder_without_adapters_runs_without_a_graph():
    language, images = (adapted(*targets) for targets in (("attention",), ("attention", "vision")))
    still, whole = (memory(train=train, adapters=sizes, seq_len=1) for train, sizes in (language, images))
    one = 512 * 2 * 11 * 1024
    assert whole["activations"] - still["activations"] > 23 * one
    merger = adapted("merger")
    alone = memory(train=merger[0], adapters=merger[1], seq_len=1)["activations"]
    assert alone < still["activations"] + one
    frozen_vision = adapted("attention", "vision", "merger", vision=PartConfig(frozen=True))[1]
    assert not frozen_vision.trains("vision") and frozen_vision.trains("merger")
    sizes = {"patches": 512, "in_flight": 3, "tp": 1, "recompute": False}
    rank = estimate_vision_rank(QWEN_2B, images[0], **sizes, adapters=images[1])
    assert rank["gradients"] == 4 * images[1].vision["vision"].parameters.on(1)


def test_recomputed_layers_keep_one_layers_adapters():
    train, sizes = adapted("attention", "mlp")
    place = sizes.language[0]
    added = 2 * (1024 * place.per_token.on(1) + place.products.on(1))
    layout = {"train": train, "max_patches": 0}
    for recompute, count in (("none", 28), ("full", 1)):
        with_, without = (memory(**layout, adapters=a, recompute=recompute)["activations"] for a in (sizes, None))
        assert with_ - without == count * added
    assert place.per_token.on(1) == 7 * 16
