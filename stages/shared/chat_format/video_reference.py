"""transformers' own code for videos, which our frames, sizes, times and prompts are compared with.

It is given the times of the decoded frames: a constant rate as it expects it, and the times themselves where the rate
varies, where it would number the frames as if their rate were constant. Only its pixels need torchvision.
"""

import dataclasses
import functools
from collections.abc import Sequence
from pkgutil import resolve_name

import numpy as np
import torch
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.video_utils import VideoMetadata

from dataset_builders.contracts.sample import Video
from dataset_builders.contracts.tokenized import GROUP_FRAMES
from dataset_builders.videos.decode import probe
from dataset_builders.videos.sampling import FramePlan, VideoConfig, constant_rate
from stages.shared.chat_format.text import load_tokenizer
from stages.shared.inputs.model_directory import ModelDirectory


@dataclasses.dataclass(frozen=True, slots=True)
class ReadVideo:
    """One video as transformers reads it, apart from its pixels."""

    indices: list[int]  # of the frames that it reads, in the times of the decoded frames
    grid: tuple[int, int, int]  # groups, rows and columns of patches
    text: str  # in place of the template's placeholder
    metadata: VideoMetadata


class VideoReference:
    """The processors of a model directory. With a `config`, its settings are taken; None: those of the directory's
    files, as transformers reads them."""

    def __init__(self, model: ModelDirectory, config: VideoConfig | None = None) -> None:
        family = model.family.video_processor
        assert family is not None
        made = resolve_name(family.reference)
        if config is None:
            self._processor = made.from_pretrained(model.path)
        else:
            size = {"shortest_edge": config.min_pixels, "longest_edge": config.max_pixels}
            own = config.model_dump(exclude={"min_pixels", "max_pixels", "patch_format"})
            self._processor = made(size=size, **own, **config.patch_format.model_dump())
        written = resolve_name(family.prompt)
        # Without torchvision, transformers does not know the classes that it checks the parts of a processor for.
        unchecked = type(written.__name__, (written,), {"check_argument_for_proper_class": lambda *_: None})
        self._writer = unchecked(Qwen2VLImageProcessorPil(), load_tokenizer(model.path), self._processor)

    def read(self, video: Video, plan: FramePlan) -> ReadVideo:
        """Return what transformers makes of a video. `plan` is ours: its frames are taken where the rate varies, or the
        frames were chosen before."""
        facts, processor = probe(video), self._processor
        metadata = VideoMetadata(total_num_frames=len(facts.times), fps=1.0)
        indices, metadata.frames_indices = [*plan.indices], [facts.times[index] for index in plan.indices]
        rate = None if video.frames else constant_rate(facts.times)
        if rate is not None:
            metadata.fps = rate
            indices = processor.sample_frames(metadata, fps=processor.fps).tolist()
            first = round(facts.times[0] * rate)  # in the file, of which only a part may be shown
            metadata.frames_indices = [first + index for index in indices]
        if len(indices) == 1:  # transformers refuses a single frame; it is read twice
            metadata.frames_indices = metadata.frames_indices * GROUP_FRAMES
        count, groups = len(metadata.frames_indices), -(-len(metadata.frames_indices) // GROUP_FRAMES)
        # Only the number of patches can be asked for, not the grid: that of frames that are one patch wider differs.
        patches = processor.get_num_of_video_patches(count, facts.height, facts.width)
        if patches != groups * plan.patches:
            raise AssertionError(f"{groups} groups of {plan.patches} patches, and transformers makes {patches} in all")
        grid = (groups, *(int(side) for side in plan.grids[0, 1:]))
        # `replace_video_token` extends the list of indices: it gets its own.
        asked = dataclasses.replace(metadata, frames_indices=[*metadata.frames_indices])
        outputs = {"video_grid_thw": torch.tensor([grid]), "video_metadata": [asked]}
        return ReadVideo(indices, grid, self._writer.replace_video_token(outputs, 0), metadata)

    def pixels(self, frames: np.ndarray, read: ReadVideo) -> tuple[np.ndarray, list[int]]:
        """Return pixel_values_videos, (P, 3 * 2 * patch_size^2) float32, and the grid of decoded frames, (n, height,
        width, 3) uint8. Needs torchvision."""
        planes = torch.from_numpy(np.repeat(frames, GROUP_FRAMES, 0) if len(frames) == 1 else frames).permute(
            0, 3, 1, 2
        )
        out = self._processor([planes], video_metadata=[read.metadata], do_sample_frames=False, return_tensors="pt")
        return out["pixel_values_videos"].numpy(), out["video_grid_thw"][0].tolist()

    def expanded(self, text: str, videos: Sequence[str]) -> str:
        """Return a rendered conversation with the texts of its videos in their places."""
        found = text.count(self._writer.video_token)
        assert found == len(videos), f"{found} placeholders for {len(videos)} videos"
        ((written,), _) = self._writer.get_text_with_replacements([text], [], list(videos))
        return written


@functools.lru_cache(maxsize=1)
def video_reference(model: ModelDirectory, config: VideoConfig | None) -> VideoReference:
    """Return the reference of a directory; this process caches the last one."""
    return VideoReference(model, config)
