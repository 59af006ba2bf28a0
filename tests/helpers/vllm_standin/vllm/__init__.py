"""A stand-in for vLLM 0.24.0: its names, arguments and refusals, with transformers to answer.

`tests/helpers/standin.py` makes a Python that finds it. What is refused here, the real one refuses, and the shapes of
what goes in and comes out are its own: tests/parity/test_vllm.py runs the same questions with the real one.
"""

import itertools
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from vllm._version import __version__ as __version__

# The fields of EngineArgs that we give (engine/arg_utils.py); any other name is a TypeError, as there.
_OPTIONS = {
    *("model", "max_num_seqs", "max_model_len", "dtype", "enforce_eager", "trust_remote_code", "generation_config"),
    *(
        "disable_log_stats",
        "gdn_prefill_backend",
        "mm_processor_kwargs",
        "limit_mm_per_prompt",
        "mm_processor_cache_gb",
    ),
    *("hf_overrides", "enable_lora", "max_loras", "max_lora_rank", "enable_tower_connector_lora"),
}
_RANKS = {1, 8, 16, 32, 64, 128, 256, 320, 512}  # config/lora.py
_MAX_LOGPROBS, _MAX_NAMED = 20, 128  # config/model.py, sampling_params.py


class SamplingParams:
    """Greedy sampling alone."""

    def __init__(
        self,
        *,
        temperature: float = 1.0,
        max_tokens: int | None = 16,
        top_p: float = 1.0,
        top_k: int = 0,
        repetition_penalty: float = 1.0,
        stop_token_ids: list[int] | None = None,
        logprobs: int | None = None,
        logprob_token_ids: list[int] | None = None,
        detokenize: bool = True,
    ) -> None:
        if max_tokens is not None and max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {max_tokens}.")
        if (logprobs or 0) > _MAX_LOGPROBS or len(logprob_token_ids or ()) > _MAX_NAMED:
            raise ValueError("Requested logprobs, which is greater than max allowed")
        assert temperature == 0.0 and repetition_penalty == 1.0, "the stand-in answers greedily"
        self.max_tokens, self.stop_token_ids = max_tokens, stop_token_ids or []
        self.logprobs, self.logprob_token_ids = logprobs, logprob_token_ids


class LLM:
    """The engine: a model that transformers loads."""

    def __init__(self, model: str, **options: Any) -> None:
        if unknown := options.keys() - _OPTIONS:
            raise TypeError(f"EngineArgs.__init__() got an unexpected keyword argument {sorted(unknown)[0]!r}")
        if options.get("enable_lora") and options["max_lora_rank"] not in _RANKS:
            raise ValueError("max_lora_rank is no choice")
        if seen := os.environ.get("STANDIN_OPTIONS"):
            shown = {"model": model, **options, "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES")}
            Path(seen).write_text(json.dumps(shown))
        self._path, self._options = model, options
        config = transformers.AutoConfig.from_pretrained(model)
        self._sees = hasattr(config, "vision_config")
        if config.model_type == "qwen3_vl_moe" and not (
            hasattr(config.text_config, "norm_topk_prob") or "norm_topk_prob" in str(options.get("hf_overrides"))
        ):
            raise AttributeError("'Qwen3VLMoeTextConfig' object has no attribute 'norm_topk_prob'")
        auto = transformers.AutoModelForImageTextToText if self._sees else transformers.AutoModelForCausalLM
        self._model = auto.from_pretrained(model, dtype=getattr(torch, options.get("dtype", "bfloat16"))).eval()
        self._tokenizer = transformers.AutoTokenizer.from_pretrained(model)
        size = (options.get("mm_processor_kwargs") or {}).get("size")
        if self._sees:
            self._images = transformers.AutoImageProcessor.from_pretrained(model, **({"size": size} if size else {}))
            self._image_id = config.image_token_id
        source = options.get("generation_config", "auto")
        ends = transformers.GenerationConfig.from_pretrained(model if source in ("auto", "vllm") else source)
        ids = ends.eos_token_id
        # input_processor.py adds the tokenizer's, and with "vllm" too those of the directory.
        self._ends = {self._tokenizer.eos_token_id, *(ids if isinstance(ids, list) else [ids])}
        self._numbers, self._waiting = itertools.count(), []
        self.llm_engine = SimpleNamespace(step=self._step)
        self.renderer = SimpleNamespace(render_chat=self._render_chat, default_chat_tok_params=None)

    def chat(self, messages, sampling_params, use_tqdm=True, lora_request=None, chat_template_kwargs=None):
        return [self._answer("0", self._rendered(messages, chat_template_kwargs), sampling_params, lora_request)]

    def enqueue(self, prompts, sampling_params, lora_request=None, use_tqdm=True):
        names = []
        for prompt, sampling in zip(prompts, sampling_params, strict=True):
            ids = prompt["prompt_token_ids"]
            assert isinstance(ids, list) and all(type(token) is int for token in ids), "a list of integers"
            images = prompt.get("multi_modal_data", {}).get("image", [])
            if len(ids) > self._options["max_model_len"]:
                raise ValueError(f"The decoder prompt (length {len(ids)}) is longer than the maximum model length")
            resize = (self._options.get("mm_processor_kwargs") or {}).get("do_resize", True)
            name = str(next(self._numbers))
            self._waiting.append((name, self._expanded(ids, images, resize), sampling, lora_request))
            names.append(f"{name}-0a1b2c3d")  # v1/engine/input_processor.py: outputs have the part before the dash
        return names

    def _step(self):
        done, self._waiting = self._waiting[:2], self._waiting[2:]
        return [self._answer(*request) for request in reversed(done)]

    def _render_chat(self, conversations, chat_params, tok_params):
        made = [self._rendered(messages, chat_params.chat_template_kwargs) for messages in conversations]
        items = [
            {"mm_kwargs": {"image": [{"pixel_values": SimpleNamespace(data=each["pixel_values"])}]}} for each in made
        ]
        return conversations, items

    def _rendered(self, messages, kwargs):
        images, turns = [], []
        for message in messages:
            content = message["content"]
            if not isinstance(content, str):
                images += [part["image_pil"] for part in content if part["type"] == "image_pil"]
                content = [{"type": "image"} if part["type"] == "image_pil" else part for part in content]
            turns.append({"role": message["role"], "content": content})
        asked = {"add_generation_prompt": True} | (kwargs or {})
        text = self._tokenizer.apply_chat_template(turns, tokenize=False, **asked)
        return self._expanded(self._tokenizer(text, add_special_tokens=False)["input_ids"], images, True)

    def _expanded(self, ids, images, resize):
        inputs = {}
        if images:
            assert self._options["mm_processor_cache_gb"] == 0, "transformers refuses text with an image and no image"
            images = [self._resized(image) for image in images] if resize else images
            inputs = dict(self._images(images=images, do_resize=False, return_tensors="pt"))
            counts = (inputs["image_grid_thw"].prod(-1) // self._images.merge_size**2).tolist()
            assert ids.count(self._image_id) == len(counts), "Failed to apply prompt replacement for mm_items['image']"
            left = iter(counts)
            ids = [i for token in ids for i in [token] * (next(left) if token == self._image_id else 1)]
        return inputs | {"input_ids": torch.tensor([ids])}

    def _resized(self, image):
        """Resize as torchvision does, which every vLLM has: transformers would take Pillow where there is none."""
        size, factor = self._images.size, self._images.patch_size * self._images.merge_size
        new = smart_resize(image.height, image.width, factor, size["shortest_edge"], size["longest_edge"])
        planes = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None]
        if planes.shape[-2:] != new:
            planes = torch.nn.functional.interpolate(planes, size=new, mode="bicubic", antialias=True)
        return Image.fromarray(planes[0].permute(1, 2, 0).numpy())

    @torch.inference_mode()
    def _answer(self, name, inputs, sampling, lora):
        model = self._model
        if lora is not None:
            assert self._options.get("enable_lora"), "LoRA is not enabled"
            import peft

            model = peft.PeftModel.from_pretrained(model, lora.lora_path).eval()
        ids = inputs["input_ids"]
        inputs |= {"attention_mask": torch.ones_like(ids)}
        if self._sees:
            inputs["mm_token_type_ids"] = (ids == self._image_id).int()
        ends = sorted(self._ends | set(sampling.stop_token_ids))
        limit = min(sampling.max_tokens, self._options["max_model_len"] - ids.shape[1])
        out = model.generate(
            **inputs,
            max_new_tokens=limit,
            do_sample=False,
            eos_token_id=ends,
            output_logits=True,
            return_dict_in_generate=True,
        )
        tokens, logprobs = out.sequences[0, ids.shape[1] :].tolist(), []
        for token, logits in zip(tokens, out.logits):
            values = logits[0].float().log_softmax(-1)
            named = sampling.logprob_token_ids or values.topk(sampling.logprobs or 1).indices.tolist()
            logprobs.append({i: SimpleNamespace(logprob=float(values[i])) for i in {*named, token}})
        if lora is not None:
            model.unload()
        return SimpleNamespace(
            request_id=name,
            finished=True,
            prompt_token_ids=ids[0].tolist(),
            outputs=[SimpleNamespace(token_ids=tokens, logprobs=logprobs)],
        )
