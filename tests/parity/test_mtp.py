"""Multi-token prediction against the formula in plain torch: float32, CPU, three shapes, every kind of sample.

transformers drops the tensors mtp.*. The reference takes its model, one sample at a time, for the hidden states and the
input of the first layer, and its decoder layer for the layer; the rest is written here.
"""

import copy
import dataclasses
import shutil

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch.testing import assert_close
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeDecoderLayer

from dataset_builders.contracts.tokenized import TokenizedSample
from stages.shared.inputs.model_directory import ModelDirectory
from tests.helpers.bins import make_samples
from tests.helpers.parity import KINDS, SEQ_LEN, assert_gradients_equal, assert_weights_leave_as_they_came, rules_of
from tests.helpers.reference import load_reference, reference_inputs
from tests.helpers.run_dir import OPTIM, model_dir
from tests.helpers.single_rank import build_tiny, single_rank
from tests.helpers.tiers import full
from tests.helpers.tiny_hybrid_model import ATTENTION
from trainer.contract.run import TrainConfig
from trainer.data.micro_batch import geometry_of, make_micro_batch
from trainer.loop.loss import loss_of

pytestmark = pytest.mark.promise(
    "Qwen3-VL, Qwen3.5, Qwen3 without images and models with experts give transformers' logits, and multi-token "
    "prediction its formula's, to 1e-4 and every gradient to 1e-4 relative, in float32."
)

# Of KINDS, samples of one and two tokens have no token after the next; the last begins right after an image's sample.
FACTOR = 0.3
TRAIN = TrainConfig(
    seed=0,
    num_steps=9,
    global_batch_size=1,
    precision="float32",
    heldout_interval=9,
    optim=OPTIM,
    mtp_loss_scaling_factor=FACTOR,
)


def stacked(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a layer's tensors with those of its experts, stored one by one, as transformers' module has them."""
    experts = {name: tensor for name, tensor in tensors.items() if ".experts." in name}
    if not experts:
        return tensors

    def of(part: str) -> list[torch.Tensor]:
        return [tensors[f"mlp.experts.{i}.{part}.weight"] for i in range(len(experts) // 3)]

    gate_up = torch.stack([torch.cat(both) for both in zip(of("gate_proj"), of("up_proj"))])
    whole = {"mlp.experts.gate_up_proj": gate_up, "mlp.experts.down_proj": torch.stack(of("down_proj"))}
    return {name: tensor for name, tensor in tensors.items() if name not in experts} | whole


class PlainMTP(torch.nn.Module):
    """The formula, of one sample alone, with weights under their names on disk."""

    def __init__(self, hf_dir, reference) -> None:
        super().__init__()
        tensors = load_file(hf_dir / "model.safetensors")
        weights = {n.removeprefix("mtp."): t for n, t in tensors.items() if n.startswith("mtp.")}
        config = copy.deepcopy(reference.config.text_config)
        kind = Qwen3_5MoeDecoderLayer if "moe" in config.model_type else Qwen3_5DecoderLayer
        layer = kind(config, config.layer_types.index(ATTENTION))
        layer.load_state_dict(
            stacked({n.removeprefix("layers.0."): t for n, t in weights.items() if n.startswith("layers.0.")})
        )
        self.layers, self.eps = torch.nn.ModuleList([layer]), config.rms_norm_eps
        self.others = torch.nn.ParameterDict(
            {n.removesuffix(".weight"): t for n, t in weights.items() if not n.startswith("layers.")}
        )
        self.reference = [reference]  # not a module of this one

    def norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * (1 + self.others[name])

    def logits(self, sample: TokenizedSample) -> tuple[torch.Tensor, torch.Tensor]:
        """The logits (n, vocabulary) of the next token, and (n - 1, vocabulary) of the token after it."""
        (reference,) = self.reference
        inputs, seen = reference_inputs(sample, reference.config), {}
        language = reference.model.language_model
        hook = language.register_forward_pre_hook(lambda _, args, kwargs: seen.update(kwargs), with_kwargs=True)
        hidden = reference.model(**inputs, use_cache=False).last_hidden_state
        hook.remove()
        embedded = seen["inputs_embeds"]
        first = reference.lm_head(hidden[0])
        inputs.pop("pixel_values", None)
        positions, _ = reference.model.get_rope_index(**inputs)
        if len(sample.input_ids) < 2:
            return first, first[:0]
        parts = self.norm("pre_fc_norm_embedding", embedded[:, 1:]), self.norm("pre_fc_norm_hidden", hidden[:, :-1])
        x = torch.cat(parts, -1) @ self.others["fc"].t()
        angles = language.rotary_emb(x, positions[:, :, :-1])
        out = self.layers[0](x, position_embeddings=angles, attention_mask=None)
        return first, reference.lm_head(self.norm("norm", out[0] if isinstance(out, tuple) else out)[0])

    def losses(self, sample: TokenizedSample) -> tuple[torch.Tensor, torch.Tensor]:
        """The losses of the answers' tokens that are predicted from the token before, and from the one before that."""
        ids = torch.from_numpy(sample.input_ids.astype("int64"))
        learnt = torch.from_numpy(sample.loss_mask.astype(bool))
        first, second = self.logits(sample)
        of_first = F.cross_entropy(first[:-1][learnt[1:]], ids[1:][learnt[1:]], reduction="none")
        return of_first, F.cross_entropy(second[:-1][learnt[2:]], ids[2:][learnt[2:]], reduction="none")

    def gradients(self) -> dict[str, torch.Tensor]:
        """The gradient of every parameter by its name on disk."""
        mine = {f"mtp.{name}.weight": param.grad for name, param in self.others.items()}
        mine |= {f"mtp.layers.{name}": param.grad for name, param in self.layers.named_parameters()}
        return mine | {name: param.grad for name, param in self.reference[0].named_parameters()}


class Pair:
    """Ours and the reference with the same weights, and one bin of mixed samples."""

    def __init__(self, shape: str, mesh) -> None:
        self.mesh, self.hf_dir = mesh, model_dir(f"mtp-{shape}")
        self.plain = PlainMTP(self.hf_dir, load_reference(self.hf_dir))
        self.ours = build_tiny(self.hf_dir, mesh, SEQ_LEN, train=TRAIN)
        self.samples = make_samples(KINDS, geometry_of(self.ours.shape), range(20, 300))
        self.batch = make_micro_batch(self.samples, geometry_of(self.ours.shape), SEQ_LEN)

    def ours_of(self, samples) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Both kinds of our losses by sample, of one bin."""
        batch = make_micro_batch(samples, geometry_of(self.ours.shape), SEQ_LEN)
        with torch.no_grad():
            first, second = self.ours(batch).tensor_split((len(batch.labels),))
        lengths = [int(sample.loss_mask[2:].sum()) for sample in samples]
        return dict(zip(batch.keys, first.split(batch.loss_lengths))), dict(zip(batch.keys, second.split(lengths)))


@pytest.fixture(scope="module")
def mesh():
    with single_rank() as mesh:
        yield mesh


SHAPES = ["first", full("second"), full("third"), full("experts-shared"), full("experts-many")]


@pytest.fixture(scope="module", params=SHAPES)
def pair(request, mesh):
    return Pair(request.param, mesh)


@pytest.fixture(scope="module")
def losses(pair):
    return pair.ours_of(pair.samples)


def test_logits_of_the_token_after_the_next_in_a_packed_bin(pair):
    seen = {}
    hook = pair.ours.language.mtp.register_forward_hook(lambda module, args, out: seen.update(out=out))
    every = torch.arange(SEQ_LEN)
    batch = dataclasses.replace(pair.batch, second_index=every, second_labels=torch.zeros_like(every))
    pair.ours(batch)
    hook.remove()
    ours, start = seen["out"][:, 0] @ pair.ours.language.output_weight.t(), 0
    for sample in pair.samples:
        _, theirs = pair.plain.logits(sample)
        assert_close(ours[start : start + len(theirs)], theirs, atol=1e-4, rtol=0)
        start += len(sample.input_ids)


def test_losses_of_each_sample_packed_and_alone(pair, losses):
    for sample in pair.samples:
        alone = pair.ours_of([sample])
        for ours, own, theirs in zip(losses, alone, pair.plain.losses(sample)):
            assert_close(ours[sample.key], theirs, atol=1e-4, rtol=0)
            assert_close(own[sample.key], theirs, atol=1e-4, rtol=0)


def test_the_loss_and_the_gradient_of_every_parameter(pair):
    theirs = [torch.cat(kind) for kind in zip(*map(pair.plain.losses, pair.samples))]
    pair.plain.zero_grad()
    pair.plain.reference[0].zero_grad()
    loss = theirs[0].mean() + FACTOR * theirs[1].sum() / len(theirs[0])
    loss.backward()
    pair.ours.zero_grad()
    losses = pair.ours(pair.batch)
    total, count, report = loss_of(losses, num_loss_tokens=len(pair.batch.labels), mtp_factor=FACTOR)
    (total / count).backward()
    assert float(total / count) == pytest.approx(float(loss), abs=1e-4)
    expected = [float(theirs[0].sum()), len(theirs[0]), float(theirs[1].sum()), len(theirs[1])]
    assert report["loss_and_tokens"].tolist() == pytest.approx(expected, rel=1e-5)
    assert_gradients_equal(pair.ours, rules_of(pair.ours, pair.hf_dir), pair.plain.gradients())


@pytest.mark.parametrize("number", [0, 4, 8])
def test_another_sample_changes_no_bit_of_the_others(pair, losses, number):
    other = make_samples(KINDS, geometry_of(pair.ours.shape), range(20, 300), seed=7)[number]
    own = pair.samples[number]
    other = dataclasses.replace(other, key=own.key, loss_mask=own.loss_mask)
    again = pair.ours_of([*pair.samples[:number], other, *pair.samples[number + 1 :]])
    for before, after in zip(losses, again):
        for key in before:
            assert torch.equal(after[key], before[key]) is (key != own.key or len(before[key]) == 0), key


def test_an_evaluation_has_the_losses_of_the_next_token_alone(pair):
    trained, without = pair.ours(pair.batch), build_tiny(pair.hf_dir, pair.mesh, SEQ_LEN)
    pair.ours.eval()
    alone = pair.ours(pair.batch)
    pair.ours.train()
    assert torch.equal(alone, without(pair.batch))
    assert_close(trained[: len(alone)], alone, atol=1e-5, rtol=0)


@pytest.mark.promise(
    "Weights that were not trained leave in the Hugging Face format with the bits and in the form in which they came."
)
@pytest.mark.full
def test_experts_may_be_stored_in_one_tensor(mesh, tmp_path):
    """Qwen3.5 stores the experts of mtp one by one, Qwen3.6 stacked, whatever the other layers do."""
    source, stacked_dir = model_dir("mtp-experts-many"), tmp_path / "stacked"
    shutil.copytree(source, stacked_dir)
    tensors, prefix = load_file(source / "model.safetensors"), "mtp.layers.0."
    layer = {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
    tensors = {n: t for n, t in tensors.items() if not n.startswith(prefix)}
    tensors |= {prefix + name: tensor for name, tensor in stacked(layer).items()}
    save_file(tensors, stacked_dir / "model.safetensors", metadata={"format": "pt"})
    models = [build_tiny(path, mesh, SEQ_LEN, train=TRAIN) for path in (source, stacked_dir)]
    for one, other in zip(*(model.parameters() for model in models)):
        assert torch.equal(one, other)
    assert_weights_leave_as_they_came(models[1], mesh, stacked_dir, tmp_path / "out")
    model = ModelDirectory(stacked_dir)
    assert model.count_copied(TRAIN) == {} != model.count_copied()


@pytest.mark.promise(
    "Weights that were not trained leave in the Hugging Face format with the bits and in the form in which they came."
)
def test_weights_in_and_out_are_bit_equal_trained_or_not(pair, tmp_path):
    for model in (pair.ours, build_tiny(pair.hf_dir, pair.mesh, SEQ_LEN)):
        is_computed = any(name.startswith("mtp.") for rule in rules_of(model, pair.hf_dir) for name in rule.hf)
        assert is_computed is (model is pair.ours)
        assert_weights_leave_as_they_came(model, pair.mesh, pair.hf_dir, tmp_path / str(is_computed))
