"""`athanor init`: it recognises each common layout of a user's data and names each fault, and its recipe runs."""

import json
import os
import shutil
import socket
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from dataset_builders.contracts.sample import from_fields
from dataset_builders.contracts.shard_io import iter_records
from dataset_builders.errors import printable
from dataset_builders.recognise.recognise import heldout_globs
from flows.cli.main import main
from flows.pipeline.recipe import load_recipe
from stages.convert.stage import STAGE as CONVERT
from stages.shared.artifacts.artifact import External
from stages.shared.artifacts.run_stage import run_stage
from tests.helpers.hub import hub_server
from tests.helpers.own_data import LAYOUTS, captions, csv_paths, draw_rows, json_lines, parquet_images, text_alone
from tests.helpers.own_faults import FAULTS
from tests.helpers.small_run import stand_in_trainer
from tests.helpers.tiers import tiered
from tests.helpers.tiny_experts_model import experts_hf_dir
from tests.helpers.tiny_hybrid_model import hybrid_hf_dir
from tests.helpers.tiny_model import tiny_hf_dir
from tests.helpers.tiny_text_model import text_hf_dir

pytestmark = pytest.mark.promise(
    "`athanor init` makes a recipe from common layouts of data, with settings that fit the GPU by the estimate, "
    "names each fault, and refuses rows with a command that makes them readable."
)

ROWS = 40
REPO = Path(__file__).parents[4]


def init(tmp_path, capsys, data, *more: str) -> tuple[int, str, str]:
    """Return the exit status, stdout and stderr of `athanor init DATA`, which writes the recipe tmp_path/my.yaml."""
    status = main(["init", str(data), "--out", str(tmp_path / "my.yaml"), "--root", str(tmp_path / "root"), *more])
    return status, *capsys.readouterr()


@pytest.fixture
def data(tmp_path) -> Path:
    """Return a directory with thirty rows, which a recipe can be made of."""
    csv_paths(tmp_path / "data", draw_rows(1, 30))
    return tmp_path / "data"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_layout_becomes_a_recipe_whose_samples_are_the_rows(tmp_path, capsys, layout):
    write, builder = LAYOUTS[layout]
    rows = draw_rows(seed=len(layout), number=ROWS)
    write(tmp_path / "my data", rows)
    status, out, err = init(tmp_path, capsys, tmp_path / "my data")
    assert status == 0, err
    assert f"builder {builder}" in out and f"{ROWS} of the {ROWS} rows that were read can be used" in out
    config = load_recipe(str(tmp_path / "my.yaml")).config
    assert config.name == "my-data" and config.convert.builder == builder
    raw = {"raw": External(tmp_path / "my data", "raw", "0" * 16)}
    made = run_stage(CONVERT, config.convert, raw, tmp_path / "root").artifact.manifest
    assert made.num_samples == len({(row.image, row.question, row.answer) for row in rows}) and made.skips == {}
    assert {shard.split for shard in made.shards} == {"train", "heldout"}
    page = (tmp_path / "root" / "init" / "my-data" / "report.html").read_text()
    assert layout == "text_alone" or page.count("data:image/png") >= 10


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_named_in_one_line(tmp_path, capsys, fault):
    write, words = FAULTS[fault]
    write(tmp_path / "data", draw_rows(5, ROWS))
    status, out, err = init(tmp_path, capsys, tmp_path / "data")
    lines = err.splitlines() if status else [line for line in out.splitlines() if line.startswith("look at: ")]
    assert any(words in line for line in lines), (status, out, err)
    assert status in (0, 2) and (status == 0 or len(lines) == 1)
    assert (tmp_path / "my.yaml").exists() == (status == 0)


def split_by_folder(d, rows):
    json_lines(d / "train", rows[:30])
    json_lines(d / "test", rows[30:])


def split_by_file(d, rows):
    parquet_images(d / "data", rows[:30])
    parquet_images(d / "other", rows[30:])
    (d / "other/train-00000-of-00001.parquet").rename(d / "data/validation-00000-of-00001.parquet")


def split_by_folder_of_images(d, rows):
    captions(d / "Train", rows[:30])
    captions(d / "test_images2017", rows[30:])


@pytest.mark.parametrize("write", [split_by_folder, split_by_file, split_by_folder_of_images])
def test_what_is_named_as_held_out_is_never_trained_on(tmp_path, capsys, write):
    rows = draw_rows(3, 40)
    write(tmp_path / "data", rows)
    status, out, err = init(tmp_path, capsys, tmp_path / "data")
    assert status == 0 and "10 of these rows are held out" in out, (out, err)
    raw = {"raw": External(tmp_path / "data", "raw", "0" * 16)}
    config = load_recipe(str(tmp_path / "my.yaml")).config.convert
    made = run_stage(CONVERT, config, raw, tmp_path / "root").artifact
    images = {
        split: {sha for shard in made.manifest.shards if shard.split == split for sha in digests(made.dir, shard)}
        for split in ("train", "heldout")
    }
    expected = {"train": rows[:30], "heldout": rows[30:]}
    assert images == {split: {sha256(row.image).hexdigest() for row in some} for split, some in expected.items()}


def digests(directory, shard) -> list[str]:
    """Return the SHA-256 of each image of a shard of samples."""
    samples = [from_fields(key, fields) for key, fields in iter_records(directory / shard.name, shard)]
    return [sha256(data).hexdigest() for sample in samples for data in sample.images]


@pytest.mark.parametrize(
    ("names", "globs"),
    [
        (["train.jsonl", "test.jsonl"], ("test.jsonl",)),
        (["data/train-00000-of-00002.parquet", "data/test-00000-of-00002.parquet"], ("data/test-*-of-*.parquet",)),
        (["captions_train2014.csv", "captions_val2014.csv"], ("captions_val*.csv",)),
        (["latest.jsonl", "contest.jsonl"], ()),
        (["test.jsonl", "val.jsonl"], ()),
        (["test-train.jsonl", "a.jsonl"], ()),
        (["val1.csv", "val1_train.csv"], ("val1.csv",)),
        (["test1/a.csv", "test1b/train.csv", "test[x].csv"], ("test*/a.csv", "test[[]x].csv")),
    ],
)
def test_globs_of_held_out_files_fit_no_other_file(names, globs):
    assert heldout_globs(names) == globs


def test_a_single_file_is_named_once(tmp_path, capsys):
    (tmp_path / "a.csv").write_text("id,url\n1,x\n")
    status, _, err = init(tmp_path, capsys, tmp_path / "a.csv")
    assert status == 2 and err.count("a.csv") == 1 and "no column looks like an answer among: id, url" in err


def test_a_recipe_is_not_overwritten(tmp_path, capsys, data):
    (tmp_path / "my.yaml").write_text("mine")
    status, _, err = init(tmp_path, capsys, data)
    assert status == 2 and "my.yaml exists already; delete it, or give --out another name" in err
    assert (tmp_path / "my.yaml").read_text() == "mine"


def test_a_recipe_in_no_directory_is_refused_before_the_data_are_read(tmp_path, capsys):
    status, out, err = init(tmp_path, capsys, tmp_path, "--out", str(tmp_path / "no" / "my.yaml"))
    assert status == 2 and out == ""
    assert f"{tmp_path / 'no'} is not a directory; make it, or give --out another name" in err


@pytest.mark.parametrize(("memory", "size"), [("24", "2B"), ("48", "8B"), ("80", "8B")])
def test_a_model_that_fits_the_gpu(tmp_path, capsys, data, memory, size):
    status, out, err = init(tmp_path, capsys, data, "--gpu-memory", memory)
    assert status == 0, err
    config, model = load_recipe(str(tmp_path / "my.yaml")).config, f"Qwen/Qwen3-VL-{size}-Instruct"
    assert (config.model, config.train.adapter.base) == (model, "train_precision")
    assert config.execution.parallel.recompute == "none" and config.train.precision == "bfloat16"
    assert f"{model}, LoRA of rank 16: " in out and f"of {memory} GB by estimate" in out


@pytest.mark.parametrize(
    ("model", "memory", "words"),
    [
        ("2B", "141", "the whole model: "),
        ("4B", "20", "LoRA of rank 16, layers computed again in backward: "),
        ("8B", "20", "LoRA of rank 16 beside a base in float8, layers computed again in backward: "),
    ],
)
def test_settings_with_which_a_model_fits(tmp_path, capsys, data, model, memory, words):
    name = f"Qwen/Qwen3-VL-{model}-Instruct"
    status, out, err = init(tmp_path, capsys, data, "--gpu-memory", memory, "--model", name)
    assert status == 0 and f"Model: {name}, {words}" in out, (out, err)


@pytest.mark.parametrize(("most", "codec"), [(1e9, "u8"), (1e5, "original")])
def test_pixels_are_stored_where_they_take_little_space(tmp_path, capsys, data, monkeypatch, most, codec):
    monkeypatch.setattr("flows.cli.fit._MOST_PIXEL_BYTES", most)
    assert init(tmp_path, capsys, data, "--gpu-memory", "80")[0] == 0
    assert load_recipe(str(tmp_path / "my.yaml")).config.tokenize.codec == codec


def test_a_model_that_does_not_fit_is_refused(tmp_path, capsys, data):
    more = ("--gpu-memory", "24", "--model", "Qwen/Qwen3-VL-32B-Instruct")
    status, _, err = init(tmp_path, capsys, data, *more)
    assert status == 2 and "Qwen3-VL-32B-Instruct does not fit 24 GB: adapters beside a base in float8" in err
    status, out, err = init(tmp_path, capsys, data, "--gpu-memory", "0")
    assert status == 2 and out == "" and "--gpu-memory 0 is no memory of a GPU in GB" in err


def test_a_model_of_ones_own_on_a_cpu_is_named_by_its_whole_path(tmp_path, capsys, data, monkeypatch):
    shutil.copytree(tiny_hf_dir(), tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    status, _, err = init(tmp_path, capsys, "data", "--model", "model")
    assert status == 0, err
    config = load_recipe("my.yaml").config
    assert (config.model, config.data) == (str(tmp_path / "model"), str(data))
    assert (config.train.precision, config.train.num_epochs) == ("float32", 37)  # of 30 rows: 40 steps


MODELS = {
    "qwen3": text_hf_dir,
    "qwen3_vl": tiny_hf_dir,
    "qwen3_5": hybrid_hf_dir,
    "qwen3_vl_moe": lambda: experts_hf_dir("listed"),
    "qwen3_5_moe": lambda: experts_hf_dir("shared"),
}
DATA = {"text": text_alone, "images": csv_paths}
FITS = [(family, data) for family in MODELS for data in DATA if (family, data) != ("qwen3", "images")]


@pytest.mark.parametrize("memory", [(), ("--gpu-memory", "80")], ids=["cpu", "gpu"])
@pytest.mark.parametrize(("family", "data"), tiered(FITS, [("qwen3", "text")]))
def test_the_recipe_of_each_family_is_planned(tmp_path, capsys, family, data, memory):
    DATA[data](tmp_path / "data", draw_rows(1, 30))
    status, _, err = init(tmp_path, capsys, tmp_path / "data", "--model", str(MODELS[family]()), *memory)
    assert status == 0, err
    config = load_recipe(str(tmp_path / "my.yaml")).config
    assert (config.train.vision.lr is None) == (family == "qwen3" or config.train.adapter is not None)
    changes = ["--set=train.precision=float32"] if memory else []  # of a recipe for a GPU on a host without one
    status = main(["plan", str(tmp_path / "my.yaml"), "--root", str(tmp_path / "root"), *changes])
    assert status == 0, capsys.readouterr().err


@pytest.mark.full
@pytest.mark.parametrize(("family", "data"), FITS)
def test_the_recipe_of_each_family_runs(tmp_path, capsys, family, data):
    DATA[data](tmp_path / "data", draw_rows(1, 30))
    assert init(tmp_path, capsys, tmp_path / "data", "--model", str(MODELS[family]()))[0] == 0
    with stand_in_trainer():
        status = main(["run", str(tmp_path / "my.yaml"), "--root", str(tmp_path / "root")])
    assert status == 0, capsys.readouterr().err
    assert [path.name for path in (tmp_path / "root" / "artifacts").iterdir() if path.name == "release"]


def test_images_for_a_text_model_are_refused_by_init_and_by_plan(tmp_path, capsys, data):
    said = "30 of 30 samples have images or videos, and {} reads only text, so they would be left out; give a model "
    status, _, err = init(tmp_path, capsys, data, "--model", str(text_hf_dir()))
    assert status == 2 and said.format(text_hf_dir()) in err and not (tmp_path / "my.yaml").exists()
    assert init(tmp_path, capsys, data, "--model", str(tiny_hf_dir()))[0] == 0
    given = ["plan", str(tmp_path / "my.yaml"), "--root", str(tmp_path / "root")]
    without_rate = (tmp_path / "my.yaml").read_text().partition("  vision:")
    (tmp_path / "my.yaml").write_text(without_rate[0] + without_rate[2].partition("\n")[2].partition("\n")[2])
    assert main([*given, f"--set=model={text_hf_dir()}"]) == 2
    assert said.format(text_hf_dir()) in capsys.readouterr().err
    assert main(given) == 0


def test_an_end_that_the_model_lacks_is_said_by_plan(tmp_path, capsys):
    text_alone(tmp_path / "data", draw_rows(1, 30))
    model = Path(shutil.copytree(text_hf_dir(), tmp_path / "model"))
    (model / "generation_config.json").write_text('{"eos_token_id": 0}')
    assert init(tmp_path, capsys, tmp_path / "data", "--model", str(model))[0] == 0
    assert main(["plan", str(tmp_path / "my.yaml"), "--root", str(tmp_path / "root")]) == 0
    number = AutoTokenizer.from_pretrained(model).convert_tokens_to_ids("<|im_end|>")
    line = f"trained turns end with <|im_end|> ({number}), which the export adds to the model's eos_token_id [0]"
    assert line in capsys.readouterr().out.splitlines()


def init_from_the_hub(directory: Path, address: str) -> subprocess.CompletedProcess[str]:
    """Run `athanor init me/squares` in a process of its own, with a hub at an address."""
    env = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    env |= {"HF_ENDPOINT": address, "HF_HOME": str(directory / "home"), "PYTHONPATH": str(REPO)}
    command = [sys.executable, "-m", "flows.cli.main", "init", "me/squares", "--out", "my.yaml"]
    return subprocess.run(command, env=env, cwd=directory, capture_output=True, text=True)


def test_a_dataset_of_the_hub_is_looked_at_by_its_first_file(tmp_path):
    directory = tmp_path / "hub"
    parquet_images(directory, draw_rows(2, ROWS))
    (directory / "zz-test.parquet").write_bytes(b"never asked for")
    with hub_server("me/squares", directory) as (address, fetched):
        done = init_from_the_hub(tmp_path, address)
    assert done.returncode == 0, done.stderr
    config = load_recipe(str(tmp_path / "my.yaml")).config
    assert config.data == "me/squares" and config.convert.heldout_files == ("zz-test.parquet",)
    assert fetched == ["train-00000-of-00001.parquet"]
    assert "of the hub's 2 files of rows only train-00000-of-00001.parquet was downloaded" in done.stdout


def test_a_hub_that_cannot_be_reached_is_one_try_and_one_line(tmp_path):
    with socket.socket() as refusing:  # bound, but it does not listen
        refusing.bind(("127.0.0.1", 0))
        done = init_from_the_hub(tmp_path, f"http://127.0.0.1:{refusing.getsockname()[1]}")
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert "raw data 'me/squares' is not a directory here, and the hub cannot be reached (" in done.stderr


HOSTILE = "a\x1b]0;x\x07 \x7f\x85\x9b31m\u202etxt\u2066"


NAMES = [
    *("a 'b\": \n# c", "\x1b[2Ja", "a\x7f", "a\x85b", " a ", "a\u2028b", "\ufeffa", "\U0001f600 \u00e9", "true"),
    HOSTILE,
]


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_reads_back_to_the_path_that_was_given(name, tmp_path, capsys):
    data = tmp_path / name / "sets"
    csv_paths(data, draw_rows(1, 40))
    status, out, err = init(tmp_path, capsys, data)
    assert status == 0, err
    assert load_recipe(str(tmp_path / "my.yaml")).config.data == str(data)
    (tmp_path / "my.yaml").unlink()
    file = (data / "data.csv").rename(data / f"{name}.csv")
    status, out, err = init(tmp_path, capsys, file)
    if name.isprintable():
        assert load_recipe(str(tmp_path / "my.yaml")).config.data == str(file), err
    else:  # the name of a file is the subset, a part of each key
        assert "cannot be part of a key; rename it" in err and printable(err) == err
    assert printable(out) == out


@pytest.mark.parametrize("which", ["data", "the folder above", "model"])
def test_a_path_that_is_not_utf8_is_refused_in_one_line(which, tmp_path, capsys):
    data = tmp_path / "caf\udce9" / "sets" if which == "the folder above" else tmp_path / "caf\udce9"
    csv_paths(tmp_path / "raw", draw_rows(1, 40))
    data.parent.mkdir(exist_ok=True)
    (tmp_path / "raw").rename(data)
    if which == "model":
        status, _, err = init(tmp_path, capsys, tmp_path, "--model", str(data))
    else:
        status, _, err = init(tmp_path, capsys, data)
    assert status == 2 and len(err.splitlines()) == 1 and r"caf\udce9" in err and "not UTF-8" in err
    assert not (tmp_path / "my.yaml").exists()
    data.rename(tmp_path / "renamed")  # the way out
    assert init(tmp_path, capsys, tmp_path / "renamed")[0] == 0


def test_nothing_that_the_data_hold_reaches_the_terminal_raw(tmp_path, capsys):
    """Names of files and columns, and texts, which `init` and `plan` print."""
    data = tmp_path / "raw"
    data.mkdir()
    rows = [{"question": f"{i}?", "answer": f"{i} {HOSTILE[-5:]}", HOSTILE: "x"} for i in range(40)]
    (data / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (data / f"{HOSTILE}.pdf").write_text("x")
    status, out, err = init(tmp_path, capsys, data)
    assert status == 0, err
    assert r"\x1b]0;x\x07" in out and printable(out) == out and printable(err) == err
    status = main(["plan", str(tmp_path / "my.yaml"), "--root", str(tmp_path / "root")])
    out, err = capsys.readouterr()
    assert status == 0 and printable(out) == out and printable(err) == err
