"""Chat templates with the structure of each generation of thinking models, in words of our own.

    qwen3           the prompt opens no block, the model writes it; history is bare
    qwen3_5         the prompt opens a block, or has an empty one if thinking is switched off; history is bare
    qwen3_5_small   the same, and thinking has to be switched on
    qwen3_6         as qwen3_5; history keeps its blocks if `preserve_thinking` is true
    qwen3_8         history keeps them unless `preserve_thinking` is false; an instruction comes first where it thinks

In all of them the last answer has a block, be it empty, and texts are trimmed.
"""

import shutil
from pathlib import Path

from tests.helpers.tiny_model import tiny_hf_dir

EFFORT = "Think as hard as is asked: xhigh."
GENERATIONS = ("qwen3", "qwen3_5", "qwen3_5_small", "qwen3_6", "qwen3_8")

_KEPT = {
    "qwen3_6": "preserve_thinking is defined and preserve_thinking is true",
    "qwen3_8": "preserve_thinking is undefined or preserve_thinking is true",
}
_EMPTY = "'<think>\\n\\n</think>\\n\\n'"
_PROMPTS = {
    "qwen3": f"{_EMPTY} if enable_thinking is defined and not enable_thinking else ''",
    "qwen3_5_small": f"'<think>\\n' if enable_thinking is defined and enable_thinking else {_EMPTY}",
}
_LARGE_PROMPT = f"{_EMPTY} if enable_thinking is defined and not enable_thinking else '<think>\\n'"
_EFFORT = (
    "{%- set effort = '' if enable_thinking is defined and not enable_thinking"
    f" else '{EFFORT}'.replace('xhigh', reasoning_effort | default('xhigh')) -%}}\n"
)
_TEMPLATE = """\
{%- macro written(content) -%}
    {%- if content is string -%}{{- content -}}
    {%- else -%}
        {%- for part in content -%}
            {{- '<|vision_start|><|image_pad|><|vision_end|>' if part.type == 'image' else part.text -}}
        {%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
{%- set last = namespace(question=-1) -%}
{%- for turn in messages -%}
    {%- if turn.role == 'user' -%}{%- set last.question = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- if last.question < 0 -%}{{- raise_exception('there is no question') -}}{%- endif -%}
{%- set system = written(messages[0].content) | trim if messages[0].role == 'system' else '' -%}
{%- set first = (effort ~ '\\n\\n' ~ system) | trim -%}
{%- if first -%}{{- '<|im_start|>system\\n' ~ first ~ '<|im_end|>\\n' -}}{%- endif -%}
{%- for turn in messages if turn.role != 'system' -%}
    {%- set place = loop.index0 + (1 if messages[0].role == 'system' else 0) -%}
    {{- '<|im_start|>' ~ turn.role ~ '\\n' -}}
    {%- if turn.role == 'assistant' and ((KEPT) or place > last.question) -%}
        {%- set thought = turn.reasoning_content | trim if turn.reasoning_content is string else '' -%}
        {{- '<think>\\n' ~ thought ~ '\\n</think>\\n\\n' -}}
    {%- endif -%}
    {{- written(turn.content) | trim ~ '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' ~ (PROMPT) -}}{%- endif -%}
"""


def think_template(generation: str) -> str:
    text = _TEMPLATE.replace("KEPT", _KEPT.get(generation, "false"))
    effort = _EFFORT if generation == "qwen3_8" else "{%- set effort = '' -%}\n"
    return effort + text.replace("PROMPT", _PROMPTS.get(generation, _LARGE_PROMPT))


def think_hf_dir(generation: str, directory: Path) -> Path:
    """Return a copy of the tiny model with the template of a generation."""
    hf_dir = Path(shutil.copytree(tiny_hf_dir(), directory / generation))
    (hf_dir / "chat_template.jinja").write_text(think_template(generation))
    return hf_dir
