"""Greedy answers by vLLM, if it is installed. Tested only against a module with vLLM's interface, never with vLLM.

vLLM gets the prompt's tokens with one placeholder per image, and the decoded images. It resizes the images by the
directory's preprocessor_config.json, with the same processor as training's reference. For other pixel limits it gets a
directory of links with a changed preprocessor_config.json, because the arguments that reach the processor depend on
vLLM's version. vLLM forms its own batches, so it gets whole groups, and `batch_size` is its limit of sequences.
"""

import atexit
import importlib
import shutil
import tempfile
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from dataset_builders.contracts.sample import SkipSample
from dataset_builders.contracts.tokenized import PixelConfig
from dataset_builders.pictures.images import image_size, open_rgb
from dataset_builders.pictures.pixels import image_grid
from stages.answer.engine import Answer, EngineSettings, Prepared, Request, check_engine
from stages.shared.chat_format.chat import ChatEncoder
from stages.shared.chat_format.images import load_image_config, write_pixel_limits
from stages.shared.inputs.model_directory import ModelDirectory, end_ids

_GROUPS_TOGETHER = 16  # groups per call, so that vLLM's scheduler can choose among many sequences


class VllmEngine:
    """The engine that uses vLLM's `LLM`, on the GPU that this process sees."""

    def __init__(self, settings: EngineSettings) -> None:
        check_engine("vllm", settings.adapter)
        settings.model.check_weights()
        self._vllm = importlib.import_module("vllm")
        self._chat = ChatEncoder(settings.model, system_prompt=settings.prompt.system_prompt)
        self._image_config = settings.prompt.pixels
        self._end_ids = frozenset({*end_ids(settings.model.path), self._chat.end_of_turn_id})
        self._encoding = threading.Lock()  # a tokenizer is not thread-safe
        self._llm = self._vllm.LLM(
            model=str(_with_pixels(settings.model, self._image_config)),
            max_num_seqs=settings.batch_size,
            trust_remote_code=False,
            generation_config="vllm",  # vLLM's defaults, not the directory's sampling settings
            disable_log_stats=True,
        )

    def prepare(self, requests: Sequence[Request]) -> Prepared:
        ready: list[tuple[int, dict[str, Any], Any]] = []
        skipped: dict[int, SkipSample] = {}
        ends = sorted(self._end_ids)
        for request in requests:
            sampling = self._vllm.SamplingParams(
                temperature=0.0, max_tokens=request.max_new_tokens, stop_token_ids=ends, detokenize=False
            )
            try:
                ready.append((request.number, self._prompt(request), sampling))
            except SkipSample as error:
                skipped[request.number] = error
        return Prepared(ready or None, skipped)

    def answer(self, groups: Iterable[Prepared]) -> Iterator[tuple[int, Answer]]:
        together: list[tuple[int, dict[str, Any], Any]] = []
        for count, group in enumerate(groups, 1):
            together += group.ready or []
            if count % _GROUPS_TOGETHER == 0:
                yield from self._generate(together)
                together = []
        yield from self._generate(together)

    def _generate(self, ready: Sequence[tuple[int, dict[str, Any], Any]]) -> Iterator[tuple[int, Answer]]:
        if not ready:
            return
        outputs = self._llm.generate(
            [prompt for _, prompt, _ in ready], [sampling for _, _, sampling in ready], use_tqdm=False
        )
        for (number, _, _), output in zip(ready, outputs, strict=True):
            ids = output.outputs[0].token_ids
            ends = [place for place, token in enumerate(ids) if token in self._end_ids]
            ids = list(ids[: ends[0]] if ends else ids)
            with self._encoding:
                text = self._chat.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
            yield number, Answer(text, bool(ends), ids)

    def _prompt(self, request: Request) -> dict[str, Any]:
        grids = [image_grid(*image_size(image), self._image_config) for image in request.images]
        with self._encoding:
            ids = self._chat.prompt_ids(request.messages, grids)
        prompt: dict[str, Any] = {"prompt_token_ids": ids.tolist()}
        if request.images:
            prompt["multi_modal_data"] = {"image": [open_rgb(image) for image in request.images]}
        return prompt


def _with_pixels(model: ModelDirectory, pixels: PixelConfig) -> Path:
    """Return the model directory if it has these limits; otherwise a directory of links with these limits."""
    if pixels == load_image_config(model):
        return model.path
    directory = Path(tempfile.mkdtemp(prefix="athanor-vllm-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    for file in model.path.iterdir():
        (directory / file.name).symlink_to(file.resolve())
    write_pixel_limits(directory, pixels.min_pixels, pixels.max_pixels)  # replaces the link by a new file
    return directory
