"""The Python that has vLLM: this one, or the one that ATHANOR_VLLM_PYTHON names.

vLLM pins torch, FastAPI and other packages to releases that are not resolved beside ours (docs/serve.md), so it may
have an environment of its own. Nothing of athanor is imported there: `stages/answer/vllm_process.py` and
`stages/verify/loaders.py` are run by their path.
"""

import functools
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from dataset_builders.errors import InputError, in_ascii, one_line

VLLM_PYTHON = "ATHANOR_VLLM_PYTHON"
TESTED = "0.24.0"
_OLDEST = (
    0,
    24,
)  # has SamplingParams.logprob_token_ids and a processor that mm_processor_cache_gb=0 leaves without cache
_ORIGIN = "import importlib.util as u; spec = u.find_spec('vllm'); print(spec.origin if spec and spec.origin else '')"
_LOOK_SECONDS = 60


class VllmPython(NamedTuple):
    """A Python that has vLLM."""

    path: str
    version: str  # of vLLM

    def environment(self) -> dict[str, str]:
        """Return what is added to the environment of a process that runs vLLM; what is set already stays."""
        # One process needs only the loopback: without an address vLLM looks its own host name up, and waits for ever
        # where no name server answers. The others: no report of its use to its makers, nothing from the hub.
        wanted = {"VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
        wanted |= {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
        # The engine in the process itself: its errors are then told by their cause, and nothing outlives a killed one.
        wanted |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1"}
        return {name: value for name, value in wanted.items() if name not in os.environ}


def find_vllm() -> VllmPython | None:
    """Return the Python that has vLLM; None if the variable is not set and this one has none that can be used.

    Raises:
        InputError: the variable names something that cannot run vLLM.
    """
    found = _look(os.environ.get(VLLM_PYTHON, ""))
    if isinstance(found, str):
        if os.environ.get(VLLM_PYTHON):
            raise InputError(found)
        return None
    return found


def check_vllm() -> VllmPython:
    """Return the Python that has vLLM; InputError if there is none."""
    found = _look(os.environ.get(VLLM_PYTHON, ""))
    if isinstance(found, str):
        raise InputError(found)
    return found


@functools.cache
def _look(named: str) -> VllmPython | str:
    """Return the Python that has vLLM, or why there is none, in one line. vLLM is not imported."""
    python, about = named or sys.executable, f"{VLLM_PYTHON}={named}" if named else sys.executable
    if named and not (Path(named).is_file() and os.access(named, os.X_OK)):
        return f"{about} is no program; give the Python of the environment that has vLLM, as /opt/vllm/bin/python"
    try:
        done = subprocess.run(
            [python, "-c", _ORIGIN],
            env={**os.environ, "PYTHONSAFEPATH": "1"},
            capture_output=True,
            text=True,
            timeout=_LOOK_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{about} does not run ({one_line(error)}); give the Python of the environment that has vLLM"
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it printed nothing"])[-1]
        return f"{about} does not run Python ({in_ascii(last[:200])}); give the one that has vLLM"
    origin = done.stdout.strip()
    if not origin:
        if named:
            return f"{about} has no vllm; install vllm=={TESTED} there, or unset {VLLM_PYTHON}"
        return (
            f"evaluate.engine is 'vllm', which is not installed here; set {VLLM_PYTHON} to the Python of an "
            f"environment that has vllm=={TESTED}, or use engine=transformers"
        )
    file = Path(origin).with_name("_version.py")
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    found = re.search(r"^__version__ = .*?(\d+)\.(\d+)([.\w+]*)", text, re.MULTILINE)
    if found is None or (int(found[1]), int(found[2])) < _OLDEST:
        version = f"{found[1]}.{found[2]}{found[3]}" if found else "of a version that it does not name"
        oldest = ".".join(map(str, _OLDEST))
        return f"{about} has vllm {version}, and {oldest} or newer is needed; install vllm=={TESTED} there"
    return VllmPython(python, f"{found[1]}.{found[2]}{found[3]}")
