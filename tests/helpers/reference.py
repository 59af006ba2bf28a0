"""transformers' models as the reference: random weights everywhere, one sample at a time, plain autograd."""

import functools
import shutil
from itertools import groupby
from pathlib import Path
from pkgutil import resolve_name

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from dataset_builders.contracts.tokenized import PatchFormat, TokenizedSample, Visual
from tests.helpers.process_dir import process_dir
from tests.helpers.tiny_model import tiny_hf_dir
from tests.helpers.tiny_text_model import randomize
from trainer.model.registry import read_model
from trainer.model.shape import ImageTokens

PIXELS = PatchFormat(
    patch_size=16, temporal_patch_size=2, merge_size=2, image_mean=(0.5, 0.4, 0.3), image_std=(0.5, 0.25, 0.3)
)


@functools.cache
def random_hf_dir(shape: str) -> Path:
    """Return a tiny HF directory without tensors of special values: norms are not one, and biases are not zero."""
    directory = process_dir("random") / shape
    shutil.copytree(tiny_hf_dir(shape), directory)
    model = load_reference(directory)
    randomize(model)
    model.save_pretrained(directory)
    return directory


def load_reference(hf_dir: Path, attention: str = "sdpa") -> PreTrainedModel:
    """Return the reference model of the directory's family in float32."""
    reference = resolve_name(read_model(hf_dir)[0].reference)
    return reference.from_pretrained(hf_dir, dtype=torch.float32, attn_implementation=attention)


def reference_inputs(
    sample: TokenizedSample, ids_of: PreTrainedConfig | ImageTokens | None, pixels: PatchFormat = PIXELS
) -> dict[str, torch.Tensor]:
    """Return a sample as transformers takes it: (1, n) ids, (P, C) normalised pixels of images and of videos.

    Args:
        ids_of: has the ids of images and videos; for a model of text alone it has none.
        pixels: mean and standard deviation by which pixels are normalised.
    """
    ids = torch.from_numpy(sample.input_ids.astype("int64"))[None]
    inputs = {"input_ids": ids}
    if hasattr(ids_of, "image_token_id"):
        inputs["mm_token_type_ids"] = (ids == ids_of.image_token_id) + 2 * (ids == ids_of.video_token_id).int()
    visuals = [*zip(sample.visuals(), sample.is_video)]
    for is_video, of_pixels, of_grids in _INPUTS:
        chosen = [visual for visual, kind in visuals if kind == is_video]
        if chosen:
            inputs[of_pixels] = torch.cat([_pixel_values(visual, pixels) for visual in chosen])
            # Videos as transformers' processor describes them: groups of the same size in a row are one video.
            grids = [visual.grid.tolist() for visual in chosen]
            if is_video:
                grids = [[len([*group]), *grid[1:]] for grid, group in groupby(grids)]
            inputs[of_grids] = torch.tensor(grids)
    return inputs


_INPUTS = ((False, "pixel_values", "image_grid_thw"), (True, "pixel_values_videos", "video_grid_thw"))


def _pixel_values(visual: Visual, pixels: PatchFormat) -> torch.Tensor:
    later = visual.later_patches if len(visual.later_patches) else visual.patches
    frames = [torch.from_numpy(frame.copy()).view(len(frame), 3, 1, -1).float() for frame in (visual.patches, later)]
    mean, std = (255 * torch.tensor(v).view(3, 1, 1) for v in (pixels.image_mean, pixels.image_std))
    return ((torch.cat(frames, 2) - mean) / std).flatten(1)


def reference_logits(model: PreTrainedModel, sample: TokenizedSample) -> torch.Tensor:
    """Return the (n, vocabulary) logits of one sample alone."""
    inputs = reference_inputs(sample, model.config)
    of_pixels = {name: value.to(model.dtype) for name, value in inputs.items() if name.startswith("pixel_values")}
    inputs = {name: value.to(model.device) for name, value in (inputs | of_pixels).items()}
    return model(**inputs, use_cache=False).logits[0]


def reference_losses(model: PreTrainedModel, sample: TokenizedSample) -> torch.Tensor:
    """Return the losses of a sample's loss tokens, in order."""
    logits = reference_logits(model, sample)[:-1]
    ids = torch.from_numpy(sample.input_ids.astype("int64")).to(logits.device)
    learnt = torch.from_numpy(sample.loss_mask.astype(bool))[1:].to(logits.device)
    return torch.nn.functional.cross_entropy(logits[learnt], ids[1:][learnt], reduction="none")
