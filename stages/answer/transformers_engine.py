"""Greedy answers of a Hugging Face model directory, with the same prompts and pixels as in training."""

import threading
from collections.abc import Iterable, Iterator, Sequence
from pkgutil import resolve_name

import numpy as np
import torch
import transformers

from dataset_builders.contracts.sample import Message, SkipSample, Video
from dataset_builders.errors import InputError
from dataset_builders.pictures.pixels import encode_frames, encode_image
from dataset_builders.videos.decode import iter_frames
from stages.answer.engine import Answer, EngineSettings, Prepared, Request
from stages.answer.greedy_decoder import NO_VIDEOS, EncodedImages, EncodedVideos, GreedyDecoder, PoolLimits, Prompt, Row
from stages.shared.chat_format.chat import ChatEncoder
from stages.shared.chat_format.images import plans_of
from stages.shared.chat_format.prompt import PromptFormat, read_prompt_format
from stages.shared.inputs.adapter_directory import AdapterDirectory
from stages.shared.inputs.load_transformers import add_adapters, no_progress_bar
from stages.shared.inputs.model_directory import ModelDirectory, end_ids

_UNLIMITED = PoolLimits(rows=1 << 30, tokens=1 << 60)


class Generator:
    """A loaded model directory that answers messages with images. It runs in bfloat16 on a GPU, in float32 without one.

    Args:
        device: number of the GPU on this host; None: the first one.
        prompt: the form of the prompts; None: the directory's own.
        adapter: an adapter of this model; None: no adapter.
    """

    def __init__(
        self,
        model: ModelDirectory,
        device: int | None = None,
        prompt: PromptFormat | None = None,
        adapter: AdapterDirectory | None = None,
    ) -> None:
        model.check_weights()  # transformers would also read pickles, and draw missing weights at random
        prompt = prompt or read_prompt_format(model)
        self._chat = ChatEncoder(model, system_prompt=prompt.system_prompt)
        self._image_config, self._video_config = prompt.pixels, prompt.videos
        loaded = _load(model, device)
        if adapter is not None:
            add_adapters(loaded, adapter)
        self.decoder = GreedyDecoder(
            loaded,
            {*end_ids(model.path), self._chat.end_of_turn_id},  # an adapter's model ends turns as it was trained to
            self._chat.image_token_id,
            self._image_config.patch_format,
            self._chat.video_token_id,
        )
        self._encoding = threading.Lock()  # a tokenizer is not thread-safe

    @property
    def context_length(self) -> int:
        return self.decoder.model.config.get_text_config().max_position_embeddings

    def encode_images(self, images: Sequence[bytes]) -> EncodedImages:
        """Convert encoded image files to patches; SkipSample if one is not a usable image."""
        encoded = [encode_image(image, self._image_config) for image in images]
        grids = np.array([grid for _, grid in encoded], np.int32).reshape(-1, 3)
        return EncodedImages(grids, tuple(patches for patches, _ in encoded))

    def encode_videos(self, videos: Sequence[Video]) -> EncodedVideos:
        """Decode the frames that the model reads; SkipSample if a video is not usable."""
        groups: list[tuple[np.ndarray, np.ndarray]] = []
        plans = plans_of(videos, self._video_config, self._chat.model)
        for video, plan in zip(videos, plans):
            frames = iter_frames(video, plan.indices, plan.seconds)
            groups += encode_frames(frames, plan.height, plan.width, self._image_config.patch_format)
        return EncodedVideos(tuple(plans), tuple(groups))

    def encode_prompt(
        self, messages: Sequence[Message], images: EncodedImages, videos: EncodedVideos = NO_VIDEOS
    ) -> Prompt:
        """Return the prompt for the answer that follows `messages`; the last message is a user's. SkipSample: the text
        holds special tokens, or its slots are not as many as the images and videos."""
        with self._encoding:
            return Prompt(self._chat.encode_prompt(messages, images.grids, videos.plans), images, videos)

    def generate(self, prompts: Sequence[Prompt], max_new_tokens: int) -> list[Answer]:
        """Return the greedy answers of one batch. Sampling settings in generation_config.json are not used."""
        rows = [Row(number, max_new_tokens) for number in range(len(prompts))]
        for _ in self.decoder.decode([self.decoder.pad(prompts, rows)], _UNLIMITED):
            pass
        return [self.answer_of(row) for row in rows]

    def answer_of(self, row: Row) -> Answer:
        with self._encoding:
            text = self._chat.tokenizer.decode(row.ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return Answer(text, row.stopped, list(row.ids))


class TransformersEngine:
    """The engine that uses transformers: the decoder's pool takes new prompts as its rows end."""

    def __init__(self, settings: EngineSettings) -> None:
        self._generator = Generator(settings.model, settings.device, settings.prompt, settings.adapter)
        self._limits = PoolLimits(settings.batch_size, settings.batch_tokens)

    def prepare(self, requests: Sequence[Request]) -> Prepared:
        """Compute pixels, tokens and positions; safe in any thread."""
        prompts: list[Prompt] = []
        rows: list[Row] = []
        skipped: dict[int, SkipSample] = {}
        for request in requests:
            try:
                images = self._generator.encode_images(request.images)
                videos = self._generator.encode_videos(request.videos)
                prompts.append(self._generator.encode_prompt(request.messages, images, videos))
                rows.append(Row(request.number, request.max_new_tokens))
            except SkipSample as error:
                skipped[request.number] = error
        return Prepared(self._generator.decoder.pad(prompts, rows) if prompts else None, skipped)

    def answer(self, groups: Iterable[Prepared]) -> Iterator[tuple[int, Answer]]:
        ready = (group.ready for group in groups if group.ready is not None)
        for row in self._generator.decoder.decode(ready, self._limits):
            yield row.number, self._generator.answer_of(row)


def _load(directory: ModelDirectory, device: int | None) -> "transformers.PreTrainedModel":
    place = torch.device("cuda", device or 0) if torch.cuda.is_available() else torch.device("cpu")
    dtype = torch.bfloat16 if place.type == "cuda" else torch.float32
    if place.type == "cpu":  # it recommends kernels for the delta rule that run only on GPUs
        transformers.logging.get_logger("transformers.integrations.hub_kernels").setLevel(transformers.logging.ERROR)
    with no_progress_bar():
        try:
            model, info = resolve_name(directory.family.reference).from_pretrained(
                directory.path,
                dtype=dtype,
                attn_implementation="sdpa",
                local_files_only=True,
                trust_remote_code=False,
                output_loading_info=True,
            )
        except (OSError, ValueError, RuntimeError, KeyError) as error:  # the errors for files that do not fit together
            first_line = (str(error) or type(error).__name__).splitlines()[0]
            raise InputError(
                f"{directory.path}: the model cannot be loaded ({first_line}); export or copy it again"
            ) from error
    if missing := sorted(info["missing_keys"]):  # transformers draws them at random
        raise InputError(
            f"{directory.path}: {len(missing)} tensors are missing, the first is {missing[0]}; copy it again"
        )
    return model.to(place).eval()
