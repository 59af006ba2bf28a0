"""Every refusal of a layout has a way out that works: its command, run as it stands, gives rows that are read."""

import csv
import io
import json
import subprocess
import sys
import tarfile
from hashlib import sha256

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dataset_builders.contracts.sample import IMAGE_SLOT, Sample
from dataset_builders.readers.parts import parts_of
from dataset_builders.sources.registry import get_builder
from dataset_builders.storage.store import location
from flows.cli.main import main
from flows.pipeline.recipe import load_recipe
from tests.helpers.own_data import draw_rows, json_lines, write_images

pytestmark = pytest.mark.promise(
    "`athanor init` makes a recipe from common layouts of data, with settings that fit the GPU by the estimate, "
    "names each fault, and refuses rows with a command that makes them readable."
)

ROWS = draw_rows(7, 12)


def init(tmp_path, capsys, data=None) -> tuple[int, str, str]:
    """Return the exit status, stdout and stderr of `athanor init`, which writes tmp_path/my.yaml."""
    recipe = tmp_path / "my.yaml"
    recipe.unlink(missing_ok=True)
    words = ["init", str(data or tmp_path / "data"), "--out", str(recipe), "--root", str(tmp_path / "root")]
    return main(words), *capsys.readouterr()


def refusal(tmp_path, capsys, words, data=None) -> str:
    """Return the one line with which `athanor init` refuses the data; it holds these words."""
    status, _, err = init(tmp_path, capsys, data)
    assert status == 2 and words in err and err.count("\n") == 1, err
    return err


def follow(err) -> None:
    """Run the command that a refusal names."""
    assert "; run: " in err, err
    subprocess.run(err.rpartition("; run: ")[2], shell=True, check=True)


def samples_as_drawn(tmp_path, capsys, data=None) -> list[Sample]:
    """Return the samples of the recipe that `athanor init` writes. They have the images and the answers of ROWS."""
    status, _, err = init(tmp_path, capsys, data)
    assert status == 0, err
    samples = samples_of(tmp_path / "my.yaml")
    assert sorted((sha256(s.images[0]).hexdigest(), s.messages[-1].text) for s in samples) == EXPECTED
    return samples


def samples_of(recipe) -> list[Sample]:
    """Return all samples of a recipe's source; none may be left out."""
    config = load_recipe(str(recipe)).config
    builder = get_builder(config.convert.builder)
    options = builder.options.model_validate(config.convert.options)
    source = location(config.data)
    parts = parts_of(builder, source, config.convert.subsets, options, config.convert.heldout_files)
    samples = [sample for part in parts for sample in builder.iter_part(part, options)]
    assert not (skips := [sample for sample in samples if not isinstance(sample, Sample)]), skips
    return samples


EXPECTED = sorted((sha256(row.image).hexdigest(), row.answer) for row in ROWS)
QUESTIONS = sorted((row.question, row.answer) for row in ROWS)


def write_json(file, value, **more):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(value, **more))


def write_lines(file, rows):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n".join(map(json.dumps, rows)))


def write_table(file, rows):
    file.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), file)


def flat(folder="images"):
    return [{"image": f"{folder}/{r.name}.png", "question": r.question, "answer": r.answer} for r in ROWS]


def with_images(write):
    def write_all(d):
        write_images(d / "images", ROWS)
        write(d)

    return write_all


def as_json(value, name="rows.json", **more):
    return with_images(lambda d: write_json(d / name, value, **more))


def columns(rows):
    return {name: [row[name] for row in rows] for name in rows[0]}


def turn(role, text):
    return [{"role": role, "content": text}]


def chat(row):
    return [*turn("user", row.question), *turn("assistant", row.answer)]


def in_turns(row):
    return {"prompt": turn("user", row.question), "completion": turn("assistant", row.answer)}


def trl(d):
    write_lines(d / "train.jsonl", [{"images": [f"images/{r.name}.png"], **in_turns(r)} for r in ROWS])


def trl_arrow(d):
    save_to_disk(d, [{**in_turns(r), "image": r.image} for r in ROWS])


def save_to_disk(d, rows):
    """Write the layout of `datasets.Dataset.save_to_disk`."""
    d.mkdir(parents=True, exist_ok=True)
    table = pa.Table.from_pylist(rows)
    with pa.ipc.new_stream(str(d / "data-00000-of-00001.arrow"), table.schema) as out:
        out.write_table(table)
    write_json(d / "dataset_info.json", {"features": {}}, indent=2)
    write_json(d / "state.json", {"_data_files": []}, indent=2)


def label_studio(d, kind="textarea", field="text"):
    tasks = [
        {
            "data": {"image": f"/data/local-files/?d=images%2F{r.name}.png", "question": r.question},
            "annotations": [{"result": [{"from_name": "choice", "type": kind, "value": {field: [r.answer]}}]}],
        }
        for r in ROWS
    ]
    write_json(d / "project-1.json", tasks)


def json_min():
    dates = {"created_at": "2026-01-01T00:00:00Z", "updated_at": "2026-01-01T00:00:00Z"}
    own = {"id": 1, "annotator": 1, "annotation_id": 1, "lead_time": 3.5, **dates}
    return [
        {"image": f"/data/local-files/?d=images/{r.name}.png", "question": r.question, "colour": r.answer, **own}
        for r in ROWS
    ]


def write_csv(file, rows, **dialect):
    with file.open("w", newline="") as out:
        writer = csv.DictWriter(out, list(rows[0]), **dialect)
        writer.writeheader()
        writer.writerows(rows)


def csv_of_messages(to_text, delimiter=","):
    rows = [{"images": f"images/{r.name}.png", "messages": to_text(chat(r))} for r in ROWS]
    return with_images(lambda d: write_csv(d / "chats.csv", rows, delimiter=delimiter))


def easy_vqa(d):
    for split, some in (("train", ROWS[:8]), ("test", ROWS[8:])):
        for number, row in enumerate(some):
            (d / split / "images").mkdir(parents=True, exist_ok=True)
            (d / split / "images" / f"{number}.png").write_bytes(row.image)
        write_json(d / split / "questions.json", [[r.question, r.answer, n] for n, r in enumerate(some)])


def coco_captions(d):
    for split, some in (("train2017", ROWS[:8]), ("val2017", ROWS[8:])):
        write_images(d / split, some)
        value = {
            "info": {},
            "images": [{"id": int(r.name), "file_name": f"{r.name}.png"} for r in some],
            "annotations": [{"image_id": int(r.name), "id": 1, "caption": r.answer} for r in some],
        }
        write_json(d / "annotations" / f"captions_{split}.json", value)


def webdataset_table(d):
    rows = [
        {"jpg": {"bytes": r.image}, "json": {"question": r.question, "answer": r.answer}, "__key__": r.name}
        for r in ROWS
    ]
    write_table(d / "00000.parquet", rows)


def json_text_table(d):
    rows = [{"png": r.image, "json": json.dumps({"question": r.question, "answer": r.answer})} for r in ROWS]
    write_table(d / "00000.parquet", rows)


def packed(*command):
    """Write rows in a file that a module of Python packed."""

    def write(d):
        json_lines(d, ROWS)
        subprocess.run([sys.executable, "-m", *command, "vqa.jsonl"], cwd=d, check=True)
        (d / "vqa.jsonl").unlink()

    return write


def leftover(name, content):
    def write(d):
        write_images(d / "train" / "images", ROWS)
        write_lines(d / "train" / "rows.jsonl", flat())
        (d / "train" / name).write_bytes(content)

    return write


def dotted_keys(d):
    d.mkdir()
    with tarfile.open(d / "00000.tar", "w") as tar:
        for row in ROWS:
            for suffix, data in (("png", row.image), ("txt", row.answer.encode())):
                info = tarfile.TarInfo(f"img/v1.{row.name}_{row.answer}.{suffix}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))


def foreign_rows(start):
    return [{**row, "image": f"{start}{row['image']}"} for row in flat()]


def foreign_paths(d):
    write_lines(d / "rows.jsonl", foreign_rows("/content/drive/set/"))


def foreign_parquet(d):
    rows = [{**row, "image": {"bytes": None, "path": row["image"]}} for row in foreign_rows("/home/you/")]
    schema = {"image": pa.struct({"bytes": pa.binary(), "path": pa.string()})}
    schema |= dict.fromkeys(("question", "answer"), pa.string())
    pq.write_table(pa.Table.from_pylist(rows, pa.schema(schema)), d / "rows.parquet")


# Name -> (function that writes the layout, words of the refusal).
REFUSED = {
    "list under another name": (
        as_json({"version": 1, "questions": flat()}, indent=1), "one object with a list 'questions'"),
    "list in an object": (as_json({"dataset": {"items": flat()}}), "one object with a list 'dataset.items'"),
    "splits in one object": (
        as_json({"train": flat()[:8], "test": flat()[8:]}), "one object with the splits 'train', 'test'"),
    "rows by their keys": (as_json({r.name: row for r, row in zip(ROWS, flat())}), "object with a row under each key"),
    "lists of columns": (as_json(columns(flat()), indent=1), "one object with a list for each column"),
    "pandas' to_json": (
        as_json({name: {str(i): v for i, v in enumerate(each)} for name, each in columns(flat()).items()}),
        "an object for each column, as pandas writes it"),
    "pandas' orient split": (
        as_json({"columns": ["image", "question", "answer"], "index": [0], "data": [list(r.values()) for r in flat()]}),
        "a table of pandas (orient split)"),
    "easy-VQA": (easy_vqa, "train/questions.json: its rows are lists of 3 values"),
    "lists with a header": (
        as_json([["image", "question", "answer"], *[list(row.values()) for row in flat()]]), "lists of 3 values"),
    "lines that are lists": (
        with_images(lambda d: write_lines(d / "a.jsonl", [list(row.values()) for row in flat()])),
        "a.jsonl: its rows are lists of 3 values"),
    "COCO's captions": (coco_captions, "COCO's captions, apart from the names of their images"),
    "TRL": (with_images(trl), "TRL's prompt and completion in turns"),
    "TRL saved by datasets": (trl_arrow, "TRL's prompt and completion in turns"),
    "Label Studio's texts": (with_images(label_studio), "tasks of Label Studio's JSON"),
    "Label Studio's choices": (
        with_images(lambda d: label_studio(d, "choices", "choices")), "tasks of Label Studio's JSON"),
    "Label Studio's JSON-MIN": (as_json(json_min()), "Label Studio's JSON-MIN or CSV"),
    "Label Studio's CSV": (
        with_images(lambda d: write_csv(d / "min.csv", json_min())), "Label Studio's JSON-MIN or CSV"),
    "messages in CSV": (csv_of_messages(json.dumps), "a CSV file with messages"),
    "messages in CSV by pandas": (csv_of_messages(str, ";"), "a CSV file with messages"),
    "answers that are objects": (
        as_json([{**row, "answer": {"text": row["answer"], "start": 1}} for row in flat()]),
        "the answers of column 'answer' are objects; take their field 'text'"),
    "answers that are lists of objects": (
        as_json([{**row, "answer": [{"answer": row["answer"], "confidence": 1}]} for row in flat()]),
        "the answers of column 'answer' are lists of objects; take their field 'answer'"),
    "several questions in a row": (
        as_json([
            {"image": row["image"], "qa": [{"question": row["question"], "answer": row["answer"]}]} for row in flat()
        ]),
        "column 'qa' holds several questions in each row"),
    "parallel questions": (
        as_json([{"image": r["image"], "questions": [r["question"]], "answers": [r["answer"]]} for r in flat()]),
        "several questions and answers in each row"),
    "a tar as a table with json": (webdataset_table, "a WebDataset tar that `datasets` wrote as a table"),
    "rows in a zip": (packed("zipfile", "-c", "vqa.zip"), "vqa.zip is packed"),
    "rows by gzip": (packed("gzip"), "vqa.jsonl.gz is compressed"),
    "rows in a tgz": (packed("tarfile", "-c", "vqa.tgz"), "vqa.tgz is packed"),
    "a leftover object": (leftover("notes.json", b'{\n "by": "me"\n}'), "if it holds no rows, move it away"),
    "a leftover without a header": (leftover("empty.csv", b""), "if it holds no rows, move it away"),
    "a leftover that is no table": (leftover("old.parquet", b"x"), "if it holds no rows, move it away"),
    "COCO's results beside rows": (
        leftover("keypoints.json", json.dumps({"images": [{}], "annotations": [{"keypoints": []}]}, indent=1).encode()),
        "COCO's annotations without captions"),
    "two leftovers": (
        lambda d: [leftover(name, b"")(d) for name in ("a.csv", "b.csv")], "if it holds no rows, move it away"),
    "tar keys with dots": (dotted_keys, "names of its members hold dots before their suffix"),
    "splits beside a version": (
        as_json({"version": 1, "train": flat()[:8], "test": flat()[8:]}), "the splits 'train', 'test'"),
    "splits below a key": (
        as_json({"data": {"train": flat()[:8], "val": flat()[8:]}}, indent=1), "the splits 'train', 'val'"),
    "a list beside a shorter one": (
        as_json({"authors": [{"name": "me"}], "items": flat()}), "a list 'items', which is taken, and 'authors'"),
    "a tar as a table with JSON as text": (json_text_table, "a WebDataset tar that `datasets` wrote as a table"),
    "a completion in turns alone": (
        as_json([
            {"image": f"images/{r.name}.png", "prompt": r.question, "completion": turn("assistant", r.answer)}
            for r in ROWS
        ]),
        "the answers of column 'completion' are lists of objects; take their field 'content'"),
    "addresses of Label Studio": (
        with_images(lambda d: write_json(d / "rows.json", foreign_rows("/data/local-files/?d="))),
        "name images by their paths there"),
    "paths of another machine": (with_images(foreign_paths), "name images by their paths there"),
    "paths of another machine in parquet": (with_images(foreign_parquet), "name images by their paths there"),
    "paths of another machine in CSV": (
        with_images(lambda d: write_csv(d / "a.csv", foreign_rows("C:\\Users\\me\\"), delimiter=";")),
        "a path on a drive of Windows"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_the_command_of_a_refusal_makes_the_rows_readable(tmp_path, capsys, name):
    write, words = REFUSED[name]
    write(tmp_path / "data")
    before = sum(1 for _ in tmp_path.rglob("*"))
    follow(refusal(tmp_path, capsys, words))
    samples = samples_as_drawn(tmp_path, capsys)
    asked = sorted((s.messages[-2].text.replace(IMAGE_SLOT, "").strip(), s.messages[-1].text) for s in samples)
    assert asked == QUESTIONS or {question for question, _ in asked} == {"Describe the image."}
    assert sum(1 for _ in tmp_path.rglob("*")) >= before  # nothing of the user's is deleted


def img2dataset(d, lost=0):
    """Write a shard of img2dataset in parquet and its figures. The first `lost` pictures could not be fetched."""
    rows = [
        {"url": f"https://x.org/{r.name}", "caption": r.answer, "key": r.name, "status": "success",
         "error_message": None, "width": 64, "height": 64, "exif": "{}", "sha256": "0",
         "jpg": None if number < lost else r.image}
        for number, r in enumerate(ROWS)
    ]  # fmt: skip
    write_table(d / "00000.parquet", rows)
    write_json(d / "00000_stats.json", {"count": 12, "successes": 12}, indent=4)


def tar_as_table(d, column="jpg", text="txt"):
    rows = [
        {column: {"bytes": r.image, "path": f"{r.name}.png"}, text: r.answer, "__key__": r.name, "__url__": "0.tar"}
        for r in ROWS
    ]
    write_table(d / "train-00000-of-00001.parquet", rows)


def chats():
    return [{"messages": chat(r), "images": [{"bytes": r.image, "path": None}]} for r in ROWS]


def sharegpt():
    said = [[{"from": "human", "value": r.question}, {"from": "gpt", "value": r.answer}] for r in ROWS]
    return [{"image": {"bytes": r.image, "path": None}, "conversations": each} for r, each in zip(ROWS, said)]


def from_the_root(d):
    write_images(d / "demo" / "images", ROWS)
    write_lines(d / "demo" / "rows.jsonl", flat("demo/images"))


def splits_on_disk(d):
    for split, some in (("train", slice(0, 8)), ("test", slice(8, None))):
        save_to_disk(d / split, chats()[some])
    write_json(d / "dataset_dict.json", {"splits": ["train", "test"]})


# Name -> function that writes a layout that is read as it is.
READ = {
    "img2dataset's parquet": img2dataset,
    "a tar as a table": tar_as_table,
    "a tar of classes as a table": lambda d: tar_as_table(d, "png", "cls"),
    "a tar of webp as a table": lambda d: tar_as_table(d, "webp", "caption"),
    "messages saved by datasets": lambda d: save_to_disk(d, chats()),
    "conversations saved by datasets": lambda d: save_to_disk(d, sharegpt()),
    "splits of messages saved by datasets": splits_on_disk,
    "prefix and suffix": as_json([{"image": r["image"], "prefix": "name it", "suffix": r["answer"]} for r in flat()]),
    "paths from the repository's root": from_the_root,
}


@pytest.mark.parametrize("name", READ)
def test_what_other_tools_write_without_doubt_is_read(tmp_path, capsys, name):
    READ[name](tmp_path / "data")
    samples_as_drawn(tmp_path, capsys)


def test_a_picture_that_could_not_be_fetched_leaves_no_caption_without_a_picture(tmp_path, capsys):
    img2dataset(tmp_path / "data", lost=1)
    status, out, err = init(tmp_path, capsys)
    assert status == 0 and "1 of 12 rows are left out as schema_error" in out, (out, err)


@pytest.mark.parametrize("path", ["{root}/pictures/{name}.png", "../pictures/{name}.png", "pictures/{name}.png"])
def test_images_beside_the_data_are_found_from_the_folder_that_the_message_names(tmp_path, capsys, path):
    root = tmp_path / "all"
    write_images(root / "pictures", ROWS)
    images = [path.format(root=root, name=row.name) for row in ROWS]
    write_lines(root / "rows" / "a.jsonl", [{**row, "image": image} for row, image in zip(flat(), images)])
    command = refusal(tmp_path, capsys, "; run: ", root / "rows").rpartition("; run: ")[2]
    assert command == f"athanor init {root}\n"
    samples_as_drawn(tmp_path, capsys, root)


def test_rows_too_deep_are_read_from_the_folder_that_the_message_names(tmp_path, capsys):
    json_lines(tmp_path / "data" / "a" / "b", ROWS)
    err = refusal(tmp_path, capsys, "give ")
    samples_as_drawn(tmp_path, capsys, err.rpartition("give ")[2].removesuffix(" as the data\n"))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("table.xlsx", "table.xlsx is a spreadsheet; save it as CSV UTF-8"),
        ("form.pdf", "form.pdf is a PDF; draw its pages as images"),
        ("photo.heic", "photo.heic is an image of a format that is not read"),
        ("rows.pkl", "rows.pkl is a file of a program"),
    ],
)
def test_a_file_of_another_kind_is_named_with_its_way_out(tmp_path, capsys, name, words):
    write_images(tmp_path / "data" / "images", ROWS)
    (tmp_path / "data" / name).write_bytes(b"x")
    refusal(tmp_path, capsys, words)
    write_lines(tmp_path / "data" / "rows.jsonl", flat())
    status, out, _ = init(tmp_path, capsys)
    assert status == 0 and f"look at: {words}" in out


def vqa_questions(d):
    write_json(d / "q.json", {"license": {}, "questions": [{"image_id": 1, "question": "a?", "question_id": 2}]})


def coco_boxes(d):
    write_json(d / "instances.json", {"images": [{"id": 1}], "annotations": [{"bbox": [0, 0, 1, 1]}]})


def rows_far_away(d):
    write_images(d.parent / "far", ROWS)
    write_json(d / "x" / "rows.json", flat(f"{d.parent}/far"))


@pytest.mark.parametrize(
    ("write", "words"),
    [
        (coco_boxes, "COCO's annotations without captions, or boxes without categories"),
        (vqa_questions, "VQAv2's questions without answers; docs/data-formats.md has a script that joins them"),
        (
            with_images(lambda d: label_studio(d, "polygonlabels", "polygonlabels")),
            "results of the kind polygonlabels",
        ),
        (rows_far_away, "outside of the source; copy them below"),
    ],
)
def test_what_no_command_can_know_is_refused_by_its_name(tmp_path, capsys, write, words):
    write(tmp_path / "data")
    assert "run:" not in refusal(tmp_path, capsys, words)


def test_an_object_of_over_64_mib_gets_a_command_too(tmp_path, capsys, monkeypatch):
    as_json({"version": 1, "all of them": flat()}, indent=1)(tmp_path / "data")
    monkeypatch.setattr("dataset_builders.recognise.exports.MAX_ROW_BYTES", 100)
    follow(refusal(tmp_path, capsys, "one object of over 64 MiB"))
    samples_as_drawn(tmp_path, capsys)


@pytest.mark.parametrize(
    "kind",
    [lambda path: {"path": path}, lambda path: path, lambda path: [{"path": path}]],
    ids=["struct", "text", "list"],
)
def test_a_table_takes_in_the_images_that_it_names_elsewhere(tmp_path, capsys, kind):
    """The images lie where no folder above both is near."""
    write_images(tmp_path / "far", ROWS)
    data = tmp_path / "a" / "b" / "data"
    write_table(data / "train.parquet", [{**row, "image": kind(row["image"])} for row in flat(f"{tmp_path}/far")])
    follow(refusal(tmp_path, capsys, "outside of the source; take them into the table; run: ", data))
    samples = samples_as_drawn(tmp_path, capsys, data)
    assert sorted((s.messages[0].text, s.messages[1].text) for s in samples) == [
        (f"<image>{question}", answer) for question, answer in QUESTIONS
    ]
