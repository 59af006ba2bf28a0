"""The dataset card: the hub reads its head, foreign text cannot break it, and tokens are added later."""

import yaml

from stages.pages.dataset_card import SplitSize, TokenCount, card_head, with_tokens
from stages.pages.markdown import fenced, table

SIZES = {"train": SplitSize(1200, 10**6, 3), "heldout": SplitSize(0, 0, 0)}
CARD = f"---\n{card_head('digits', SIZES, True)}---\n\n# digits\n\n## Examples\n\n{fenced('## x')}\n"
COUNTS = {"a": TokenCount(2, 100, 40, 30), "b": TokenCount(1, 11, 5, 0)}


def test_head_names_configs_sizes_and_only_splits_that_hold_something():
    found = yaml.safe_load(card_head("digits", SIZES, True))
    assert found["configs"] == [
        {"config_name": "default", "data_files": [{"split": "train", "path": "train/*.tar"}]},
    ]
    assert found["dataset_info"]["splits"] == [{"name": "train", "num_bytes": 10**6, "num_examples": 1200}]
    assert found["dataset_info"]["dataset_size"] == 10**6 and found["size_categories"] == ["1K<n<10K"]
    assert found["task_categories"] == ["image-text-to-text"]
    assert yaml.safe_load(card_head("x", SIZES, False))["task_categories"] == ["text-generation"]


def test_size_categories_are_the_hubs():
    for samples, name in [(999, "n<1K"), (1000, "1K<n<10K"), (1_880_000, "1M<n<10M"), (10**9, "n>1B")]:
        sizes = {"train": SplitSize(samples, 1, 1), "heldout": SplitSize(0, 0, 0)}
        assert yaml.safe_load(card_head("x", sizes, True))["size_categories"] == [name]


def test_foreign_text_breaks_neither_table_nor_fence():
    text = table(["answer", "times"], [["a|b\n## `c` <script>", 1234]])
    assert len(text.splitlines()) == 3 and text.splitlines()[2] == "| a\\|b \\#\\# \\`c\\` \\<script\\> | 1,234 |"
    lines = fenced("~~~~\n## Tokens\n~~~").splitlines()
    assert lines[0] == lines[-1] == "~~~~~"


def test_tokens_are_added_at_the_end():
    card = with_tokens(CARD, COUNTS, "By a tokenizer.")
    assert card.startswith(CARD.rstrip("\n")) and "\n## Tokens\n\nBy a tokenizer.\n" in card
    assert "| b | 1 | 11 | 5 | 0 | 11.0 |" in card and card.endswith("| all | 3 | 111 | 45 | 30 | 37.0 |\n")
