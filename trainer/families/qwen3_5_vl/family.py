"""Qwen3.5 in one object, without torch."""

import dataclasses

from trainer.families.qwen3_5_vl.shape import read_shape
from trainer.families.qwen3_vl.family import FAMILY as QWEN3_VL

# Images and tokens are Qwen3-VL's, and so are the parts; there is no deepstack.
FAMILY = dataclasses.replace(
    QWEN3_VL,
    model_type="qwen3_5",
    read_shape=read_shape,
    model="trainer.families.qwen3_5_vl.model:Qwen35VLModel",
    rules="trainer.families.qwen3_5_vl.weights:rules",
    reference="transformers:Qwen3_5ForConditionalGeneration",
    carried=("mtp.",),  # the layer that predicts a second token, for speculative decoding
    embedded=None,
)
