"""The program that loads an export as somebody else would, in a process of its own, and answers the drawn questions.

    python -P loaders.py job.json            every loader of the job
    python loaders.py job.json NAME          that one, in the Python that has vLLM

In: job.json with the directories and the loaders; `questions.json`, see `stage.py`. Out: one file per loader with,
for each question, the first token that differs from our answer, its margin and the pixels' deviation.

It is run by its path and imports nothing from athanor.
"""

import base64
import gc
import importlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image

TOP = 20  # tokens whose log probabilities vLLM returns, at most: its `max_logprobs`
NAMED = 128  # tokens whose log probabilities can be asked for: its MAX_LOGPROB_TOKEN_IDS (sampling_params.py)


class Transformers:
    """A directory loaded by transformers' auto classes; with `adapter`, PEFT's adapter on its base."""

    def __init__(self, job: dict[str, Any], adapter: str = "") -> None:
        path = Path(job["hf_dir"])
        config = transformers.AutoConfig.from_pretrained(path)
        has_vision = hasattr(config, "vision_config")
        auto = transformers.AutoModelForImageTextToText if has_vision else transformers.AutoModelForCausalLM
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        model = auto.from_pretrained(job["base_dir"] if adapter else path, dtype=dtype)
        if adapter:
            model = importlib.import_module("peft").PeftModel.from_pretrained(model, adapter)
        self.model = model.to(self.device).eval()
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(path)
        self.processor = transformers.AutoImageProcessor.from_pretrained(path) if has_vision else None
        self.image_token_id = getattr(config, "image_token_id", None)
        self.folder = Path(job["questions"])
        # The base model's may end elsewhere than the turns that the adapter was trained on.
        config = transformers.GenerationConfig.from_pretrained(adapter) if adapter else model.generation_config
        ends = config.eos_token_id
        self.ends = [ends] if isinstance(ends, int) else list(ends)

    def answer(self, question: dict[str, Any], limit: int, patch_format: dict[str, Any]) -> dict[str, Any]:
        """Return how the answer to one question differs from ours."""
        inputs = self._inputs(question)
        row: dict[str, Any] = {"prompt": _first_difference(inputs["input_ids"][0].tolist(), question["prompt_ids"])}
        if row["prompt"] is not None:
            return row
        row |= self._compare(inputs, question, limit)
        if question["images"]:
            ours = torch.from_numpy(_normalised(np.load(self.folder / question["patches"]), patch_format))
            std = 255 * float(np.mean(patch_format["image_std"]))
            theirs = inputs["pixel_values"].cpu().float()
            row["pixels"] = float((theirs - ours).abs().mean()) * std if theirs.shape == ours.shape else 255.0
            if row["pixels"] and row["position"] is not None and theirs.shape == ours.shape:
                row["with_our_pixels"] = self._compare(inputs | {"pixel_values": ours}, question, limit)
        return row

    def _inputs(self, question: dict[str, Any]) -> dict[str, torch.Tensor]:
        text = self.tokenizer.apply_chat_template(
            _messages(question), add_generation_prompt=True, tokenize=False, enable_thinking=False
        )
        ids, tensors = self.tokenizer(text, add_special_tokens=False)["input_ids"], {}
        if question["images"]:
            images = [Image.open(self.folder / name) for name in question["images"]]
            tensors = dict(self.processor(images=images, return_tensors="pt"))
            counts = iter((tensors["image_grid_thw"].prod(-1) // self.processor.merge_size**2).tolist())
            ids = [i for token in ids for i in [token] * (next(counts, 1) if token == self.image_token_id else 1)]
        tensors["input_ids"] = torch.tensor([ids])
        tensors["attention_mask"] = torch.ones_like(tensors["input_ids"])
        if self.image_token_id is not None:
            tensors["mm_token_type_ids"] = (tensors["input_ids"] == self.image_token_id).int()
        return tensors

    @torch.inference_mode()
    def _compare(self, inputs: dict[str, torch.Tensor], question: dict[str, Any], limit: int) -> dict[str, Any]:
        out = self.model.generate(
            **{name: tensor.to(self.device) for name, tensor in inputs.items()},
            **{"max_new_tokens": limit, "do_sample": False, "output_logits": True, "return_dict_in_generate": True},
            eos_token_id=self.ends,
        )
        ids = out.sequences[0, inputs["input_ids"].shape[1] :].tolist()
        return self.compare(ids, [step[0].float() for step in out.logits], question["ids"])

    def compare(self, ids: list[int], logits: list[torch.Tensor], expected: list[int]) -> dict[str, Any]:
        """Return the position of the first other token, both tokens, and the margin in logits with their spread."""
        tokens = [-1 if token in self.ends else token for token in ids]
        place = _first_difference(tokens, expected)
        row: dict[str, Any] = {"position": place, "spread": float(logits[0].std())}
        if place is None or place >= min(len(tokens), len(expected)):
            return row
        row |= {"theirs": tokens[place], "ours": expected[place], "spread": float(logits[place].std())}
        values = [
            logits[place][self.ends if token == -1 else [token]].max() for token in (tokens[place], expected[place])
        ]
        return row | {"margin": float(values[0] - values[1])}


class Adapter(Transformers):
    """The base model with the adapter, loaded by PEFT."""

    def __init__(self, job: dict[str, Any]) -> None:
        super().__init__(job, job["adapter_dir"])


class Pyfunc:
    """The directory as an MLflow model: its answers are texts."""

    def __init__(self, job: dict[str, Any]) -> None:
        mlflow, self._frame = importlib.import_module("mlflow"), importlib.import_module("pandas").DataFrame
        self._model = mlflow.pyfunc.load_model(str(Path(job["hf_dir"]).parent))
        self.folder = Path(job["questions"])

    def answer(self, question: dict[str, Any], limit: int, patch_format: dict[str, Any]) -> dict[str, Any]:
        """Return whether the text of the answer is ours; if not, the first token that differs."""
        images = [base64.b64encode((self.folder / name).read_bytes()).decode() for name in question["images"]]
        given = {"question": question["question"], "images": images, "system": question["system"]}
        (text,) = self._model.predict(self._frame([given]), params={"max_new_tokens": limit})
        if text == question["text"].strip():
            return {"prompt": None, "position": None}
        model = self._model.unwrap_python_model()
        pictures = [Image.open(self.folder / name) for name in question["images"]]
        inputs = model.inputs(model.messages(question["question"], len(images), question["system"]), pictures)
        ids, logits = model.generate(inputs, limit)
        ends = model.model.generation_config.eos_token_id
        comparer = object.__new__(Transformers)  # for its `compare` alone: nothing is loaded again
        comparer.ends = [ends] if isinstance(ends, int) else list(ends)
        prompt = _first_difference(inputs["input_ids"][0].tolist(), question["prompt_ids"])
        row = comparer.compare(ids, [step[0].float() for step in logits], question["ids"])
        return {"prompt": prompt, **row, "text": text}


class Vllm:
    """vLLM on the directory, asked by its chat interface, which forms the prompt and the pixels itself."""

    def __init__(self, job: dict[str, Any], adapter: bool = False) -> None:
        self._vllm = importlib.import_module("vllm")
        self.dtype = "bfloat16" if torch.cuda.is_available() or job["is_hybrid"] else "float32"
        options = {
            "model": job["base_dir"] if adapter else job["hf_dir"],
            "max_model_len": job["longest"],
            "max_num_seqs": 1,  # one question at a time, as every other loader
            "dtype": self.dtype,
            "enforce_eager": True,  # compiling takes longer than a few questions
            "trust_remote_code": False,
            # What decides how an answer ends; sampling is set below.
            "generation_config": job["adapter_dir"] if adapter else "auto",
        }
        if job["size"]:
            options["limit_mm_per_prompt"] = {"video": 0}
            options["mm_processor_cache_gb"] = 0  # see stages/answer/vllm_process.py
        if job["is_hybrid"]:
            options["gdn_prefill_backend"] = "triton"
        self._lora = None
        if adapter:
            self._lora = importlib.import_module("vllm.lora.request").LoRARequest("adapter", 1, job["adapter_dir"])
            options |= job["lora"] | {"hf_overrides": job["overrides"]}
            if job["size"]:  # the base has limits of its own
                options["mm_processor_kwargs"] = {"size": job["size"]}
        self._llm = self._vllm.LLM(**options)
        self.folder = Path(job["questions"])
        self._ends = set(job["ends"])

    def answer(self, question: dict[str, Any], limit: int, patch_format: dict[str, Any]) -> dict[str, Any]:
        """Return how the answer to one question differs from ours; the margin is of log probabilities."""
        asked = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0}
        asked["max_tokens"] = limit + (
            question["ids"][-1:] == [-1]
        )  # one more than ours, if it does not end where ours does
        wanted = sorted({token for token in question["ids"] if token != -1} | self._ends)
        # With the names of all tokens that we gave, the margin of each place is known.
        asked |= {"logprob_token_ids": wanted} if len(wanted) <= NAMED else {"logprobs": TOP}
        messages = _messages(question, [Image.open(self.folder / name) for name in question["images"]])
        (out,) = self._llm.chat(
            messages,
            self._vllm.SamplingParams(**asked),
            use_tqdm=False,
            lora_request=self._lora,
            chat_template_kwargs={"enable_thinking": False},
        )
        row: dict[str, Any] = {"prompt": _first_difference(list(out.prompt_token_ids), question["prompt_ids"])}
        if row["prompt"] is not None:
            return row
        if question["images"]:
            row["pixels"] = self._deviation(question, messages, patch_format)
        (best,) = out.outputs
        tokens = [-1 if token in self._ends else token for token in best.token_ids]
        place = row["position"] = _first_difference(tokens, question["ids"])
        if place is None or place >= min(len(tokens), len(question["ids"])):
            return row
        row |= {"theirs": tokens[place], "ours": question["ids"][place]}
        known = {token: entry.logprob for token, entry in best.logprobs[place].items()}
        ours = [known[token] for token in (self._ends if row["ours"] == -1 else [row["ours"]]) if token in known]
        return row | ({"margin": known[best.token_ids[place]] - max(ours)} if ours else {})

    def _deviation(
        self, question: dict[str, Any], messages: list[dict[str, Any]], patch_format: dict[str, Any]
    ) -> float:
        """Return the mean difference, of 255, of the pixels that vLLM's processor makes and ours."""
        renderers, renderer = importlib.import_module("vllm.renderers"), self._llm.renderer
        params = renderers.ChatParams(chat_template_kwargs={"enable_thinking": False, "add_generation_prompt": True})
        _, (made,) = renderer.render_chat([messages], params, renderer.default_chat_tok_params)
        theirs = torch.cat([item["pixel_values"].data for item in made["mm_kwargs"]["image"]]).float()
        ours = torch.from_numpy(_normalised(np.load(self.folder / question["patches"]), patch_format))
        if theirs.shape != ours.shape:
            return 255.0
        return float((theirs - ours).abs().mean()) * 255 * float(np.mean(patch_format["image_std"]))


class VllmAdapter(Vllm):
    """vLLM on the base model, with the adapter by its LoRA interface."""

    def __init__(self, job: dict[str, Any]) -> None:
        super().__init__(job, adapter=True)


LOADERS: dict[str, Any] = {
    "transformers": Transformers,
    "peft": Adapter,
    "mlflow": Pyfunc,
    "vllm": Vllm,
    "vllm adapter": VllmAdapter,
}


def _messages(question: dict[str, Any], pictures: list[Image.Image] | None = None) -> list[dict[str, Any]]:
    """Return the question for a chat template, or with its pictures for a program that takes them in the messages."""
    images = iter([{"type": "image_pil", "image_pil": p} for p in pictures] if pictures else [])
    parts = question["question"].split("<image>")
    content = [{"type": "text", "text": parts[0]}] if parts[0] else []
    for part in parts[1:]:
        content += [next(images, {"type": "image"}), *([{"type": "text", "text": part}] if part else [])]
    begin = [{"role": "system", "content": question["system"]}] if question["system"] else []
    return [*begin, {"role": "user", "content": content if question["images"] else question["question"]}]


def _first_difference(ours: list[int], theirs: list[int]) -> int | None:
    if ours == theirs:
        return None
    return next((i for i, (a, b) in enumerate(zip(ours, theirs)) if a != b), min(len(ours), len(theirs)))


def _normalised(patches: np.ndarray, patch_format: dict[str, Any]) -> np.ndarray:
    """Return pixel values, (P, 3 * frames * size^2) float32, of patches (P, 3 * size^2) uint8."""
    mean, std = (255 * np.array(patch_format[n], np.float32).reshape(1, 3, 1, 1) for n in ("image_mean", "image_std"))
    values = (patches.reshape(len(patches), 3, 1, -1).astype(np.float32) - mean) / std
    return values.repeat(patch_format["temporal_patch_size"], 2).reshape(len(patches), -1)


def main() -> None:
    """Ask every loader of the job, one after the other."""
    if os.environ.get("RANK", "0") != "0":
        return
    os.umask(0o077)
    job = json.loads(Path(sys.argv[1]).read_text("utf-8"))
    asked = json.loads((Path(job["questions"]) / "questions.json").read_text("utf-8"))
    for name in sys.argv[2:] or job["loaders"]:
        file = Path(job["results"], f"{name}.json")
        if name.startswith("vllm") and not sys.argv[2:]:
            _ask_elsewhere(name, job, file)  # its own process: it keeps the memory of its GPU
        else:
            file.write_text(json.dumps(_ask(name, job, asked)), "utf-8")
        result = json.loads(file.read_text("utf-8"))
        if not sys.argv[2:]:
            print(f"{name}: {result['error'] or 'done'}, {result['seconds']} s", flush=True)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # the next program needs the memory


def _ask_elsewhere(name: str, job: dict[str, Any], file: Path) -> None:
    """Ask a loader of vLLM in the Python that has it."""
    file.unlink(missing_ok=True)
    command = [job["vllm_python"], __file__, sys.argv[1], name]
    ended = subprocess.run(command, env={**os.environ, **job["vllm_environment"]}).returncode
    if not file.is_file():
        error = f"its process ended with status {ended}, see the log"
        file.write_text(json.dumps({"error": error, "rows": [], "dtype": "float32", "seconds": 0.0}), "utf-8")


def _ask(name: str, job: dict[str, Any], asked: dict[str, Any]) -> dict[str, Any]:
    start, rows, error = time.perf_counter(), [], ""
    dtype = "bfloat16" if torch.cuda.is_available() else "float32"
    try:
        loader = LOADERS[name](job)
        dtype = getattr(loader, "dtype", dtype)
        for question in asked["questions"]:
            # As many tokens as ours, the end among them: an answer that our limit cut says nothing about what follows.
            rows.append(loader.answer(question, len(question["ids"]), asked["patch_format"]))
    except Exception as failure:  # any library may refuse the directory, in its own way
        error = " ".join(f"{type(failure).__name__}: {failure}".split())[:400]
    return {"error": error, "rows": rows, "dtype": dtype, "seconds": round(time.perf_counter() - start, 2)}


if __name__ == "__main__":
    main()
