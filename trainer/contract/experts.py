"""The settings of a training whose model routes tokens to experts."""

from typing import Literal

from pydantic import Field

from dataset_builders.contracts.strict import StrictModel


class ExpertsConfig(StrictModel):
    """How a router is trained. By default only the loss of the answers trains it, as in transformers."""

    auxiliary_loss: Literal["pooled", "layer"] = Field(
        default="pooled",
        description="the loss that evens the experts' loads: pooled over all layers as in transformers (an even load "
        "gives top_k), or layer, each layer's own as megatron-core computes it (an even load gives 1 a layer)",
    )
    coefficient: float = Field(default=0.0, ge=0, le=1, description="factor of the auxiliary loss; 0: there is none")
    force_balance: bool = Field(
        default=False, description="deal tokens to experts in turn, for measurements of speed; nothing useful is learnt"
    )
