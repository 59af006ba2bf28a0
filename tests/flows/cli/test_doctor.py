"""The doctor: it names each missing part with the way out, and only a missing part makes the machine unfit."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from packaging.requirements import Requirement

from flows.cli import doctor
from flows.cli.main import main


def test_this_machine_is_fit(tmp_path, capsys):
    assert main(["doctor", "--root", str(tmp_path / "not" / "there")]) == 0
    text = capsys.readouterr().out
    assert "python" in text and "requirements fit" in text and "cores" in text
    assert "Everything that `athanor run` needs is here." in text


@pytest.mark.parametrize(
    ("version", "state"), [((3, 10), "missing"), ((3, 11), "ok"), ((3, 12), "ok"), ((3, 13), "missing")]
)
def test_python(version, state):
    finding = doctor.check_python(version)
    assert finding.state == state and ("install Python 3.11 or 3.12" in finding.way_out) == (state == "missing")


def test_requirements_that_do_not_fit():
    assert doctor.check_requirement(Requirement("numpy>=1")) is None
    too_new = doctor.check_requirement(Requirement("numpy<1"))
    assert too_new.state == "missing" and too_new.value.endswith(", needed: numpy<1")
    assert too_new.way_out == "pip install -c constraints.txt -e ."
    assert doctor.check_requirement(Requirement("no-such-thing==1")).value.startswith("not installed")


def test_versions_other_than_the_tested_ones_are_a_note(tmp_path):
    (tmp_path / "constraints.txt").write_text("# comment\nnumpy==0.1  # old\nno-such-thing==1\n")
    finding = doctor.check_tested_versions(tmp_path, has_gpu=False)
    assert finding.state == "note" and "(tested: 0.1)" in finding.value and finding.way_out.startswith("pip install")
    (tmp_path / "constraints.txt").write_text("no-such-thing==1\n")
    assert doctor.check_tested_versions(tmp_path, has_gpu=False).state == "ok"


def test_on_a_gpu_the_tested_versions_are_those_of_the_gpu_stack(tmp_path):
    (tmp_path / "constraints.txt").write_text("numpy==0.1\n")
    assert doctor.check_tested_versions(tmp_path, has_gpu=True).value == "no constraints.txt here"
    (tmp_path / "constraints-gpu.txt").write_text("NumPy==0.2\n")
    finding = doctor.check_tested_versions(tmp_path, has_gpu=True)
    assert finding.state == "note" and "(tested: 0.2)" in finding.value and "0.1)" not in finding.value
    assert finding.way_out == "make gpu"


def test_a_small_disk_is_missing_something(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: SimpleNamespace(free=1e8))
    assert main(["doctor", "--root", str(tmp_path)]) == 1
    text = capsys.readouterr().out
    assert "0.1 GB free" in text and "choose another --root" in text and "Missing: disk." in text


def test_a_gpu_without_the_engine_is_slower_and_says_what_mends_it(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(doctor, "ask_driver", lambda *_: ["NVIDIA H200, 143771 MiB"] * 8)
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None)
    gpu, engine = doctor.check_gpus(["NVIDIA H200, 143771 MiB"] * 8)
    assert gpu.value == "8 x NVIDIA H200, 143771 MiB"
    assert engine.state == "note" and "slower" in engine.value and engine.way_out == "make gpu"
    assert main(["doctor", "--root", str(tmp_path)]) == 0 and "make gpu" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("capabilities", "version", "state", "words"),
    [
        (["9.0", "9.0"], "4.0.0b36", "ok", "4.0.0b36"),
        (["9.0"], "", "note", "not installed"),
        (["8.9"], "", "ok", "needs compute capability 9.0, and the GPU has 8.9"),
    ],
)
def test_flash_attention_where_the_gpu_can_use_it(monkeypatch, capabilities, version, state, words):
    monkeypatch.setattr(doctor, "installed_version", lambda name: version)
    (finding,) = doctor.check_flash(capabilities)
    assert finding.state == state and words in finding.value
    assert finding.way_out == (
        "make gpu, or without a compiler: pip install -c constraints.txt -e '.[flash]'" if state == "note" else ""
    )
    assert doctor.check_flash([]) == []


def test_no_network_is_a_note():
    finding = doctor.check_network("http://127.0.0.1:9")
    assert finding.state == "note" and "give directories" in finding.way_out


def test_constraints_pin_every_requirement():
    names = {
        line.partition("==")[0].lower() for line in Path("constraints.txt").read_text().splitlines() if "==" in line
    }
    declared = [Requirement(r) for r in doctor.importlib.metadata.requires("athanor-vlm") if "extra ==" not in r]
    missing = {r.name.lower() for r in declared} - {name.replace("_", "-") for name in names} - names
    assert not missing
