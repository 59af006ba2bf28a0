"""An independent check of stored samples against transformers' own processor and tokenizer.

The pixels are always compared with Pillow's decoding of the file, and with transformers' torchvision-backed image
processor if torchvision can be imported. The ids are compared with the ids of the text in which every image token is
written out before tokenization, as in transformers' processors, without the splice of `stages.shared.chat_format.chat`.
The ids before each trained answer are compared with the ids of its inference prompt.
"""

import functools
import importlib
import importlib.util
from collections.abc import Sequence
from pkgutil import resolve_name
from typing import Any

import numpy as np

from dataset_builders.contracts.sample import IMAGE_SLOT, Message, Sample, SkipSample
from dataset_builders.contracts.tokenized import PixelConfig, TokenizedSample
from dataset_builders.pictures.images import open_rgb
from dataset_builders.pictures.pixels import encode_rgb, pixel_values
from stages.shared.chat_format.chat import ChatEncoder, trained_answers
from stages.shared.chat_format.template import REASONING, Messages
from stages.shared.inputs.model_directory import ModelDirectory

WITHOUT_TORCHVISION = (
    "Pillow's decoding; with transformers' image processor too where torchvision imports: "
    "pip install -e '.[torchvision]'"
)
_PROCESSOR_FIELDS = (
    *("patch_size", "temporal_patch_size", "merge_size", "image_mean", "image_std"),
    *("do_resize", "resample", "do_rescale", "rescale_factor", "do_normalize", "do_convert_rgb"),
)


class ProcessorCheck:
    """Comparison of stored samples with transformers' output for the same samples."""

    def __init__(self, config: PixelConfig, chat: ChatEncoder) -> None:
        self._config, self._chat = config, chat
        self._has_pictures = chat.model.family.image_processor is not None
        self._processor = _image_processor(chat.model, config.min_pixels, config.max_pixels)

    @property
    def pixels_against(self) -> str:
        """The reference that the pixels are compared with, for the artifact's stats and its page."""
        if not self._has_pictures:
            return "nothing: the model reads no pictures"
        if self._processor is None:
            return WITHOUT_TORCHVISION
        return f"Pillow's decoding and transformers' image processor, torchvision {torchvision_version()}"

    def check(self, sample: Sample, stored: TokenizedSample) -> None:
        """Check that every id, patch and grid equals transformers' output for the sample without its dropped turns. An
        AssertionError is a bug in this code, and stops the stage."""
        grids = self._check_images(sample, stored)
        (text,) = self._chat.template.render([self._turns(sample.messages)])
        assert stored.input_ids.tolist() == self._ids(text, grids), (
            f"{sample.key}: the stored ids are not those of the text with its image tokens written out"
        )
        self._check_prompts(sample, stored, grids)

    def _check_prompts(self, sample: Sample, stored: TokenizedSample, grids: np.ndarray) -> None:
        answers = [place for place, message in enumerate(sample.messages) if message.role == "assistant"]
        trained_on = trained_answers(sample.messages, self._chat.learn)
        places = [place for place, is_trained in zip(answers, trained_on) if is_trained]
        # Every other change of the mask is the start of a trained answer.
        starts = np.flatnonzero(np.diff(stored.loss_mask, prepend=0, append=0))[::2]
        for place, start in zip(places, starts, strict=True):
            before, answer = self._turns(sample.messages[:place]), sample.messages[place]
            thinks = bool(self._chat.reasoning_of(answer))
            (text,) = self._chat.template.render([before], add_generation_prompt=True, thinks=thinks)
            images = sum(message.text.count(IMAGE_SLOT) for message in sample.messages[:place])
            assert stored.input_ids[:start].tolist() == self._ids(text, grids[:images]), (
                f"{sample.key}: the ids before message {place} are not those of its prompt at inference"
            )

    def _check_images(self, sample: Sample, stored: TokenizedSample) -> np.ndarray:
        """Compare the images; return the reference's grids, (images, 3) int64."""
        assert len(sample.images) == len(stored.image_grid_thw), f"{sample.key}: not a grid for each image"
        grids, start = [], 0
        for place, (image, stored_grid) in enumerate(zip(sample.images, stored.image_grid_thw)):
            patches = stored.patches[start : start + int(stored_grid.prod())]
            start += len(patches)
            where, decoded = f"{sample.key}: image {place}", open_rgb(image)
            by_pillow, grid = encode_rgb(np.array(decoded), self._config)
            if self._processor is not None:
                out = self._processor(images=[decoded], return_tensors="pt")
                grid = out["image_grid_thw"][0].numpy()
                values = pixel_values(patches, self._config.patch_format)
                assert np.array_equal(values, out["pixel_values"].numpy()), f"{where} is not what transformers makes"
            assert np.array_equal(patches, by_pillow), f"{where} is not what Pillow decodes"
            assert grid.tolist() == stored_grid.tolist(), f"{where} has grid {stored_grid}, transformers has {grid}"
            grids.append(grid)
        assert start == len(stored.patches), f"{sample.key}: patches of no image"
        return np.array(grids, np.int64).reshape(-1, 3)

    def _turns(self, messages: Sequence[Message]) -> Messages:
        chat = self._chat
        turns: Messages = [{"role": m.role, "content": _content(m)} for m in messages]
        for turn, message in zip(turns, messages):
            turn |= {REASONING: reasoning} if (reasoning := chat.reasoning_of(message)) else {}
        if chat.system_prompt and "system" not in [m.role for m in messages]:
            turns.insert(0, {"role": "system", "content": chat.system_prompt})
        return turns

    def _ids(self, text: str | SkipSample, grids: np.ndarray) -> list[int]:
        chat = self._chat
        assert isinstance(text, str), text
        token = chat.tokenizer.convert_ids_to_tokens(chat.image_token_id) if chat.images else None
        first, *others = text.split(token) if token else [text]
        tokens = grids.prod(-1) // self._config.patch_format.merge_size**2
        assert len(others) == len(tokens), f"{len(others)} placeholders for {len(tokens)} images"
        written_out = first + "".join(str(token) * int(n) + rest for n, rest in zip(tokens, others))
        return chat.tokenizer(written_out, add_special_tokens=False)["input_ids"]


def torchvision_version() -> str | None:
    """Return torchvision's version; None if it cannot be imported (built for another torch, for example)."""
    if importlib.util.find_spec("torchvision") is None:
        return None
    try:
        return importlib.import_module("torchvision").__version__
    except (ImportError, RuntimeError, OSError):
        return None


def _content(message: Message) -> str | list[dict[str, str]]:
    if message.role == "assistant":
        return message.text.strip()
    if message.role == "system" or IMAGE_SLOT not in message.text:
        return message.text
    parts: list[dict[str, str]] = []
    rest = message.text
    while IMAGE_SLOT in rest:
        before, _, rest = rest.partition(IMAGE_SLOT)
        parts += [{"type": "text", "text": before}] * bool(before) + [{"type": "image"}]
    return [*parts, {"type": "text", "text": rest}] if rest else parts


@functools.lru_cache(maxsize=1)
def _image_processor(model: ModelDirectory, min_pixels: int, max_pixels: int) -> Any | None:
    """Return transformers' torchvision-backed processor of a directory; None without torchvision or without images."""
    if torchvision_version() is None:
        return None
    if model.family.image_processor is None:
        return None
    raw, *_ = model.image_settings.values()
    fields = {name: raw[name] for name in _PROCESSOR_FIELDS if name in raw}
    fields["size"] = {"shortest_edge": min_pixels, "longest_edge": max_pixels}
    return resolve_name(model.family.image_processor.reference)(**fields)
