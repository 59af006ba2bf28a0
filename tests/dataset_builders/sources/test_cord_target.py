"""A parse as JSON or as Donut's tags, and back: every tree is restored unchanged, or is refused."""

import json
import random
from functools import partial

import pytest
from transformers import DonutProcessor

from dataset_builders.sources.cord_target import MAX_DEPTH, InnerTag, NoTagForm, from_json, from_tags, to_json, to_tags

pytestmark = pytest.mark.promise("A receipt goes from raw row to nTED, as JSON and as tags, with an exact inverse.")

MENU = {
    "menu": [
        {"nm": "Nasi Goreng", "cnt": "2", "price": "18.000", "sub": {"nm": "Telur", "price": "3.000"}},
        {"nm": ["Es", "Teh"], "price": "4.000"},
    ],
    "sub_total": {"subtotal_price": "25.000", "tax_price": ["1.000", "1.500"]},
    "total": {"total_price": "27.500"},
}
KEYS = ["nm", "price", "sub", "menu", "text_sequence", "", "s_nm", "a b", "/", "caf\u00e9"]
PIECES = ["a", "7", " ", "<", ">", "/", "s_", "\n", "\u00e9", "<s_", "sep/", "/>", "<<", "</s_nm", '"', "\\", "\u4e2d"]


def donut(obj):
    """Convert as json2token of clovaai/donut (donut/model.py) does, reimplemented without its special tokens."""
    if isinstance(obj, dict):
        if list(obj) == ["text_sequence"]:
            return obj["text_sequence"]
        return "".join(f"<s_{key}>{donut(obj[key])}</s_{key}>" for key in sorted(obj, reverse=True))
    return "<sep/>".join(map(donut, obj)) if isinstance(obj, list) else str(obj)


def leaf(rng):
    return "".join(rng.choice(PIECES) for _ in range(rng.randrange(5)))


def tree(rng, depth, in_list=False):
    """Return any tree that has a form in tags: empty and one-item lists and objects, hostile texts and keys."""
    kind = rng.random()
    if depth == 0 or kind < 0.35:
        return leaf(rng)
    if kind < 0.6:
        return [] if in_list else [tree(rng, depth - 1, True) for _ in range(rng.randrange(4))]
    return {rng.choice(KEYS): tree(rng, depth - 1) for _ in range(rng.randrange(4))}


def values(rng, depth):
    """Return any JSON tree."""
    kind = rng.random()
    if depth == 0 or kind < 0.4:
        return rng.choice(
            [leaf(rng), rng.random() * 10 ** rng.randint(-9, 30), rng.randint(-(10**20), 10**20), True, None]
        )
    if kind < 0.7:
        return [values(rng, depth - 1) for _ in range(rng.randrange(4))]
    return {leaf(rng): values(rng, depth - 1) for _ in range(rng.randrange(4))}


def canonical(value):
    """Return a text that is the same for equal trees, whatever the order of keys; 1, 1.0 and True differ."""
    return json.dumps(value, sort_keys=True)


def test_tags_of_10000_random_trees_come_back():
    refused = 0
    for seed in range(10_000):
        whole = tree(random.Random(seed), 5)
        try:
            text = to_tags(whole)
        except InnerTag:
            refused += 1
            continue
        assert canonical(from_tags(text)) == canonical(whole), (seed, text)
    assert 0 < refused < 1000


def test_json_of_10000_random_trees_comes_back_and_does_not_depend_on_the_order_of_keys():
    for seed in range(10_000):
        whole = values(random.Random(seed), 5)
        text = to_json(whole)
        assert canonical(from_json(text)) == canonical(whole), (seed, text)
        assert to_json(json.loads(canonical(whole))) == text and "\n" not in text


def test_a_receipt_is_written_as_donut_writes_it_and_donuts_reader_reads_it():
    assert to_tags(MENU) == donut(MENU)
    assert to_tags(MENU).startswith("<s_total><s_total_price>27.500</s_total_price></s_total><s_sub_total>")
    read = partial(DonutProcessor.token2json, DonutProcessor.__new__(DonutProcessor), added_vocab={})
    assert read(to_tags({"menu": MENU["menu"][0], "total": MENU["total"]})) == {
        "menu": {"nm": "Nasi Goreng", "cnt": "2", "price": "18.000", "sub": {"nm": "Telur", "price": "3.000"}},
        "total": {"total_price": "27.500"},
    }


def plain_tree(rng, depth):
    """Return a tree that Donut's form can hold: no list under two items, no empty object, no list in a list."""
    if depth == 0 or rng.random() < 0.4:
        return rng.choice(["a", "7.000", "b c", ""])
    if rng.random() < 0.4:
        return [{"nm": plain_tree(rng, depth - 1)} for _ in range(rng.randint(2, 3))]
    return {key: plain_tree(rng, depth - 1) for key in rng.sample(["nm", "price", "sub", "etc"], rng.randint(1, 3))}


def test_what_donuts_form_is_enough_for_is_donuts_form():
    trees = [plain_tree(random.Random(seed), 4) for seed in range(2000)]
    assert all(to_tags(whole) == donut(whole) for whole in trees)


@pytest.mark.parametrize(
    ("whole", "text"),
    [
        ({"menu": [{"nm": "a"}]}, "<s_menu><one/><s_nm>a</s_nm></s_menu>"),
        ({"menu": {"nm": "a"}}, "<s_menu><s_nm>a</s_nm></s_menu>"),
        ({"menu": []}, "<s_menu><list/></s_menu>"),
        ({"menu": {}}, "<s_menu><dict/></s_menu>"),
        ({"menu": ""}, "<s_menu></s_menu>"),
        ({"menu": [""]}, "<s_menu><one/></s_menu>"),
        ({"menu": ["", ""]}, "<s_menu><sep/></s_menu>"),
        ({"menu": [[], {}]}, "<s_menu><list/><sep/><dict/></s_menu>"),
        ({"text_sequence": "a"}, "<s_text_sequence>a</s_text_sequence>"),
        ({"nm": " a "}, "<s_nm> a </s_nm>"),
        ({"nm": {"nm": "a"}}, "<s_nm><s_nm>a</s_nm></s_nm>"),
        ({}, "<dict/>"),
    ],
)
def test_what_is_written_otherwise_than_donut_does(whole, text):
    assert to_tags(whole) == text and canonical(from_tags(text)) == canonical(whole)


@pytest.mark.parametrize(
    ("whole", "kind"),
    [
        *((whole, NoTagForm) for whole in ({"a": 1}, {"a": None}, {"a": True}, {"a": [["b"]]}, {"a>": "b"})),
        *(({"a": text}, InnerTag) for text in ("see <s_nm>", "x</s_a>", "x<sep/>y", "<one/>")),
    ],
)
def test_a_tree_without_a_form_is_refused(whole, kind):
    with pytest.raises(NoTagForm) as caught:
        to_tags(whole)
    assert type(caught.value) is kind


@pytest.mark.parametrize(
    "text",
    [
        *("<s_a>", "</s_a>", "<s_a>b", "<s_a>b</s_b>", "<s_a>b</s_a>c", "c<s_a>b</s_a>", "<s_a>b</s_a><s_a>c</s_a>"),
        *("<s_a><s_b>c</s_a></s_b>", "<dict/>x", "x<one/>", "<one/>a<sep/>b", "<s_a>b</s_a></s_a>"),
        *("<s_a>" * (MAX_DEPTH + 2) + "</s_a>" * (MAX_DEPTH + 2), "<s_a>" * 50_000),
    ],
    ids=lambda text: text[:30],
)
def test_tags_that_do_not_match_are_an_error(text):
    with pytest.raises(ValueError):
        from_tags(text)


def test_whatever_a_model_writes_is_a_tree_or_a_value_error():
    tags = ["<s_a>", "</s_a>", "<s_b>", "</s_b>", "<sep/>", "<one/>", "<list/>", "<dict/>", "x", ""]
    read = 0
    for seed in range(20_000):
        rng = random.Random(seed)
        text = "".join(rng.choice(tags) for _ in range(rng.randrange(9)))
        try:
            whole = from_tags(text)
        except ValueError:
            continue
        read += 1
        assert canonical(from_tags(to_tags(whole))) == canonical(whole), text
    assert read > 1000


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "{'a': 1}", '{"a": 1, "a": 2}', '{"a": NaN}', '{"a": -Infinity}', '{"a": 1e999}', "9" * 5000),
        *("[" * 100_000, "[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1)),
    ],
    ids=lambda text: text[:20],
)
def test_what_is_no_json_here(text):
    with pytest.raises(ValueError):
        from_json(text)
