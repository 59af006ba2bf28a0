"""Which modules a job gets on which host, the line that says so, and what is refused."""

import re
from dataclasses import replace

import pytest

from dataset_builders.errors import InputError
from trainer.contract.modules import Host, check_precision, describe, modules_of

CPU = Host()
H200, A100, ADA = Host("NVIDIA H200", (9, 0)), Host("NVIDIA A100", (8, 0)), Host("NVIDIA L40S", (8, 9))
WITH_ENGINE = Host("NVIDIA H200", (9, 0), "2.11.0")
OLD_WITH_ENGINE = Host("NVIDIA A100", (8, 0), "2.11.0")
UNKNOWN = Host("NVIDIA X")  # whose capability the driver did not tell


@pytest.mark.parametrize(
    ("wanted", "host", "modules"),
    [
        ("auto", CPU, "exact"),
        ("plain", CPU, "exact"),
        ("auto", H200, "plain"),
        ("auto", UNKNOWN, "plain"),
        ("auto", ADA, "portable"),
        ("plain", A100, "portable"),
        ("portable", H200, "portable"),
        ("auto", WITH_ENGINE, "engine"),
        ("engine", WITH_ENGINE, "engine"),
        ("plain", WITH_ENGINE, "plain"),
        ("portable", WITH_ENGINE, "portable"),
        ("auto", OLD_WITH_ENGINE, "engine"),
    ],
)
def test_choice(wanted, host, modules):
    assert modules_of(wanted, host) == modules


@pytest.mark.parametrize("host", [CPU, H200])
def test_an_engine_that_is_not_there_is_refused(host):
    with pytest.raises(InputError, match=r"^execution.modules=engine: .*set execution.modules=auto$"):
        modules_of("engine", host)


def test_the_line_names_the_modules_and_what_the_engine_would_gain():
    assert describe("auto", CPU) == "plain torch, on a CPU"
    all_there = replace(WITH_ENGINE, flash="4.0.0b36")
    assert describe("auto", all_there) == "Transformer Engine 2.11.0, FlashAttention 4.0.0b36, on NVIDIA H200"
    assert describe("plain", all_there).startswith("plain torch, FlashAttention 4.0.0b36 and our kernels, on NVIDIA")
    assert "Flash" not in describe("portable", all_there) + describe("auto", replace(OLD_WITH_ENGINE, flash="4.0.0b36"))
    missing, no_flash = (
        rf"{library} is not installed \(make gpu installs it; it trains about 1\.\d+ times as fast\)"
        for library in ("Transformer Engine", "FlashAttention 4")
    )
    assert re.fullmatch(rf"Transformer Engine 2.11.0, on NVIDIA H200; {no_flash}", describe("auto", WITH_ENGINE))
    assert re.fullmatch(rf"plain torch and our kernels, on NVIDIA H200; {missing}; {no_flash}", describe("auto", H200))
    old = r"they need compute capability 9\.0, and it has 8\.0"
    assert re.match(rf"plain torch without our kernels, on NVIDIA A100; {old}; {missing}$", describe("auto", A100))
    assert describe("plain", all_there).endswith("on NVIDIA H200; execution.modules=plain")
    assert describe("portable", WITH_ENGINE).startswith("plain torch without our kernels, on NVIDIA H200; execution.")
    assert re.match(rf"Transformer Engine 2.11.0, without our kernels \({old}\)", describe("auto", OLD_WITH_ENGINE))


@pytest.mark.parametrize(
    ("wanted", "host", "words"),
    [
        ("auto", CPU, "needs a GPU of the Hopper generation or newer, not a CPU"),
        ("auto", A100, "needs a GPU of the Hopper generation or newer, not NVIDIA A100"),
        ("auto", H200, "needs Transformer Engine, which is not installed: make gpu installs it"),
        ("plain", WITH_ENGINE, "needs Transformer Engine, and this job is execution.modules=plain"),
    ],
)
def test_float8_without_what_it_needs_is_refused_with_the_way_out(wanted, host, words):
    with pytest.raises(InputError, match=re.escape(words)) as caught:
        check_precision("float8", wanted, host)
    assert str(caught.value).endswith("set train.precision=bfloat16")
    check_precision("bfloat16", wanted, host)
    check_precision("float8", "auto", WITH_ENGINE)
