"""Layers built from a set of modules, and the exact set, for CPUs.

The sets for CUDA, and the choice between all sets, are in modules/.
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.backends import BackendSpecProvider, LocalSpecProvider
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules

from dataset_builders.errors import InputError
from trainer.contract.run import RunConfig
from trainer.layers.attention_cores import TorchVarlenAttention
from trainer.layers.packed_layer import PackedLayer

# The keys are transformers' names.
ACTIVATIONS = {"silu": F.silu, "gelu": F.gelu, "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh")}

FLOAT8_ROWS = 16  # cuBLAS needs both dimensions of a float8 product to be multiples of this


class TorchNorm(torch.nn.Module):
    """RMSNorm or LayerNorm in float32, by `config.normalization`, with marks for sequence parallelism.

    An RMSNorm with a zero-centred weight multiplies by 1 + weight, also in float32.
    """

    def __init__(self, config, hidden_size: int, eps: float = 1e-6, **_: object) -> None:
        super().__init__()
        self.eps, self.shape = eps, (hidden_size,)
        self.zero_centred = config.layernorm_zero_centered_gamma
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel
        self.bias = None
        if config.normalization == "LayerNorm":
            self.bias = torch.nn.Parameter(torch.zeros(hidden_size, dtype=config.params_dtype))
            self.bias.sequence_parallel = config.sequence_parallel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.zero_centred:
            return (F.rms_norm(x.float(), self.shape, None, self.eps) * (1 + self.weight.float())).to(x.dtype)
        if self.bias is None:
            return self.weight * F.rms_norm(x.float(), self.shape, None, self.eps).to(x.dtype)
        return F.layer_norm(x.float(), self.shape, self.weight.float(), self.bias.float(), self.eps).to(x.dtype)

    def sum_and_norm(self, x: torch.Tensor, delta: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return x + delta, or x if delta is None, and its norm; all are (..., hidden)."""
        total = x if delta is None else x + delta
        return total, self(total)


class TorchSwiglu:
    """silu(first half) * second half. It is not a torch module, because it has no state to save."""

    def __init__(self, *, config: object) -> None:
        pass

    def __call__(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up


class TorchModules(LocalSpecProvider):
    """Plain torch modules. Slow, exact, and the same on every machine."""

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False) -> type:
        return TorchNorm

    def core_attention(self, head_dim: int = 0, *, causal: bool = True) -> type:
        return TorchVarlenAttention

    def activation_func(self) -> type:
        return TorchSwiglu


def shared_config(dtype: torch.dtype) -> dict[str, Any]:
    """Return the settings that the TransformerConfigs of all parts of a model share."""
    return {
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "attention_softmax_in_fp32": True,
        "calculate_per_token_loss": True,  # a mean over the tokens of the global batch, not of each micro batch
        "use_cpu_initialization": not torch.cuda.is_available(),  # where parameters are allocated
        "perform_initialization": False,  # weights are loaded; megatron-core then sets no marks, see below
        # Fusions that need CUDA stay off, because Transformer Engine has its own.
        "bias_dropout_fusion": False,
        "bias_activation_fusion": False,
        "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": False,
        "persist_layer_norm": False,
        "apply_rope_fusion": False,
        "batch_p2p_sync": False,
    }


def check_float8(run: RunConfig) -> None:
    """Check that a job's layout allows the language model's products in float8."""
    way_out = "set train.precision=bfloat16"
    parallel = run.execution.parallel
    if parallel.sharding == "fsdp":
        raise InputError(f"train.precision=float8 does not go with parallel.sharding=fsdp; {way_out}")
    slices = parallel.cp * (parallel.tp if parallel.sequence_parallel else 1)
    if run.seq_len % (FLOAT8_ROWS * slices):
        raise InputError(
            f"seq_len={run.seq_len} over {slices} slices is not a multiple of {FLOAT8_ROWS} tokens, which "
            f"train.precision=float8 needs; take a multiple of {FLOAT8_ROWS * slices} or {way_out}"
        )


def layer_around(mixer: ModuleSpec, feed_forward: ModuleSpec, modules: BackendSpecProvider) -> ModuleSpec:
    return ModuleSpec(
        module=PackedLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=modules.layer_norm(),
            self_attention=mixer,
            pre_mlp_layernorm=modules.layer_norm(),
            mlp=feed_forward,
        ),
    )
