"""Greedy answers by vLLM, in a process of the Python that has it (`vllm_process.py`).

vLLM gets our tokens, with one placeholder per image, and the images at the size that they have in training: the threads
that prepare questions decode and resize, and vLLM's processor only normalises and cuts patches. It forms its own
batches, so questions are sent as they are prepared, and `batch_size` is its limit of sequences.
"""

import collections
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from dataset_builders.contracts.sample import SkipSample
from dataset_builders.errors import InputError, in_ascii
from dataset_builders.pictures.images import read_rgb
from dataset_builders.pictures.pixels import resized
from stages.answer.engine import Answer, EngineSettings, Prepared, Request, check_engine
from stages.shared.chat_format.chat import ChatEncoder
from stages.shared.inputs.model_directory import end_ids
from stages.shared.inputs.served import lora_options, missing_keys
from stages.shared.launchers.parent import with_parent
from stages.shared.launchers.vllm import check_vllm

_AHEAD = 2  # times batch_size: questions that vLLM has at once, so that it always has one for a free place
_TAIL_LINES = 40
_END_SECONDS = 60


class _Question(NamedTuple):
    """A question in the form of `vllm_process.py`."""

    number: int
    head: bytes  # the line of JSON
    images: list[np.ndarray]  # (height, width, 3) uint8 each


class VllmEngine:
    """The engine that uses vLLM, on one GPU of this host."""

    def __init__(self, settings: EngineSettings) -> None:
        check_engine("vllm", settings.adapter)
        settings.model.check_weights()
        vllm, adapter = check_vllm(), settings.adapter
        self._chat = ChatEncoder(settings.model, system_prompt=settings.prompt.system_prompt)
        self._pixels = settings.prompt.pixels
        self._ends = frozenset({*end_ids(settings.model.path), self._chat.end_of_turn_id})
        self._most = _AHEAD * settings.batch_size
        self._encoding = threading.Lock()  # a tokenizer is not thread-safe
        shape = settings.model.shape
        limits = {"shortest_edge": self._pixels.min_pixels, "longest_edge": self._pixels.max_pixels}
        given = {
            "model": str(settings.model.path.resolve()),
            "batch_size": settings.batch_size,
            "longest": settings.longest,
            "is_hybrid": shape.language.in_chunks,
            "size": limits if shape.vision else None,
            "ends": sorted(self._ends),
            "overrides": missing_keys(settings.model.config),
            "adapter": None if adapter is None else str(adapter.path.resolve()),
            "lora": {} if adapter is None else lora_options(adapter.config["r"], adapter.modules),
        }
        program = [vllm.path, str(Path(__file__).with_name("vllm_process.py")), json.dumps(given)]
        self._process = subprocess.Popen(
            with_parent(program),
            env={**os.environ, **vllm.environment(), **_gpu(settings.device)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self._tail: collections.deque[str] = collections.deque(maxlen=_TAIL_LINES)
        self._answers: queue.Queue[dict[str, Any] | None] = queue.Queue()
        threading.Thread(target=_pass_on, args=(self._process.stderr, self._tail), daemon=True).start()
        threading.Thread(target=_read, args=(self._process.stdout, self._answers), daemon=True).start()
        weakref.finalize(self, _end, self._process)
        if self._answers.get() is None:
            raise InputError(
                f"vLLM {vllm.version} does not load {settings.model.path}: {self._reason()}; use engine=transformers"
            )

    def prepare(self, requests: Sequence[Request]) -> Prepared:
        ready: list[_Question] = []
        skipped: dict[int, SkipSample] = {}
        for request in requests:
            try:
                ready.append(self._question(request))
            except SkipSample as error:
                skipped[request.number] = error
        return Prepared(ready or None, skipped)

    def answer(self, groups: Iterable[Prepared]) -> Iterator[tuple[int, Answer]]:
        waiting = 0
        for group in groups:
            for question in group.ready or ():
                while waiting >= self._most or not self._answers.empty():
                    yield self._next()
                    waiting -= 1
                self._send(question)
                waiting += 1
        for _ in range(waiting):
            yield self._next()

    def _question(self, request: Request) -> _Question:
        images = [resized(read_rgb(image), self._pixels) for image in request.images]
        size = self._pixels.patch_format.patch_size
        grids = np.array([(1, len(i) // size, i.shape[1] // size) for i in images], np.int32).reshape(-1, 3)
        with self._encoding:
            ids = self._chat.prompt_ids(request.messages, grids)
        head = {
            "number": request.number,
            "ids": ids.tolist(),
            "limit": request.max_new_tokens,
            "images": [image.shape[:2] for image in images],
        }
        return _Question(request.number, json.dumps(head).encode() + b"\n", images)

    def _send(self, question: _Question) -> None:
        try:
            self._process.stdin.write(question.head)
            for image in question.images:
                self._process.stdin.write(image)
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._died() from None

    def _next(self) -> tuple[int, Answer]:
        found = self._answers.get()
        if found is None:
            raise self._died()
        if "refused" in found:
            raise InputError(f"vLLM does not take a question: {in_ascii(found['refused'])}; use engine=transformers")
        ids = found["ids"]
        ends = [place for place, token in enumerate(ids) if token in self._ends]
        ids = ids[: ends[0]] if ends else ids
        with self._encoding:
            text = self._chat.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return found["number"], Answer(text, bool(ends), ids)

    def _died(self) -> RuntimeError:
        self._answers.put(None)  # for a later call
        return RuntimeError(f"vLLM's process ended: {self._reason()}")

    def _reason(self) -> str:
        """Return the last error that vLLM printed."""
        self._process.wait(_END_SECONDS)
        lines = [line.removeprefix("[rank0]: ").strip() for line in self._tail]
        named = [line for line in lines if "Error" in line.split(":")[0] and not line.startswith("File ")]
        return in_ascii((named or lines or ["it printed nothing"])[-1][:400])


def _gpu(device: int | None) -> dict[str, str]:
    """Return the environment that shows vLLM the worker's GPU alone: it has no argument for it."""
    if device is None:
        return {}
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if visible != [""] and device >= len(visible):
        raise InputError(
            f"worker {device} of this host has no GPU: CUDA_VISIBLE_DEVICES={','.join(visible)}; lower "
            "execution.cluster.processes"
        )
    return {"CUDA_VISIBLE_DEVICES": str(device) if visible == [""] else visible[device]}


def _pass_on(source: IO[bytes], tail: collections.deque[str]) -> None:
    for line in source:
        tail.append(line.decode(errors="replace").rstrip())
        sys.stderr.write(in_ascii(tail[-1]) + "\n")


def _read(source: IO[bytes], answers: queue.Queue[dict[str, Any] | None]) -> None:
    for line in source:
        answers.put(json.loads(line))
    answers.put(None)


def _end(process: subprocess.Popen) -> None:
    """Let vLLM's process end, so that its GPU is free again."""
    process.stdin.close()
    try:
        process.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
        process.wait()
