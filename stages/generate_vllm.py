"""Greedy answers of vLLM, where it is installed; never run against the library itself, only against its interface.

vLLM gets the prompt's tokens with one placeholder an image and the decoded pictures; it scales them by the directory's
preprocessor_config.json, with the same processor as training's reference. Where other limits are asked for, it gets a
directory of links that has those: which arguments of its own reach the processor depends on its version. It fills its
batches by itself, so a group is handed over whole and `batch_size` is its limit of sequences.
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
from dataset_builders.images import image_size, open_rgb
from dataset_builders.pixels import PixelConfig, image_grid
from stages.answer_engine import Answer, Asked, EngineSettings, Prepared, check_engine
from stages.encode_chat import ChatEncoder
from stages.encode_image import load_image_config, write_pixel_limits
from stages.generate import end_ids_of, read_generation_config
from stages.hf_directory import check_hf_dir

_GROUPS_TOGETHER = 16  # handed over in one call, so that its scheduler has something to choose from


class VllmEngine:
    """An `LLM` of vLLM on the GPU that this process sees.

    Raises:
        InputError: the directory is no complete model, or vLLM is not installed.
    """

    def __init__(self, settings: EngineSettings) -> None:
        check_engine("vllm")
        check_hf_dir(settings.hf_dir)
        self._vllm = importlib.import_module("vllm")
        self._chat = ChatEncoder(settings.hf_dir, system_prompt=settings.prompt.system_prompt)
        self._image_config = settings.prompt.pixels
        self._end_ids = frozenset(end_ids_of(settings.hf_dir, read_generation_config(settings.hf_dir)))
        self._encoding = threading.Lock()  # a tokenizer is not made for several threads
        self._llm = self._vllm.LLM(
            model=str(_with_pixels(settings.hf_dir, self._image_config)),
            max_num_seqs=settings.batch_size,
            trust_remote_code=False,
            generation_config="vllm",  # its own defaults, not the directory's sampling settings
            disable_log_stats=True,
        )

    def prepare(self, asked: Sequence[Asked]) -> Prepared:
        """vLLM's prompts and sampling parameters."""
        ready: list[tuple[int, dict[str, Any], Any]] = []
        skipped: dict[int, SkipSample] = {}
        for question in asked:
            try:
                ready.append((question.number, self._prompt(question), self._sampling(question.max_new_tokens)))
            except SkipSample as error:
                skipped[question.number] = error
        return Prepared(ready or None, skipped)

    def answer(self, groups: Iterable[Prepared]) -> Iterator[tuple[int, Answer]]:
        """(number, answer) of each question."""
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
            yield number, self._answer(output.outputs[0].token_ids)

    def _answer(self, ids: Sequence[int]) -> Answer:
        ends = [place for place, token in enumerate(ids) if token in self._end_ids]
        said = list(ids[: ends[0]] if ends else ids)
        with self._encoding:
            text = self._chat.tokenizer.decode(said, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return Answer(text, bool(ends), len(said))

    def _prompt(self, question: Asked) -> dict[str, Any]:
        grids = [image_grid(*image_size(image), self._image_config) for image in question.images]
        with self._encoding:
            ids = self._chat.prompt_ids(question.messages, grids)
        prompt: dict[str, Any] = {"prompt_token_ids": ids.tolist()}
        if question.images:
            prompt["multi_modal_data"] = {"image": [open_rgb(image) for image in question.images]}
        return prompt

    def _sampling(self, max_new_tokens: int) -> Any:
        return self._vllm.SamplingParams(
            temperature=0.0, max_tokens=max_new_tokens, stop_token_ids=sorted(self._end_ids), detokenize=False
        )


def _with_pixels(hf_dir: Path, pixels: PixelConfig) -> Path:
    """The model directory, or links to its files beside configs with these limits."""
    if pixels == load_image_config(hf_dir):
        return hf_dir
    directory = Path(tempfile.mkdtemp(prefix="athanor-vllm-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    for file in hf_dir.iterdir():
        (directory / file.name).symlink_to(file.resolve())
    write_pixel_limits(directory, pixels.min_pixels, pixels.max_pixels)  # a new file in place of a link
    return directory
