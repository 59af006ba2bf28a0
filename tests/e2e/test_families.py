"""Models of other families through the whole flow: tokenized, trained, exported, answered, on a CPU."""

import json
import os
import random
from base64 import b64decode
from collections.abc import Iterator, Mapping
from pathlib import Path
from pkgutil import resolve_name

import pytest
import torch
from safetensors.torch import load_file

from flows.cli.main import main
from stages.shared.pages.report import read_report
from tests.e2e.command import made, only, own_process, sets
from tests.helpers.bins import MIXED, make_samples
from tests.helpers.evaluation import picture
from tests.helpers.reference import load_reference, reference_losses
from tests.helpers.single_rank import build_tiny, single_rank
from tests.helpers.tiny_hybrid_model import hybrid_hf_dir, mtp_hf_dir
from tests.helpers.tiny_text_model import text_config, write_text_model
from tests.toy_family.family import write_distribution
from tests.toy_family.reference import write_toy
from trainer.contract.result import read_metrics
from trainer.data.micro_batch import geometry_of, make_micro_batch
from trainer.model import registry
from trainer.model.registry import read_model

SETTINGS = {
    "convert.builder": "openai_messages",
    "convert.options": "{}",
    "convert.heldout_fraction": 0.2,
    "tokenize.max_seq_len": 128,
    "plan_bins.seq_len": 256,
    "train.num_steps": 12,
    "train.optim.warmup_steps": 2,
    "train.heldout_interval": 6,
    "evaluate.max_new_tokens": 3,
    "evaluate.max_samples_per_subset": 4,
    "execution.num_workers": 1,
    "execution.registry.gates": "{}",
}

DIGITS = {name: value for name, value in SETTINGS.items() if not name.startswith("convert")} | {
    "data.num_scans": 60,
    "data.num_multi": 8,
    "data.num_pairs": 8,
    "data.num_texts": 8,
    "train.optim.clip_grad_norm": 0.1,
    "execution.registry.gates": "{}",
}


@pytest.fixture(autouse=True)
def this_process() -> Iterator[None]:
    with own_process():
        yield


def write_sums(directory: Path) -> Path:
    """Write questions and answers without images."""
    rng, rows = random.Random(3), []
    for _ in range(60):
        one, two = rng.randint(0, 9), rng.randint(0, 9)
        question = {"role": "user", "content": f"What is {one} plus {two}?"}
        rows.append({"messages": [question, {"role": "assistant", "content": str(one + two)}]})
    directory.mkdir(exist_ok=True)
    (directory / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return directory


def athanor(root: Path, model: Path, **changes: object) -> int:
    return run(root, {**SETTINGS, "data": write_sums(root.parent / "raw"), "model": model, **changes})


def run(root: Path, settings: Mapping[str, object]) -> int:
    return main(["run", "--root", str(root), *sets(settings)])


def weights(model: Path, root: Path) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return the tensors of a model and of its export, which have the same names and dtypes."""
    before, after = (load_file(path / "model.safetensors") for path in (model, only(root, "export").dir / "hf"))
    assert {name: t.dtype for name, t in before.items()} == {name: t.dtype for name, t in after.items()}
    return before, after


def answers(root: Path) -> list[str]:
    """Return the lines of one of the answered models, as many as of the other."""
    return (made(root, "answer")[0].dir / "answers.jsonl").read_text().splitlines()


def card_of(root: Path) -> str:
    return (only(root, "release").dir / "hf" / "README.md").read_text()


@pytest.mark.promise(
    "Qwen3-VL, Qwen3.5, Qwen3 without images and models with experts give transformers' logits, and multi-token "
    "prediction its formula's, to 1e-4 and every gradient to 1e-4 relative, in float32."
)
@pytest.mark.full
def test_qwen3_is_tokenized_trained_exported_and_answered(tmp_path):
    model, root = tmp_path / "qwen3", tmp_path / "root"
    write_text_model(model, text_config())
    assert athanor(root, model) == 0
    tokenized, exported = only(root, "tokenize").manifest, only(root, "export").manifest
    assert tokenized.stats["total"]["num_images"] == 0 and not tokenized.skips
    rows = read_metrics(only(root, "train").dir)
    assert rows[-1].heldout_loss < rows[5].heldout_loss
    assert {name for name in rows[-1].model_extra if name.endswith("grad_norm")} == {"language_grad_norm"}
    before, after = weights(model, root)
    assert list(exported.stats["parameters"]) == ["language"]
    assert all((before[name] != after[name]).any() for name in before) and len(answers(root)) == 4
    assert exported.stats["carried"] == {} and "those of the base model" not in card_of(root)


@pytest.mark.promise(
    "Qwen3-VL, Qwen3.5, Qwen3 without images and models with experts give transformers' logits, and multi-token "
    "prediction its formula's, to 1e-4 and every gradient to 1e-4 relative, in float32."
)
@pytest.mark.full
def test_qwen3_5_is_trained_with_its_drafts(tmp_path):
    model, root = mtp_hf_dir(), tmp_path / "root"
    settings = {"train.mtp_loss_scaling_factor": 0.3, "compare": "null", "verify": "null"}
    assert run(root, {**DIGITS, "model": model, **settings}) == 0
    trained, stats = only(root, "train").dir, only(root, "export").manifest.stats
    losses = [row.mtp_loss for row in read_metrics(trained)]
    assert losses[-1] < losses[5]
    sections = read_report(trained)["sections"]
    assert b"mtp_loss" in b64decode(sections[0]["source"].partition(",")[2]), "the third curve of the loss"
    before, after = weights(model, root)
    for name, tensor in before.items():
        assert tensor.shape == after[name].shape and not torch.equal(tensor, after[name]), name
    assert (stats["carried"], stats["mtp"]) == ({}, 15)
    assert "The 15 tensors of multi-token prediction" in card_of(root)


@pytest.mark.promise(
    "Qwen3-VL, Qwen3.5, Qwen3 without images and models with experts give transformers' logits, and multi-token "
    "prediction its formula's, to 1e-4 and every gradient to 1e-4 relative, in float32."
)
@pytest.mark.full
def test_qwen3_5_is_trained_on_pictures_exported_with_what_it_carries_and_answers(tmp_path, capsys):
    model, root = hybrid_hf_dir(), tmp_path / "root"
    assert run(root, {**DIGITS, "model": model}) == 0
    rows, exported = read_metrics(only(root, "train").dir), only(root, "export")
    assert rows[-1].heldout_loss < rows[5].heldout_loss
    before, after = weights(model, root)
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]) is name.startswith("mtp."), name
    assert json.loads((exported.dir / "hf/config.json").read_text())["dtype"] == "float32"
    assert_losses_of(load_reference(exported.dir / "hf"), exported.dir / "hf")
    assert len(answers(root)) >= 4
    assert len(made(root, "evaluate")) == 2 and len(made(root, "compare")) == 1  # before training, and after
    (tmp_path / "picture.png").write_bytes(picture(3))
    capsys.readouterr()
    assert main(["ask", str(exported.dir / "hf"), str(tmp_path / "picture.png"), "Which digit?"]) == 0
    assert capsys.readouterr().out.strip()
    assert exported.manifest.stats["carried"] == {"mtp.": 2}
    assert "The 2 tensors `mtp.*` are those of the base model, unchanged" in card_of(root)


def assert_losses_of(reference, hf_dir: Path) -> None:
    """Assert that our model of a directory has the losses of a reference."""
    geometry = geometry_of(read_model(hf_dir)[1])
    samples = make_samples(MIXED, geometry, range(20, 300))
    wanted = torch.cat([reference_losses(reference, sample) for sample in samples])
    with single_rank() as mesh:
        ours = build_tiny(hf_dir, mesh)(make_micro_batch(samples, geometry, 128))
    torch.testing.assert_close(ours, wanted, atol=1e-4, rtol=0)


@pytest.fixture
def toy(tmp_path, monkeypatch) -> Iterator[Path]:
    """Make a directory of the toy model, whose family is registered as that of an installed package."""
    installed = write_distribution(tmp_path / "installed")
    monkeypatch.syspath_prepend(installed)
    registry._all_places.cache_clear()
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(installed), str(Path(__file__).parents[2])]))
    yield write_toy(tmp_path / "toy")
    registry._all_places.cache_clear()


@pytest.mark.promise(
    "A family of models is a folder of its own, in another package too: a toy family goes through the flow."
)
def test_the_toys_losses_are_its_references(toy):
    family, shape = read_model(toy)
    assert shape.num_deepstack == 0 and shape.language.rotary_dim < shape.language.layers[0].mixer.head_dim
    reference = resolve_name(family.reference).from_pretrained(toy, dtype=torch.float32).eval()
    assert sum(param.numel() for param in reference.parameters()) == sum(shape.parameters.values())
    assert_losses_of(reference, toy)


TP2 = {"execution.cluster.processes": 2, "execution.parallel.tp": 2}
PP2 = {"execution.cluster.processes": 2, "execution.parallel.pp": 2}
ADAPTED = {"train.adapter.rank": 4, "train.adapter.alpha": 8}


@pytest.mark.promise(
    "A family of models is a folder of its own, in another package too: a toy family goes through the flow."
)
@pytest.mark.full
@pytest.mark.parametrize(
    ("settings", "layouts", "trained"),
    [({}, (TP2, PP2), ("g_proj", "mlp.gate", "mlp.blend")), (ADAPTED, (TP2,), ("g_proj",))],
    ids=["full", "adapters"],
)
def test_a_toy_family_registered_here_goes_through_the_flow_in_every_layout(
    toy, tmp_path, capsys, settings, layouts, trained
):
    losses, trained_weights = [], []
    for number, layout in enumerate(({}, *layouts)):
        root = tmp_path / f"root-{number}"
        assert run(root, {**DIGITS, "model": toy, **settings, **layout}) == 0
        assert only(root, "tokenize").manifest.stats["total"]["num_images"] > 0
        losses.append([row.loss for row in read_metrics(only(root, "train").dir)])
        before, after = weights(toy, root)
        trained_weights.append(after)
        assert len(answers(root)) > 3
    changed = {name for name in before if (before[name] != trained_weights[0][name]).any()}
    assert losses[0][-1] < losses[0][0]
    for part in trained:
        of_part = {name for name in before if part in name}
        assert of_part and of_part <= changed, part
    for other_losses, other_weights in zip(losses[1:], trained_weights[1:], strict=True):
        assert losses[0] == pytest.approx(other_losses, rel=1e-4)
        for name, weight in trained_weights[0].items():
            torch.testing.assert_close(weight, other_weights[name], rtol=0, atol=1e-4)
    capsys.readouterr()
    given = sets({**DIGITS, "model": toy, **settings})
    assert main(["plan", "--root", str(tmp_path / "root-0"), *given]) == 0
    planned = capsys.readouterr().out
    assert "activations" in planned and "0 of" in planned and "stages would be made" in planned


@pytest.mark.promise(
    "A family of models is a folder of its own, in another package too: a toy family goes through the flow."
)
def test_settings_of_a_part_that_a_model_lacks_are_refused(tmp_path, capsys):
    model = tmp_path / "qwen3"
    write_text_model(model, text_config())
    assert athanor(tmp_path / "root", model, **{"train.vision.frozen": "true"}) == 2
    assert "train.vision.frozen is True, and a qwen3 model has no part 'vision'; its parts: language" in (
        capsys.readouterr().err
    )
    assert athanor(tmp_path / "root", model, **{"train.language.frozen": "true"}) == 2
    assert "nothing is left to train in a qwen3 model" in capsys.readouterr().err
