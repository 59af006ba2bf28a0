"""The program that renders a chat template, in a process that a limit may end without harm to its caller.

In: one line of JSON with the template, its variables and the limits, then one line for each list of conversations. The
limit of CPU seconds applies to a list: a caller whose list ended the process sends its conversations one by one.
Out: one line for each list, with [kind, text] for each conversation. `kind` is text, refused (raised by the template
itself) or failed (a limit, or an error of the template).

It is run by its path and imports nothing from athanor.
"""

import json
import resource
import signal
import sys
from typing import Any

import psutil
from jinja2 import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template


def main() -> None:
    """Answer requests until the input ends."""
    settings = json.loads(sys.stdin.buffer.readline())
    limit = psutil.Process().memory_info().vms + settings["memory"]
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    for line in sys.stdin.buffer:
        # The signal's default action ends the process, even in the middle of one long operation.
        signal.setitimer(signal.ITIMER_PROF, settings["cpu_seconds"])
        outcomes = [_render(settings, *request) for request in json.loads(line)]
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.buffer.write(json.dumps(outcomes).encode() + b"\n")
        sys.stdout.buffer.flush()


def _render(
    settings: dict[str, Any], messages: list[dict[str, Any]], add_generation_prompt: bool, thinks: bool, given: int
) -> tuple[str, str]:
    try:
        (text,), _ = render_jinja_template(
            [messages],
            chat_template=settings["template"],
            add_generation_prompt=add_generation_prompt,
            enable_thinking=thinks,
            **settings["variables"],
        )
    except TemplateError as error:
        return "refused", _short(error)
    except MemoryError:
        return "failed", f"needs over {settings['memory'] >> 20} MiB of memory"
    except Exception as error:  # a template is a program and can raise nearly any exception
        return "failed", f"fails with {type(error).__name__}: {_short(error)}"
    limit = settings["characters"] + settings["characters_per_given"] * given
    if len(text) > limit:
        return "failed", f"writes {len(text):,} characters for a conversation of {given:,}, over the limit of {limit:,}"
    return "text", text


def _short(error: Exception) -> str:
    return " ".join(str(error)[:1000].split())[:200]


if __name__ == "__main__":
    main()
