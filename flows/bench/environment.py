"""The Python that runs lmms-eval: an environment of its own, made once in the root, or one that the user names.

lmms-eval asks for older versions of some packages than athanor has, so the two do not share an environment. The own
environment sees athanor's packages behind its own, so that torch and transformers are those that trained the model, and
only the packages that differ are downloaded.
"""

import importlib.metadata
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from dataset_builders.errors import InputError
from dataset_builders.storage.files import write_text
from stages.evaluate.lmms_eval.task import INSTALL, LMMS_EVAL

_PACKAGES = INSTALL.split()[2:]
_SAME = ("torch", "transformers")  # packages that must be the versions of the training
_CPU_BUILDS = "https://download.pytorch.org/whl/cpu"
_STAMP = "athanor-installed.txt"
_VERSION = "import importlib.metadata as m, decord, lmms_eval, torchvision; print(m.version('lmms-eval'))"


def lmms_eval_python(given: Path | None, directory: Path) -> Path:
    """Return the Python that runs lmms-eval.

    Args:
        given: the Python that the user names; None: the one of an environment in `directory`, which is made if needed.

    Raises:
        InputError: the given Python cannot import lmms-eval, or lmms-eval cannot be installed.
    """
    if given is not None:
        return _checked(given)
    python = directory / "bin" / "python"
    wanted = " ".join([*_PACKAGES, *_pins()])
    stamp = directory / _STAMP
    if not (stamp.is_file() and stamp.read_text(encoding="utf-8") == wanted):
        print(f"Installing lmms-eval {LMMS_EVAL} into {directory}, once; --python names an environment that has it")
        _install(directory, python)
        write_text(stamp, wanted)
    return python


def _checked(python: Path) -> Path:
    python = Path(shutil.which(str(python)) or python).absolute()
    try:
        done = subprocess.run([str(python), "-c", _VERSION], capture_output=True, text=True, check=False)
    except OSError as error:
        raise InputError(f"--python {python}: {error.strerror}; give the path of a Python that has lmms-eval") from None
    version = done.stdout.strip()
    if done.returncode or not version:
        how = f"{python} -m {INSTALL}"
        raise InputError(f"--python {python} cannot import lmms-eval ({_last_line(done.stderr)}); install it: {how}")
    if version != LMMS_EVAL:
        print(f"lmms-eval {version} of {python}; athanor was tested with {LMMS_EVAL}")
    return python


def _install(directory: Path, python: Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    _run([sys.executable, "-m", "venv", str(directory)])
    paths = subprocess.run(
        [str(python), "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"], capture_output=True, text=True
    )
    write_text(Path(paths.stdout.strip()) / "athanor.pth", sysconfig.get_paths()["purelib"] + "\n")
    pins = directory / "constraints.txt"
    write_text(pins, "\n".join(_pins()) + "\n")
    # Beside a CPU build of torch, torchvision must be a CPU build too; PyPI has only the one for CUDA.
    index = ["--extra-index-url", _CPU_BUILDS] if importlib.metadata.version("torch").endswith("+cpu") else []
    _run([str(python), "-m", "pip", "install", "--quiet", "-c", str(pins), *index, *_PACKAGES])
    _run([str(python), "-c", _VERSION])


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise InputError(
            f"lmms-eval cannot be installed ({_last_line(done.stderr)}); `{INSTALL}` in an "
            "environment of its own, and name its Python with --python"
        )


def _pins() -> list[str]:
    return [f"{name}=={importlib.metadata.version(name)}" for name in _SAME]


def _last_line(text: str) -> str:
    """Return the last line that names an error, or the last line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.lower().startswith("error")]
    return ([*lines[-1:], *errors[-1:]] or ["no message"])[-1]
