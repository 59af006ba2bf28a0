"""dataset_card.md: what a dataset holds, for people and, in its YAML head, for the Hugging Face hub.

The head follows the hub's dataset card metadata (huggingface.co/docs/hub/datasets-cards): `configs` names the shards
of each split, which `datasets` loads as WebDataset; `dataset_info` has samples and bytes. The card says nothing of
time or place: its bytes depend on the data alone.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import yaml

from dataset_builders.contracts.sample import SPLITS

DATASET_CARD = "dataset_card.md"
_SIZE_CATEGORIES = (
    (10**3, "n<1K"),
    (10**4, "1K<n<10K"),
    (10**5, "10K<n<100K"),
    (10**6, "100K<n<1M"),
    (10**7, "1M<n<10M"),
    (10**8, "10M<n<100M"),
    (10**9, "100M<n<1B"),
)


@dataclass(frozen=True, slots=True)
class SplitSize:
    """What one split holds: samples, and its shards' bytes."""

    num_samples: int
    num_bytes: int
    num_shards: int


@dataclass(frozen=True, slots=True)
class TokenCount:
    """What tokenization made of one subset; patches are vision patches before merging."""

    num_samples: int
    num_tokens: int
    num_loss_tokens: int
    num_patches: int


def card_head(name: str, splits: Mapping[str, SplitSize], has_pictures: bool) -> str:
    """The YAML head of a card, with its `---` lines."""
    used = {split: splits[split] for split in SPLITS if splits[split].num_samples}
    samples = sum(size.num_samples for size in used.values())
    total = sum(size.num_bytes for size in used.values())
    files = [{"split": split, "path": f"{split}/*.tar"} for split in used]
    sizes = [{"name": split, "num_bytes": s.num_bytes, "num_examples": s.num_samples} for split, s in used.items()]
    head = {
        "pretty_name": name,
        "task_categories": ["image-text-to-text" if has_pictures else "text-generation"],
        "tags": ["webdataset"],
        "size_categories": [_size_category(samples)],
        "configs": [{"config_name": "default", "data_files": files}],
        "dataset_info": {
            "config_name": "default",
            "splits": sizes,
            "download_size": total,
            "dataset_size": total,
        },
    }
    return f"---\n{yaml.safe_dump(head, sort_keys=False, allow_unicode=True)}---\n"


def section(title: str, body: str) -> str:
    """A section of a card; `body` is Markdown."""
    return f"\n## {title}\n\n{body.strip()}\n"


def table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table; numbers get thousands separators and stand right. Foreign text is made harmless."""
    is_number = [bool(rows) and all(isinstance(row[i], int | float) for row in rows) for i in range(len(columns))]
    lines = [columns, ["---:" if number else "---" for number in is_number]]
    lines += [[_cell(value) for value in row] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def block(text: str) -> str:
    """Foreign text as it is, in a fence that nothing in it closes."""
    longest = max((len(run) for run in re.findall(r"~+", text)), default=0)
    fence = "~" * max(3, longest + 1)
    return f"{fence}\n{text}\n{fence}"


def with_tokens(card: str, subsets: Mapping[str, TokenCount], note: str = "") -> str:
    """The card with a section "Tokens", which replaces one that is there.

    Args:
        card: a whole card.
        subsets: name -> what tokenization made of it.
        note: a sentence above the table: the tokenizer, the limits.
    """
    columns = ["subset", "samples", "tokens", "learnt tokens", "patches", "tokens a sample"]
    rows: list[list[object]] = [_token_row(name, count) for name, count in subsets.items()]
    counts = list(subsets.values())
    total = TokenCount(*(sum(getattr(c, f.name) for c in counts) for f in dataclasses.fields(TokenCount)))
    rows.append(_token_row("all", total))
    return with_section(card, "Tokens", f"{note}\n\n{table(columns, rows)}")


def with_section(card: str, title: str, body: str) -> str:
    """The card with this section, in the place of the one of that title or at its end."""
    pieces = _sections(card)
    places = [i for i, piece in enumerate(pieces) if piece.splitlines()[:1] == [f"## {title}"]]
    place = places[0] if places else len(pieces)
    pieces[place : place + 1] = [section(title, body).lstrip("\n")]
    return "\n".join(piece.rstrip("\n") + "\n" for piece in pieces)


def _sections(card: str) -> list[str]:
    """What stands before the first `## ` heading, and each section from its heading on; fences are not looked into."""
    pieces, fence = [""], ""
    for line in card.splitlines(keepends=True):
        mark = line.strip() if re.fullmatch(r"~{3,}", line.strip()) else ""
        if not fence and line.startswith("## "):
            pieces.append("")
        if mark and fence in ("", mark):
            fence = "" if fence else mark
        pieces[-1] += line
    return pieces


def _token_row(name: str, count: TokenCount) -> list[object]:
    mean = round(count.num_tokens / max(1, count.num_samples), 1)
    return [name, count.num_samples, count.num_tokens, count.num_loss_tokens, count.num_patches, mean]


def _size_category(samples: int) -> str:
    return next((name for limit, name in _SIZE_CATEGORIES if samples < limit), "n>1B")


def _cell(value: object) -> str:
    if isinstance(value, int | float):
        return f"{value:,}"
    text = " ".join(str(value).split())
    return re.sub(r"([\\|`*_\[\]<>#~])", r"\\\1", text) or " "
