"""The reference for pixels: transformers' torchvision image processor, if torchvision is installed.

The project does not need torchvision. To compare with it, install it beside and not into the environment:

    make .venv/torchvision                                       # `make test-full` does it by itself
    PYTHONPATH=.venv/torchvision python -m tests.parity.compare_pixels

PyPI's torchvision is built for CUDA. Beside a CPU build of torch its compiled part does not load and its Python part
then misses its operators, so their names are declared here. Scaling and normalising use none of them.
"""

import importlib
import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dataset_builders.pictures.images import open_rgb
from dataset_builders.pictures.pixels import PixelConfig

_declared: list[torch.library.Library] = []


def torchvision_version() -> str | None:
    """Return the version of an importable torchvision, or None."""
    if importlib.util.find_spec("torchvision") is None:
        return None
    try:
        return importlib.import_module("torchvision").__version__
    except RuntimeError:  # operator torchvision::nms does not exist
        _declare_operators()
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        return importlib.import_module("torchvision").__version__


def reference_pixels(data: bytes, config: PixelConfig) -> tuple[np.ndarray, np.ndarray]:
    """Return (pixel_values float32, grid) of an encoded image, from transformers' own processor."""
    out = image_processor(config)(images=[open_rgb(data)], return_tensors="pt")
    return out["pixel_values"].numpy(), out["image_grid_thw"][0].numpy()


def image_processor(config: PixelConfig) -> Any:
    """Return transformers' torchvision-backed image processor with the settings of `config`."""
    module = importlib.import_module("transformers.models.qwen2_vl.image_processing_qwen2_vl")
    patch_format = config.patch_format
    return module.Qwen2VLImageProcessor(
        size={"shortest_edge": config.min_pixels, "longest_edge": config.max_pixels},
        patch_size=patch_format.patch_size,
        temporal_patch_size=patch_format.temporal_patch_size,
        merge_size=patch_format.merge_size,
        image_mean=list(patch_format.image_mean),
        image_std=list(patch_format.image_std),
    )


def _declare_operators() -> None:
    origin = importlib.util.find_spec("torchvision").origin
    source = Path(origin).with_name("_meta_registrations.py").read_text(encoding="utf-8")
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in sorted(set(re.findall(r'register_(?:meta|fake)\("(?:torchvision::)?(\w+)"\)', source))):
        library.define(f"{name}(Tensor x) -> Tensor")
    _declared.append(library)  # the declarations exist as long as the library object
