"""The embedded model: complete for transformers, the same bytes everywhere."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from transformers import AutoModelForImageTextToText, AutoTokenizer

from dataset_builders.contracts.sample import IMAGE_SLOT, Message, Sample
from stages.embedded_model.stage import STAGE, _texts, make_tiny_hf_dir
from stages.shared.artifacts.artifact import Artifact
from stages.shared.artifacts.run_stage import run_stage
from stages.shared.inputs.model_directory import ModelDirectory
from tests.helpers.samples import make_samples_artifact, turns
from tests.helpers.tiny_model import FIRST, SHAPES, TEXTS, tiny_hf_dir
from tests.helpers.trees import tree_digest
from trainer.contract.names import HF_EXPORT

_MAKE_SHAPES = """
import sys
from pathlib import Path
from stages.embedded_model.stage import make_tiny_hf_dir
from tests.helpers.tiny_model import SHAPES, TEXTS
for shape, config in SHAPES.items():
    make_tiny_hf_dir(Path(sys.argv[1]) / shape, config, TEXTS)
"""


@pytest.mark.full
def test_another_process_makes_the_same_bytes(tmp_path):
    subprocess.run([sys.executable, "-c", _MAKE_SHAPES, str(tmp_path)], check=True)
    for shape in SHAPES:
        assert tree_digest(tmp_path / shape) == tree_digest(tiny_hf_dir(shape))


def test_neither_global_seed_nor_threads_matter(tmp_path):
    state = torch.random.get_rng_state()
    torch.manual_seed(99)
    before = torch.random.get_rng_state()
    assert tree_digest(make_tiny_hf_dir(tmp_path / "again", FIRST, TEXTS)) == tree_digest(tiny_hf_dir())
    assert torch.equal(torch.random.get_rng_state(), before), "the caller's random state was touched"
    torch.random.set_rng_state(state)


def test_another_seed_gives_other_weights_and_nothing_else(tmp_path):
    other = tree_digest(make_tiny_hf_dir(tmp_path / "other", FIRST.model_copy(update={"seed": 7}), TEXTS))
    first = tree_digest(tiny_hf_dir())
    assert [name for name in first if other[name] != first[name]] == ["model.safetensors"]


@pytest.mark.parametrize("shape", SHAPES)
def test_transformers_loads_and_runs_it(shape):
    path = tiny_hf_dir(shape)
    ModelDirectory(path).check_weights()
    model = AutoModelForImageTextToText.from_pretrained(path, local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    config = model.config
    assert config.model_type == "qwen3_vl" and config.text_config.vocab_size % 128 == 0
    assert sum(config.text_config.rope_parameters["mrope_section"]) == config.text_config.head_dim // 2
    assert config.text_config.rope_parameters["mrope_interleaved"]
    assert config.text_config.num_key_value_heads < config.text_config.num_attention_heads
    assert len(config.vision_config.deepstack_visual_indexes) >= 2
    tied = model.lm_head.weight.data_ptr() == model.get_input_embeddings().weight.data_ptr()
    assert tied is config.tie_word_embeddings
    ids = torch.tensor([tokenizer("Which digit is it?")["input_ids"]])
    assert torch.isfinite(model(input_ids=ids).logits).all()


def test_every_special_token_is_one_id_and_config_json_agrees():
    for shape in SHAPES:
        path = tiny_hf_dir(shape)
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
        config = json.loads((path / "config.json").read_text())
        named = {"image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>"}
        named |= {"vision_start_token_id": "<|vision_start|>", "vision_end_token_id": "<|vision_end|>"}
        for key, token in named.items():
            assert tokenizer(f"a{token}b")["input_ids"].count(config[key]) == 1
            assert tokenizer.convert_ids_to_tokens(config[key]) == token
        generation = json.loads((path / "generation_config.json").read_text())
        assert tokenizer.convert_ids_to_tokens(generation["eos_token_id"]) == ["<|im_end|>", "<|endoftext|>"]
        assert tokenizer.eos_token == "<|im_end|>" and len(tokenizer) <= config["text_config"]["vocab_size"]
    first, second = (AutoTokenizer.from_pretrained(tiny_hf_dir(name)).get_added_vocab() for name in ("first", "second"))
    assert first.keys() == second.keys() and not set(first.values()) & set(second.values())


def test_any_text_comes_back_from_its_ids():
    tokenizer = AutoTokenizer.from_pretrained(tiny_hf_dir(), local_files_only=True)
    for text in ("snow \u2744 and \u00e9", "tabs\tand\n\nlines", "12345", "\U0001f600"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert len(tokenizer("98")["input_ids"]) == 2, "digits are one token each"


def test_chat_template_writes_qwen_structure():
    tokenizer = AutoTokenizer.from_pretrained(tiny_hf_dir(), local_files_only=True)
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Which?"}]},
        {"role": "assistant", "content": "7"},
        {"role": "user", "content": "Sure?"},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>Which?<|im_end|>\n"
        "<|im_start|>assistant\n7<|im_end|>\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n"
    )


def _samples(directory: Path) -> Artifact:
    """Return samples of the texts: a question and its answer each, one with reasoning, and one that is held out."""
    train = [
        Sample(key=f"a/{i:08d}", messages=turns(f"{IMAGE_SLOT}{text}", str(i)), images=(b"x",))
        for i, text in enumerate(TEXTS)
    ]
    answer = Message(role="assistant", text="a", reasoning="because", references=("unseen",))
    train.append(Sample(key="b/00000000", messages=(Message(role="user", text="q"), answer), images=()))
    heldout = [Sample(key="a/99999999", messages=turns("held", "out"), images=())]
    return make_samples_artifact(directory, {"train/shard-00000.tar": train, "heldout/shard-00000.tar": heldout})


def test_the_stage_trains_its_tokenizer_on_the_texts_of_the_train_split(tmp_path):
    samples = _samples(tmp_path / "samples")
    result = run_stage(STAGE, FIRST, {"samples": samples}, tmp_path / "root")
    path = result.artifact.dir / HF_EXPORT
    ModelDirectory(path).check_weights()
    assert len(AutoTokenizer.from_pretrained(path)("digit")["input_ids"]) < len("digit")
    numbered = [text for i, question in enumerate(TEXTS) for text in (question, str(i))]
    assert list(_texts(samples)) == [*numbered, "q", "a", "because"]
    assert result.artifact.manifest.stats["texts"] == len(numbered) + 3


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("vocab_size", 500), ("num_kv_heads", 3), ("vision_num_heads", 3), ("deepstack_indexes", (0, 3))),
        *(("num_layers", 2), ("max_pixels", 10), ("colour", "red")),
    ],
)
def test_impossible_shapes_are_refused(field, value):
    with pytest.raises(ValidationError, match=field):
        type(FIRST).model_validate({**FIRST.model_dump(), field: value})
