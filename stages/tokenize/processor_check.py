"""An independent check of stored samples against transformers' own processor and tokenizer.

The pixels are always compared with Pillow's decoding of the file, and with transformers' torchvision-backed image
processor if torchvision can be imported. The ids are compared with the ids of the text in which every image token is
written out before tokenization, as in transformers' processors, without the splice of `stages.shared.chat_format.chat`.
The ids before each trained answer are compared with the ids of its inference prompt.

Of a video, transformers' own code chooses the frames, sizes them, and writes the text with their times; see
stages/shared/chat_format/video_reference.py.
"""

import functools
import importlib
import importlib.util
from collections.abc import Sequence
from pkgutil import resolve_name
from typing import Any

import numpy as np

from dataset_builders.contracts.sample import IMAGE_SLOT, VIDEO_SLOT, Message, Sample, SkipSample, Video
from dataset_builders.contracts.tokenized import GROUP_FRAMES, PatchFormat, PixelConfig, TokenizedSample, Visual
from dataset_builders.pictures.images import open_rgb
from dataset_builders.pictures.pixels import encode_frames, encode_rgb, pixel_values
from dataset_builders.videos.decode import iter_frames, probe, read_frames
from dataset_builders.videos.sampling import FramePlan, VideoConfig
from stages.shared.chat_format.chat import ChatEncoder, trained_answers
from stages.shared.chat_format.template import REASONING, Messages
from stages.shared.chat_format.video_reference import VideoReference, video_reference
from stages.shared.inputs.model_directory import ModelDirectory

WITHOUT_TORCHVISION = (
    "Pillow's decoding; with transformers' image processor too where torchvision imports: "
    "pip install -e '.[torchvision]'"
)
# Frames of a video that transformers' processor is given, which holds them several times. The pixels of a longer or
# larger one are compared with PyAV's frames alone.
_MOST_BYTES = 1 << 29
_PROCESSOR_FIELDS = (
    *("patch_size", "temporal_patch_size", "merge_size", "image_mean", "image_std"),
    *("do_resize", "resample", "do_rescale", "rescale_factor", "do_normalize", "do_convert_rgb"),
)


class ProcessorCheck:
    """Comparison of stored samples with transformers' output for the same samples."""

    def __init__(self, config: PixelConfig, chat: ChatEncoder, videos: VideoConfig | None = None) -> None:
        self._config, self._chat, self._videos = config, chat, videos
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

    def check(self, sample: Sample, stored: TokenizedSample, plans: Sequence[FramePlan] = ()) -> None:
        """Check that every id, patch and grid equals transformers' output for the sample without its dropped turns. An
        AssertionError is a bug in this code, and stops the stage. `plans` are the frames that are read of videos."""
        visuals = stored.visuals()
        images = [visual for visual, is_video in zip(visuals, stored.is_video) if not is_video]
        groups = [visual for visual, is_video in zip(visuals, stored.is_video) if is_video]
        grids = self._check_images(sample, images)
        texts: list[str] = []
        for place, (video, plan) in enumerate(zip(sample.videos, plans, strict=True)):
            mine, groups = groups[: len(plan.times)], groups[len(plan.times) :]
            texts.append(self._check_video(f"{sample.key}: video {place}", video, plan, mine))
        assert not groups, f"{sample.key}: groups of no video"
        (text,) = self._chat.template.render([self._turns(sample.messages)])
        assert stored.input_ids.tolist() == self._ids(text, grids, texts), (
            f"{sample.key}: the stored ids are not those of the text with its image tokens written out"
        )
        self._check_prompts(sample, stored, grids, texts)

    def _check_prompts(self, sample: Sample, stored: TokenizedSample, grids: np.ndarray, videos: Sequence[str]) -> None:
        answers = [place for place, message in enumerate(sample.messages) if message.role == "assistant"]
        trained_on = trained_answers(sample.messages, self._chat.learn)
        places = [place for place, is_trained in zip(answers, trained_on) if is_trained]
        # Every other change of the mask is the start of a trained answer.
        starts = np.flatnonzero(np.diff(stored.loss_mask, prepend=0, append=0))[::2]
        for place, start in zip(places, starts, strict=True):
            before, answer = self._turns(sample.messages[:place]), sample.messages[place]
            thinks = bool(self._chat.reasoning_of(answer))
            (text,) = self._chat.template.render([before], add_generation_prompt=True, thinks=thinks)
            shown = "".join(message.text for message in sample.messages[:place])
            expected = self._ids(text, grids[: shown.count(IMAGE_SLOT)], videos[: shown.count(VIDEO_SLOT)])
            assert stored.input_ids[:start].tolist() == expected, (
                f"{sample.key}: the ids before message {place} are not those of its prompt at inference"
            )

    def _check_images(self, sample: Sample, stored: Sequence[Visual]) -> np.ndarray:
        """Compare the images; return the reference's grids, (images, 3) int64."""
        assert len(sample.images) == len(stored), f"{sample.key}: not a grid for each image"
        grids = []
        for place, (image, visual) in enumerate(zip(sample.images, stored)):
            where, decoded = f"{sample.key}: image {place}", open_rgb(image)
            by_pillow, grid = encode_rgb(np.array(decoded), self._config)
            if self._processor is not None:
                out = self._processor(images=[decoded], return_tensors="pt")
                grid = out["image_grid_thw"][0].numpy()
                values = pixel_values(visual.patches, self._config.patch_format)
                assert np.array_equal(values, out["pixel_values"].numpy()), f"{where} is not what transformers makes"
            assert np.array_equal(visual.patches, by_pillow), f"{where} is not what Pillow decodes"
            assert grid.tolist() == visual.grid.tolist(), f"{where} has grid {visual.grid}, transformers has {grid}"
            grids.append(grid)
        return np.array(grids, np.int64).reshape(-1, 3)

    def _check_video(self, where: str, video: Video, plan: FramePlan, groups: Sequence[Visual]) -> str:
        """Compare a video; return the text that the reference writes for it."""
        reference, patch_format = self._reference(), self._config.patch_format
        read = reference.read(video, plan)
        assert read.indices == [*plan.indices], f"{where}: frames {plan.indices}, transformers takes {read.indices}"
        grid, facts = [*read.grid], probe(video, decode=False)
        is_small = 3 * facts.height * facts.width * len(plan.indices) <= _MOST_BYTES
        if torchvision_version() is not None and is_small:
            expected, grid = reference.pixels(read_frames(video, plan.indices), read)
            values = np.concatenate([_group_values(group, patch_format) for group in groups])
            assert np.array_equal(values, expected), f"{where} is not what transformers makes"
        grids = [group.grid.tolist() for group in groups]
        assert grids == [[1, *grid[1:]]] * grid[0], f"{where} has grids {grids}, transformers has {grid}"
        frames = iter_frames(video, plan.indices)  # one after the other
        pairs = encode_frames(frames, plan.height, plan.width, patch_format)
        for number, (group, pair) in enumerate(zip(groups, pairs, strict=True)):
            same = np.array_equal(group.patches, pair[0]) and np.array_equal(group.later_patches, pair[1])
            assert same, f"{where}: group {number} is not what PyAV decodes"
        return read.text

    def _reference(self) -> VideoReference:
        return video_reference(self._chat.model, self._videos)

    def _turns(self, messages: Sequence[Message]) -> Messages:
        chat = self._chat
        turns: Messages = [{"role": m.role, "content": _content(m)} for m in messages]
        for turn, message in zip(turns, messages):
            turn |= {REASONING: reasoning} if (reasoning := chat.reasoning_of(message)) else {}
        if chat.system_prompt and "system" not in [m.role for m in messages]:
            turns.insert(0, {"role": "system", "content": chat.system_prompt})
        return turns

    def _ids(self, text: str | SkipSample, grids: np.ndarray, videos: Sequence[str]) -> list[int]:
        chat = self._chat
        assert isinstance(text, str), text
        text = self._reference().expanded(text, videos) if videos else text
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
    kinds = {IMAGE_SLOT: "image", VIDEO_SLOT: "video"}
    if message.role == "system" or not any(slot in message.text for slot in kinds):
        return message.text
    parts: list[dict[str, str]] = []
    rest = message.text
    while found := [slot for slot in kinds if slot in rest]:
        slot = min(found, key=rest.index)
        before, _, rest = rest.partition(slot)
        parts += [{"type": "text", "text": before}] * bool(before) + [{"type": kinds[slot]}]
    return [*parts, {"type": "text", "text": rest}] if rest else parts


def _group_values(group: Visual, patch_format: PatchFormat) -> np.ndarray:
    """Return transformers' pixel values of a temporal group, (h*w, 3 * 2 * patch_size^2) float32."""
    shape = (len(group.patches), 3, GROUP_FRAMES, -1)
    first, later = (pixel_values(patches, patch_format).reshape(shape) for patches in group[1:])
    return np.stack([first[:, :, 0], later[:, :, 0]], 2).reshape(len(group.patches), -1)


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
