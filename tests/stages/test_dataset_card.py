"""The card: its head is what the hub reads, foreign text cannot break it, and tokens are added later."""

import yaml

from stages.dataset_card import SplitSize, TokenCount, block, card_head, section, table, with_section, with_tokens

SIZES = {"train": SplitSize(1200, 10**6, 3), "heldout": SplitSize(0, 0, 0)}
CARD = card_head("digits", SIZES, True) + "\n# digits\n" + section("Splits", "a") + section("Examples", block("## x"))
COUNTS = {"a": TokenCount(2, 100, 40, 30), "b": TokenCount(1, 11, 5, 0)}


def head(card: str) -> dict:
    return yaml.safe_load(card.split("---\n")[1])


def test_head_names_configs_sizes_and_only_splits_that_hold_something():
    found = head(CARD)
    assert found["configs"] == [
        {"config_name": "default", "data_files": [{"split": "train", "path": "train/*.tar"}]},
    ]
    assert found["dataset_info"]["splits"] == [{"name": "train", "num_bytes": 10**6, "num_examples": 1200}]
    assert found["dataset_info"]["dataset_size"] == 10**6 and found["size_categories"] == ["1K<n<10K"]
    assert found["task_categories"] == ["image-text-to-text"]
    assert head(card_head("x", SIZES, False))["task_categories"] == ["text-generation"]


def test_size_categories_are_the_hubs():
    for samples, name in [(999, "n<1K"), (1000, "1K<n<10K"), (1_880_000, "1M<n<10M"), (10**9, "n>1B")]:
        sizes = {"train": SplitSize(samples, 1, 1), "heldout": SplitSize(0, 0, 0)}
        assert head(card_head("x", sizes, True))["size_categories"] == [name]


def test_foreign_text_breaks_neither_table_nor_fence():
    text = table(["answer", "times"], [["a|b\n## `c` <script>", 1234]])
    assert len(text.splitlines()) == 3 and text.splitlines()[2] == "| a\\|b \\#\\# \\`c\\` \\<script\\> | 1,234 |"
    fenced = block("~~~~\n## Tokens\n~~~").splitlines()
    assert fenced[0] == fenced[-1] == "~~~~~"


def test_tokens_are_added_at_the_end_and_replaced():
    once = with_tokens(CARD, COUNTS, "By a tokenizer.")
    assert once.startswith(CARD.rstrip("\n")) and "| all | 3 | 111 | 45 | 30 | 37.0 |" in once
    again = with_tokens(once, COUNTS | {"b": TokenCount(1, 12, 5, 0)})
    assert again.count("\n## Tokens\n") == 1 and "| all | 3 | 112 |" in again and "By a tokenizer" not in again
    assert with_tokens(again, COUNTS, "By a tokenizer.") == once


def test_a_section_is_replaced_in_its_place_and_headings_in_fences_are_text():
    card = with_section(CARD, "Splits", "b")
    assert card.index("## Splits\n\nb") < card.index("## Examples") and "\na\n" not in card
    card = with_section(CARD, "x", "new")
    assert "~~~\n## x\n~~~" in card and card.rstrip().endswith("## x\n\nnew")
    assert head(card) == head(CARD)
