"""Generation: a batch gives the same answers as its prompts one by one; prompts and answers match transformers."""

import io
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText, AutoTokenizer
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from dataset_builders.contracts.sample import IMAGE_SLOT, Message, SkipSample
from dataset_builders.errors import InputError
from dataset_builders.storage.files import write_json
from flows.pipeline.plan import check_model
from flows.pipeline.recipe import load_recipe
from stages.answer.transformers_engine import Generator
from stages.shared.inputs.model_directory import ModelDirectory, add_end, end_ids, read_json
from tests.helpers.evaluation import conversation, mixed_samples, picture, talkative_hf_dir
from tests.helpers.tiers import full
from tests.helpers.tiny_hybrid_model import hybrid_hf_dir
from tests.stages.answer.test_greedy_decoder import said_alone

pytestmark = pytest.mark.promise(
    "A batch whose rows come and go gives the tokens that transformers gives each prompt alone, also after kill -9."
)

NEW_TOKENS = 12
PICTURED = mixed_samples(2)[1]
_FILE, _CONFIG, _TEXT = "generation_config.json", "config.json", "text_config"


@pytest.fixture(scope="module")
def generator():
    return Generator(ModelDirectory(talkative_hf_dir()))


def _prompt(generator, sample):
    return generator.encode_prompt(sample.messages[:1], generator.encode_images(sample.images))


def test_a_batch_answers_as_its_prompts_do_one_by_one(generator):
    prompts = [_prompt(generator, sample) for sample in mixed_samples(12)]
    assert len({len(p.input_ids) for p in prompts}) > 6, "the prompts should need padding"
    alone = [generator.generate([prompt], NEW_TOKENS)[0] for prompt in prompts]
    assert len({answer.text for answer in alone}) == len(prompts), "equal answers would prove nothing"
    assert generator.generate(prompts, NEW_TOKENS) == alone
    assert generator.generate(prompts[::-1], NEW_TOKENS) == alone[::-1]
    texts = [number for number, sample in enumerate(mixed_samples(12)) if not sample.images]
    assert generator.generate([prompts[i] for i in texts], NEW_TOKENS) == [alone[i] for i in texts]


def _transformers_answer(hf_dir, question, images):
    """Return the same answer by transformers only. The images' sides are multiples of 32, so nothing is resized."""
    processor = Qwen2VLImageProcessorPil.from_pretrained(hf_dir)
    tokenizer = AutoTokenizer.from_pretrained(hf_dir)
    model = AutoModelForImageTextToText.from_pretrained(hf_dir, dtype=torch.float32).eval()
    content = [{"type": "image"} for _ in images] + [{"type": "text", "text": question}]
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )
    inputs = processor(images=images, return_tensors="pt") if images else {}
    for grid in inputs["image_grid_thw"] if images else []:
        text = text.replace("<|image_pad|>", "<|placeholder|>" * (int(grid.prod()) // 4), 1)
    ids = tokenizer(text.replace("<|placeholder|>", "<|image_pad|>"), return_tensors="pt")["input_ids"]
    types = {"mm_token_type_ids": (ids == model.config.image_token_id).int()} if images else {}
    options = {"do_sample": False, "max_new_tokens": NEW_TOKENS}
    out = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **inputs, **types, **options)
    return ids[0].numpy(), tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)


@pytest.mark.parametrize("sizes", [[], [(64, 64)], [(96, 32), (64, 128)]], ids=["text", "image", "two images"])
def test_ids_and_answers_are_those_of_transformers_own_path(generator, sizes):
    from_bytes = [picture(7 + i, *size) for i, size in enumerate(sizes)]
    opened = [Image.open(io.BytesIO(data)) for data in from_bytes]
    sample = conversation("a/00000000", [(IMAGE_SLOT * len(sizes) + "Which of the two?", "left")], from_bytes)
    prompt = _prompt(generator, sample)
    ids, text = _transformers_answer(talkative_hf_dir(), "Which of the two?", opened)
    np.testing.assert_array_equal(prompt.input_ids, ids)
    assert generator.generate([prompt], NEW_TOKENS)[0].text == text


def _with_generation(tmp_path, **settings):
    """Return a copy of the model with these settings in its generation_config.json."""
    directory = shutil.copytree(talkative_hf_dir(), tmp_path / "hf")
    write_json(directory / _FILE, read_json(directory / _FILE) | settings)
    return directory


def test_an_answer_stops_at_any_end_token_and_its_text_is_what_came_before(generator, tmp_path):
    prompt = _prompt(generator, PICTURED)
    said = said_alone(generator, prompt, NEW_TOKENS)
    place = next(i for i in range(3, len(said)) if said[i] not in said[:i])
    ending = Generator(ModelDirectory(_with_generation(tmp_path, eos_token_id=[said[place], 3])))
    (answer,) = ending.generate([prompt], NEW_TOKENS)
    assert (answer.stopped, answer.num_tokens) == (True, place)
    assert answer.text == generator._chat.tokenizer.decode(said[:place], skip_special_tokens=True)
    (cut,) = ending.generate([prompt], place)
    assert (cut.stopped, cut.num_tokens) == (False, place)
    (last,) = ending.generate([prompt], place + 1)
    assert last.stopped, "the end token as the last token that is allowed still is a stop"


def test_an_answer_that_ends_at_once_is_empty(generator, tmp_path):
    prompt = _prompt(generator, PICTURED)
    first = said_alone(generator, prompt, NEW_TOKENS)[0]
    ending = Generator(ModelDirectory(_with_generation(tmp_path, eos_token_id=first)))
    (answer,) = ending.generate([prompt], NEW_TOKENS)
    assert (answer.text, answer.stopped, answer.num_tokens) == ("", True, 0)


def test_sampling_settings_of_the_directory_are_not_used(generator, tmp_path):
    sampling = {"do_sample": True, "temperature": 5.0, "top_k": 400, "repetition_penalty": 3.0}
    other, prompt = Generator(ModelDirectory(_with_generation(tmp_path, **sampling))), _prompt(generator, PICTURED)
    assert other.generate([prompt], NEW_TOKENS) == generator.generate([prompt], NEW_TOKENS)


@pytest.mark.parametrize(
    "given",
    [
        *({_FILE: 5, _CONFIG: 9}, {_FILE: [5, 7], _TEXT: 9}, {_FILE: None, _CONFIG: 9}),
        *({_CONFIG: [5, 7], _TEXT: 9}, {_TEXT: 5}, {}),
    ],
)
def test_the_ends_of_a_directory_are_those_that_transformers_reads(tmp_path, given):
    directory = Path(shutil.copytree(talkative_hf_dir(), tmp_path / "hf"))
    config = read_json(directory / _CONFIG)
    for keys, name in ((config, _CONFIG), (config[_TEXT], _TEXT)):
        keys.pop("eos_token_id", None)
        keys |= {"eos_token_id": given[name]} if name in given else {}
    write_json(directory / _CONFIG, config)
    (directory / _FILE).unlink()
    if _FILE in given:
        write_json(directory / _FILE, {"eos_token_id": given[_FILE], "pad_token_id": 3})
        theirs = transformers.GenerationConfig.from_pretrained(directory)
    else:
        theirs = transformers.GenerationConfig.from_model_config(transformers.AutoConfig.from_pretrained(directory))
    eos = theirs.eos_token_id
    assert end_ids(directory) == ([] if eos is None else eos if isinstance(eos, list) else [eos])
    assert add_end(directory, 6) and not add_end(directory, 6)
    after = transformers.GenerationConfig.from_pretrained(directory)
    assert after.eos_token_id == [*end_ids(directory)] and after.eos_token_id[-1] == 6
    assert after.pad_token_id == theirs.pad_token_id and after.bos_token_id == theirs.bos_token_id


@pytest.mark.parametrize("eos", ["5", [5, None], full(True), full({"id": 5}), full([[5]]), full(-1)])
def test_an_end_that_is_no_token_is_refused_before_training(tmp_path, eos):
    directory = _with_generation(tmp_path, eos_token_id=eos)
    words = r"generation_config\.json: eos_token_id is .*; give the id of a token"
    with pytest.raises(InputError, match=words):
        check_model(load_recipe("embedded", [f"model={directory}"]).config)
    with pytest.raises(InputError, match=words):
        Generator(ModelDirectory(directory))


def test_an_answer_ends_with_its_turn_whatever_the_directory_says(tmp_path):
    for number, eos in enumerate((None, 3, [4, 5])):
        ending = Generator(ModelDirectory(_with_generation(tmp_path / str(number), eos_token_id=eos)))
        end = ending._chat.end_of_turn_id
        assert ending.decoder.end_ids == {*(eos if isinstance(eos, list) else filter(None, [eos])), end}


def _with_weights(tmp_path, change):
    """Return a copy of the model whose tensors were changed."""
    directory = shutil.copytree(talkative_hf_dir(), tmp_path / "hf")
    weights = load_file(directory / "model.safetensors")
    change(weights)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


UP = "model.language_model.layers.0.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda held: held.update({UP: held[UP].T.contiguous()}), "cannot be loaded"),
        (
            lambda held: held.update({f"{UP}s": held.pop(UP)}),
            f"1 tensors are missing, the first is {re.escape(UP)}; copy it again",
        ),
    ],
    ids=["transposed", "under another name"],
)
def test_weights_that_do_not_fit_are_refused_in_one_line_and_not_drawn_at_random(tmp_path, change, words):
    with pytest.raises(InputError, match=words) as error:
        Generator(ModelDirectory(_with_weights(tmp_path, change)))
    assert "\n" not in str(error.value)


def test_weights_of_another_size_than_the_configs_are_refused_in_one_line(tmp_path):
    directory = shutil.copytree(talkative_hf_dir(), tmp_path / "hf")
    config = read_json(directory / _CONFIG)
    config[_TEXT]["intermediate_size"] *= 2
    write_json(directory / _CONFIG, config)
    with pytest.raises(InputError, match=r"its weights are .* numbers, and the sizes in config.json make") as error:
        Generator(ModelDirectory(directory))
    assert "\n" not in str(error.value)


def test_weights_that_are_not_finite_give_no_answer(tmp_path):
    directory = _with_weights(tmp_path, lambda held: held["model.language_model.norm.weight"][:1].fill_(float("nan")))
    generator = Generator(ModelDirectory(directory))
    prompt = generator.encode_prompt([Message(role="user", text="Which?")], generator.encode_images([]))
    with pytest.raises(InputError, match=r"hf: the model's output is not finite; export or copy it again"):
        generator.generate([prompt], 2)


def test_a_prompt_with_too_few_images_is_skipped(generator):
    message = Message(role="user", text=f"{IMAGE_SLOT}{IMAGE_SLOT}Which?")
    with pytest.raises(SkipSample, match="image_count_mismatch"):
        generator.encode_prompt([message], generator.encode_images([picture(1)]))


@pytest.mark.full
def test_a_cpu_is_not_advised_to_install_kernels_that_need_a_gpu():
    """transformers prints the advice once per process, so this test starts another process."""
    code = """
import sys
from dataset_builders.contracts.sample import Message
from pathlib import Path
from stages.answer.transformers_engine import Generator
from stages.shared.inputs.model_directory import ModelDirectory
generator = Generator(ModelDirectory(Path(sys.argv[1])))
images = generator.encode_images([])
print(generator.generate([generator.encode_prompt([Message(role="user", text="Which digit?")], images)], 3))
"""
    command = [sys.executable, "-W", "ignore", "-c", code, str(hybrid_hf_dir())]
    done = subprocess.run(command, capture_output=True, text=True)
    assert "Answer(" in done.stdout, done.stderr
    assert "falling back" not in done.stderr
