"""The family of Qwen3-VL with experts in one object, without torch."""

import dataclasses

from trainer.families.qwen3_vl.family import FAMILY as QWEN3_VL
from trainer.families.qwen3_vl_moe.embedded import embedded_configs
from trainer.families.qwen3_vl_moe.shape import read_shape
from trainer.families.qwen3_vl_moe.variants import VARIANTS
from trainer.parts.experts.sizes import WithExperts

FAMILY = dataclasses.replace(
    QWEN3_VL,
    model_type="qwen3_vl_moe",
    read_shape=read_shape,
    reference="transformers:Qwen3VLMoeForConditionalGeneration",
    embedded=embedded_configs,
    sizes=(WithExperts,),
    variants=VARIANTS,
)
