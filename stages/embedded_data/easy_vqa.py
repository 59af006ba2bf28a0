"""embedded_easy_vqa: the package easy-vqa as parquet files in the_cauldron's schema; no input, no network.

easy_vqa_train/train-00000-of-00008.parquet ...   easy_vqa_test/test-00000-of-00002.parquet ...

Row 12 of a subset is picture 12 of the package.
"""

from collections.abc import Mapping
from pathlib import Path

from dataset_builders.sources.embedded import EASY_VQA_SPLITS, check_easy_vqa, iter_easy_vqa_rows
from stages.embedded_data.digits import write_rows_report, write_subset
from stages.shared.artifacts.artifact import Stage, StageOutput
from stages.shared.inputs.config import EmbeddedEasyVqaConfig

VERSION = 1


def _run(config: EmbeddedEasyVqaConfig, inputs: Mapping[str, object], work: Path, resources: object) -> StageOutput:
    check_easy_vqa(config.version)
    subsets = {f"easy_vqa_{split}": list(iter_easy_vqa_rows(split)) for split in EASY_VQA_SPLITS}
    for split, (subset, rows) in zip(EASY_VQA_SPLITS, subsets.items()):
        write_subset(work / subset, rows, split)
    write_rows_report(work, f"easy-VQA {config.version}", subsets)
    return StageOutput(
        stats={
            "rows": {subset: len(rows) for subset, rows in subsets.items()},
            "questions": {subset: sum(len(row["texts"]) for row in rows) for subset, rows in subsets.items()},
        }
    )


STAGE = Stage("embedded_easy_vqa", VERSION, _run, on_disk=True, digested=("*/*.parquet",))
