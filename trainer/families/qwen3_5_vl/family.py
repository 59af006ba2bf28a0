"""The Qwen3.5 family in one object, without torch."""

import dataclasses

from dataset_builders.errors import InputError
from trainer.contract.parallel import ParallelConfig
from trainer.contract.run import TrainConfig
from trainer.families.qwen3_5_vl.embedded import embedded_configs
from trainer.families.qwen3_5_vl.shape import read_shape
from trainer.families.qwen3_5_vl.variants import VARIANTS
from trainer.families.qwen3_vl.family import FAMILY as QWEN3_VL
from trainer.parts.attention.sizes import WithPartialRotation
from trainer.parts.delta.sizes import WithDelta


def check_settings(train: TrainConfig, parallel: ParallelConfig) -> None:
    """Check that delta layers support the settings of a training."""
    if train.precision == "float8":
        raise InputError(
            "train.precision is float8, in which the delta layers of a qwen3_5 model have not been tried; set "
            "train.precision=bfloat16"
        )


# Images, tokens and parts are the same as in Qwen3-VL; deepstack is absent.
FAMILY = dataclasses.replace(
    QWEN3_VL,
    model_type="qwen3_5",
    read_shape=read_shape,
    reference="transformers:Qwen3_5ForConditionalGeneration",
    check_settings=check_settings,
    carried=("mtp.",),  # multi-token prediction, used for speculative decoding; a training may train it
    embedded=embedded_configs,
    sizes=(WithPartialRotation, WithDelta),
    variants=VARIANTS,
)
