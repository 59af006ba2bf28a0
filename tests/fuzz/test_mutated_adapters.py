"""Mutated PEFT adapters from a seeded generator: each is read and gives PEFT's numbers, or is refused with the file's
name.

The core draws from a fixed seed. The full tier draws 200 from a new seed each time, which it prints. ATHANOR_FUZZ_SEED
repeats a seed.
"""

import copy
import json
import os
import random
import secrets
import shutil
from collections import Counter
from functools import cache
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

from dataset_builders.errors import InputError
from stages.shared.inputs.adapter_directory import AdapterDirectory
from stages.shared.inputs.load_transformers import add_adapters
from stages.shared.inputs.model_directory import ModelDirectory
from tests.fuzz.hostile import value
from tests.fuzz.mutated_models import spoil_header
from tests.helpers.adapter_files import write_adapter
from tests.helpers.evaluation import talkative_hf_dir
from trainer.contract.peft import ADAPTER_CONFIG, ADAPTER_WEIGHTS

pytestmark = pytest.mark.promise(
    "PEFT gives our logits from our adapters to 1e-5, those of experts too; merging is `merge_and_unload` to the "
    "bit, training continues from its directory and ours, and an adapter beside its base answers as the merged "
    "model."
)

SEED = 20261124
NEW_SEED = int(os.environ.get("ATHANOR_FUZZ_SEED") or secrets.randbelow(1 << 31))
PEFT_KEYS = ("bias", "rank_pattern", "alpha_pattern", "modules_to_save", "exclude_modules", "layers_to_transform")
PEFT_KEYS = (*PEFT_KEYS, "lora_dropout", "fan_in_fan_out", "init_lora_weights", "layers_pattern", "unknown_key")
NUMBERS = (float("nan"), float("inf"), float("-inf"), True, False, None, 0, -1, 1, 3, 4, 0.5, 6.5, 1e300, "4", [4], {})
NAMES = ("q_proj", ["q_proj"], ".*q_proj", "all-linear", [], "", "(", ["q_proj", 5], None, [""], [".*"])
UNFIT_MODULES = ("model.language_model.norm", "model.language_model.embed_tokens", "lm_head", "model.visual")
DTYPES = (torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int8, torch.bool, torch.float8_e4m3fn)


def change_config(rng: random.Random, path: Path) -> None:
    config = json.loads(path.read_text())
    kind = rng.random()
    if kind < 0.3:
        config[rng.choice(("r", "lora_alpha", "use_rslora", "use_dora", "lora_dropout"))] = rng.choice(NUMBERS)
    elif kind < 0.5:
        config[rng.choice(("target_modules", "exclude_modules"))] = rng.choice(NAMES)
    elif kind < 0.6:
        config.pop(rng.choice(list(config)))
    elif kind < 0.7:
        modules = config["target_modules"]
        config["target_modules"] = rng.choice((modules[1:], [*modules, "no.such.module"], modules * 2, modules[::-1]))
    else:
        config[rng.choice((*config, *PEFT_KEYS))] = value(rng)
    path.write_text(json.dumps(config))


def change_tensors(rng: random.Random, path: Path) -> None:
    tensors = load_file(path)
    name, other = rng.sample(sorted(tensors), 2)
    tensor, module = tensors[name], name.rsplit(".lora_", 1)[0]
    spot = tuple(rng.randrange(side) for side in tensor.shape)
    new_names = (name + "x", name.removeprefix("base_model."), "base_model.model." + name)
    rng.choice(
        (
            lambda: tensors.pop(name),
            lambda: tensors.update({rng.choice(new_names): tensors.pop(name)}),
            lambda: tensors.update({name: tensor.to(rng.choice(DTYPES))}),
            lambda: tensor[spot].fill_(rng.choice((float("nan"), float("inf"), float("-inf")))),
            lambda: tensors.update({name: rng.choice(other_shapes(tensor))}),
            lambda: tensors.update({name: tensors[other].clone(), other: tensor.clone()}),
            lambda: tensors.update({name: tensor * rng.choice((0.0, -1.0, 3.0, 1e-30))}),
            lambda: tensors.update(adapter_of(rng.choice(UNFIT_MODULES))),
            lambda: [tensors.pop(key) for key in list(tensors) if key.startswith(f"{module}.lora_")],
            lambda: tensors.update({f"{module}.lora_magnitude_vector": torch.ones(len(tensor))}),
            lambda: tensors.update({f"{module}.{rng.choice(('weight', 'bias'))}": torch.ones(tensor.shape)}),
        )
    )()
    save_file(tensors, path, metadata={"format": "pt"})


def other_shapes(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tensor.T.contiguous(), tensor[:-1].clone(), tensor[..., None].clone(), tensor.sum()


def adapter_of(module: str) -> dict[str, torch.Tensor]:
    place = f"base_model.model.{module}"
    return {f"{place}.lora_A.weight": torch.zeros(4, 64), f"{place}.lora_B.weight": torch.zeros(64, 4)}


def flip_bits(rng: random.Random, path: Path) -> None:
    data = bytearray(path.read_bytes())
    for _ in range(rng.choice((1, 1, 8))):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def mutate(rng: random.Random, directory: Path) -> str:
    """Change an adapter's directory, and return the kind of the change."""
    kind = rng.choices(("config", "tensors", "header", "bits"), (4, 4, 1, 1))[0]
    {
        "config": lambda: change_config(rng, directory / ADAPTER_CONFIG),
        "tensors": lambda: change_tensors(rng, directory / ADAPTER_WEIGHTS),
        "header": lambda: spoil_header(rng, directory / ADAPTER_WEIGHTS),
        "bits": lambda: flip_bits(rng, directory / rng.choice((ADAPTER_CONFIG, ADAPTER_WEIGHTS))),
    }[kind]()
    return kind


@cache
def base() -> torch.nn.Module:
    return AutoModelForImageTextToText.from_pretrained(talkative_hf_dir(), dtype=torch.float32).eval()


@torch.no_grad()
def logits(model: torch.nn.Module) -> torch.Tensor:
    return model(input_ids=torch.arange(5, 25)[None]).logits


def outcome(directory: Path) -> str:
    """Read a directory and return the outcome.

    Raises:
        AssertionError: it was read and PEFT's numbers differ, or the refusal does not name the directory.
    """
    try:
        adapter = AdapterDirectory(directory)
        adapter.check_base(ModelDirectory(talkative_hf_dir()))
    except InputError as error:
        line = str(error)
        assert str(directory) in line and "\n" not in line and len(line) < 1501, line
        return "refused"
    ours = copy.deepcopy(base())
    add_adapters(ours, adapter)
    theirs = peft.PeftModel.from_pretrained(copy.deepcopy(base()), directory).eval()
    expected = logits(theirs)
    torch.testing.assert_close(logits(ours), expected, atol=1e-4 * expected.abs().max().item(), rtol=0)
    return "read"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("seed", "count"),
    [pytest.param(SEED, 40, id="core"), pytest.param(NEW_SEED, 200, id="full", marks=pytest.mark.full)],
)
def test_a_mutated_adapter_gives_pefts_numbers_or_is_refused_by_name(seed, count, tmp_path, capsys):
    if seed != SEED:
        with capsys.disabled():
            print(f"ATHANOR_FUZZ_SEED={seed}", end=" ", flush=True)
    whole = {kind: write_adapter(tmp_path / kind, talkative_hf_dir(), kind=kind) for kind in ("lora", "dora")}
    assert [outcome(directory) for directory in whole.values()] == ["read", "read"]
    outcomes: Counter[str] = Counter()
    for number in range(count):
        rng = random.Random(f"{seed} {number}")
        directory = Path(shutil.copytree(whole[rng.choice(("lora", "dora"))], tmp_path / str(number)))
        kind = mutate(rng, directory)
        try:
            outcomes[f"{kind}: {outcome(directory)}"] += 1
        except Exception as error:
            raise AssertionError(f"{kind} of seed {seed}, number {number}: {error!r}") from error
        shutil.rmtree(directory)
    assert outcomes.total() == count and {"config: read", "config: refused", "tensors: refused"} <= outcomes.keys()
