"""A family of models, described in one object. Loads neither torch nor megatron.

Values of the form "module:name" are imported by `pkgutil.resolve_name`, in the process that needs them: their modules
load torch and megatron-core, or transformers.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dataset_builders.contracts.strict import StrictModel
from trainer.contract.parallel import ParallelConfig
from trainer.contract.run import TrainConfig
from trainer.model.rules import Rule
from trainer.model.shape import ModelShape


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageProcessor:
    """The processors that convert images, or the frames of videos, to the same patches as ours."""

    types: tuple[str, ...]  # values of image_processor_type in preprocessor_config.json, or of video_processor_type
    reference: str  # "module:class" of transformers, backed by torchvision; samples are compared with its output


@dataclass(frozen=True, kw_only=True, slots=True)
class VideoProcessor(ImageProcessor):
    """The processors of videos, and how a video is written in a prompt."""

    prompt: str  # "module:class" of transformers, whose `replace_video_token` writes a video; ids are compared with it


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """A family of models."""

    model_type: str  # the model_type in config.json
    # returns the model's sizes, given the parsed config.json and its path; refuses unknown keys
    read_shape: Callable[[Mapping[str, Any], Path | str], ModelShape]
    # yields the table of weights of a shape, in HF's order of tensors
    rules: Callable[[ModelShape], Iterable[Rule]]
    # names of the parts. Each can be frozen, and has its own learning rate, gradient norm and parameter count.
    parts: tuple[str, ...]
    # returns the part of a parameter, given its name in the bare model; ValueError if it has none
    part_of: Callable[[str], str]
    model: str  # "module:class" of a chunk of the model, see `trainer.layers.packed_model.PackedModel`
    encoder: str = ""  # "module:function" that builds only the vision encoder; empty for a text-only family
    reference: str  # "module:class" of transformers that generates with a directory of this family
    # the tokens that begin and end a turn in the family's chat template
    turn_tokens: tuple[str, str] = ("<|im_start|>", "<|im_end|>")
    image_processor: ImageProcessor | None = None  # None for a text-only family
    video_processor: VideoProcessor | None = None  # None for a family that reads no videos
    # raises InputError for settings that the family does not support yet and that its shape does not exclude
    check_settings: Callable[[TrainConfig, ParallelConfig], None] = lambda train, parallel: None
    # prefixes of the names of tensors that need not be computed; if they are not, they are neither trained nor counted,
    # and an export copies them
    copied: tuple[str, ...] = ()
    # returns the configs of a model with random weights by file name, given sizes and token ids; None if the family
    # supports only models from a directory
    embedded: Callable[[Mapping[str, Any], Mapping[str, int]], dict[str, dict[str, Any]]] | None = None
    # classes of the fields of `EmbeddedModelConfig` that only some families have, and this family has
    sizes: tuple[type[StrictModel], ...] = ()
    # sizes by name: the published ones, and the smallest for a CPU, "<model_type>_tiny"
    variants: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def weight_rules(self, shape: ModelShape) -> Sequence[Rule]:
        """Return the table of weights, in HF's order of tensors."""
        return list(self.rules(shape))


def freeze(module: Any, train: TrainConfig, family: Family) -> None:
    """Exclude the parameters of frozen parts from training. Call this before megatron-core's DDP wraps the model,
    because DDP allocates a buffer for every parameter that requires a gradient."""
    for name, param in module.named_parameters():
        if train.part(family.part_of(name)).frozen:
            param.requires_grad = False
