"""The facts of a model's shape that its micro batches need."""

from trainer.data.micro_batch import Geometry
from trainer.model.shape import ModelShape


def geometry_of(shape: ModelShape) -> Geometry:
    """Return the geometry of a model's micro batches."""
    vision, images, in_chunks = shape.vision, shape.images, shape.language.in_chunks
    if vision is None or images is None:
        return Geometry(in_chunks=in_chunks)
    patch_bytes = 3 * vision.patch_size**2
    return Geometry(images.image_token_id, vision.spatial_merge_size, patch_bytes, in_chunks=in_chunks)
