"""The decays' parameters in an optimizer's step: float32 in a model in bfloat16, and no weight decay."""

import pytest
import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

from tests.helpers.run_dir import OPTIM, write_job
from tests.helpers.single_rank import build_tiny, single_rank
from tests.helpers.tiny_hybrid_model import hybrid_hf_dir
from trainer.loop.optim import build_optimizer, set_learning_rate
from trainer.model.registry import get_family

pytestmark = pytest.mark.promise(
    "Qwen3-VL, Qwen3.5, Qwen3 without images and models with experts give transformers' logits, and multi-token "
    "prediction its formula's, to 1e-4 and every gradient to 1e-4 relative, in float32."
)

EXACT = ("a_log", "dt_bias")


def stepped(tmp_path, gradient: float) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Each parameter before and after the first update, in bfloat16."""
    optim = OPTIM.model_copy(update={"weight_decay": 0.5, "warmup_steps": 0, "lr": 1e-2, "clip_grad_norm": 1e9})
    train = write_job(tmp_path, num_steps=4, shape="hybrid-first").train.model_copy(update={"optim": optim})
    with single_rank() as mesh:
        model = build_tiny(hybrid_hf_dir(), mesh, dtype=torch.bfloat16)
        config = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
        chunk = DistributedDataParallel(model.config, config, model)
        before = {name: param.detach().clone() for name, param in model.named_parameters()}
        optimizer = build_optimizer([chunk], train, torch.bfloat16, get_family("qwen3_5"))
        set_learning_rate(optimizer, 0, optim, 4)
        for param in model.parameters():
            param.main_grad.fill_(gradient)
        optimizer.step()
        return {name: (before[name], param.detach().clone()) for name, param in model.named_parameters()}


def test_decays_and_norms_have_no_weight_decay(tmp_path):
    """Without a gradient a parameter moves by its weight decay alone."""
    for name, (before, after) in stepped(tmp_path, gradient=0.0).items():
        is_free = before.dim() == 1
        assert torch.equal(before, after) is is_free, name


def test_a_step_below_bfloat16s_resolution_is_not_lost(tmp_path):
    moved = {name: pair for name, pair in stepped(tmp_path, gradient=1.0).items() if name.endswith(EXACT)}
    assert len(moved) == 6
    for before, after in moved.values():
        assert before.dtype is after.dtype is torch.float32
        torch.testing.assert_close(before - after, torch.full_like(before, 1e-2), rtol=1e-4, atol=0)
