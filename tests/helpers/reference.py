"""transformers' models as the reference: random weights everywhere, one sample at a time, plain autograd."""

import functools
import shutil
from pathlib import Path
from pkgutil import resolve_name

import torch
from transformers import PreTrainedModel

from dataset_builders.contracts.tokenized import PatchFormat, TokenizedSample
from tests.helpers.process_dir import process_dir
from tests.helpers.tiny_model import tiny_hf_dir
from tests.helpers.tiny_text_model import randomize
from trainer.model.registry import read_model

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
    sample: TokenizedSample, image_token_id: int | None, pixels: PatchFormat = PIXELS
) -> dict[str, torch.Tensor]:
    """Return a sample as transformers takes it: (1, n) ids, (P, C) normalised pixels with the temporal copy.

    Args:
        image_token_id: None for a model of text alone.
        pixels: mean and standard deviation by which pixels are normalised.
    """
    ids = torch.from_numpy(sample.input_ids.astype("int64"))[None]
    inputs = {"input_ids": ids}
    if image_token_id is not None:
        inputs["mm_token_type_ids"] = (ids == image_token_id).int()
    if len(sample.image_grid_thw):
        patches = torch.from_numpy(sample.patches.copy()).view(len(sample.patches), 3, 1, -1).float()
        mean, std = (255 * torch.tensor(v).view(3, 1, 1) for v in (pixels.image_mean, pixels.image_std))
        values = ((patches - mean) / std).expand(-1, 3, pixels.temporal_patch_size, -1)
        inputs["pixel_values"] = values.reshape(len(patches), -1)
        inputs["image_grid_thw"] = torch.from_numpy(sample.image_grid_thw.astype("int64"))
    return inputs


def reference_logits(model: PreTrainedModel, sample: TokenizedSample) -> torch.Tensor:
    """Return the (n, vocabulary) logits of one sample alone."""
    inputs = reference_inputs(sample, getattr(model.config, "image_token_id", None))
    if "pixel_values" in inputs:
        inputs["pixel_values"] = inputs["pixel_values"].to(model.dtype)
    inputs = {name: value.to(model.device) for name, value in inputs.items()}
    return model(**inputs, use_cache=False).logits[0]


def reference_losses(model: PreTrainedModel, sample: TokenizedSample) -> torch.Tensor:
    """Return the losses of a sample's loss tokens, in order."""
    logits = reference_logits(model, sample)[:-1]
    ids = torch.from_numpy(sample.input_ids.astype("int64")).to(logits.device)
    learnt = torch.from_numpy(sample.loss_mask.astype(bool))[1:].to(logits.device)
    return torch.nn.functional.cross_entropy(logits[learnt], ids[1:][learnt], reduction="none")
