"""The golden tables: the result of each reference for each case, and where ours differs."""

import json
from pathlib import Path
from typing import Any

from stages.shared.scoring.metrics.contract import Judged

GOLDEN = {path.stem: json.loads(path.read_text()) for path in sorted((Path(__file__).parent / "golden").glob("*.json"))}


def judged(case: dict[str, Any]) -> Judged:
    return Judged(question=case.get("question", ""), references=tuple(case["references"]), answer=case["answer"])


def all_judged(name: str) -> list[Judged]:
    """Return every answer of a metric's golden table, including the differences."""
    return [judged(case) for case in (*GOLDEN[name]["cases"], *GOLDEN[name]["differences"])]
