"""The choice of the modules that a job trains with. The trainer makes it on its GPU; `run` and `plan` make it before
the first stage if the training runs on this host.

    engine     Transformer Engine's, on CUDA
    plain      torch's and megatron-core's, with our Triton kernels
    portable   the same without our kernels: for GPUs on which the kernels were never tried
    exact      for a CPU
"""

from dataclasses import dataclass, replace
from typing import Literal

from dataset_builders.errors import InputError

Wanted = Literal["auto", "engine", "plain", "portable"]
Modules = Literal["engine", "plain", "portable", "exact"]

# Our Triton kernels were only tested on Hopper; most are ordinary Triton and might run on Ampere and Ada (8.0 to 8.9).
# Below this capability a job takes the portable modules by default.
KERNEL_CAPABILITY = (9, 0)
FLOAT8_CAPABILITY = (8, 9)
ENGINE_GAIN = 1.1  # tokens per second on an H200: Qwen3-VL-2B 25,480 against 22,558, Qwen3.5-2B 25,491 against 22,774
FLASH_GAIN = 1.05  # Qwen3-VL-2B 28,553 against 27,109, both with Transformer Engine, on one H200
INSTALL = "make gpu"


@dataclass(frozen=True, slots=True)
class Host:
    """The GPU and the library that a training runs on."""

    gpu: str = ""  # name of the GPU; "" if there is none that torch can use
    capability: tuple[int, int] | None = None  # the GPU's compute capability; None if it is unknown
    engine: str = ""  # version of Transformer Engine; "" if it is not installed
    flash: str = ""  # version of FlashAttention 4; "" if it is not installed

    @property
    def has_flash(self) -> bool:
        """Whether FlashAttention 4 computes attention on this GPU: only Hopper was there to try it."""
        return bool(self.flash) and self.capability is not None and self.capability[0] == KERNEL_CAPABILITY[0]

    @property
    def has_kernels(self) -> bool:
        """Whether our Triton kernels run on this GPU."""
        return bool(self.gpu) and (self.capability is None or self.capability >= KERNEL_CAPABILITY)


def modules_of(wanted: Wanted, host: Host) -> Modules:
    """Return the name of the module set for this host."""
    if wanted == "engine" and not (host.engine and host.gpu):
        why = f"is not installed ({INSTALL} installs it)" if host.gpu else "needs an NVIDIA GPU, and here is none"
        raise InputError(f"execution.modules=engine: Transformer Engine {why}; or set execution.modules=auto")
    if not host.gpu:
        return "exact"
    if wanted in ("engine", "portable") or (wanted == "auto" and host.engine):
        return "engine" if wanted == "auto" else wanted
    return "plain" if host.has_kernels else "portable"


def check_precision(precision: str, wanted: Wanted, host: Host) -> None:
    """Check that the host can compute in a precision."""
    if precision != "float8":
        return
    way_out = "set train.precision=bfloat16"
    if not host.gpu or (host.capability is not None and host.capability < FLOAT8_CAPABILITY):
        where = host.gpu or "a CPU"
        raise InputError(
            f"train.precision=float8 needs a GPU of the Hopper generation or newer, not {where}; {way_out}"
        )
    if modules_of(wanted, host) != "engine":
        why = f"is execution.modules={wanted}" if host.engine else f"is not installed: {INSTALL} installs it"
        beside = "and this job" if host.engine else "which"
        raise InputError(f"train.precision=float8 needs Transformer Engine, {beside} {why}; or {way_out}")


def describe(wanted: Wanted, host: Host) -> str:
    """Describe the modules of a job in one line, with the speed that a missing library would add."""
    modules = modules_of(wanted, host)
    if modules == "exact":
        return "plain torch, on a CPU"
    if modules == "engine":
        kernels = "" if host.has_kernels else f", without our kernels ({_too_old(host)})"
        names = f"Transformer Engine {host.engine}{_flash(host)}{kernels}"
        return "; ".join([f"{names}, on {host.gpu}", *_without_flash(host)])
    names = f"plain torch{_flash(host)} and our kernels" if modules == "plain" else "plain torch without our kernels"
    reasons = [_too_old(host)] if modules == "portable" and not host.has_kernels else []
    if host.engine or wanted != "auto":
        reasons.append(f"execution.modules={wanted}")
    if not host.engine:
        reasons.append(_missing("Transformer Engine", ENGINE_GAIN))
    if modules == "plain":
        reasons += _without_flash(host)
    return f"{names}, on {host.gpu}; {'; '.join(reasons)}"


def _missing(library: str, gain: float) -> str:
    return f"{library} is not installed ({INSTALL} installs it; it trains about {gain} times as fast)"


def _without_flash(host: Host) -> list[str]:
    would_run = replace(host, flash="any").has_flash
    return [_missing("FlashAttention 4", FLASH_GAIN)] if would_run and not host.flash else []


def _flash(host: Host) -> str:
    return f", FlashAttention {host.flash}" if host.has_flash else ""


def _too_old(host: Host) -> str:
    needed, has = (".".join(map(str, pair)) for pair in (KERNEL_CAPABILITY, host.capability or (0, 0)))
    return f"they need compute capability {needed}, and it has {has}"
