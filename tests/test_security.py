"""Prefect stores no pickles, settings and URLs hold no secrets, archives write nothing outside; see
test_unsafe_code."""

import ast
import io
import os
import re
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import pytest
from pydantic import BaseModel, SecretStr

from dataset_builders.errors import InputError
from dataset_builders.sources.registry import BUILDERS, get_builder
from flows.pipeline.config import PipelineConfig
from flows.pipeline.recipe import load_recipe
from stages.shared.inputs import model_directory, raw_source
from tests.helpers.document_tables import models_in
from tests.helpers.json_rows import read_source, write_file
from tests.helpers.raw_rows import png
from tests.test_architecture import MODULES, ROOT, name_of

pytestmark = pytest.mark.promise(
    "Secrets appear in no file, log, database or command line of a run, servers ask for a login, and no "
    "foreign pickle or code runs."
)

KEPT_RESULTS = """
import importlib, sys
from prefect import Flow, Task
found = {}
for name in sys.argv[1:]:
    found |= {(name, key): x for key, x in vars(importlib.import_module(name)).items() if isinstance(x, Flow | Task)}
print(*sorted({x.name for x in found.values()}))
print(*[f"{module}.{key}" for (module, key), x in found.items() if x.persist_result is not False])
"""


@pytest.mark.full
def test_prefect_keeps_no_results(tmp_path):
    """Prefect's results would be pickles. Tested in a new process, because Prefect reads its home at its import."""
    names = [name_of(path) for path in MODULES if "prefect" in path.read_text() and name_of(path).startswith("flows.")]
    environment = {**os.environ, "PREFECT_HOME": str(tmp_path)}
    command = [sys.executable, "-c", KEPT_RESULTS, *names]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=ROOT, check=True)
    names, kept = done.stdout.splitlines()
    assert {"prepare-data", "vlm-sft", "evaluate", "stage_task", "register"} <= set(names.split()) and kept == ""


def fields(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, object]]:
    for name, field in model.model_fields.items():
        yield prefix + name, field.annotation
        for inner in models_in(field.annotation):
            yield from fields(inner, f"{prefix}{name}.")


SECRET_WORDS = re.compile(r"(?i)(^|_)(password|passwd|secret|token|credentials?|api_?key|access_?key|auth)(_|$)")


def test_no_setting_holds_a_secret():
    """Settings are in logs, manifests, Prefect's database and MLflow, so secrets come only from the environment."""
    models = [PipelineConfig, *(get_builder(name).options for name in BUILDERS)]
    everything = dict(pair for model in models for pair in fields(model))
    assert len(everything) > 80 and SECRET_WORDS.search("hub_token") and SECRET_WORDS.search("s3_access_key")
    found = [name for name in everything if SECRET_WORDS.search(name.rpartition(".")[2])]
    assert found == []
    assert not any(annotation is SecretStr for annotation in everything.values())


@pytest.mark.parametrize("module", [model_directory, raw_source])
def test_the_hubs_token_is_read_from_the_environment(module, monkeypatch):
    """No code passes a token. huggingface_hub itself finds HF_TOKEN, or the token that `hf auth login` stored."""
    calls = [n for n in ast.walk(ast.parse(Path(module.__file__).read_text())) if isinstance(n, ast.Call)]
    downloads = [call for call in calls if ast.unparse(call.func).endswith("snapshot_download")]
    assert downloads and not any(keyword.arg == "token" for call in downloads for keyword in call.keywords)
    monkeypatch.setenv("HF_TOKEN", "hf_fromtheenvironment")
    assert huggingface_hub.get_token() == "hf_fromtheenvironment"


URLS = ["s3://AKIAKEY:canary/with+slash@bucket/data", "https://me:canary@host/x", "s3://canary@bucket"]


@pytest.mark.parametrize("field", ["data", "model", "execution.dask_address"])
@pytest.mark.parametrize("url", URLS)
def test_a_password_in_a_url_is_refused_and_not_shown(field, url):
    with pytest.raises(InputError, match="a URL must not carry a key or password") as caught:
        load_recipe(overrides=[f"{field}={url}"])
    chain, seen = caught.value, []
    while chain is not None:
        seen.append(f"{chain!s}{chain!r}")
        chain = chain.__cause__ or chain.__context__
    assert field in seen[0] and "...@" in seen[0] and "\n" not in str(caught.value)
    assert "canary" not in "".join(seen)


OUTSIDE = ["../../escaped.png", "/tmp/athanor-escaped.png", "a/../../../escaped.png", "a\\..\\escaped.png"]


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_member_of_a_tar_writes_nothing_outside(tmp_path, name):
    """Members are read inside the archive. Their names become keys of samples and never paths."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for suffix, data in ((".png", png(1)), (".txt", b"one")):
            info = tarfile.TarInfo(name.removesuffix(".png") + suffix)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
        for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE):
            info = tarfile.TarInfo("link.png")
            info.type, info.linkname = kind, "/etc/hostname"
            tar.addfile(info)
    source = tmp_path / "deep" / "source"
    write_file(source / "s/00000.tar", out.getvalue())
    before = sorted(tmp_path.rglob("*"))
    options = {"question": "constant:What is it?", "answer": "txt"}
    items = read_source("webdataset_tars", source, **options)
    assert [item.key for item in items] == ["s/00000000", "s/00000001"] and items[1].reason == "duplicate_key"
    assert sorted(tmp_path.rglob("*")) == before and not Path("/tmp/athanor-escaped.png").exists()
