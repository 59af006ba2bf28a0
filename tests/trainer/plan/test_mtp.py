"""The sizes and FLOPs of multi-token prediction, and the settings that cannot train it."""

import pytest

from dataset_builders.errors import InputError
from tests.helpers.single_rank import build_tiny, single_rank
from tests.helpers.tiny_hybrid_model import hybrid_hf_dir, mtp_hf_dir
from tests.trainer.train_config import train_config
from trainer.contract.adapter import AdapterConfig
from trainer.contract.parallel import ParallelConfig
from trainer.contract.run import PartConfig, TrainConfig
from trainer.data.flops import training_cost
from trainer.model.registry import read_model
from trainer.model.shape import Work
from trainer.plan.checks import check_mtp
from trainer.plan.estimate import estimate_memory
from trainer.plan.pieces import language_flops

pytestmark = pytest.mark.promise(
    "Qwen3-VL, Qwen3.5, Qwen3 without images and models with experts give transformers' logits, and multi-token "
    "prediction its formula's, to 1e-4 and every gradient to 1e-4 relative, in float32."
)


TRAIN, ALONE = train_config(mtp_loss_scaling_factor=0.1), train_config()


def test_without_its_factor_it_is_nowhere():
    assert read_model(mtp_hf_dir(), ALONE) == read_model(mtp_hf_dir())
    assert read_model(mtp_hf_dir())[1].language == read_model(hybrid_hf_dir())[1].language
    assert "mtp_loss_scaling_factor" not in ALONE.model_dump()


def test_its_parameters_and_flops_are_those_of_its_modules():
    shape = read_model(mtp_hf_dir(), TRAIN)[1]
    with single_rank() as mesh:
        model = build_tiny(mtp_hf_dir(), mesh, train=TRAIN)
    mtp, sizes = model.language.mtp, shape.language.mtp
    assert sizes.parameters == sum(param.numel() for param in mtp.parameters())
    assert shape.parameters["language"] == sum(param.numel() for param in model.language.parameters())
    attention, mlp = mtp.layer.self_attention, mtp.layer.mlp
    before, after, squared = sizes.flops
    assert before == 2 * (mtp.fc.numel() + attention.linear_qkv.weight.numel())
    assert after == 2 * sum(linear.weight.numel() for linear in (attention.linear_proj, *mlp.children()))
    assert squared == sizes.layer.flops.squared > 0


def test_a_step_counts_it_three_times_with_its_logits_and_all_tokens_of_the_layer_before():
    family, shape = read_model(mtp_hf_dir(), TRAIN)
    alone, work = read_model(mtp_hf_dir())[1], Work(1000, 200, 50_000, 0, 0)
    forward, lm = shape.forward_flops, shape.language
    logits = 2 * lm.hidden_size * lm.vocab_size
    more = {name: forward[name] - alone.forward_flops[name] for name in forward}
    last = lm.layers[-1].flops.after
    assert more["per_token"] == lm.mtp.flops.before + last
    assert more["per_loss_token"] == lm.mtp.flops.after - last + logits
    assert more["per_token_squared"] == lm.mtp.flops.squared
    cost, without = (training_cost(sizes, family, TRAIN) for sizes in (shape, alone))
    for name in ("per_token", "per_loss_token", "per_token_squared"):
        assert getattr(cost, name) - getattr(without, name) == 3 * more[name]
    one = ((range(lm.num_layers),), ParallelConfig())
    by_plan = [sum(language_flops(sizes, one[1], work, (), one[0])) for sizes in (shape, alone)]
    assert by_plan == [pytest.approx(each.language(work)) for each in (cost, without)]


def test_memory_counts_its_weights_gradients_moments_and_logits():
    def memory(train: TrainConfig, **layout: object) -> dict[str, int]:
        shape = read_model(mtp_hf_dir(), train)[1]
        pieces, sizes = (range(shape.language.num_layers),), {"dp": 1, "seq_len": 64, "max_patches": 64}
        return estimate_memory(shape, ParallelConfig(**layout), train, pieces=pieces, **sizes)

    lm = read_model(mtp_hf_dir(), TRAIN)[1].language
    for tp in (1, 2):
        whole, without = memory(TRAIN, tp=tp), memory(ALONE, tp=tp)
        number = lm.mtp.undivided + lm.mtp.layer.parameters / tp
        assert [whole[name] - without[name] for name in ("weights", "gradients", "optimizer")] == [
            pytest.approx(factor * number, abs=2) for factor in (4, 4, 8)
        ]
    kept = lm.mtp.saved_activations(selective=False) + 3 * lm.hidden_size + lm.vocab_size
    assert memory(TRAIN)["activations"] - memory(ALONE)["activations"] == 4 * 64 * kept


REFUSED = {
    "a model without it": (hybrid_hf_dir, {}, {}, "this model has none with its own embeddings"),
    "adapters": (mtp_hf_dir, {"adapter": AdapterConfig(rank=4, alpha=8)}, {}, "train.adapter trains adapters alone"),
    "frozen": (mtp_hf_dir, {"language": PartConfig(frozen=True)}, {}, "train.language.frozen=true freezes it"),
    "a pipeline": (mtp_hf_dir, {}, {"pp": 2}, "it needs the embeddings beside the last layer, which pp=2 puts"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_train_it_is_refused_in_one_line(name):
    directory, settings, layout, reason = REFUSED[name]
    shape = read_model(directory())[1]
    check_mtp(train_config(**settings), ParallelConfig(**layout), shape)
    with pytest.raises(InputError, match=r"^train\.mtp_loss_scaling_factor is 0\.1 ") as caught:
        check_mtp(train_config(mtp_loss_scaling_factor=0.1, **settings), ParallelConfig(**layout), shape)
    assert reason in str(caught.value) and "\n" not in str(caught.value)
    assert "set train.mtp_loss_scaling_factor=0" in str(caught.value)
    check_mtp(TRAIN, ParallelConfig(tp=2, cp=2), read_model(mtp_hf_dir())[1])
