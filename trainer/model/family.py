"""A family of models: everything that the house needs to know of it, in one object. Loads neither torch nor megatron.

Values of the form "module:name" are imported by `late_import.load`, in the process that needs them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer.contract.parallel import ParallelConfig
from trainer.contract.run import TrainConfig
from trainer.model.late_import import load
from trainer.model.shape import ModelShape


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageProcessor:
    """The image processors that turn pictures into the same patches as ours.

    Attributes:
        types: values of image_processor_type in preprocessor_config.json.
        reference: "module:class" of transformers, backed by torchvision; samples are compared with it.
    """

    types: tuple[str, ...]
    reference: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """A family of models.

    Attributes:
        model_type: of config.json.
        read_shape: the parsed config.json and its path -> the model's sizes; every key is understood or refused.
        parts: each can be frozen, has its own learning rate and gradient norm, and its parameters are counted.
        part_of: the name of a parameter of the bare model -> its part; ValueError if it has none.
        model: "module:class" of a chunk of the model, see `trainer.layers.packed_model.PackedModel`.
        encoder: "module:function", what builds its vision encoder alone; empty for a family of text alone.
        rules: "module:function", shape -> the table of weights, see `trainer.model.rules.Rule`.
        reference: "module:class" of transformers that generates with a directory of this family.
        turn_tokens: the tokens that begin and end a turn in its chat template.
        image_processor: None for a family of text alone.
        check_settings: what the family cannot do yet, beyond what its shape tells: raises InputError for it.
        carried: beginnings of the names of tensors that this code does not compute; they are neither trained nor
            counted, and an export has them as they were.
        embedded: sizes and ids of tokens -> the configs of a model of random weights, by the names of their files; None
            where only a directory can be of this family.
        variants: names of published sizes, and of the smallest for a CPU, "<model_type>_tiny" -> these sizes.
    """

    model_type: str
    read_shape: Callable[[Mapping[str, Any], Path | str], ModelShape]
    parts: tuple[str, ...]
    part_of: Callable[[str], str]
    model: str
    rules: str
    encoder: str = ""
    reference: str
    turn_tokens: tuple[str, str] = ("<|im_start|>", "<|im_end|>")
    image_processor: ImageProcessor | None = None
    check_settings: Callable[[TrainConfig, ParallelConfig], None] = lambda train, parallel: None
    carried: tuple[str, ...] = ()
    embedded: Callable[[Mapping[str, Any], Mapping[str, int]], dict[str, dict[str, Any]]] | None = None
    variants: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def weight_rules(self, shape: ModelShape) -> Sequence[Any]:
        """The table of weights, in HF's order of tensors."""
        return list(load(self.rules)(shape))
