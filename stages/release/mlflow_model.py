"""The model in this directory for `mlflow.pyfunc`: questions with pictures in, answers out.

MLflow runs this file (models from code). It needs mlflow, transformers, torch and pillow, and nothing of the program
that made the model. Prompts and pixels equal those of the training, bit for bit. The model runs in bfloat16 on a GPU
and in float32 without one.
"""

import base64
import io
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import torch
import transformers
from PIL import Image, ImageOps

SLOT = "<image>"
MAX_NEW_TOKENS = 64
_MAX_PIXELS = 89_478_485  # of one picture, before it is resized; Pillow warns above this number
_GREY_16 = ("I", "I;16", "I;16B", "I;16L", "I;16N")
# No EPS, which Pillow hands to Ghostscript, a program that runs code from the file.
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000", "AVIF")
_MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr", *_GREY_16)
_NOT_TEXT = re.compile(r"[\x00-\x08\x0b-\x1f\ud800-\udfff]")


class PictureModel(mlflow.pyfunc.PythonModel):
    """Greedy answers to questions with pictures.

    A row of the input has `question`, and optionally `images`, a list of image files in base64 (or data: addresses),
    and `system`, the system prompt. `<image>` in a question marks the place of a picture; without such marks the
    pictures come first.

    A row that no training sample could be is refused with a ValueError of one line: special tokens of the chat, control
    characters, no text, another number of pictures, a file that is no picture of a usual format.
    """

    def load_context(self, context: Any) -> None:
        """Load the model, its tokenizer and its settings of pixels from the directory."""
        path = Path(context.artifacts["hf_dir"])
        config = transformers.AutoConfig.from_pretrained(path, local_files_only=True)
        has_vision = hasattr(config, "vision_config")
        auto = transformers.AutoModelForImageTextToText if has_vision else transformers.AutoModelForCausalLM
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        model = auto.from_pretrained(path, dtype=dtype, attn_implementation="sdpa", local_files_only=True)
        self.model = model.to(self.device).eval()
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(path, local_files_only=True)
        tokens = sorted(self.tokenizer.get_added_vocab(), key=len, reverse=True)
        self.special = re.compile("|".join(map(re.escape, tokens)) or "$^")
        self.image_token_id = config.image_token_id if has_vision else None
        self.pixels = json.loads((path / "preprocessor_config.json").read_text("utf-8")) if has_vision else {}
        system = path / "system_prompt.txt"
        self.system = system.read_text("utf-8") if system.is_file() else ""

    def predict(self, context, model_input, params=None):  # MLflow warns of hints that are not its own
        """Return the answer of each row of a table, stripped: list[str]."""
        limit = int((params or {}).get("max_new_tokens", MAX_NEW_TOKENS))
        return [self._answer(row, limit) for row in model_input.to_dict("records")]

    def _answer(self, row: dict[str, Any], max_new_tokens: int) -> str:
        given, system = row.get("images"), row.get("system")
        if isinstance(given, str):
            raise ValueError("images is a text; give a list of pictures in base64")
        images = [_decode(text) for text in given] if isinstance(given, Sequence) or hasattr(given, "tolist") else []
        messages = self.messages(row.get("question"), len(images), system if isinstance(system, str) else "")
        ids, _ = self.generate(self.inputs(messages, images), max_new_tokens)
        return self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False).strip()

    def messages(self, question: str, num_images: int, system: str = "") -> list[dict[str, Any]]:
        """Return the messages of the chat template.

        Raises:
            ValueError: a text is none that the training data may hold, the question marks another number of pictures,
                or there is a picture for a text model.
        """
        self._check_text("question", question)
        if system:
            self._check_text("system", system)
        if num_images and self.image_token_id is None:
            raise ValueError(f"images has {num_images} pictures, and the model reads text alone; leave images out")
        text = question if SLOT in question else SLOT * num_images + question
        parts = text.split(SLOT)
        if len(parts) != num_images + 1:
            raise ValueError(f"the question marks {len(parts) - 1} pictures with {SLOT}, and images has {num_images}")
        content = [{"type": "text", "text": parts[0]}] if parts[0] else []
        for part in parts[1:]:
            content += [{"type": "image"}, *([{"type": "text", "text": part}] if part else [])]
        system = system or self.system
        begin = [{"role": "system", "content": system}] if system else []
        return [*begin, {"role": "user", "content": content if num_images else question}]

    def _check_text(self, field: str, text: Any) -> None:
        if not isinstance(text, str) or not text.strip():
            raise ValueError(f"{field} is {text!r}; give a text")
        found = self.special.search(text) or _NOT_TEXT.search(text)
        if field == "system" and SLOT in text:
            raise ValueError(f"system holds {SLOT}; pictures are in the question alone")
        if found:
            raise ValueError(f"{field} holds {found.group()!r}, which no text of a person may hold; leave it out")

    def inputs(self, messages: Sequence[dict[str, Any]], images: Sequence[Image.Image]) -> dict[str, torch.Tensor]:
        """Return the inputs of the model for one prompt; ids are (1, S) int64."""
        text = self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False, enable_thinking=False
        )
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        tensors: dict[str, torch.Tensor] = {}
        if images:
            encoded = [patches_of(image, self.pixels) for image in images]
            grids = torch.tensor([grid for _, grid in encoded])
            counts = iter((grids.prod(-1) // self.pixels["merge_size"] ** 2).tolist())
            ids = [i for token in ids for i in [token] * (next(counts) if token == self.image_token_id else 1)]
            tensors = {"pixel_values": torch.cat([patches for patches, _ in encoded]), "image_grid_thw": grids}
        tensors["input_ids"] = torch.tensor([ids])
        tensors["attention_mask"] = torch.ones_like(tensors["input_ids"])
        if self.image_token_id is not None:
            tensors["mm_token_type_ids"] = (tensors["input_ids"] == self.image_token_id).int()
        return {name: tensor.to(self.device) for name, tensor in tensors.items()}

    @torch.inference_mode()
    def generate(self, inputs: dict[str, torch.Tensor], max_new_tokens: int) -> tuple[list[int], tuple[Any, ...]]:
        """Return the ids of the greedy answer with its end-of-turn token, and the logits of each, (1, vocabulary)."""
        ends = self.model.generation_config.eos_token_id
        plain = transformers.GenerationConfig(
            do_sample=False,
            max_new_tokens=max_new_tokens,
            eos_token_id=ends,
            pad_token_id=ends if isinstance(ends, int) else ends[0],
            output_logits=True,
            return_dict_in_generate=True,
        )
        out = self.model.generate(**inputs, generation_config=plain)
        return out.sequences[0, inputs["input_ids"].shape[1] :].tolist(), out.logits


def patches_of(image: Image.Image, settings: dict[str, Any]) -> tuple[torch.Tensor, list[int]]:
    """Return the pixel values of an RGB picture, (h * w, 3 * frames * size^2) float32, and its grid [1, h, w].

    torch resizes bytes here as torchvision does for transformers' processor. Pillow would round differently.
    """
    size, merge, frames = (settings[name] for name in ("patch_size", "merge_size", "temporal_patch_size"))
    height, width = _resized(image.height, image.width, size * merge, settings)
    planes = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    planes = planes.view(image.height, image.width, 3).permute(2, 0, 1)[None]
    if planes.shape[-2:] != (height, width):
        planes = torch.nn.functional.interpolate(planes, (height, width), mode="bicubic", antialias=True)
    mean, std = (255 * torch.tensor(settings[name]).view(3, 1, 1) for name in ("image_mean", "image_std"))
    values = (planes[0].float() - mean) / std
    rows, columns = height // size, width // size
    values = values.view(3, rows // merge, merge, size, columns // merge, merge, size)
    values = values.permute(1, 4, 2, 5, 0, 3, 6).reshape(rows * columns, 3, 1, size * size)
    return values.expand(-1, -1, frames, -1).reshape(rows * columns, -1), [1, rows, columns]


def _resized(height: int, width: int, factor: int, settings: dict[str, Any]) -> tuple[int, int]:
    size = settings.get("size") or {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}  # as in transformers
    low = settings.get("min_pixels") or size["shortest_edge"]
    high = settings.get("max_pixels") or size["longest_edge"]
    if max(height, width) > 200 * min(height, width):
        raise ValueError(f"a picture of {width} x {height} pixels: the longer side is over 200 times the shorter")
    new_height, new_width = (round(side / factor) * factor for side in (height, width))
    if new_height * new_width > high:
        shrink = math.sqrt(height * width / high)
        return tuple(max(factor, math.floor(side / shrink / factor) * factor) for side in (height, width))
    if new_height * new_width < low:
        grow = math.sqrt(low / (height * width))
        return tuple(math.ceil(side * grow / factor) * factor for side in (height, width))
    return new_height, new_width


def _opened(data: bytes) -> Image.Image:
    """Return the picture of a file, decoded and upright. Hostile bytes make Pillow raise nearly anything."""
    try:
        image = Image.open(io.BytesIO(data), formats=_FORMATS)
        if image.width * image.height <= _MAX_PIXELS:
            image = ImageOps.exif_transpose(image)
            image.load()
    except MemoryError:
        raise
    except Exception as error:
        text = " ".join(str(error).split())[:200] or type(error).__name__
        text = "no format that is read here" if text.startswith("cannot identify") else text
        raise ValueError(f"a picture of {len(data)} bytes cannot be read: {text}; give a whole PNG or JPEG") from None
    if image.width * image.height > _MAX_PIXELS:
        raise ValueError(f"a picture of {image.width} x {image.height} pixels; at most {_MAX_PIXELS:,} are read")
    if image.mode not in _MODES:
        raise ValueError(f"a picture of mode {image.mode}; convert it to RGB")
    return image


def _decode(text: str) -> Image.Image:
    """Return a picture in base64 as RGB, upright, with transparency on white."""
    try:
        data = base64.b64decode(re.sub(r"^data:[^,]*,", "", text), validate=True)
    except (TypeError, ValueError) as error:
        raise ValueError(f"a picture is not base64 ({error}); give the file's bytes in base64") from error
    image = _opened(data)
    if image.mode in _GREY_16:
        wide = np.asarray(image).astype(np.uint32)
        return Image.fromarray(((wide + 128) // 257).astype(np.uint8)).convert("RGB")
    if not image.has_transparency_data:
        return image.convert("RGB")
    image = image.convert("RGBA")
    white = Image.new("RGBA", image.size, "white")
    white.alpha_composite(image)
    return white.convert("RGB")


mlflow.models.set_model(PictureModel())
