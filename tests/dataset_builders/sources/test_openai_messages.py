"""OpenAI's messages and similar formats to samples: slots, weights, layouts, reasons, and files of every layout."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dataset_builders.contracts.sample import from_fields, to_fields
from dataset_builders.errors import InputError
from dataset_builders.readers import text_files
from dataset_builders.sources.conversations import OPENAI_MESSAGES, ConversationOptions
from dataset_builders.sources.registry import get_builder
from tests.helpers.json_rows import data_uri, read_source, reasons, turns, write_file
from tests.helpers.json_rows import json_lines as lines
from tests.helpers.raw_rows import png

pytestmark = pytest.mark.promise(
    "Each builder turns its source's rows into samples, names and counts each bad row, and no image is both "
    "trained on and held out."
)

ONE, TWO = png(1), png(2)
URL = {"type": "image_url", "image_url": {"url": data_uri(ONE), "detail": "high"}}
SECOND = {"type": "image", "image": data_uri(TWO)}


def text(value):
    return {"type": "text", "text": value}


def message(role, content, **fields):
    return {"role": role, "content": content, **fields}


def ask(*parts, answer="yes", **fields):
    """Return a row of one question made of these parts."""
    return {"messages": [message("user", list(parts)), message("assistant", answer)], **fields}


def chat(*texts, **fields):
    """Return a row of plain texts, user and assistant alternating."""
    turns = [message(("user", "assistant")[i % 2], text) for i, text in enumerate(texts)]
    return {"messages": turns, **fields}


def read(source, **options):
    return read_source("openai_messages", source, **options)


def read_rows(tmp_path, rows):
    write_file(tmp_path / "s.jsonl", lines(rows))
    return read(tmp_path)


def test_images_lie_where_their_parts_are(tmp_path):
    row = {
        "messages": [
            message("developer", "Answer in one word."),
            message("user", [text(" Is "), URL, text(" like\r\n"), SECOND, text("? ")]),
            message("assistant", [text("Rath"), text("er")]),
        ]
    }
    (sample,) = read_rows(tmp_path, [row])
    assert sample.key == "s/00000000" and sample.images == (ONE, TWO)
    assert turns(sample) == [
        ("system", "Answer in one word."),
        ("user", "Is <image> like\n<image>?"),
        ("assistant", "Rather"),
    ]


def test_images_of_later_questions_and_the_shapes_of_parts(tmp_path):
    write_file(tmp_path / "a/1.png", ONE)
    shapes = [
        {"type": "input_image", "image_url": data_uri(ONE)},
        {"type": "image_url", "image_url": data_uri(ONE)},
        {"type": "image", "url": "a/1.png", "text": None},
        {"type": "image", "path": "a/1.png"},
        {"type": "image", "image": "a/1.png", "image_url": None},
    ]
    rows = [{"messages": [*chat("a?", "b")["messages"], *ask(shape, text("c?"))["messages"]]} for shape in shapes]
    samples = read_rows(tmp_path, rows)
    assert all(sample.images == (ONE,) and turns(sample)[2] == ("user", "<image>c?") for sample in samples)
    assert len(samples) == len(shapes)


@pytest.mark.parametrize(
    ("mark", "is_learnt"),
    [
        *(({name: False}, False) for name in ("loss", "trainable", "training", "train", "train_on_turn")),
        *(({name: 0}, False) for name in ("weight", "loss_mask", "lossMask", "compute_loss", "loss_weight")),
        *(({name: True}, False) for name in ("masked", "isMasked", "do_not_train", "no_loss", "skip", "ignore_loss")),
        *(({name: True}, True) for name in ("trainable", "train", "loss_mask", "edited", "from_cache")),
        *(({name: False}, True) for name in ("masked", "ignored", "skip", "edited", "is_bad")),
        ({"correct": False}, False),
        ({"weight": 1}, True),
        ({"weight": None, "train": None, "label": "cat", "score": 0}, True),
    ],
    ids=str,
)
def test_marks_of_other_tools_beside_an_answer(mark, is_learnt, tmp_path):
    messages = [message("user", "a?"), message("assistant", "b", **mark), *chat("c?", "d")["messages"]]
    (sample,) = read_rows(tmp_path, [{"messages": messages}])
    assert [m.is_learnt for m in sample.messages] == [True, is_learnt, True, True]


@pytest.mark.parametrize(
    ("texts", "order"),
    [
        (("Is <image 1> like <image 2>?", "no"), (1, 2)),
        (("Is <image_2> like <image_1>?", "no"), (2, 1)),
        (("<|image_1|>\nWhich?", "this", "And <|image_2|>?", "so"), (1, 2)),
        (("<image0><image1>Which?", "this"), (1, 2)),
    ],
)
def test_numbered_marks_place_the_images_of_their_numbers(texts, order, tmp_path):
    (sample,) = read_rows(tmp_path, [chat(*texts, images=[data_uri(ONE), data_uri(TWO)])])
    assert sample.images == tuple({1: ONE, 2: TWO}[number] for number in order)
    assert "".join(m.text for m in sample.messages).count("<image>") == 2


@pytest.mark.parametrize("name", ["image_path", "img", "image_url", "file_name", "pictures", "image_files"])
def test_images_by_the_other_names_that_people_give_them(name, tmp_path):
    write_file(tmp_path / "1.png", ONE)
    row = chat("a?", "b", **{name: "1.png"})
    assert read_rows(tmp_path, [row])[0].images == (ONE,)
    both = {**row, "image": data_uri(TWO), name: "https://example.com/1.png"}
    assert read_rows(tmp_path, [both])[0].images == (TWO,)


REASONED = [  # an answer, its reasoning and its text
    (message("assistant", "b", reasoning_content=" It is.\r\nSo. "), "It is.\nSo.", "b"),
    (message("assistant", "b", reasoning="It is."), "It is.", "b"),
    (message("assistant", "b", reasoning_content=None, reasoning=""), "", "b"),
    (message("assistant", [text("<think>\nIt is.\n</think>"), text("\n\nb")]), "It is.", "b"),
    (message("assistant", "<think>\n\n</think>\n\nb"), "", "b"),
    (message("assistant", "b, not <think>x</think>"), "", "b, not <think>x</think>"),
    (message("assistant", "<think> of a number"), "", "<think> of a number"),
    (message("assistant", "<think>x</think>c", reasoning_content="It is."), "It is.", "<think>x</think>c"),
]


def test_reasoning_is_a_field_of_an_answer_or_a_block_before_its_text(tmp_path):
    question = message("user", "a?", reasoning="no")
    samples = read_rows(tmp_path, [{"messages": [question, answer]} for answer, *_ in REASONED])
    assert [from_fields(sample.key, to_fields(sample)) for sample in samples] == samples
    assert [(s.messages[1].reasoning, s.messages[1].text) for s in samples] == [(why, b) for _, why, b in REASONED]
    assert not any(sample.messages[0].reasoning for sample in samples)
    assert "reasoning" not in json.loads(to_fields(samples[2])["json"])["messages"][1]
    assert samples[1].digest() == samples[3].digest() != samples[2].digest()


def test_reasoning_of_another_type_and_a_block_alone_are_left_out(tmp_path):
    answers = [
        message("assistant", "b", reasoning_content=["why"]),
        message("assistant", "<think>\nIt is.\n</think>"),
        message("assistant", "b", reasoning="a\x07b"),
    ]
    items = read_rows(tmp_path, [{"messages": [message("user", "a?"), a]} for a in answers])
    assert reasons(items) == ["schema_error", "empty_target", "control_chars"]


def test_marks_of_swift_and_llama_factory(tmp_path):
    write_file(tmp_path / "demo/1.png", ONE)
    images = ["demo/1.png", {"bytes": None, "path": data_uri(TWO)}]
    rows = [
        chat("Is <image> like <image>?", "no", images=images),
        chat("Which?", "this", "Why?", "so", images=images),
        chat("Hm?", "yes", images=[], system="Be short."),
        chat("Is <image> one?", "yes", image="demo/1.png"),
    ]
    marked, plain, none, single = read_rows(tmp_path, rows)
    assert marked.images == (ONE, TWO) and turns(marked)[0] == ("user", "Is <image> like <image>?")
    assert turns(plain)[0] == ("user", "<image><image>Which?")
    assert turns(none)[:2] == [("system", "Be short."), ("user", "Hm?")] and none.images == ()
    assert single.images == (ONE,)


def test_parts_that_name_nothing_take_the_images_beside(tmp_path):
    write_file(tmp_path / "1.png", ONE)
    row = ask({"type": "image"}, text("or "), {"type": "image"}, text("?"), images=["1.png", data_uri(TWO)])
    (sample,) = read_rows(tmp_path, [row])
    assert sample.images == (ONE, TWO) and turns(sample)[0] == ("user", "<image>or <image>?")


def read_table(tmp_path, rows, schema, **options):
    storage = pa.schema([field.with_type(stored_as(field.type)) for field in schema])
    pq.write_table(pa.Table.from_pylist(rows, storage).cast(schema), tmp_path / "t.parquet", **options)
    return read(tmp_path)


def stored_as(kind):
    """Return the type without its JSON marks."""
    if isinstance(kind, pa.JsonType):
        return pa.string()
    if pa.types.is_list(kind):
        return pa.list_(stored_as(kind.value_type))
    return pa.struct([(f.name, stored_as(f.type)) for f in kind]) if pa.types.is_struct(kind) else kind


def test_parquet_with_contents_that_are_marked_as_json(tmp_path):
    """SkyRL's converter writes this through datasets 5: each content is its own JSON, with texts in quotes."""
    schema = pa.schema({"messages": pa.list_(pa.struct({"role": pa.string(), "content": pa.json_(pa.string())}))})
    part = {"type": "image", "image": data_uri(ONE, "jpeg")}
    contents = [json.dumps([part, text("Which?")]), json.dumps('say "this"')]
    rows = [{"messages": [message("user", contents[0]), message("assistant", c)]} for c in (contents[1], "{")]
    sample, broken = read_table(tmp_path, rows, schema)
    assert sample.images == (ONE,) and turns(sample) == [("user", "<image>Which?"), ("assistant", 'say "this"')]
    assert broken.reason == "json_parse_error" and broken.key == "t/00000001"


def test_parquet_with_structs_and_with_text(tmp_path):
    part = pa.struct({"type": pa.string(), "text": pa.string(), "image": pa.string()})
    turn = pa.struct({"role": pa.string(), "content": pa.list_(part), "weight": pa.int64()})
    picture = pa.struct({"bytes": pa.binary(), "path": pa.string()})
    schema = pa.schema({"messages": pa.list_(turn), "images": pa.list_(picture), "other": pa.int32()})
    question = message("user", [{"type": "image"}, text("is it?")])
    row = {"messages": [question, message("assistant", [text("yes")], weight=0)], "images": [{"bytes": ONE}]}
    samples = read_table(tmp_path, [row] * 5, schema, row_group_size=2)
    assert [sample.key for sample in samples] == [f"t/{i:08d}" for i in range(5)]
    assert samples[4].images == (ONE,) and turns(samples[4])[0] == ("user", "<image>is it?")
    assert not samples[4].messages[1].is_learnt
    write_file(tmp_path / "t" / "1.jsonl", lines([chat("a?", "b")]))  # the same subset: numbers continue
    assert [item.key for item in read(tmp_path)][4:] == ["t/00000004", "t/00000005"]
    whole = read_table(
        tmp_path, [{"messages": json.dumps(chat("a?", "b")["messages"])}], pa.schema({"messages": pa.string()})
    )
    assert turns(whole[0]) == [("user", "a?"), ("assistant", "b")]
    with pytest.raises(InputError, match="lacks the column 'messages'; it has: text"):
        read_table(tmp_path, [{"text": "a"}], pa.schema({"text": pa.string()}))


BAD_ROWS = {
    "no json": (b'{"messages": [', "json_parse_error"),
    "not utf-8": (b'{"messages": "\xff"}', "json_parse_error"),
    "a key twice": (b'{"messages": [{"role": "user", "role": "system", "content": "a"}]}', "json_parse_error"),
    "deep": (b"[" * 100_000, "json_parse_error"),
    "a list": ([], "schema_error"),
    "no messages": ({"text": "a"}, "schema_error"),
    "messages text": ({"messages": "a"}, "json_parse_error"),
    "message text": ({"messages": ["a"]}, "schema_error"),
    "no turn": ({"messages": []}, "no_text"),
    "two conversations": (chat("a?", "b", conversations=[{"from": "human", "value": "a?"}]), "schema_error"),
    "tools": (chat("a?", "b", tools=[{"type": "function"}]), "schema_error"),
    "content null": (chat("a?", None), "schema_error"),
    "part text": (ask("a"), "schema_error"),
    "part of sound": (ask({"type": "input_audio", "input_audio": {"data": ""}}), "schema_error"),
    "role null": ({"messages": [message(None, "a")]}, "schema_error"),
    "tool": ({"messages": [*chat("a?", "b")["messages"], message("tool", "c")]}, "bad_role"),
    "tool call": ({"messages": [message("user", "a?"), message("assistant", None, tool_calls=[{}])]}, "bad_role"),
    "no question": ({"messages": [message("assistant", "a")]}, "bad_role"),
    "two answers": ({"messages": [*chat("a?", "b")["messages"], message("assistant", "c")]}, "bad_role"),
    "question last": (chat("a?", "b", "c?"), "bad_role"),
    "system alone": ({"messages": [message("system", "a")]}, "bad_role"),
    "system later": ({"messages": [*chat("a?", "b")["messages"], message("system", "c")]}, "bad_role"),
    "system twice": (
        {"messages": [message("system", "c"), *chat("a?", "b")["messages"]], "system": "d"}, "schema_error"),
    "weight 2": ({"messages": [message("user", "a?"), message("assistant", "b", weight=2)]}, "schema_error"),
    "empty answer": (chat("a?", " \n"), "empty_target"),
    "empty question": (chat(" ", "b"), "empty_prompt"),
    "escape": (chat("a\x1b?", "b"), "control_chars"),
    "lone surrogate": (chat("a\ud800?", "b"), "schema_error"),
    "literal mark": (chat("is <image> a tag?", "b"), "special_token_in_text"),
    "mark of two parts": (ask(URL, text("<ima"), text("ge>?")), "special_token_in_text"),
    "mark in an answer": (chat("a?", "<image>", images=[data_uri(ONE)]), "special_token_in_text"),
    "literal mark and named part": (ask(URL, text("<image>?"), images=[data_uri(ONE)]), "special_token_in_text"),
    "image in an answer": ({"messages": [message("user", "a?"), message("assistant", [URL])]}, "schema_error"),
    "named parts and images": (ask(URL, text("?"), images=[data_uri(ONE)]), "image_count_mismatch"),
    "part without a name": (ask({"type": "image"}, text("?")), "image_count_mismatch"),
    "fewer images than marks": (chat("<image><image>?", "b", images=[data_uri(ONE)]), "image_count_mismatch"),
    "images and image": (chat("a?", "b", images=["a.png"], image="a.png"), "schema_error"),
    "image null": (ask({"type": "image", "image": {"url": None}}), "schema_error"),
    "mark of training": (
        {"messages": [message("user", "a?"), message("assistant", "b", loss_mask=[0, 1])]}, "schema_error"),
    "mark of two meanings": (
        {"messages": [message("user", "a?"), message("assistant", "b", mask=1)]}, "schema_error"),
    "row not to train": (chat("a?", "b", train=False), "schema_error"),
    "label false": (chat("a?", "b", label=False), "schema_error"),
    "preference": (chat("a?", "b", rejected="c"), "schema_error"),
    "mark without a box": (chat("Find <ref-object>", "<bbox>"), "box_count_mismatch"),
    "placeholder of another case": (chat("<Image>?", "b", images=[data_uri(ONE)]), "special_token_in_text"),
    "numbered mark twice": (chat("<image 1> or <image 1>?", "b", images=[data_uri(ONE)]), "special_token_in_text"),
    "numbered mark in an answer": (chat("a?", "see <image_1>", images=[data_uri(ONE)]), "special_token_in_text"),
    "image of another name": (chat("a?", "b", thumbnail_img="1.png"), "schema_error"),
    "no such file": (ask({"type": "image", "image": "no.png"}, text("?")), "image_not_found"),
    "no base64": (ask({"type": "image", "image": "data:image/png;base64,????"}), "decode_error"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_ROWS)
def test_bad_row_is_named_and_its_neighbours_stay(name, tmp_path):
    bad, reason = BAD_ROWS[name]
    items = read_rows(tmp_path, [chat("1?", "1"), bad, chat("2?", "2")])
    assert reasons(items) == [None, reason, None]
    assert [item.key for item in items] == ["s/00000000", "s/00000001", "s/00000002"]
    items[1].detail.encode()


def test_a_file_is_never_opened_for_a_row_that_is_refused_anyway(tmp_path, monkeypatch):
    monkeypatch.setattr("dataset_builders.readers.image_refs.ImageReader.read", lambda *_: 1 / 0)
    (item,) = read_rows(tmp_path, [ask({"type": "image", "image": "1.png"}, answer=" ")])
    assert item.reason == "empty_target"


def line(row):
    return lines([row])


def numbered(count):
    return [chat(f"What is {i}?", f"{i} \u00e4\u4e16\U0001f600") for i in range(count)]


SHAPES = {
    "lines": lambda rows: lines(rows),
    "lines without a last newline": lambda rows: lines(rows)[:-1],
    "lines with a byte order mark": lambda rows: b"\xef\xbb\xbf" + lines(rows),
    "lines that end in CRLF": lambda rows: lines(rows).replace(b"\n", b"\r\n"),
    "lines with blank ones": lambda rows: b"\xef\xbb\xbf \r\n\n" + b" \n\n".join(map(line, rows)) + b"\n" * 9 + b"\t ",
    "joined files with marks": lambda rows: b"".join(b"\xef\xbb\xbf" + line(row) for row in rows) + b"\xef\xbb\xbf",
    "array": lambda rows: json.dumps(rows).encode(),
    "array of raw unicode": lambda rows: json.dumps(rows, ensure_ascii=False, indent=1).encode(),
    "array with a byte order mark": lambda rows: b"\xef\xbb\xbf \n" + json.dumps(rows).encode() + b"\n \n",
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("block", [7, 1 << 20])
def test_every_shape_of_file_gives_the_same_rows_however_it_is_cut(shape, block, tmp_path, monkeypatch):
    monkeypatch.setattr(text_files, "_BLOCK", block)
    monkeypatch.setattr(text_files, "_PART_ROWS", 4)
    rows = numbered(10)
    write_file(tmp_path / "s.json", SHAPES[shape](rows))
    parts = OPENAI_MESSAGES.list_parts(tmp_path, (), ConversationOptions())
    assert [part.num_rows for part in parts] == [4, 4, 2]
    assert [part.first_row for part in parts] == [0, 4, 8] == [part.file_row for part in parts]
    items = read(tmp_path)
    assert [turns(item)[0][1] for item in items] == [f"What is {i}?" for i in range(10)]
    assert [turns(item)[1][1] for item in items] == [row["messages"][1]["content"] for row in rows]
    chosen = [item.key for item in read(tmp_path, rows={1, 4, 9})]
    assert chosen == ["s/00000001", "s/00000004", "s/00000009"]


def test_parts_are_cut_by_bytes_too(tmp_path, monkeypatch):
    monkeypatch.setattr(text_files, "_PART_BYTES", 400)
    for name in ("a.jsonl", "b.json"):
        rows = numbered(20)
        write_file(tmp_path / name, lines(rows) if name == "a.jsonl" else json.dumps(rows).encode())
    parts = OPENAI_MESSAGES.list_parts(tmp_path, (), ConversationOptions())
    assert all(part.span[1] - part.span[0] < 600 for part in parts) and len(parts) > 8
    assert [item.key for item in read(tmp_path)] == [f"{s}/{i:08d}" for s in "ab" for i in range(20)]


def test_a_line_that_is_too_long_is_one_bad_row(tmp_path, monkeypatch):
    monkeypatch.setattr(text_files, "MAX_ROW_BYTES", 200)
    rows = [chat("1?", "1"), chat("x" * 1000, "y"), chat("2?", "2")]
    items = read_rows(tmp_path, rows)
    assert reasons(items) == [None, "json_parse_error", None] and "1087 bytes" in items[1].detail
    assert reasons(read_rows(tmp_path, [rows[0], b" " * 1000, rows[2]])) == [None, None]
    (tmp_path / "s.jsonl").unlink()
    write_file(tmp_path / "s.json", json.dumps(rows).encode())
    with pytest.raises(InputError, match="row of over 200 bytes"):
        monkeypatch.setattr(text_files, "_BLOCK", 64)
        read(tmp_path)


BROKEN_FILES = {
    "array that ends": (b'[{"messages": []},', "ends within the array"),
    "array cut in a text": (b'[{"messages": "abc', "malformed"),
    "array without a comma": (b'[{"a": 1} {"a": 2}]', "where ',' or ']' should be"),
    "array with rubbish": (b'[{"a": 1}, x]', "malformed"),
    "array and more": (b'[{"a": 1}]\n[{"a": 2}]', "goes on"),
    "deep array": (b"[" * 100_000, "nested too deeply"),
    "utf-16": ('[{"a": 1}]'.encode("utf-16"), "UTF-16"),
    "gzip": (b"\x1f\x8b\x08\0\0\0", "gunzip"),
}


@pytest.mark.parametrize("name", BROKEN_FILES)
def test_a_broken_file_is_one_clear_line(name, tmp_path):
    data, text = BROKEN_FILES[name]
    write_file(tmp_path / "s.json", data)
    with pytest.raises(InputError) as caught:
        read(tmp_path)
    assert text in str(caught.value) and str(tmp_path / "s.json") in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_integer_of_5000_digits_harms_nobody(tmp_path):
    row = b'{"id": ' + b"9" * 5000 + b', "messages": ' + json.dumps(chat("a?", "b")["messages"]).encode() + b"}"
    write_file(tmp_path / "a.jsonl", row)
    write_file(tmp_path / "b.json", b"[" + row + b"]")
    assert reasons(read(tmp_path)) == [None, None]


def test_the_rows_of_a_subset_are_numbered_on_and_another_subset_is_named(tmp_path):
    rows = numbered(4)
    for i, name in enumerate(["b/x.jsonl", "a.json", "t-00001-of-00002.jsonl", "t-00000-of-00002.jsonl"]):
        write_file(tmp_path / name, lines(rows[i : i + 1]))
    write_file(tmp_path / ".hidden.jsonl", b"rubbish")
    found = [(item.key, turns(item)[0][1]) for item in read(tmp_path)]
    assert found[:2] == [("a/00000000", "What is 1?"), ("b/00000000", "What is 0?")]
    assert found[2:] == [("t/00000000", "What is 3?"), ("t/00000001", "What is 2?")]
    assert [item.key for item in read(tmp_path, subsets=["t"])] == ["t/00000000", "t/00000001"]
    with pytest.raises(InputError, match=r"no subset 'tt'.*there are: a, b, t"):
        read(tmp_path, subsets=["tt"])


def test_sources_that_cannot_be_read(tmp_path):
    with pytest.raises(InputError, match="does not exist"):
        read(tmp_path / "no")
    with pytest.raises(InputError, match="holds neither"):
        read(tmp_path)
    write_file(tmp_path / "a\nb.jsonl", lines(numbered(1)))
    with pytest.raises(InputError, match=r"a\\nb.*rename"):
        read(tmp_path)


def test_image_root_is_a_directory_below_the_source(tmp_path):
    write_file(tmp_path / "pictures/1.png", ONE)
    write_file(tmp_path / "s/rows.jsonl", lines([ask({"type": "image", "image": "1.png"}, text("?"))]))
    assert reasons(read(tmp_path)) == ["image_not_found"]
    assert read(tmp_path, image_root="pictures")[0].images == (ONE,)
    for wrong in ("picture", "../x", "/etc"):
        with pytest.raises(InputError, match="image_root"):
            read(tmp_path, image_root=wrong)


def test_patterns_name_every_file_that_is_read(tmp_path):
    patterns = OPENAI_MESSAGES.patterns
    assert "s/*.jsonl" in patterns(["s"]) and "*.json" in patterns([]) and "**/*.[jJ][pP][gG]" in patterns(["s"])
    assert get_builder("openai_messages") is OPENAI_MESSAGES
