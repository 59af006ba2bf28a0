"""Greedy answers of a Hugging Face model directory, from the prompts and the pixels that training used."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import transformers

from dataset_builders.contracts.errors import InputError
from dataset_builders.contracts.sample import Message
from dataset_builders.pixels import encode_image, pixel_values
from stages.encode_chat import ChatEncoder, read_system_prompt
from stages.encode_image import load_image_config
from stages.hf_directory import check_hf_dir
from stages.transformers_progress import no_progress_bar


@dataclass(frozen=True, eq=False, slots=True)
class EncodedImages:
    """Images of one conversation, ready for any prompt that shows the first few of them.

    Attributes:
        grids: (g, 3) int32, patches before merging.
        patches: for each image (t*h*w, 3 * patch_size^2) uint8 in HF order.
    """

    grids: np.ndarray
    patches: tuple[np.ndarray, ...]


@dataclass(frozen=True, eq=False, slots=True)
class Prompt:
    """What one answer is generated from.

    Attributes:
        input_ids: (n,) int32, ends where the answer begins.
        images: those of the prompt, in order of appearance.
    """

    input_ids: np.ndarray
    images: EncodedImages


@dataclass(frozen=True, slots=True)
class Answer:
    """What was generated.

    Attributes:
        text: without special tokens.
        stopped: an end-of-turn token came before max_new_tokens were used up.
        num_tokens: generated tokens without the end-of-turn token.
    """

    text: str
    stopped: bool
    num_tokens: int


class Generator:
    """A model directory, loaded: messages and images in, answers out.

    float32 on CPU; bfloat16 on a GPU, where there is one.

    Args:
        hf_dir: config.json, weights, tokenizer, chat template, preprocessor_config.json and generation_config.json.

    Raises:
        InputError: the directory is no complete model of a supported architecture.
    """

    def __init__(self, hf_dir: Path) -> None:
        check_hf_dir(hf_dir)
        self._chat = ChatEncoder(hf_dir, system_prompt=read_system_prompt(hf_dir))
        self._image_config = load_image_config(hf_dir)
        self._model = _load(hf_dir)
        self._end_ids = _end_ids(hf_dir, self._model)

    def encode_images(self, images: Sequence[bytes]) -> EncodedImages:
        """Encoded image files -> patches.

        Raises:
            SkipSample: one of them is no usable image.
        """
        encoded = [encode_image(image, self._image_config) for image in images]
        grids = np.array([grid for _, grid in encoded], np.int32).reshape(-1, 3)
        return EncodedImages(grids, tuple(patches for patches, _ in encoded))

    def encode_prompt(self, messages: Sequence[Message], images: EncodedImages) -> Prompt:
        """The prompt of the answer that follows `messages`, whose last one is a user's.

        Args:
            images: one for each image slot of the messages.

        Raises:
            SkipSample: the text holds special tokens, or the images are too many or too few.
        """
        return Prompt(self._chat.encode_prompt(messages, images.grids), images)

    def generate(self, prompts: Sequence[Prompt], max_new_tokens: int) -> list[Answer]:
        """The greedy answers of one batch. Sampling settings in generation_config.json are not used."""
        inputs = self._collate(prompts)
        config = transformers.GenerationConfig(
            do_sample=False, max_new_tokens=max_new_tokens, eos_token_id=self._end_ids, pad_token_id=self._end_ids[0]
        )
        self._model.generation_config = config  # generate() would fill what `config` leaves open from the directory's
        with torch.inference_mode():
            ids = self._model.generate(**inputs, generation_config=config)
        return [self._answer(row) for row in ids[:, inputs["input_ids"].shape[1] :].tolist()]

    def _collate(self, prompts: Sequence[Prompt]) -> dict[str, torch.Tensor]:
        """Padded on the left, so that every row's first new token is in the same column."""
        longest = max(len(prompt.input_ids) for prompt in prompts)
        ids = np.full((len(prompts), longest), self._end_ids[0], np.int64)
        attended = np.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, longest - len(prompt.input_ids) :] = prompt.input_ids
            attended[row, longest - len(prompt.input_ids) :] = 1
        arrays = {"input_ids": ids, "attention_mask": attended}
        patches = [patches for prompt in prompts for patches in prompt.images.patches]
        if patches:
            arrays["pixel_values"] = pixel_values(np.concatenate(patches), self._image_config.patch_format)
            arrays["image_grid_thw"] = np.concatenate([prompt.images.grids for prompt in prompts]).astype(np.int64)
            # Without the token types transformers cannot place the image tokens in mrope.
            arrays["mm_token_type_ids"] = (ids == self._chat.image_token_id).astype(np.int32)
        return {name: torch.from_numpy(array).to(self._model.device) for name, array in arrays.items()}

    def _answer(self, ids: list[int]) -> Answer:
        ends = [i for i, token in enumerate(ids) if token in self._end_ids]
        answer = ids[: ends[0]] if ends else ids
        text = self._chat.tokenizer.decode(answer, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return Answer(text, bool(ends), len(answer))


def _load(hf_dir: Path) -> "transformers.PreTrainedModel":
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    with no_progress_bar():
        try:
            model = transformers.AutoModelForImageTextToText.from_pretrained(
                hf_dir, dtype=dtype, local_files_only=True, trust_remote_code=False
            )
        except (OSError, ValueError, RuntimeError, KeyError) as error:  # each is some way for files not to fit together
            first_line = (str(error) or type(error).__name__).splitlines()[0]
            raise InputError(f"{hf_dir}: the model cannot be loaded ({first_line}); export or copy it again") from error
    return model.to(device).eval()


def _end_ids(hf_dir: Path, model: "transformers.PreTrainedModel") -> list[int]:
    found = model.generation_config.eos_token_id
    ids = [found] if isinstance(found, int) else list(found or [])
    if not ids:
        raise InputError(
            f"{hf_dir / 'generation_config.json'} gives no eos_token_id, so no answer would ever end; "
            "copy the model's own file, or add the id of its end-of-turn token"
        )
    return ids
