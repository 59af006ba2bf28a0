"""A request cannot name a path outside the root and the service's directories, however the path is spelled."""

import json
import os
import re
from pathlib import Path

import pytest

from dataset_builders.errors import InputError
from dataset_builders.storage.row_objects import DATA_STORES_VARIABLE, named_stores
from dataset_builders.storage.store import location
from flows.pipeline.config import PipelineConfig
from flows.pipeline.recipe import load_recipe
from flows.service.request import CORES_AT_MOST, DATA_DIRS_VARIABLE, RECIPE_ONLY, check_request_paths, is_recipe_only

pytestmark = pytest.mark.promise(
    "A page of another origin, another user of the machine, and somebody with the password run no command."
)


def config(**changes: object) -> PipelineConfig:
    return load_recipe(overrides=[f"{k.replace('__', '.')}={json.dumps(v)}" for k, v in changes.items()]).config


@pytest.fixture
def root(tmp_path, monkeypatch) -> Path:
    monkeypatch.delenv(DATA_DIRS_VARIABLE, raising=False)
    monkeypatch.delenv(DATA_STORES_VARIABLE, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in ("root/raw", "outside", "cwd", "home", "root-too"):
        (tmp_path / name).mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "cwd")
    (tmp_path / "root" / "link-out").symlink_to(tmp_path / "outside")
    (tmp_path / "root" / "link-in").symlink_to(tmp_path / "root" / "raw")
    (tmp_path / "root" / "ring").symlink_to(tmp_path / "root" / "ring")
    (tmp_path / "outside" / "way-in").symlink_to(tmp_path / "root" / "raw")
    (tmp_path / "cwd" / "owner").mkdir()
    (tmp_path / "cwd" / "owner" / "name").symlink_to(tmp_path / "outside")
    return tmp_path / "root"


def refusal(root: Path, **changes: object) -> str:
    with pytest.raises(InputError) as caught:
        check_request_paths(config(**changes), root)
    assert "\n" not in str(caught.value)
    return str(caught.value)


FIELDS = ["data", "model", "start_adapter"]
INSIDE = ["{root}/raw", "{root}", "{root}/raw/../raw", "{root}/link-in", "{root}/not-there-yet", "{top}/outside/way-in"]
OUTSIDE = [
    *("/etc", "/", ".", "..", "../root/../outside", "~", "~/x", "~root/x", "{top}/outside", "{top}/root-too"),
    *("{root}/..", "{root}/../outside", "{root}/link-out", "{root}/link-out/below", "{root}/raw/../../outside"),
    *("/proc/self/root/etc", "{root}/../root/../outside", "//etc/passwd", "/{root}/../outside", "owner/name"),
    *("owner/../../outside", "./owner/name", "a/b/c", "one", " /etc", "%2e%2e/outside", "..\\outside"),
]
ADDRESSES = [
    *("file:///etc", "FILE:///etc", "local:///etc", "file://{root}/raw", "http://127.0.0.1:4200/api", "https://x/y"),
    *("memory://x", "ftp://x/y", "ssh://x/y", "github://org/", "simplecache::s3://b/x", "simplecache::file:///etc"),
    *("zip://x::file:///etc/a.zip", "s3://b/x::file:///etc", "s3://b/../x", "s3:///etc", "s3://../x", "reference://x"),
]


@pytest.mark.parametrize("field", FIELDS)
def test_below_the_root(root, field):
    for text in INSIDE:
        check_request_paths(config(**{field: text.format(root=root, top=root.parent)}), root)


def check_refused(root: Path, field: str, texts: list[str], expected: str) -> None:
    """Check that each text is refused by the expected line."""
    for text in texts:
        with pytest.raises(InputError) as caught:  # credentials in an address are refused by the configuration itself
            check_request_paths(config(**{field: text.format(root=root, top=root.parent)}), root)
        assert re.fullmatch(expected, str(caught.value)), text


@pytest.mark.parametrize("field", FIELDS)
def test_out_of_the_root(root, field):
    expected = rf"{field}=.* which a request may not name; give a path below .*{DATA_DIRS_VARIABLE}.*"
    check_refused(root, field, OUTSIDE, expected)


def test_each_of_several_sources(root):
    columns = {"image": "i", "question": "q", "answer": "a"}
    several = {"convert__builder": None, "convert__options": {}}

    def sources(second: str, image_root: str = "") -> list[dict]:
        options = {**columns, "image_root": image_root}
        pairs = [("a", f"{root}/raw"), ("b", second)]
        return [{"name": name, "source": source, "builder": "table", "options": options} for name, source in pairs]

    check_request_paths(config(data=sources("org/name", "pictures"), **several), root)
    assert refusal(root, data=sources("/etc"), **several).startswith("data.1.source='/etc' leads to '/etc', which")
    assert refusal(root, data=sources(f"{root}/raw", "/etc"), **several).startswith("data.0.options.image_root='/etc'")


@pytest.mark.parametrize("field", FIELDS)
def test_addresses_that_are_no_object_stores(root, field):
    check_refused(root, field, ADDRESSES, rf"({field}=|recipe embedded with --set).*")


@pytest.mark.parametrize("field", FIELDS)
def test_hub_names(root, field):
    check_request_paths(config(**{field: "Qwen/Qwen3-VL-2B-Instruct"}), root)


STORES = [
    *("s3://169.254.169.254", "s3://169.254.169.254/latest/meta-data", "abfs://c@127.0.0.1", "az://x@evil.example/y"),
    *("s3://bucket/a/b", "gs://bucket", "hf://datasets/a/b", "abfs://box@account/x"),
]


@pytest.mark.parametrize("field", FIELDS)
def test_no_store_unless_the_service_names_it(root, monkeypatch, field):
    expected = rf"{field}=.* a store of the service, which has none.*{DATA_STORES_VARIABLE}.*"
    check_refused(root, field, STORES, expected)
    for text in STORES:
        monkeypatch.setenv(DATA_STORES_VARIABLE, f"gs://other, {text}/ s3://third/x")
        check_request_paths(config(**{field: f"{text}/below"}), root)
        others = [f"{text}-too/below", f"{text}/../x", f"{text}/x::file:///etc", "gs://oth", "s3://third"]
        check_refused(root, field, others, ".*not an address that a request may name.*")


def test_stores_of_the_recipe_and_the_root(root):
    recipe = config(data="s3://bucket/sets", model="hf://models/one")
    for field, text in (("data", "s3://bucket/sets/a"), ("model", "s3://bucket/sets/m"), ("data", "s3://runs/x/y")):
        check_request_paths(config(**{"data": "s3://bucket/sets", field: text}), location("s3://runs/x"), recipe)
    with pytest.raises(InputError, match="s3://bucket/sets or hf://models/one or s3://runs/x"):
        check_request_paths(config(data="s3://bucket/set"), location("s3://runs/x"), recipe)


@pytest.mark.parametrize("text", ["bucket/sets", "file:///etc", "http://127.0.0.1", "s3://a/../b", "/data"])
def test_a_wrong_list_of_stores_is_told(monkeypatch, text):
    monkeypatch.setenv(DATA_STORES_VARIABLE, f"s3://right {text}")
    with pytest.raises(InputError, match=f"{DATA_STORES_VARIABLE}: .* is not the URL of an object store"):
        named_stores()


@pytest.mark.parametrize("field", CORES_AT_MOST)
def test_a_request_takes_no_more_than_the_machine_has(root, monkeypatch, field):
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    name = field.replace(".", "__")
    batch = {"train__global_batch_size": 12}
    check_request_paths(config(**{name: 3}, **batch), root)
    assert refusal(root, **{name: 4}, **batch) == f"{field}=4 is more than a request may ask for here; give 3 or less"
    check_request_paths(config(**{name: 4}, **batch), root, config(**{name: 4}, **batch))


def test_directories_of_the_service(root, monkeypatch):
    monkeypatch.setenv(DATA_DIRS_VARIABLE, os.pathsep.join(["", str(root.parent / "outside"), " ", "/nowhere"]))
    check_request_paths(config(data=f"{root.parent}/outside/x"), root)
    check_request_paths(config(data=f"{root}/link-out"), root)
    check_request_paths(config(data=f"{root}/raw"), root)
    assert "/nowhere" in refusal(root, data="/etc")
    assert "leads to" in refusal(root, data=f"{root.parent}/outside-too")


def test_a_root_in_a_store_allows_no_path_of_this_machine(root):
    away = location("memory://runs")
    assert "an object store" in refusal(away, data=f"{root}/raw")


@pytest.mark.parametrize("text", ["\0", "/etc\0", "a" * 5000, "{root}/ring/x"])
def test_what_is_no_path(root, text):
    changed = config().model_copy(update={"data": text.format(root=root)})
    with pytest.raises(InputError, match=r"^data="):
        check_request_paths(changed, root)


@pytest.mark.parametrize("text", ["/etc", "../..", "a/../../b"])
def test_image_root_stays_below_the_source(root, text):
    options = {"convert__builder": "llava", "data": f"{root}/raw", "convert__options": {"image_root": text}}
    assert "must be below the source" in refusal(root, **options)


def test_the_recipes_own_paths_pass(root):
    recipe = config(data="/srv/data")
    check_request_paths(config(data="/srv/data", train__seed=5), root, recipe)
    with pytest.raises(InputError, match="leads to '/srv'"):
        check_request_paths(config(data="/srv"), root, recipe)


CHANGES = {
    "execution.dask_address": "tcp://elsewhere:8786",
    "execution.model_code_sha256": "0" * 64,
    "execution.cluster.launcher": "slurm",
    "execution.cluster.nodes": 2,
    "execution.cluster.job_file": "other.sbatch",
    "execution.registry.push_to": "other/model",
    "execution.registry.push_private": False,
    "execution.registry.other_heldout": "champion",
}


@pytest.mark.parametrize("field", CHANGES)
def test_what_is_the_recipes_alone(root, field):
    header = {"execution.cluster.job_file": "gpu.sbatch"}
    on_slurm = {"execution.cluster.launcher": "slurm", "execution.cluster.processes": 2, "train.global_batch_size": 2}
    needs = {"execution.cluster.launcher": header, "execution.cluster.nodes": {**header, **on_slurm}}
    beside = {name.replace(".", "__"): value for name, value in needs.get(field, {}).items()}
    usual, changed = config(**beside), config(**beside, **{field.replace(".", "__"): CHANGES[field]})
    for recipe in [usual] if beside else [usual, None]:
        with pytest.raises(InputError) as caught:
            check_request_paths(changed, root, recipe)
        assert str(caught.value).startswith(f"{field}={CHANGES[field]!r} cannot be set by a request")
    check_request_paths(changed, root, changed)
    with pytest.raises(InputError, match="cannot be set by a request"):  # a reset to the default is a change too
        check_request_paths(usual, root, changed)


def test_every_rule_is_about_fields_that_there_are():
    for rule in RECIPE_ONLY:
        model = PipelineConfig
        for name in rule.split("."):
            model = model.model_fields[name].annotation
        assert any(field.startswith(rule) for field in CHANGES)
    assert not is_recipe_only("execution.cluster.processes") and not is_recipe_only("execution.dask_address_too")


def test_all_that_reaches_a_shell_or_another_machine_is_the_recipes_alone():
    """A field of this kind that is added later must be covered by one of the rules."""
    kinds = {*("script", "file", "command", "extra", "image", "mount"), *("secret", "account", "address", "host")}
    kinds |= {"env", "push"}
    found = [name for name in all_fields(PipelineConfig) if set(name.rpartition(".")[2].split("_")) & kinds]
    assert "execution.dask_address" in found
    assert [name for name in found if name.startswith("execution.") and not is_recipe_only(name)] == []


def all_fields(model, prefix: str = "") -> list[str]:
    names = []
    for name, field in model.model_fields.items():
        names.append(prefix + name)
        if hasattr(field.annotation, "model_fields"):
            names += all_fields(field.annotation, f"{prefix}{name}.")
    return names
