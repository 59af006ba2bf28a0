"""A comparison of the private parts of a library with the record of what our code was written for.

`python -m tests.helpers.private_parts MODULE` prints what the function `changes` of a test module yields. The tests run
it in a process of their own, because other tests replace the parts that are compared.
"""

import importlib.metadata
import inspect
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter

import pytest

from tests.test_architecture import ROOT

_MARK = "changed: "
Parameters = Sequence[str] | None  # as written in a signature: "x", "y=None", "*"; None: only the name counts


def changed(recorded: Mapping[str, Parameters], *, may_gain: bool = False) -> Iterator[str]:
    """Yield a phrase for each recorded part that the installed library lacks, or has with other parameters.

    Args:
        recorded: "module:name" -> its parameters.
        may_gain: whether more parameters with defaults are no change, for a library of which several versions fit.
    """
    for name, parameters in recorded.items():
        module, _, path = name.partition(":")
        try:
            part = attrgetter(path)(importlib.import_module(module))
        except (ImportError, AttributeError):
            yield f"{name} is gone"
            continue
        if parameters is not None and (difference := _difference(list(parameters), parameters_of(part), may_gain)):
            yield f"{name} {difference}"


def differing(name: str, found: Iterable[str], recorded: Iterable[str]) -> Iterator[str]:
    """Yield a phrase if a set of names is not as recorded."""
    lost, gained = sorted(set(recorded) - set(found)), sorted(set(found) - set(recorded))
    if lost or gained:
        changes = [f"lost {', '.join(lost)}"] * bool(lost) + [f"gained {', '.join(gained)}"] * bool(gained)
        yield f"{name} {' and '.join(changes)}"


def unmentioned(function: Callable, *names: str) -> Iterator[str]:
    """Yield a phrase if the code of a Python function does not use these names, attributes and strings."""
    code = function.__code__
    used = {*code.co_names, *(value for value in code.co_consts if isinstance(value, str))}
    yield from differing(f"{function.__module__}:{function.__qualname__}", used & {*names}, names)


def fail_if_changed(package: str, module: str) -> None:
    """Fail with one line if `changes` of a test module yields anything, or fails."""
    command = [sys.executable, "-m", "tests.helpers.private_parts", module]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    found = [line.removeprefix(_MARK) for line in done.stdout.splitlines() if line.startswith(_MARK)]
    if done.returncode:
        found.append(done.stderr.strip().splitlines()[-1])
    if found:
        pytest.fail(f"{package} {importlib.metadata.version(package)}: {'; '.join(found)}", pytrace=False)


def parameters_of(part: object) -> list[str]:
    """Return the parameters of a Python function, of a torch operator, or of a C++ function by its docstring."""
    if (operator := getattr(part, "default", None)) is not None and hasattr(operator, "_schema"):
        return [f"{arg.name}{'=' * arg.has_default_value()}" for arg in operator._schema.arguments]
    try:
        parameters = inspect.signature(part).parameters.values()
    except (TypeError, ValueError):
        return re.findall(r"(\w+): ", str(part.__doc__).split("->")[0])
    texts, kinds = [], [parameter.kind for parameter in parameters]
    for parameter in parameters:
        is_first = parameter.kind is parameter.KEYWORD_ONLY and "*" not in texts
        if is_first and parameter.VAR_POSITIONAL not in kinds:
            texts.append("*")
        texts.append(str(parameter.replace(annotation=parameter.empty)).replace(" = ", "="))
    return texts


def _difference(recorded: list[str], found: list[str], may_gain: bool) -> str:
    lost = [text for text in recorded if text not in found]
    gained = [text for text in found if text not in recorded and not (may_gain and "=" in text)]
    changes = [f"lost parameter {', '.join(lost)}"] * bool(lost) + [f"gained {', '.join(gained)}"] * bool(gained)
    if not changes and [text for text in found if text in recorded] != recorded:
        changes = [f"has its parameters in the order {', '.join(found)}"]
    return " and ".join(changes)


if __name__ == "__main__":
    for phrase in importlib.import_module(sys.argv[1]).changes():
        print(_MARK, phrase, sep="")
