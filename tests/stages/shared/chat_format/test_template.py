"""A chat template has limits of time, memory and text, and is never rendered in athanor's own processes."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from dataset_builders.contracts.sample import Message, SkipSample
from dataset_builders.errors import InputError
from stages.shared.chat_format import template
from stages.shared.chat_format.chat import ChatEncoder
from stages.shared.chat_format.template import ChatTemplate, check_template, read_template
from stages.shared.inputs.model_directory import ModelDirectory
from tests.helpers.patience import at_most
from tests.helpers.samples import turns
from tests.helpers.tiers import tiered
from tests.helpers.tiny_model import tiny_hf_dir
from tests.helpers.tiny_text_model import text_hf_dir

pytestmark = pytest.mark.promise(
    "Images that cost seconds per kilobyte, damaged JPEGs, endless chat templates and links out of a source "
    "are refused with a reason."
)

_PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


@pytest.fixture
def short_limit(monkeypatch):
    monkeypatch.setattr(template, "CPU_SECONDS", 0.5)


@pytest.fixture(autouse=True)
def _no_checked_templates():
    template._checked.cache_clear()
    yield
    template._checked.cache_clear()


def model_with(directory: Path, text: str) -> Path:
    hf_dir = Path(shutil.copytree(tiny_hf_dir(), directory / "model"))
    (hf_dir / "chat_template.jinja").write_text(text)
    return hf_dir


# template -> the error's text about it
_HOSTILE = {
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}": "needs over 0.5 s of CPU",
    "{{ 9**(9**(messages|length + 8)) % 7 }}": "needs over 0.5 s of CPU",
    "{{ 'a' * 3000000000 }}": "needs over 1024 MiB of memory",
    "{% set x = namespace(t='a') %}"
    "{% for i in range(50) %}{% set x.t = x.t ~ x.t %}{% endfor %}{{ x.t }}": "needs over 1024 MiB of memory",
    "{{ '%3000000000d' % 1 }}": "needs over 1024 MiB of memory",
    "{{ 'a' * 2000000 }}": r"writes 2,000,000 characters for a conversation of \d+, over the limit of 100,\d+",
    "{{ 1 // 0 }}": "fails with ZeroDivisionError: integer division or modulo by zero",
    "{{ 1 + 'a' }}": "fails with TypeError: unsupported operand",
    "{% include 'other.jinja' %}": "fails with TypeError: no loader",
    "{% for i in range(10**9) %}{% endfor %}": "fails with OverflowError: Range too big",
    "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}": "fails with RecursionError: maximum recursion depth",
    "{% for m in messages %}": r"refuses a plain question \(Unexpected end of template",
    "{{ raise_exception('never') }}": r"refuses a plain question \(never\)",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}": "fails with RecursionError",
}


_CORE = (  # one for each limit, an error of the template and a refusal
    "{{ 9**(9**(messages|length + 8)) % 7 }}",
    "{{ 'a' * 3000000000 }}",
    "{{ 'a' * 2000000 }}",
    "{{ 1 // 0 }}",
    "{{ raise_exception('never') }}",
)


@pytest.mark.parametrize("text", tiered(_HOSTILE, _CORE), ids=[text[:40] for text in _HOSTILE])
def test_a_hostile_template_is_one_line_before_any_tokenizer(text, tmp_path, request):
    if "0.5 s" in _HOSTILE[text]:
        request.getfixturevalue("short_limit")
    hf_dir = model_with(tmp_path, text)
    with pytest.raises(InputError, match=f"{hf_dir}: the chat template .*{_HOSTILE[text]}") as caught:
        check_template(ModelDirectory(hf_dir))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600
    assert "copy the chat_template.jinja of the model's makers" in str(caught.value)


_COUNTED = "<|im_start|>system\n{{ messages|length }} messages<|im_end|>\n"
_HELD = "<|im_start|>system\nHello.<|im_end|>\n"
# text inserted before a sound template -> the trial whose prompt is not a prefix of its text
_UNLIKE_THE_PROMPT = {
    "{%- if add_generation_prompt %}" + _HELD + "{% endif -%}\n": "with 1 turn the",
    _COUNTED: "with 1 turn the",
    "{%- if messages|length > 4 %}" + _COUNTED + "{% endif -%}\n": "with 3 turns the",
    "{%- if messages[0].role == 'system' %}" + _COUNTED + "{% endif -%}\n": "with 1 turn and a system message the",
    "{%- if messages[0].role == 'system' and messages|length > 3 %}" + _COUNTED + "{% endif -%}\n": (
        "with 2 turns and a system message the"
    ),
}


@pytest.mark.parametrize("added", tiered(_UNLIKE_THE_PROMPT, list(_UNLIKE_THE_PROMPT)[-1:]))
def test_a_template_whose_text_is_not_its_prompt_is_refused_by_its_files_alone(added, tmp_path):
    hf_dir = model_with(tmp_path, added + (tiny_hf_dir() / "chat_template.jinja").read_text())
    with pytest.raises(InputError, match=f"{hf_dir}: {_UNLIKE_THE_PROMPT[added]} chat template writes ") as caught:
        check_template(ModelDirectory(hf_dir))
    assert "before the last answer where its prompt at inference has " in str(caught.value)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600


# Each text begins with its prompt, but a text of several turns does not begin with the text of its first turns.
REWRITING = (
    "{%- set ns = namespace(last=0) %}{% for m in messages %}"
    "{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor -%}\n"
    "{%- for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'user' and loop.index0 < ns.last and messages[0].role == 'system' %}(old) {% endif %}"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{{ '<|vision_start|><|image_pad|><|vision_end|>' if part.type == 'image' else part.text }}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_a_template_that_rewrites_questions_after_a_system_message_is_refused_by_the_ids(tmp_path):
    hf_dir = model_with(tmp_path, REWRITING)
    check_template(ModelDirectory(hf_dir))
    with pytest.raises(InputError, match=r"with 2 turns and a system message the ids before message 2 are not those"):
        ChatEncoder(ModelDirectory(hf_dir))
    (hf_dir / "chat_template.jinja").write_text(REWRITING.replace("(old) ", ""))
    ChatEncoder(ModelDirectory(hf_dir))


def test_a_text_models_template_is_not_tried_with_an_image_as_an_encoder_of_images_does(tmp_path):
    text = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    text += "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    hf_dir = Path(shutil.copytree(text_hf_dir(), tmp_path / "text"))
    (hf_dir / "chat_template.jinja").write_text(text)
    check_template(ModelDirectory(hf_dir))
    ChatEncoder(ModelDirectory(hf_dir))
    with pytest.raises(InputError, match="chat template fails with TypeError"):
        ChatEncoder(ModelDirectory(model_with(tmp_path, text)))


def test_a_template_that_refuses_system_messages_or_a_second_turn_passes(tmp_path):
    """A conversation that the template refuses is left out, with the template's own message."""
    sound = (tiny_hf_dir() / "chat_template.jinja").read_text()
    for condition in ("messages[0].role == 'system'", "messages|length > 2"):
        refusing = f"{{%- if {condition} %}}{{{{ raise_exception('no') }}}}{{% endif -%}}\n{sound}"
        hf_dir = model_with(tmp_path / condition[:11], refusing)
        check_template(ModelDirectory(hf_dir))
        ChatEncoder(ModelDirectory(hf_dir))


def test_a_sound_template_is_checked_by_its_files_alone(tmp_path):
    """The recipe's check imports neither torch nor transformers."""
    code = "import sys\nfrom pathlib import Path\nfrom stages.shared.chat_format.template import check_template\n"
    code += "from stages.shared.inputs.model_directory import ModelDirectory\n"
    code += f"check_template(ModelDirectory(Path({str(tiny_hf_dir())!r})))\n"
    code += "print(sorted({'torch', 'transformers'} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_template_is_found_where_transformers_finds_it(tmp_path):
    hf_dir = model_with(tmp_path, "from the file")
    settings = hf_dir / "tokenizer_config.json"
    settings.write_text(json.dumps({"chat_template": "from the settings", "eos_token": "E", "pad_token": None}))
    assert read_template(hf_dir) == ("from the file", {"eos_token": "E"})
    (hf_dir / "chat_template.jinja").unlink()
    (hf_dir / "chat_template.json").write_text(json.dumps({"chat_template": "the old file"}))
    assert read_template(hf_dir)[0] == "from the settings"
    settings.write_text("{}")
    assert read_template(hf_dir)[0] == "the old file"
    (hf_dir / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(InputError, match=r"chat_template\.jinja cannot be read"):
        read_template(hf_dir)


def test_text_is_transformers_own():
    chat = ChatEncoder(ModelDirectory(tiny_hf_dir()))
    conversations = [turns("a", "b"), turns('\ud800 \u2028 \u00e9\n"', "\\n\t"), turns("c", "d", "e", "f")]
    given = [chat._turns(messages) for messages in conversations]
    expected = [chat.tokenizer.apply_chat_template(one, tokenize=False, enable_thinking=False) for one in given]
    assert chat.template.render(given) == expected


def conversation(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_an_input_that_makes_the_template_run_on_costs_its_sample_alone(short_limit):
    chat = ChatTemplate(
        "here", "{% if 'x' in messages[0].content %}{{ 9**(9**(messages|length + 8)) }}{% endif %}" + _PLAIN, {}
    )
    texts = chat.render([conversation(text) for text in ("a", "x", "b", "c")])
    assert [text if isinstance(text, str) else text.reason for text in texts] == [
        *("user: a\n", "mask_span_mismatch", "user: b\n", "user: c\n")
    ]
    assert "the chat template needs over 0.5 s of CPU for a conversation of" in texts[1].detail
    chat.render([conversation("x")])
    chat.render([conversation("x")])
    with pytest.raises(InputError, match=r"here: the chat template needs over 0\.5 s .*, like 3 others before"):
        chat.render([conversation("x")])


def test_an_input_may_be_large():
    chat = ChatTemplate("here", _PLAIN, {})
    texts = chat.render([conversation("word " * 400_000) for _ in range(5)])
    assert [len(text) for text in texts] == [2_000_007] * 5


def test_errors_of_an_input_leave_its_sample_out(tmp_path):
    text = (tiny_hf_dir() / "chat_template.jinja").read_text()
    chat = ChatEncoder(
        ModelDirectory(
            model_with(tmp_path, "{%- if 'zero' in messages[-1].content -%}{{ 1 // 0 }}{%- endif -%}" + text)
        )
    )
    good, bad = chat.tokenize([turns("a", "b"), turns("a", "zero")])
    assert chat.decode(good.ids).endswith("b<|im_end|>\n")
    assert isinstance(bad, SkipSample) and "the chat template fails with ZeroDivisionError" in bad.detail
    with pytest.raises(SkipSample, match="ZeroDivisionError"):
        chat.count_tokens((Message(role="user", text="a zero"),))


def test_a_process_that_is_killed_is_started_again():
    chat = ChatTemplate("here", _PLAIN, {})
    assert chat.render([conversation("a")]) == ["user: a\n"]
    for texts in (["a"], ["a", "b"]):
        os.kill(chat._process.pid, signal.SIGKILL)
        chat._process.wait()
        assert chat.render([conversation(text) for text in texts]) == [f"user: {text}\n" for text in texts]


def test_the_process_ends_with_its_owner_even_one_that_is_killed():
    chat = ChatTemplate("here", _PLAIN, {})
    chat.render([conversation("a")])
    process = chat._process
    del chat
    assert process.poll() is not None
    code = "import os, sys\nfrom stages.shared.chat_format.template import ChatTemplate\n"
    code += "chat = ChatTemplate('here', 'a', {})\nchat.check(has_images=True)\n"
    code += "print(chat._process.pid, flush=True)\nos.kill(os.getpid(), 9)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL
    _, left = psutil.wait_procs(_processes(int(done.stdout)), timeout=at_most(60))
    assert not left


def _processes(pid: int) -> list[psutil.Process]:
    return [psutil.Process(pid)] if psutil.pid_exists(pid) else []
