"""The routing of tokens to experts, as transformers computes it, and its auxiliary losses.

s = tokens, E = experts, k = experts per token.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F

from trainer.layers.segments import RoutedTokens


class Routing(NamedTuple):
    """The choice of experts."""

    probabilities: torch.Tensor  # (s, E) float32, over all experts
    weights: torch.Tensor  # (s, k) in the dtype of the logits: the chosen experts' probabilities, divided by their sum
    # (s, k) int64 indices of the chosen experts. Of equal probabilities, torch.topk decides.
    chosen: torch.Tensor


def route(hidden: torch.Tensor, router: torch.Tensor, top_k: int) -> Routing:
    """Route (s, D) by a router (E, D). (transformers 5.23, Qwen3VLMoeTextTopKRouter)"""
    logits = F.linear(hidden, router)
    probabilities = logits.softmax(-1, dtype=torch.float32)  # over all experts, before the choice
    top, chosen = probabilities.topk(top_k, -1)
    return Routing(probabilities, (top / top.sum(-1, keepdim=True)).to(logits.dtype), chosen)


def tokens_of_experts(chosen: torch.Tensor, is_token: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Return (E,) float64: the number of tokens of each expert, without padding, given (s, k) indices of experts."""
    # float64 is exact for counts of tokens, and what `Reports` sums. bincount would wait for the device.
    counts = torch.zeros(num_experts, dtype=torch.float64, device=chosen.device)
    return counts.scatter_add_(0, chosen.flatten(), is_token.double().repeat_interleave(chosen.size(1)))


class LoadPool:
    """The loads of the experts of all layers in one bin, for an auxiliary loss over all layers."""

    def __init__(self) -> None:
        self.layers: set[int] = set()  # every layer that will be put
        self._tokens: RoutedTokens | None = None
        self._of_layers: dict[int, torch.Tensor] = {}

    def put(self, tokens: RoutedTokens, layer: int, load_and_probability: torch.Tensor) -> None:
        """Set the (2, E) loads and mean probabilities of a layer, for the bin with these tokens."""
        if tokens is not self._tokens:
            self._tokens, self._of_layers = tokens, {}
        # A layer that is recomputed in the backward pass sets the same values again.
        self._of_layers[layer] = load_and_probability

    @property
    def is_complete(self) -> bool:
        """Whether all layers have been put."""
        return self._of_layers.keys() == self.layers

    def mean(self) -> torch.Tensor:
        """Return (2, E): loads and probabilities as means over the layers."""
        return torch.stack([*self._of_layers.values()]).mean(0)

    def load(self) -> torch.Tensor:
        """Return (E,): the mean loads of the layers."""
        return self.mean()[0]


class WithAuxiliaryLoss(torch.autograd.Function):
    """The identity of a layer's output, which adds the gradient of an auxiliary loss to the router's probabilities.

    Both losses are E * sum over e of f_e P_e, where P_e is the mean probability of expert e, and f_e the number of its
    tokens per token of the bin. f_e has no gradient, so the gradient of the probabilities is the same for all tokens.

    - "layer" is the sum over layers of each layer's own loss, divided by k (Fedus et al. 2021, arXiv:2101.03961,
      equation 4; aux_loss in megatron-core). An even load gives 1 per layer.
    - "pooled" takes f and P over the tokens of all layers together and does not divide by k (transformers 5.23,
      load_balancing_loss_func). An even load gives k.
    """

    @staticmethod
    def forward(ctx, out, probabilities, is_token, scale, loads):
        """Return `out`.

        Args:
            scale: factor of the loss' gradient, without f.
            loads: returns (E,) f; called in the backward pass, when all layers have been routed.
        """
        ctx.scale, ctx.loads = scale, loads
        ctx.save_for_backward(is_token)
        return out.view_as(out)

    @staticmethod
    def backward(ctx, grad):
        (is_token,) = ctx.saved_tensors
        per_expert = (ctx.scale * ctx.loads()).float()
        return grad, is_token[:, None] * per_expert, None, None, None
