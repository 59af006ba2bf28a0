"""The program that answers prompts with vLLM, in the Python that has it; `vllm_engine.py` starts it and talks to it.

    python vllm_process.py SETTINGS_JSON      questions on stdin, answers on stdout, vLLM's own lines on stderr

A question is a line of JSON, {"number", "ids", "limit", "images": [[height, width], ...]}, and then the pixels of its
images, uint8 RGB. An answer is a line, {"number", "ids"} or {"number", "refused"}; the first line is {"ready": true}.
The program ends when stdin does, and all answers are given.

It is run by its path and imports nothing from athanor. The names that it uses are those of vLLM 0.24.0:
`LLM(...)` takes the fields of EngineArgs (engine/arg_utils.py), `enqueue` and `wait_for_completion` are in
entrypoints/llm.py, `LLMEngine.step` in v1/engine/llm_engine.py.
"""

import json
import os
import queue
import sys
import threading
from typing import Any, BinaryIO

import vllm
from PIL import Image
from vllm.lora.request import LoRARequest
from vllm.platforms import current_platform


def load(settings: dict[str, Any]) -> tuple[Any, Any]:
    """Return the engine and its LoRARequest, which is None without an adapter."""
    is_cpu = current_platform.is_cpu()
    options: dict[str, Any] = {
        "model": settings["model"],
        "max_num_seqs": settings["batch_size"],
        # vLLM reserves cache for one sequence of this length, by default the model's longest, or does not start.
        "max_model_len": settings["longest"],
        # As the evaluation with transformers. By default vLLM takes the file's, and bfloat16 for float32.
        "dtype": "bfloat16" if settings["is_hybrid"] or not is_cpu else "float32",
        "enforce_eager": is_cpu,  # there compiling takes longer than the answers
        "trust_remote_code": False,
        "generation_config": "vllm",  # not the directory's sampling settings; its end tokens count all the same
        "disable_log_stats": True,
        "hf_overrides": settings["overrides"],
    }
    if settings["is_hybrid"]:
        # By default FlashInfer's kernel, which Hopper compiles for minutes when it is first used.
        options["gdn_prefill_backend"] = "triton"
    if settings["size"] is not None:
        # The images come resized. `size` is what vLLM derives the longest prompt of an image from, and reserves for.
        options["mm_processor_kwargs"] = {"size": settings["size"], "do_resize": False}
        options["limit_mm_per_prompt"] = {"video": 0}  # otherwise it tries the longest video at its start
        # With the cache vLLM calls the processor on text with image tokens and no image, which transformers 5.23
        # refuses (ProcessorMixin.validate_inputs).
        options["mm_processor_cache_gb"] = 0
    llm = vllm.LLM(**options, **settings["lora"])
    return llm, None if settings["adapter"] is None else LoRARequest("adapter", 1, settings["adapter"])


def read_question(source: BinaryIO) -> dict[str, Any] | None:
    """Return the next question, its images as vLLM takes them; None at the end."""
    line = source.readline()
    if not line:
        return None
    question = json.loads(line)
    images = []
    for height, width in question["images"]:
        images.append(Image.frombytes("RGB", (width, height), source.read(3 * height * width)))
    return {**question, "images": images}


def main() -> None:
    settings = json.loads(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)  # what vLLM prints, and its own processes, must not get between the answers
    llm, lora = load(settings)
    answers.write('{"ready": true}\n')
    coming: queue.Queue[dict[str, Any] | None] = queue.Queue()

    def read() -> None:
        while (question := read_question(sys.stdin.buffer)) is not None:
            coming.put(question)
        coming.put(None)

    threading.Thread(target=read, daemon=True).start()
    numbers: dict[str, int] = {}  # vLLM's name of a request -> the question's number
    is_open = True
    while is_open or numbers:
        # As many as have come; a question is waited for only if there is nothing else to do.
        while is_open and (not numbers or not coming.empty()):
            question = coming.get()
            if question is None:
                is_open = False
                break
            prompt: dict[str, Any] = {"prompt_token_ids": question["ids"]}
            if question["images"]:
                prompt["multi_modal_data"] = {"image": question["images"]}
            sampling = vllm.SamplingParams(
                temperature=0.0,
                max_tokens=question["limit"],
                stop_token_ids=settings["ends"],
                detokenize=False,
            )
            try:
                (name,) = llm.enqueue([prompt], [sampling], lora_request=lora, use_tqdm=False)
            except ValueError as error:  # vLLM's kind of error for a prompt that it does not take
                refused = " ".join(str(error).split())[:400]
                answers.write(json.dumps({"number": question["number"], "refused": refused}) + "\n")
                continue
            numbers[name.partition("-")[0]] = question["number"]  # without the random part that outputs do not have
        for output in llm.llm_engine.step() if numbers else ():
            if output.finished:
                answer = {"number": numbers.pop(output.request_id), "ids": list(output.outputs[0].token_ids)}
                answers.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
