"""The facts of a model's shape that its micro batches need."""

from trainer.data.micro_batch import Geometry
from trainer.model.shape import ModelShape


def geometry_of(shape: ModelShape) -> Geometry:
    vision, images = shape.vision, shape.images
    language = shape.language
    of_layers = {"in_chunks": language.in_chunks, "marks_padding": language.routes_tokens}
    of_layers["predicts_second"] = language.mtp is not None
    if vision is None or images is None:
        return Geometry(**of_layers)
    return Geometry(images.image_token_id, vision.spatial_merge_size, 3 * vision.patch_size**2, **of_layers)
