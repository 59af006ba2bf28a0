"""The recognition of the columns that are the image, the question and the answer."""

import pytest

from dataset_builders.recognise.columns import CLASSIFY, DESCRIBE, READ, find_columns, tar_options

pytestmark = pytest.mark.promise(
    "`athanor init` makes a recipe from common layouts of data, with settings that fit the GPU by the estimate, "
    "names each fault, and refuses rows with a command that makes them readable."
)

STRUCT = {"bytes": b"\x89PNG", "path": None}


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"image": STRUCT, "question": "a?", "answer": "b"}, ("image", "question", "answer")),
        ({"Image": b"\x89PNG", "Query": "a?", "Response": "b", "id": 3}, ("Image", "Query", "Response")),
        ({"file_name": "a/1.JPG", "text": "a cat"}, ("file_name", f"<image>{DESCRIBE}", "text")),
        ({"img": [STRUCT, STRUCT], "prompt": "both?", "completion": "yes"}, ("img", "prompt", "completion")),
        ({"image": STRUCT, "label": "cat", "width": 3}, ("image", f"<image>{CLASSIFY}", "label")),
        ({"image": STRUCT, "latex_formula": "x^2"}, ("image", f"<image>{READ}", "latex_formula")),
        ({"picture": "data:image/png;base64,iVBO", "q": "Is it a dog?", "a": "no"}, ("picture", "q", "a")),
        ({"instruction": "Add.", "output": 3, "source": "web"}, (None, "instruction", "output")),
        ({"Bild": "1.jpg", "Frage": "a?", "Antwort": "b", "Gr\u00f6\u00dfe": 3}, ("Bild", "Frage", "Antwort")),
        ({"fichier": "1.jpg", "R\u00e9ponse": "b"}, ("fichier", f"<image>{DESCRIBE}", "R\u00e9ponse")),
        ({"page scan": STRUCT, "id": 1, "words": "a b"}, ("page scan", f"<image>{DESCRIBE}", "words")),
    ],
)
def test_columns_by_their_names_and_values(row, expected):
    found = find_columns([row, row])
    assert (found.options["image"], found.options["question"], found.options["answer"]) == expected
    assert set(found.unused) == set(row) - set(expected)


def test_numbered_columns_of_images_are_shown_together_and_others_are_not():
    row = {"image": STRUCT, "image_2": STRUCT, "mask": STRUCT, "question": "the same?", "answer": "no"}
    columns = find_columns([row, row])
    assert columns.options["image"] == ["image", "image_2"] and columns.unused == ("mask",)
    assert find_columns([row, {**row, "image_2": None}]).options["null_image"] == "absent"


def test_several_answers_are_references_and_a_null_image_may_be_absent():
    rows = [
        {"image": "1.png", "question": "a?", "answers": ["x", "y"]},
        {"image": "", "question": "b?", "answers": ["z"]},
    ]
    options = find_columns(rows).options
    assert options["references"] == options["answer"] == "answers" and options["null_image"] == "absent"


@pytest.mark.parametrize(
    ("column", "value"),
    [("qa_pairs", [{"question": "a?", "answer": "b"}, {"question": "c?", "answer": "d"}]), ("questions", ["a?", "c?"])],
)
def test_several_questions_in_a_row_are_refused_and_no_other_column_is_taken_for_the_answer(column, value):
    row = {"image": "1.png", column: value, "tags": ["x", "y"]}
    assert f"column {column!r} holds" in find_columns([row]) and "openai_messages" in find_columns([row])


def test_the_choices_that_an_answer_names_belong_to_the_question():
    row = {"image": "1.png", "question": "Which?", "A": "red", "B": "blue", "answer": "B"}
    columns = find_columns([row, {**row, "answer": "A"}])
    assert columns.options["question"] == "{question}\nA. {A}\nB. {B}" and columns.unused == ()
    assert find_columns([{**row, "answer": "red"}]).options["question"] == "question"
    some = find_columns([{**row, "C": None}, {**row, "C": "green", "D": ""}])  # D is empty in all rows
    assert some.options["question"].endswith("\nC. {C}") and some.unused == ("D",)


def test_the_input_of_an_instruction_belongs_to_the_question():
    rows = [{"instruction": "Add.", "input": "1 + 2", "output": "3"}, {"instruction": "Greet.", "output": "Hi."}]
    columns = find_columns(rows)
    assert columns.options["question"] == "{instruction}\n{input}" and columns.unused == ()


def test_a_column_of_splits_is_taken_where_its_values_are_known():
    rows = [{"question": "a", "answer": "b", "split": split} for split in ("train", "train", "dev")]
    assert find_columns(rows).options["heldout_splits"] == ["dev", "validation", "test"]
    rows[0]["split"] = "north"
    assert "split" not in find_columns(rows).options


@pytest.mark.parametrize(
    ("row", "why"),
    [
        (
            {"image": STRUCT, "width": [3, None]},
            "no column looks like an answer among: image, width; name that column answer",
        ),
        (
            {"answer": "b", "id": 3},
            "no column looks like a question, and none holds images or videos, among: answer, id",
        ),
    ],
)
def test_why_there_is_no_reading(row, why):
    assert find_columns([row]) == why


@pytest.mark.parametrize(
    ("group", "options"),
    [
        ({"jpg": b"", "txt": b""}, {"question": f"constant:{DESCRIBE}", "answer": "txt"}),
        ({"0.png": b"", "1.png": b"", "json": b'{"messages": [1]}'}, {"messages": "json:messages"}),
        (
            {"jpg": b"", "json": b'{"question": "a?", "answer": "b"}'},
            {"question": "json:question", "answer": "json:answer"},
        ),
        ({"jpg": b"", "json": b'{"caption": "b"}'}, {"question": f"constant:{DESCRIBE}", "answer": "json:caption"}),
        ({"json": b'[{"role": "user"}]'}, {"text_only": True, "messages": "json"}),
        ({"jpg": b"", "json": b"{", "cls": b"3"}, {"question": f"constant:{CLASSIFY}", "answer": "cls"}),
    ],
)
def test_members_of_a_tar(group, options):
    assert tar_options([group, group]) == options


def test_a_tar_without_text_is_refused():
    assert (
        tar_options([{"jpg": b"", "npy": b""}]) == "no member with text (json, txt, caption, text, cls) among: jpg, npy"
    )
    assert tar_options([]) == "it holds no sample"
    joined = {"jpg": b"", "json": b'{"question": "Which?", "A": "red", "B": "blue", "answer": "B"}'}
    assert "joined from several fields ({question} A. {A} B. {B})" in tar_options([joined])


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (
            {"image": "1.png", "question": {"en": "a?", "de": "b?"}, "answer": "c"},
            "'question' holds an object (en, de)",
        ),
        ({"image": "1.png", "question": "a?", "answer": {"text": "c"}}, "'answer' holds an object (text)"),
        ({"question": "a?", "choices": ["x", "y"], "answer": 1}, "'choices' holds the choices of each question"),
        ({"image": "1.png", "query": "a?", "options": ["x", "y"], "label": "A"}, "'options' holds the choices"),
        ({"prompt": "a?", "chosen": "b", "rejected": "c"}, "'chosen' holds data of preferences"),
    ],
)
def test_what_no_map_of_columns_reads_is_refused(row, words):
    assert words in find_columns([row, row])


@pytest.mark.parametrize("value", ["iVBORw0KGgo" + "A" * 300, 17, "a/000017", "https://example.com/1.png", "['1.png']"])
def test_a_column_called_image_is_the_image_whatever_it_holds(value):
    """Reading then says what is wrong with it, and no row becomes text alone."""
    row = {"image": value, "question": "a?", "answer": "b"}
    assert find_columns([row]).options["image"] == "image"
    assert find_columns([{**row, "image": None}]).options == {**find_columns([row]).options, "null_image": "absent"}


def test_images_stand_in_the_order_of_their_numbers_and_two_without_a_usual_name_are_both_read():
    row = {f"image_{number}": STRUCT for number in (1, 10, 3)} | {"question": "a?", "answer": "b"}
    assert find_columns([row]).options["image"] == ["image_1", "image_3", "image_10"]
    row = {"before": STRUCT, "after": STRUCT, "question": "What changed?", "answer": "b"}
    assert find_columns([row]).options["image"] == ["before", "after"]
    row = {"page 10": STRUCT, "page 9": STRUCT, "question": "a?", "answer": "b"}
    assert find_columns([row]).options["image"] == ["page 9", "page 10"]
