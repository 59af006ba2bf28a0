"""The Qwen3-VL family in one object, without torch."""

from trainer.families.qwen3_vl.embedded import embedded_configs
from trainer.families.qwen3_vl.shape import read_shape
from trainer.families.qwen3_vl.variants import VARIANTS
from trainer.model.family import Family, ImageProcessor

_MERGERS = ("vision.merger.", "vision.deepstack_mergers.")


def part_of(name: str) -> str:
    """Return the part that a parameter of the bare model belongs to: "vision", "merger" or "language"."""
    if name.startswith(_MERGERS):
        return "merger"
    part = name.partition(".")[0]
    if part not in ("vision", "language"):
        raise ValueError(f"parameter {name} is neither of vision nor of language")
    return part


FAMILY = Family(
    model_type="qwen3_vl",
    read_shape=read_shape,
    parts=("vision", "merger", "language"),
    part_of=part_of,
    model="trainer.families.qwen3_vl.model:Qwen3VLModel",
    rules="trainer.families.qwen3_vl.weights:rules",
    encoder="trainer.families.qwen3_vl.model:build_encoder",
    reference="transformers:Qwen3VLForConditionalGeneration",
    embedded=embedded_configs,
    variants=VARIANTS,
    image_processor=ImageProcessor(
        types=("Qwen2VLImageProcessor", "Qwen2VLImageProcessorFast"),
        reference="transformers.models.qwen2_vl.image_processing_qwen2_vl:Qwen2VLImageProcessor",
    ),
)
