"""dataset_card.md: a description of a dataset, for people and, in its YAML head, for the Hugging Face hub.

The head follows the hub's dataset card metadata (huggingface.co/docs/hub/datasets-cards): `configs` names the shards of
each split, which `datasets` loads as WebDataset; `dataset_info` has samples and bytes. The card contains no time and no
path: its bytes depend only on the data.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

import yaml

from dataset_builders.contracts.sample import SPLITS
from stages.pages.markdown import table

DATASET_CARD = "dataset_card.md"
_SIZE_CATEGORIES = {
    10**3: "n<1K",
    10**4: "1K<n<10K",
    10**5: "10K<n<100K",
    10**6: "100K<n<1M",
    10**7: "1M<n<10M",
    10**8: "10M<n<100M",
    10**9: "100M<n<1B",
}


@dataclass(frozen=True, slots=True)
class SplitSize:
    """The number of samples, shards and bytes of one split."""

    num_samples: int
    num_bytes: int
    num_shards: int


@dataclass(frozen=True, slots=True)
class TokenCount:
    """The figures of one tokenized subset; patches are vision patches before merging."""

    num_samples: int
    num_tokens: int
    num_loss_tokens: int
    num_patches: int


def card_head(name: str, splits: Mapping[str, SplitSize], has_pictures: bool) -> str:
    """Return the YAML between the `---` lines at the head of a card."""
    used = {split: splits[split] for split in SPLITS if splits[split].num_samples}
    samples = sum(size.num_samples for size in used.values())
    total = sum(size.num_bytes for size in used.values())
    files = [{"split": split, "path": f"{split}/*.tar"} for split in used]
    sizes = [{"name": split, "num_bytes": s.num_bytes, "num_examples": s.num_samples} for split, s in used.items()]
    head = {
        "pretty_name": name,
        "task_categories": ["image-text-to-text" if has_pictures else "text-generation"],
        "tags": ["webdataset"],
        "size_categories": [next((text for most, text in _SIZE_CATEGORIES.items() if samples < most), "n>1B")],
        "configs": [{"config_name": "default", "data_files": files}],
        "dataset_info": {
            "config_name": "default",
            "splits": sizes,
            "download_size": total,
            "dataset_size": total,
        },
    }
    return yaml.safe_dump(head, sort_keys=False, allow_unicode=True)


def with_tokens(card: str, subsets: Mapping[str, TokenCount], note: str) -> str:
    """Return the samples' card with a section "Tokens" at its end.

    Args:
        card: a whole card.
        subsets: name -> figures of the tokenized subset.
        note: a sentence above the table, with the tokenizer and the limits.
    """
    columns = ["subset", "samples", "tokens", "learnt tokens", "patches", "tokens per sample"]
    counts = {name: dataclasses.astuple(count) for name, count in subsets.items()}
    counts["all"] = tuple(map(sum, zip(*counts.values()))) or (0, 0, 0, 0)
    rows = [[name, *count, round(count[1] / max(1, count[0]), 1)] for name, count in counts.items()]
    return f"{card.rstrip()}\n\n## Tokens\n\n{note}\n\n{table(columns, rows)}\n"
