"""Experts behind a router: their loads, and the auxiliary loss that evens them."""

from types import SimpleNamespace

import pytest
import torch
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import load_balancing_loss_func

from tests.helpers.run_dir import model_dir
from tests.helpers.single_rank import build_tiny, single_rank
from tests.museum.fault import fault_seen
from trainer.contract.run import ExpertsConfig
from trainer.layers.segments import RoutedTokens
from trainer.parts.experts import module

pytestmark = pytest.mark.promise(
    "athanor has none of the museum's published faults, and each test fails where the fault is put in."
)

REAL, PADDING = 40, 24  # tokens


@pytest.fixture(scope="module")
def experts():
    """Return a layer of experts whose auxiliary loss is taken alone, and the hidden states of some tokens."""
    with single_rank() as mesh:
        model = build_tiny(model_dir("experts-shared"), mesh).train()
        layer = model.language.decoder.layers[0].mlp
        layer.settings = ExpertsConfig(auxiliary_loss="pooled", coefficient=1.0)
        generator = torch.Generator().manual_seed(2)
        hidden = 3 * torch.randn(REAL + PADDING, 1, layer.part.hidden_size, generator=generator)
        yield SimpleNamespace(layer=layer, hidden=hidden)


def reported(experts, *bins: torch.Tensor, padding: int = 0) -> tuple[dict[str, float], list[float]]:
    """Return the layer's metrics of a step over these bins, and the number of tokens of each expert."""
    layer = experts.layer
    layer.reports = type(layer.reports)()
    layer.prepare_training(SimpleNamespace(experts=layer.settings), 0, layer.reports)
    for hidden in bins:
        is_token = torch.arange(len(hidden)) < len(hidden) - padding
        layer(hidden, None, RoutedTokens(is_token, int(is_token.sum()), 1, ()))
    sums = layer.reports.sums()
    loads = next(values for values in sums if len(values) == layer.part.num_experts)
    return layer.reports.metrics(torch.cat(sums).tolist()), loads.tolist()


def test_the_auxiliary_loss_takes_one_softmax(experts, monkeypatch):
    """The router returned probabilities as its logits, so the auxiliary loss was that of their softmax, which is nearly
    even.

    https://github.com/ByteDance-Seed/VeOmni/pull/715 https://github.com/huggingface/transformers/issues/45120
    """
    layer = experts.layer
    logits = experts.hidden[:, 0] @ layer.router.detach().t()
    expected = float(load_balancing_loss_func((logits,), layer.part.num_experts, layer.part.top_k))

    def check() -> None:
        assert reported(experts, experts.hidden)[0]["auxiliary_loss"] == pytest.approx(expected, rel=1e-5)

    check()
    route = module.route

    def twice(*given):
        routing = route(*given)
        return routing._replace(probabilities=routing.probabilities.softmax(-1))

    monkeypatch.setattr(module, "route", twice)
    with fault_seen():
        check()


def test_padding_is_no_load_of_an_expert(experts, monkeypatch):
    """Padding was counted among the tokens of its expert, in the loads and in the auxiliary loss.

    https://github.com/NVIDIA/Megatron-LM/issues/1984
    """
    expected = reported(experts, experts.hidden[:REAL])

    def check() -> None:
        assert reported(experts, experts.hidden, padding=PADDING) == (pytest.approx(expected[0]), expected[1])

    check()
    count = module.tokens_of_experts
    monkeypatch.setattr(
        module, "tokens_of_experts", lambda chosen, is_token, experts: count(chosen, torch.ones_like(is_token), experts)
    )
    with fault_seen():
        check()


def test_the_loads_of_a_bin_are_divided_by_its_own_tokens(experts, monkeypatch):
    """Counts of the experts' tokens were summed over micro batches, but divided by the tokens of the last micro batch.

    https://github.com/NVIDIA/Megatron-LM/issues/7213
    """
    bins = experts.hidden.split((REAL, PADDING))
    expected = sum(reported(experts, hidden)[0]["auxiliary_loss"] for hidden in bins) / len(bins)

    def check() -> None:
        assert reported(experts, *bins)[0]["auxiliary_loss"] == pytest.approx(expected, rel=1e-6)

    check()
    count, running = module.tokens_of_experts, torch.zeros(experts.layer.part.num_experts, dtype=torch.float64)
    monkeypatch.setattr(module, "tokens_of_experts", lambda *given: running.add_(count(*given)).clone())
    with fault_seen():
        check()
