"""`athanor init`: each common layout of a user's own data is recognised, each fault named, and the recipe runs."""

import gzip
import json
import shutil

import pytest

from flows.cli.main import main
from flows.pipeline.recipe import load_recipe
from stages.artifacts.artifact import External
from stages.artifacts.run_stage import run_stage
from stages.convert.stage import STAGE as CONVERT
from tests.helpers.hub import hub_server
from tests.helpers.own_data import LAYOUTS, csv_paths, draw_rows, json_lines, llava_json, parquet_images

ROWS = 40


def init(tmp_path, capsys, data, *more: str) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of `athanor init DATA`, whose recipe is tmp_path/my.yaml."""
    status = main(["init", str(data), "--out", str(tmp_path / "my.yaml"), "--root", str(tmp_path / "root"), *more])
    return status, *capsys.readouterr()


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


def _drop_half_of_the_images(d, rows):
    csv_paths(d, rows)
    for row in rows[::2]:
        (d / "imgs" / f"{row.name}.png").unlink()


def _write(name, content):
    def write(d, rows):
        d.mkdir()
        (d / name).write_bytes(content if isinstance(content, bytes) else content(rows))

    return write


def _after(layout, change):
    def write(d, rows):
        layout(d, rows)
        change(d)

    return write


def _replace(name, *pairs):
    def change(d):
        text = (d / name).read_text()
        for old, new in pairs:
            assert old in text
            text = text.replace(old, new)
        (d / name).write_text(text)

    return change


def _broken_images(d, rows):
    csv_paths(d, rows)
    for row in rows[:5]:
        (d / "imgs" / f"{row.name}.png").write_bytes(row.image[:60])


def _lines(rows):
    return [{"image": "x.png", "question": row.question, "answer": row.answer} for row in rows]


# Fault -> (how it is written, what one line of stderr or of the anomalies says).
FAULTS = {
    "nothing": (lambda d, rows: d.mkdir(), "it holds no file; nearest layout: JSON lines like"),
    "images alone": (lambda d, rows: LAYOUTS["captions"][0](d, rows) or [f.unlink() for f in d.glob("*.txt")], "40 images and nothing that says what to learn about them; nearest layout: a text file with its caption"),
    "half of the images are missing": (_drop_half_of_the_images, "20 of 40 rows are left out as image_not_found; the first: data/00000000: 'imgs/0000.png'"),
    "images in another folder": (_after(csv_paths, lambda d: shutil.move(d / "imgs", d.parent / "elsewhere")), "40 of 40 rows are image_not_found as table"),
    "damaged images": (_broken_images, "5 of 40 rows are left out as truncated_image"),
    "empty csv": (_write("a.csv", b""), "a.csv has no header line"),
    "header alone": (_write("a.csv", b"image,question,answer\n"), "nearest layout: a first line `image,question,answer`"),
    "no header": (_write("a.csv", lambda rows: "".join(f"imgs/{r.name}.png,{r.question},{r.answer}\n" for r in rows).encode()), "a.csv: its first line is a row and no header; write the columns' names above it, for example image,question,answer"),
    "csv in utf-16": (_write("a.csv", "image,question,answer\na.png,b,c\n".encode("utf-16")), "a.csv is UTF-16; convert it to UTF-8"),
    "csv by gzip": (_write("a.csv", gzip.compress(b"image,question,answer\n")), "a.csv is compressed by gzip; unpack it"),
    "open quote": (_write("a.csv", b'image,question,answer\na.png,"b,c\nd.png,e,f\n'), "close its quote"),
    "ragged rows": (_after(csv_paths, _replace("data.csv", (",red", ""))), "the row has 3 cells, the header 4"),
    "empty answers": (_after(csv_paths, _replace("data.csv", (",blue", ","))), "left out as empty_target"),
    "no answer column": (_after(csv_paths, _replace("data.csv", ("answer", "thing"), ("question", "note"), ("?", "."))), "no column looks like an answer among: id, image, note, thing"),
    "column twice": (_after(csv_paths, _replace("data.csv", ("id,image", "answer,image"))), "has the column 'answer' 2 times; rename the others"),
    "json cut": (_after(llava_json, lambda d: (d / "train.json").write_text((d / "train.json").read_text()[:-30])), "train.json"),
    "json lines cut": (_after(json_lines, _replace("vqa.jsonl", ('"response"', '"response'))), "vqa.jsonl: its first rows cannot be read; row 0: json_parse_error: "),
    "json of one object": (_write("a.json", b'{"version": 1}'), "a.json: no column looks like an answer among: version"),
    "json of numbers": (_write("a.jsonl", b"1\n2\n3\n"), "a.jsonl has no row with fields"),
    "images from the web": (_write("a.jsonl", lambda rows: "".join(json.dumps({**r, "image": "https://x.org/1.png"}) + "\n" for r in _lines(rows)).encode()), "addresses of the web are not fetched"),
    "paths out of the data": (_write("a.jsonl", lambda rows: "".join(json.dumps({**r, "image": "../../etc/x.png"}) + "\n" for r in _lines(rows)).encode()), "image_not_found"),
    "roles that are none": (_write("a.jsonl", lambda rows: "".join(json.dumps({"messages": [{"role": "robot", "content": r.question}, {"role": "assistant", "content": r.answer}]}) + "\n" for r in rows).encode()), "40 of 40 rows are bad_role as openai_messages"),
    "no answers": (_write("a.jsonl", lambda rows: "".join(json.dumps({"messages": [{"role": "user", "content": r.question}]}) + "\n" for r in rows).encode()), "40 of 40 rows are bad_role as openai_messages"),
    "marks without images": (_after(llava_json, _replace("train.json", ("<image>", "<image><image>"))), "40 of 40 rows are image_count_mismatch as llava"),
    "parquet cut": (_after(parquet_images, lambda d: [f.write_bytes(f.read_bytes()[:-9]) for f in d.glob("*.parquet")]), "is not a readable parquet file"),
    "no parquet": (_write("a.parquet", b"hello"), "a.parquet is not a readable parquet file"),
    "tar without text": (_after(LAYOUTS["tar_captions"][0], lambda d: shutil.copy(d / "shard-000000.tar", d / "x.tgz")), "files that are not read: x.tgz"),
    "no tar": (_write("a.tar", b"hello" * 300), "a.tar"),
    "one answer": (_after(csv_paths, _replace("data.csv", (",red", ",blue"), (",green", ",blue"), (",yellow", ",blue"))), "answers are 'blue': there is little to learn"),
    "rows twice": (_after(json_lines, lambda d: (d / "vqa.jsonl").write_text((d / "vqa.jsonl").read_text() * 2)), "40 of 80 samples repeat one before them"),
    "files of no kind": (_write("a.docx", b"x"), "none of its files is read, for example a.docx"),
    "images that no row names": (_after(LAYOUTS["text_alone"][0], lambda d: csv_paths(d / "more", draw_rows(1, 3)) or (d / "more" / "data.csv").unlink()), "no row uses one of the 3 image files"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_named_in_one_line(tmp_path, capsys, fault):
    write, words = FAULTS[fault]
    write(tmp_path / "data", draw_rows(5, ROWS))
    status, out, err = init(tmp_path, capsys, tmp_path / "data")
    lines = err.splitlines() if status else [line for line in out.splitlines() if line.startswith("look at: ")]
    assert any(words in line for line in lines), (status, out, err)
    assert status in (0, 2) and (status == 0 or len(lines) == 1)
    assert (tmp_path / "my.yaml").exists() == (status == 0)


def test_a_recipe_is_not_overwritten(tmp_path, capsys):
    csv_paths(tmp_path / "data", draw_rows(1, 20))
    (tmp_path / "my.yaml").write_text("mine")
    status, _, err = init(tmp_path, capsys, tmp_path / "data")
    assert status == 2 and "my.yaml is there already; delete it, or give --out another name" in err
    assert (tmp_path / "my.yaml").read_text() == "mine"


@pytest.mark.parametrize(
    ("memory", "model", "adapter", "recompute"),
    [
        ("24", "Qwen/Qwen3-VL-2B-Instruct", "train_precision", "none"),
        ("48", "Qwen/Qwen3-VL-8B-Instruct", "train_precision", "none"),
        ("80", "Qwen/Qwen3-VL-8B-Instruct", "train_precision", "none"),
    ],
)
def test_a_model_that_fits_the_gpu(tmp_path, capsys, memory, model, adapter, recompute):
    csv_paths(tmp_path / "data", draw_rows(1, 30))
    status, out, err = init(tmp_path, capsys, tmp_path / "data", "--gpu-memory", memory)
    assert status == 0, err
    config = load_recipe(str(tmp_path / "my.yaml")).config
    assert (config.model, config.train.adapter.base) == (model, adapter)
    assert config.execution.parallel.recompute == recompute and config.train.precision == "bfloat16"
    assert f"{model}, LoRA of rank 16: " in out and f"of {memory} GB by estimate" in out


@pytest.mark.parametrize(
    ("model", "memory", "words"),
    [
        ("Qwen/Qwen3-VL-2B-Instruct", "141", "the whole model: "),
        ("Qwen/Qwen3-VL-4B-Instruct", "24", "LoRA of rank 16 beside a base in float8: "),
        (
            "Qwen/Qwen3-VL-8B-Instruct",
            "24",
            "LoRA of rank 16, layers computed again in backward: ",
        ),
    ],
)
def test_settings_with_which_a_model_fits(tmp_path, capsys, model, memory, words):
    csv_paths(tmp_path / "data", draw_rows(1, 30))
    status, out, err = init(tmp_path, capsys, tmp_path / "data", "--gpu-memory", memory, "--model", model)
    assert status == 0 and f"Model: {model}, {words}" in out, (out, err)


def test_a_model_that_does_not_fit_is_refused(tmp_path, capsys):
    csv_paths(tmp_path / "data", draw_rows(1, 30))
    more = ("--gpu-memory", "24", "--model", "Qwen/Qwen3-VL-32B-Instruct")
    status, _, err = init(tmp_path, capsys, tmp_path / "data", *more)
    assert status == 2 and "Qwen3-VL-32B-Instruct does not fit 24 GB: adapters beside a base in float8" in err
    status, _, err = init(tmp_path, capsys, tmp_path / "data", "--gpu-memory", "0")
    assert status == 2 and "--gpu-memory 0 is no memory of a GPU in GB" in err


def test_a_dataset_of_the_hub_is_looked_at_by_its_first_file(tmp_path, capsys, monkeypatch):
    directory = tmp_path / "hub"
    parquet_images(directory, draw_rows(2, ROWS))
    (directory / "other.parquet").write_bytes(b"never asked for")
    with hub_server("me/squares", directory) as (url, asked):
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", url)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        status, out, err = init(tmp_path, capsys, "me/squares")
    assert status == 0, err
    assert load_recipe(str(tmp_path / "my.yaml")).config.data == "me/squares"
    assert "of the hub's 2 files of rows only other.parquet" in out or "only train-00000-of-00001.parquet" in out
    assert asked
