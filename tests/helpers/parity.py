"""A packed bin of athanor against transformers."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch.testing import assert_close

from dataset_builders.contracts.manifest import FileEntry
from dataset_builders.contracts.tokenized import TokenizedSample
from tests.helpers.bins import MIXED, Kind, make_samples
from tests.helpers.reference import load_reference, reference_inputs, reference_logits, reference_losses
from tests.helpers.single_rank import build_tiny
from trainer.checkpoint.hf_weights import HFTensors, save_hf_weights
from trainer.data.micro_batch import geometry_of, make_micro_batch
from trainer.layers.packed_model import PackedModel
from trainer.layers.segments import mrope_angles
from trainer.model.registry import read_model
from trainer.model.rules import Rule
from trainer.parallel.mesh import Mesh

# Samples end one before, at and one after the end of a chunk of the delta rule, one has a single token, and so has the
# padding of a bin of this length.
SEQ_LEN = 365
KINDS = [*MIXED, Kind(63), Kind(1), Kind(64), Kind(65), Kind(90, ((1, 4, 6),)), Kind(2)]


class Pair:
    """Ours and the reference with the same weights, and one bin of mixed samples. Athanor's model may be on a GPU."""

    def __init__(
        self,
        hf_dir: Path,
        mesh: Mesh,
        kinds: Sequence[Kind] = KINDS,
        seq_len: int = SEQ_LEN,
        modules: str = "exact",
    ) -> None:
        self.mesh, self.hf_dir, self.seq_len = mesh, hf_dir, seq_len
        self.reference = load_reference(hf_dir)
        self.ours = build_tiny(hf_dir, mesh, seq_len, modules=modules)
        self.geometry = geometry_of(self.ours.shape)
        self.samples = make_samples(list(kinds), self.geometry, range(20, 300))
        self.batch = make_micro_batch(self.samples, self.geometry, seq_len).to(mesh.device)

    def losses_by_sample(self, samples: Sequence[TokenizedSample]) -> dict[str, torch.Tensor]:
        """Return our losses of each sample's loss tokens, of one bin."""
        batch = make_micro_batch(samples, self.geometry, self.seq_len)
        with torch.no_grad():
            return dict(zip(batch.keys, self.ours(batch).split(batch.loss_lengths), strict=True))

    def pixels(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the pixels and grids of all images as transformers takes them, and of the videos like images."""
        inputs = [reference_inputs(s, self.reference.config) for s in self.samples]
        pixels, grids = (
            [i[name] for i in inputs for name in names if name in i]
            for names in (("pixel_values", "pixel_values_videos"), ("image_grid_thw", "video_grid_thw"))
        )
        return torch.cat(pixels), torch.cat(grids)


def assert_logits_equal(pair: Pair) -> None:
    """Assert that the logits of every sample agree to 1e-4."""
    ours = (pair.ours.hidden_states(pair.batch)[:, 0] @ pair.ours.language.output_weight.t()).cpu()
    start = 0
    for sample in pair.samples:
        theirs = reference_logits(pair.reference, sample)
        assert_close(ours[start : start + len(theirs)], theirs, atol=1e-4, rtol=0)
        start += len(theirs)


def assert_losses_and_gradients_equal(pair: Pair) -> None:
    """Assert that the loss of every token agrees to 1e-4, and the gradient of every parameter to 1e-4 of its norm."""
    pair.reference.zero_grad()
    theirs = torch.cat([reference_losses(pair.reference, sample) for sample in pair.samples])
    theirs.mean().backward()
    pair.ours.zero_grad()
    ours = pair.ours(pair.batch)
    ours.mean().backward()
    assert_close(ours.cpu(), theirs, atol=1e-4, rtol=0)
    grads = {name: param.grad for name, param in pair.reference.named_parameters()}
    assert_gradients_equal(pair.ours, rules_of(pair.ours, pair.hf_dir), grads)


def rules_of(model: PackedModel, hf_dir: Path) -> Sequence[Rule]:
    return read_model(hf_dir)[0].weight_rules(model.shape)


def assert_gradients_equal(model: PackedModel, rules: Sequence[Rule], theirs: Mapping[str, torch.Tensor]) -> None:
    """Assert that the gradient of every parameter agrees with that of its name on disk, to 1e-4 of its norm."""
    params, compared = dict(model.named_parameters()), set()
    for rule in rules:
        for name, grad in zip(rule.hf, rule.packing.split(params[rule.ours].grad.cpu(), len(rule.hf), 1)):
            assert theirs[name].norm() > 1e-6, f"{name} shows nothing"
            assert float((grad - theirs[name]).norm() / theirs[name].norm()) <= 1e-4, name
            compared.add(name)
    assert compared == set(theirs)


def assert_positions_and_angles_equal(pair: Pair) -> None:
    """Assert that every token has the position of transformers, and the angles of its rotation to 1e-6."""
    rotary, start = pair.reference.model.language_model.rotary_emb, 0
    for sample in pair.samples:
        inputs = reference_inputs(sample, pair.reference.config)
        inputs = {name: value for name, value in inputs.items() if not name.startswith("pixel_values")}
        positions, _ = pair.reference.model.get_rope_index(**inputs)
        ours = pair.batch.position_ids[:, start : start + len(sample.input_ids)]
        assert torch.equal(ours, positions[:, 0])
        cos, sin = rotary(torch.zeros(1), positions)
        angles = mrope_angles(ours, pair.ours.shape.language)
        assert_close(angles.cos().tile(2), cos[0], atol=1e-6, rtol=0)
        assert_close(angles.sin().tile(2), sin[0], atol=1e-6, rtol=0)
        start += len(sample.input_ids)


def assert_nothing_to_learn_gives_gradients_of_zero(pair: Pair) -> None:
    pair.ours.zero_grad()
    losses = pair.ours(make_micro_batch([], pair.geometry, pair.seq_len))
    assert losses.shape == (0,)
    losses.sum().backward()
    for name, param in pair.ours.named_parameters():
        assert param.grad is not None and not param.grad.any(), name


def assert_weights_leave_as_they_came(
    model: PackedModel, mesh: Mesh, hf_dir: Path, out: Path, **settings: int
) -> list[FileEntry]:
    """Assert that saved weights have the names, dtypes, shapes and bits of those that were loaded; return the files."""
    entries = save_hf_weights([model], mesh, rules_of(model, hf_dir), hf_dir, out, **settings)
    before, after = HFTensors(hf_dir), HFTensors(out)
    assert before.names() == after.names()
    for name in before.names():
        assert before.header(name) == after.header(name), name
        assert torch.equal(before.get(name), after.get(name)), name
    return entries
