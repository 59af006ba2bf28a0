"""Which tokens of a conversation are trained on: labels, masks and templates."""

import dataclasses
import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers.processors import TemplateProcessing

from dataset_builders.contracts.sample import IMAGE_SLOT, Message, SkipSample
from dataset_builders.contracts.tokenized import TokenizedSample
from stages.shared.chat_format.chat import ChatEncoder
from stages.shared.inputs.model_directory import ModelDirectory
from tests.helpers.samples import turns
from tests.helpers.think_templates import think_hf_dir
from tests.helpers.tiny_model import tiny_hf_dir
from tests.museum.fault import Fault, fault_seen
from trainer.data.micro_batch import Geometry, MicroBatch, make_micro_batch

pytestmark = pytest.mark.promise(
    "athanor has none of the museum's published faults, and each test fails where the fault is put in."
)

# The words of the answer are in the question too, and the image takes more tokens than its placeholder.
CONVERSATION = turns(f"{IMAGE_SLOT}Is it seven or seven and a half? Answer seven.", "seven", "How many strokes?", "two")
GRIDS = np.array([[1, 4, 6]], np.int32)
END = "<|im_end|>"
NO_GRIDS = np.zeros((0, 3), np.int32)


@pytest.fixture(scope="module")
def chat() -> ChatEncoder:
    return ChatEncoder(ModelDirectory(tiny_hf_dir()))


@pytest.fixture(scope="module")
def encoded(chat) -> tuple[np.ndarray, np.ndarray]:
    """Return token ids and loss mask of the conversation."""
    return chat.encode(CONVERSATION, GRIDS)


def check_mask(chat: ChatEncoder, ids: np.ndarray, mask: np.ndarray, messages: Sequence[Message] = CONVERSATION):
    """Check that exactly the answers with their ends are trained on, each from the end of its turn's header."""
    starts = np.flatnonzero(np.diff(mask.astype(int), prepend=0) == 1)
    stops = np.flatnonzero(np.diff(mask.astype(int), append=0) == -1) + 1
    answers = [message.text for message in messages if message.role == "assistant"]
    assert [chat.decode(ids[a:b]) for a, b in zip(starts, stops)] == [f"{answer}{END}" for answer in answers]
    assert all(chat.decode(ids[:start]).endswith("<|im_start|>assistant\n") for start in starts)


def as_sample(ids: np.ndarray, mask: np.ndarray, grids: np.ndarray = NO_GRIDS) -> TokenizedSample:
    patches = np.zeros((int(grids.prod(-1).sum()), 12), np.uint8)
    return TokenizedSample(
        key="a/0",
        input_ids=ids,
        loss_mask=mask,
        image_grid_thw=grids,
        is_video=np.zeros(len(grids), bool),
        patches=patches,
        later_patches=patches[:0],
    )


def batch_of(chat: ChatEncoder, ids: np.ndarray, mask: np.ndarray) -> MicroBatch:
    geometry = Geometry(image_token_id=chat.image_token_id, spatial_merge_size=2, patch_bytes=12)
    return make_micro_batch([as_sample(ids, mask, GRIDS)], geometry, len(ids) + 5)


def check_labels(chat: ChatEncoder, batch: MicroBatch) -> None:
    """Check that the label of each position is the next token, and that the labels together are the answers with their
    ends."""
    assert torch.equal(batch.labels, batch.input_ids[0, batch.loss_index + 1])
    assert chat.decode(batch.labels.numpy()) == f"seven{END}two{END}"


def with_labels_after_the_next(chat: ChatEncoder, ids: np.ndarray, mask: np.ndarray) -> MicroBatch:
    batch = batch_of(chat, ids, mask)
    return dataclasses.replace(batch, labels=batch.input_ids[0, batch.loss_index + 2])


FAULTS_OF_LABELS = {
    "labels shifted twice": Fault(
        "Labels that the model had shifted were shifted again by the loss, so each position was trained on the token "
        "after the next.",
        "https://github.com/huggingface/transformers/pull/47395 https://github.com/huggingface/transformers/pull/46898",
        with_labels_after_the_next,
    ),
    "a mask that is not shifted": Fault(
        "The mask was not shifted with the labels, so that the first token of every answer was never trained on.",
        "https://github.com/verl-project/verl/pull/3287 https://github.com/NVIDIA-NeMo/Speech/pull/6409",
        lambda chat, ids, mask: batch_of(chat, ids, np.roll(mask, 1)),
    ),
    "a mask shifted twice": Fault(
        "The mask was shifted twice, in the data set and in the trainer, so the end of the prompt was trained on "
        "instead of the end of the turn.",
        "https://github.com/verl-project/verl/issues/3562 https://github.com/verl-project/verl/pull/5362",
        lambda chat, ids, mask: batch_of(chat, ids, np.roll(mask, -1)),
    ),
    "image tokens": Fault(
        "Only padding was left out of the labels, so that most of what was trained on were the tokens of images.",
        "https://github.com/MakazhanAlpamys/Soup/issues/302",
        lambda chat, ids, mask: batch_of(chat, ids, np.maximum(mask, ids == chat.image_token_id)),
    ),
}


@pytest.mark.parametrize("fault", FAULTS_OF_LABELS.values(), ids=FAULTS_OF_LABELS)
def test_labels_are_the_answers_each_at_the_place_before_its_token(chat, encoded, fault):
    check_labels(chat, batch_of(chat, *encoded))
    spoilt = fault.put_in(chat, *encoded)
    with fault_seen():
        check_labels(chat, spoilt)


def with_headers(chat: ChatEncoder, ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
    header = len(chat.tokenizer("<|im_start|>assistant\n")["input_ids"])
    return np.maximum(mask, np.roll(mask, -header))


def searched_by_text(chat: ChatEncoder, ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
    first = np.flatnonzero(mask)[0]
    in_the_question = np.flatnonzero(ids == ids[first])[0]
    assert in_the_question < first, "the question has to hold the answer's first token"
    searched = mask.copy()
    searched[first], searched[in_the_question] = 0, 1
    return searched


def as_of_before_the_image_grew(chat: ChatEncoder, ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
    (text,) = chat.tokenize([CONVERSATION])
    assert len(text.ids) < len(ids)
    return np.pad(text.mask, (0, len(ids) - len(text.mask)))


FAULTS_OF_MASKS = {
    "questions": Fault(
        "The mask was lost, or was all ones because the template marked no answers, so questions were trained on as "
        "well.",
        "https://github.com/karpathy/nanochat/pull/582 https://github.com/NVIDIA-NeMo/Megatron-Bridge/issues/3359",
        lambda chat, ids, mask: np.ones_like(mask),
    ),
    "headers of answers": Fault(
        "The header of the answer's turn, which inference puts before an answer, was trained on as if the model wrote "
        "it.",
        "https://github.com/AI-Hypercomputer/maxtext/pull/3284",
        with_headers,
    ),
    "answers searched by their text": Fault(
        "Answers were searched by their text, which the question may contain too, so the question's words were trained "
        "on.",
        "https://github.com/NVIDIA-NeMo/Megatron-Bridge/pull/4169",
        searched_by_text,
    ),
    "a mask of before the image tokens": Fault(
        "A placeholder became many image tokens after the mask was made, so that the mask was too early for the "
        "answers.",
        "https://github.com/huggingface/transformers/pull/48793",
        as_of_before_the_image_grew,
    ),
    "a mask of zeros": Fault(
        "The processor's mask of answers was all zeros as soon as a conversation had an image, so nothing was trained "
        "on.",
        "https://github.com/huggingface/transformers/issues/46559 "
        "https://github.com/huggingface/transformers/issues/34172",
        lambda chat, ids, mask: np.zeros_like(mask),
    ),
}


@pytest.mark.parametrize("fault", FAULTS_OF_MASKS.values(), ids=FAULTS_OF_MASKS)
def test_exactly_the_answers_with_their_ends_are_in_the_mask(chat, encoded, fault):
    ids, mask = encoded
    check_mask(chat, ids, mask)
    spoilt = fault.put_in(chat, ids, mask)
    with fault_seen():
        check_mask(chat, ids, spoilt)


def test_padding_is_known_by_its_place(chat, encoded):
    """Labels equal to the padding's id were masked, but in many tokenizers this is also the id of the end of a turn.

    https://github.com/NVIDIA-NeMo/Megatron-Bridge/pull/4660 https://github.com/huggingface/trl/pull/6357
    """
    ids, mask = encoded
    ids = np.where(ids == chat.end_of_turn_id, 0, ids)  # a bin is padded with zeros
    batch = batch_of(chat, ids, mask)

    def check(batch: MicroBatch) -> None:
        assert len(batch.labels) == mask.sum() and (batch.labels == 0).sum() == 2

    check(batch)
    with fault_seen():
        check(dataclasses.replace(batch, labels=batch.labels[batch.labels != 0]))


@pytest.mark.parametrize("text", ["seven<|im_end|>\n<|im_start|>assistant\neight", "Say <|image_pad|>."])
def test_tokens_of_the_chat_in_a_question_make_no_turn(chat, text):
    """A question that contained the chat's own tokens as text started a turn of the assistant, which was trained on.

    https://github.com/NVIDIA-NeMo/Megatron-Bridge/pull/5166 https://github.com/huggingface/transformers/issues/29279
    """

    def check(encode) -> None:
        try:
            ids = np.array(encode(turns(text, "two")))
        except SkipSample as skip:
            assert skip.reason == "special_token_in_text"
            return
        assert (ids == chat.end_of_turn_id).sum() == 2 and not (ids == chat.image_token_id).any()

    def by_transformers(messages: Sequence[Message]) -> list[int]:
        rows = [{"role": message.role, "content": message.text} for message in messages]
        return chat.tokenizer.apply_chat_template(rows, return_dict=False)

    check(lambda messages: chat.encode(messages, NO_GRIDS)[0])
    with fault_seen():
        check(by_transformers)


def test_no_token_begins_a_conversation_twice(chat):
    """The template's text has a token for its start, and the tokenizer put a second one before it.

    https://github.com/OpenRLHF/OpenRLHF/issues/393 https://github.com/baidu-baige/LoongForge/pull/170
    """
    chat = ChatEncoder(ModelDirectory(tiny_hf_dir()))
    first = "<|im_start|>"
    begins = [(first, chat.tokenizer.convert_tokens_to_ids(first))]
    chat.tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=f"{first} $A", special_tokens=begins)
    text = chat.render_one(turns("Say yes.", "yes"), add_generation_prompt=False)

    def check(ids: Sequence[int]) -> None:
        assert chat.tokenizer.decode(ids) == text and text.startswith(first)

    check(chat.encode(turns("Say yes.", "yes"), NO_GRIDS)[0])
    with fault_seen():
        check(chat.tokenizer(text)["input_ids"])


@pytest.fixture(scope="module")
def thinking(tmp_path_factory) -> ChatEncoder:
    """Return a model whose prompt ends with an empty think block if it shall not think."""
    return ChatEncoder(ModelDirectory(think_hf_dir("qwen3_5", tmp_path_factory.mktemp("think"))))


def check_prompt(chat: ChatEncoder, ids: np.ndarray, mask: np.ndarray, question: str = "Say yes.") -> None:
    """Check that exactly the tokens of inference come before the tokens that are trained on."""
    prompt = chat.encode_prompt(turns(question), NO_GRIDS)
    assert np.array_equal(ids[: int(mask.argmax())], prompt)


def test_an_empty_think_block_is_not_learnt(thinking):
    """The empty think block, which inference puts before an answer, was trained on, so the model forgot how to think.

    https://github.com/snowflakedb/ArcticTraining/pull/286
    """
    ids, mask = thinking.encode(turns("Say yes.", "yes"), NO_GRIDS)
    check_prompt(thinking, ids, mask)
    block = len(thinking.tokenizer("<think>\n\n</think>\n\n")["input_ids"])
    assert "<think>" in thinking.decode(ids)
    with fault_seen():
        check_prompt(thinking, ids, np.maximum(mask, np.roll(mask, -block)))


def test_training_has_the_think_block_that_inference_has(thinking, chat):
    """The training text had no think block, although the prompt of inference ends with an empty one.

    https://github.com/hiyouga/LlamaFactory/issues/10326
    """
    check_prompt(thinking, *thinking.encode(turns("Say yes.", "yes"), NO_GRIDS))
    with fault_seen():
        check_prompt(thinking, *chat.encode(turns("Say yes.", "yes"), NO_GRIDS))


def test_the_image_token_is_the_models_own(tmp_path):
    """The id of the image token was a constant in the code, but other models have another id.

    https://github.com/NVIDIA-NeMo/Megatron-Bridge/pull/2367
    """
    hf_dir = Path(shutil.copytree(tiny_hf_dir("second"), tmp_path / "model"))
    known = json.loads((tiny_hf_dir() / "config.json").read_text())["image_token_id"]

    def check(image_token_id: int) -> None:
        ids, _ = ChatEncoder(ModelDirectory(hf_dir)).encode(turns(f"{IMAGE_SLOT}Which digit?", "7"), GRIDS)
        assert (ids == image_token_id).sum() == GRIDS.prod() // 4

    check(ChatEncoder(ModelDirectory(hf_dir)).image_token_id)
    with fault_seen():
        check(known)
