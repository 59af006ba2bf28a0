"""`athanor preview` as a user types it: it writes one file and prints its path, or one line if there is no artifact."""

import re
import shutil
from pathlib import Path

import pytest

from dataset_builders.storage.store import location
from flows.cli.main import main
from stages.shared.artifacts.artifact import Artifact
from stages.shared.artifacts.run_stage import run_stage
from stages.shared.inputs.model_directory import ModelDirectory, processor_input
from stages.tokenize.stage import STAGE, TokenizeConfig
from tests.helpers.object_store import BUCKET, moto_server
from tests.helpers.pages import assert_self_contained
from tests.helpers.samples import make_sample, make_samples_artifact
from tests.helpers.small_run import error_line
from tests.helpers.tiny_model import tiny_hf_dir


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("root")
    shards = {"train/shard-00000.tar": list(map(make_sample, range(8)))}
    made = make_samples_artifact(root / "artifacts" / "convert" / "new", shards)
    directory = made.dir.rename(made.dir.with_name(made.manifest.fingerprint))
    hf_dir = root / "artifacts" / "embedded_model" / ("e" * 16) / "hf"
    shutil.copytree(tiny_hf_dir(), hf_dir)
    inputs = {"samples": Artifact.load(directory), "processor": processor_input(ModelDirectory(hf_dir))}
    run_stage(STAGE, TokenizeConfig(max_seq_len=512, max_pixels=None, max_skip_fraction=1.0), inputs, root)
    return root


def _preview(*arguments: object) -> int:
    return main(["preview", *map(str, arguments)])


def test_a_page_is_written_below_the_root_and_its_path_printed(root, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (directory,) = (root / "artifacts" / "convert").iterdir()
    assert _preview("convert", "--root", root) == _preview(directory) == 0
    first, second = map(Path, capsys.readouterr().out.splitlines())
    name = f"convert-{directory.name[:8]}.html"
    assert (first, second) == (root / "previews" / name, tmp_path / "athanor-root" / "previews" / name)
    page = first.read_text(encoding="utf-8")
    assert_self_contained(page)
    assert all(make_sample(number).key in page for number in range(8))
    assert [path.name for path in first.parent.iterdir()] == [name], "nothing else is written"


def test_out_samples_and_key(root, tmp_path, capsys):
    out, key = tmp_path / "page.html", make_sample(5).key
    assert _preview("tokenize", "--root", root, "--out", out, "--key", key) == 0
    assert capsys.readouterr().out.strip() == str(out)
    assert out.read_text(encoding="utf-8").count("data-group=") == 1 and key in out.read_text(encoding="utf-8")
    assert _preview("tokenize", "--root", root, "--out", out, "--samples", "3") == 0
    assert out.read_text(encoding="utf-8").count("data-group=") == 3
    shard = next(root.glob("artifacts/tokenize/*/train/*.tar"))
    assert _preview(shard, "--root", root, "--out", out, "--model", tiny_hf_dir()) == 0
    assert ", train/shard-00000.tar</code>" in out.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["{tmp}/nothing"], "is not an artifact: it has no manifest.json"),
        (["plan_bins"], "give the directory of one, or one of its stages: convert, tokenize"),
        (["convert", "--samples", "0"], "--samples 0 is too few; give 1 or more"),
        (["convert", "--key", "a/00000000"], "--key a/00000000: no sample of"),
        (["convert", "--out", "{tmp}/no/page.html"], "is not a directory; make it or choose another"),
        (["tokenize", "--model", "nowhere"], "model 'nowhere' is not a directory here"),
    ],
)
def test_mistakes_are_one_line(root, tmp_path, capsys, arguments, words):
    assert _preview(*(word.format(tmp=tmp_path) for word in arguments), "--root", root) == 2
    assert words in error_line(capsys) and not list(tmp_path.iterdir())


@pytest.mark.parametrize("stage", ["convert", pytest.param("tokenize", marks=pytest.mark.full)])
def test_an_artifact_in_a_store_gives_the_same_page(root, tmp_path, stage, monkeypatch):
    monkeypatch.setenv("ATHANOR_CACHE_DIR", str(tmp_path / "cache"))
    local, remote = tmp_path / "local.html", tmp_path / "remote.html"
    (directory,) = (root / "artifacts" / stage).iterdir()
    assert _preview(stage, "--root", root, "--out", local) == 0
    with moto_server():
        store = location(f"s3://{BUCKET}/root")
        for file in (root / "artifacts").rglob("*"):
            if file.is_file() and file.suffix != ".safetensors":  # only the tokenizer is fetched
                store.fs.put_file(str(file), (store / str(file.relative_to(root))).path)
        assert _preview(store / "artifacts" / stage / directory.name, "--out", remote) == 0
        assert _without_links(remote) == _without_links(local)
        assert _preview(stage, "--root", store, "--out", remote, "--samples", "1") == 0
        assert _preview(store / "artifacts" / stage / "nothing", "--out", remote) == 2


def _without_links(page: Path) -> str:
    """Return the page without links. A page on this machine links its parents' reports; a page of a store does not."""
    return re.sub(r'<a href="[^>]*>(.*?)</a>', r"\1", page.read_text(encoding="utf-8"), flags=re.DOTALL)
