"""Qwen3.5 alone: a model may have layers of the delta rule alone, and their decays are float32."""

import dataclasses

import pytest
import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

from tests.helpers.run_dir import OPTIM
from tests.helpers.single_rank import build_tiny, single_rank
from tests.helpers.tiny_hybrid_model import DELTA, hybrid_config, hybrid_hf_dir
from tests.trainer.train_config import train_config
from trainer.contract.parallel import ParallelConfig
from trainer.families.qwen3_5_vl.family import read_shape
from trainer.layers.decoder import decoder_config
from trainer.loop.optim import build_optimizer, set_learning_rate
from trainer.model.registry import get_family

pytestmark = pytest.mark.promise(
    "Qwen3-VL, Qwen3.5, Qwen3 without images and models with experts give transformers' logits, and multi-token "
    "prediction its formula's, to 1e-4 and every gradient to 1e-4 relative, in float32."
)

LAYERS = {"delta": {"layer_types": [DELTA] * 4}, "delta, fewer than an interval": {"num_hidden_layers": 3}}
LAYERS |= {name + ", mtp": layers | {"mtp_num_hidden_layers": 1} for name, layers in LAYERS.items()}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("tp", [1, 2])
def test_a_model_needs_no_layer_of_attention(name, tp):
    config = hybrid_config()
    config["text_config"] |= LAYERS[name]
    shape = read_shape(config)
    has_mtp = shape.mtp is not None
    language = dataclasses.replace(shape.language, mtp=shape.mtp)
    assert {mixer.role for mixer in language.mixers} == {"delta"}
    assert has_mtp is ("num_heads" in language.divided_widths())
    settings = decoder_config(language, ParallelConfig(tp=tp, sequence_parallel=tp > 1), torch.float32)
    assert settings.num_attention_heads == (4 if has_mtp else tp) and settings.attention_output_gate is has_mtp


def test_a_step_below_bfloat16s_resolution_is_not_lost_and_decays_do_not_decay():
    """With weight decay, a step would be as long as the learning rate only for numbers that are zero."""
    optim = OPTIM.model_copy(update={"weight_decay": 0.5, "warmup_steps": 0, "lr": 1e-2, "clip_grad_norm": 1e9})
    train = train_config(optim=optim)
    with single_rank() as mesh:
        model = build_tiny(hybrid_hf_dir(), mesh, dtype=torch.bfloat16)
        config = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
        chunk = DistributedDataParallel(model.config, config, model)
        decays = {name: param for name, param in model.named_parameters() if name.endswith(("a_log", "dt_bias"))}
        before = {name: param.detach().clone() for name, param in decays.items()}
        optimizer = build_optimizer([chunk], train, torch.bfloat16, get_family("qwen3_5"))
        set_learning_rate(optimizer, 0, optim, 4)
        for param in model.parameters():
            param.main_grad.fill_(1.0)
        optimizer.step()
    assert len(decays) == 6
    for name, param in decays.items():
        assert before[name].dtype is param.dtype is torch.float32
        torch.testing.assert_close(before[name] - param, torch.full_like(param, 1e-2), rtol=1e-4, atol=0)
