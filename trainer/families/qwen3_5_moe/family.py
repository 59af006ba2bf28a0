"""The family of Qwen3.5 with experts in one object, without torch."""

import dataclasses

from trainer.families.qwen3_5_moe.embedded import embedded_configs
from trainer.families.qwen3_5_moe.shape import read_shape
from trainer.families.qwen3_5_moe.variants import VARIANTS
from trainer.families.qwen3_5_vl.family import FAMILY as QWEN3_5
from trainer.parts.experts.sizes import WithExperts

FAMILY = dataclasses.replace(
    QWEN3_5,
    model_type="qwen3_5_moe",
    read_shape=read_shape,
    reference="transformers:Qwen3_5MoeForConditionalGeneration",
    embedded=embedded_configs,
    sizes=(*QWEN3_5.sizes, WithExperts),
    variants=VARIANTS,
)
