"""One question to an exported model, with or without an image, with the same prompt and pixels as in training."""

from pathlib import Path

from dataset_builders.contracts.sample import IMAGE_SLOT, Message, SkipSample
from dataset_builders.errors import InputError
from stages.answer.transformers_engine import Generator
from stages.artifacts.intact import check_written
from stages.chat.conversation import USABLE, UnusableImage, check_text, prompt_of


def ask(
    hf_dir: Path, picture: Path | None, question: str, max_new_tokens: int = 64, adapter_dir: Path | None = None
) -> str:
    """Return the model's greedy answer, stripped.

    Args:
        hf_dir: a Hugging Face model directory.
        picture: an image file that is shown before the question; None: no image.
        question: plain text; the model's chat template turns it into the prompt.
        max_new_tokens: the answer is cut after this number of tokens.
        adapter_dir: a PEFT directory with an adapter for the model; None: no adapter.

    Raises:
        InputError: there is no such model, adapter or image, the model or adapter of an artifact was changed, the image
            is not usable, or the question cannot be asked.
    """
    images = [] if picture is None else [_read_picture(picture)]
    if not question.strip():
        raise InputError('the question is empty; ask for example "Which digit is in the picture?"')
    for directory in filter(None, (hf_dir, adapter_dir)):
        check_written(directory.resolve())
    try:
        check_text(question)
        generator = Generator(hf_dir, adapter_dir=adapter_dir)
        messages = [Message(role="user", text=IMAGE_SLOT * len(images) + question)]
        prompt = prompt_of(generator, messages, images)
    except UnusableImage as error:
        raise InputError(f"picture {picture} cannot be used ({error}); give {USABLE}") from error
    except SkipSample as error:
        raise InputError(
            f"the question cannot be asked ({error}); give plain text without the model's special tokens"
        ) from error
    return generator.generate([prompt], max_new_tokens)[0].text.strip()


def _read_picture(picture: Path) -> bytes:
    if not picture.is_file():
        raise InputError(f"picture {picture} does not exist, or is not a file; check the path")
    try:
        return picture.read_bytes()
    except OSError as error:
        raise InputError(f"picture {picture} cannot be read ({error.strerror}); check its permissions") from error
