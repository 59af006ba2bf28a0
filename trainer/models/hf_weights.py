"""Reading an HF directory's safetensors into a model, and writing a model's back; tensor by tensor, no converted copy.

Each rank reads what it holds: its pipeline rank's layers, its tensor-parallel slice of each.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from megatron.core.transformer.module import MegatronModule
from safetensors import safe_open
from safetensors.torch import save_file

from dataset_builders.contracts.errors import InputError
from dataset_builders.contracts.files import write_json
from trainer.models.qwen3_vl.weights import Rule, fuse, rules, split

INDEX = "model.safetensors.index.json"
SHARD_BYTES = 5_000_000_000

# Transformer Engine keeps a norm and the linear after it in one module.
_FUSED_NORMS = (
    ("self_attention.linear_qkv.layer_norm_", "input_layernorm."),
    ("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm."),
)


class HFTensors:
    """The tensors of an HF directory by name, whichever file they are in."""

    def __init__(self, hf_dir: Path) -> None:
        self.dir = hf_dir
        index = hf_dir / INDEX
        if index.is_file():
            self._files: dict[str, str] = json.loads(index.read_text())["weight_map"]
        else:
            self._files = {}
            for path in sorted(hf_dir.glob("*.safetensors")):
                with safe_open(path, "pt") as file:
                    self._files |= dict.fromkeys(file.keys(), path.name)
        if not self._files:
            raise InputError(f"{hf_dir} holds no *.safetensors; give a directory that from_pretrained can read")

    def names(self) -> set[str]:
        return set(self._files)

    def get(self, name: str) -> torch.Tensor:
        """One tensor, on the CPU, in its stored dtype."""
        if name not in self._files:
            raise InputError(f"{self.dir}: the tensor {name} is missing; is it a complete model of this architecture?")
        with safe_open(self.dir / self._files[name], "pt") as file:
            return file.get_tensor(name)


def load_hf_weights(model: MegatronModule, hf_dir: Path) -> int:
    """Fill every parameter of this rank's model from `hf_dir`; returns how many.

    Raises:
        InputError: a tensor is missing, has another shape, or is left over.
    """
    source = HFTensors(hf_dir)
    table = {rule.ours: rule for rule in rules(model.sizes)}
    _check_leftovers(source, table, model)
    tp = model.language.groups.tp
    count = 0
    for name, param in _global_names(model):
        rule = table[name]
        whole = fuse(rule, [source.get(part) for part in rule.hf], model.sizes)
        part = _tp_slice(whole, param, rule, tp.rank(), tp.size())
        if part.shape != param.shape:
            raise InputError(
                f"{hf_dir}: {rule.hf[0]} gives the shape {tuple(part.shape)}, config.json {tuple(param.shape)}"
            )
        with torch.no_grad():
            param.copy_(part)
        count += 1
    return count


def _check_leftovers(source: HFTensors, table: dict[str, Rule], model: MegatronModule) -> None:
    known = {name for rule in table.values() for name in rule.hf}
    if model.share_embeddings_and_output_weights:
        known.add("lm_head.weight")  # some directories store the tied weight twice
    left = sorted(source.names() - known)
    if left:
        raise InputError(f"{source.dir}: {len(left)} tensors have no place in the model, the first is {left[0]}")


def _global_names(model: MegatronModule) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Every parameter under the name of the table: layers numbered over all pipeline ranks, norms apart."""
    decoder = "language.decoder.layers."
    for name, param in model.named_parameters():
        if name.startswith(decoder):
            local, rest = name.removeprefix(decoder).split(".", 1)
            name = f"{decoder}{model.language.decoder.layers[int(local)].layer_number - 1}.{rest}"
        for fused, apart in _FUSED_NORMS:
            name = name.replace(fused, apart)
        yield name, param


def _tp_slice(whole: torch.Tensor, param: torch.nn.Parameter, rule: Rule, rank: int, size: int) -> torch.Tensor:
    if size == 1 or not getattr(param, "tensor_model_parallel", False):
        return whole
    if rule.kind == "glu":
        return torch.cat([half.chunk(size)[rank] for half in whole.chunk(2)])
    return whole.chunk(size, dim=param.partition_dim)[rank]


def save_hf_weights(model: MegatronModule, source_dir: Path, out_dir: Path) -> int:
    """Write the weights of a whole model (tp = pp = 1) as safetensors, in the dtypes of `source_dir`.

    Returns:
        bytes of all tensors.
    """
    source = HFTensors(source_dir)
    params = dict(_global_names(model))
    stored = source.names()
    shards: list[dict[str, torch.Tensor]] = [{}]
    total = room = 0
    for rule in rules(model.sizes):
        for name, tensor in zip(rule.hf, split(rule, params[rule.ours].detach(), model.sizes)):
            tensor = tensor.to("cpu", source.get(name).dtype if name in stored else None).contiguous()
            if room and room + tensor.nbytes > SHARD_BYTES:
                shards.append({})
                room = 0
            shards[-1][name] = tensor.clone()
            room, total = room + tensor.nbytes, total + tensor.nbytes
    _write_shards(shards, total, out_dir)
    return total


def _write_shards(shards: list[dict[str, torch.Tensor]], total: int, out_dir: Path) -> None:
    out_dir.mkdir(parents=True, exist_ok=True)
    if len(shards) == 1:
        save_file(shards[0], out_dir / "model.safetensors", metadata={"format": "pt"})
        return
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, out_dir / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    write_json(out_dir / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
