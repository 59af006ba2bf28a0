"""A receipt from raw row to nTED: raw rows of CORD-V2 -> convert -> answers -> evaluate, with JSON and with tags.

The answers are made up, so that their scores are known beforehand: computed by hand from the definition, or by Donut's
own evaluator (tests/golden/cord.json). Both targets of the same rows must give these numbers.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from dataset_builders.contracts.sample import Sample
from dataset_builders.sources.cord_target import NoTagForm, Tree, from_json, from_tags, to_json, to_tags
from dataset_builders.sources.cord_v2 import PROMPTS
from flows.pipeline.recipe import load_recipe
from stages.answer.heldout import GeneratedAnswer, heldout_samples, to_line
from stages.convert.stage import STAGE as CONVERT
from stages.evaluate.config import EvaluateConfig
from stages.evaluate.predictions import read_predictions
from stages.evaluate.stage import STAGE as EVALUATE
from stages.shared.artifacts.artifact import Artifact, External
from stages.shared.artifacts.run_stage import run_stage
from tests.helpers.drawn.suite import iter_cord_splits
from tests.helpers.drawn.write import SUITE_YAML
from tests.helpers.evaluation import answers_artifact
from tests.helpers.raw_rows import CORD_SCHEMA, cord_row, png, write_parquet
from tests.stages.convert.test_convert import all_samples
from tests.stages.shared.scoring.metrics.cord_cases import CORD_JSON, RECEIPTS

pytestmark = pytest.mark.promise("A receipt goes from raw row to nTED, as JSON and as tags, with an exact inverse.")

NUM_DRAWN = 40
SPLIT_SEEDS = {"train": 0, "validation": 1000, "test": 2000}  # digests of the images, which are all different
HELDOUT = ("cord_v2_validation", "cord_v2_test")
EXACT = {"abs": 1e-12, "rel": 0}
WRITERS: dict[str, Callable[[Tree], str]] = {"json": to_json, "donut": to_tags}
READERS: dict[str, Callable[[str], Tree]] = {"json": from_json, "donut": from_tags}

# The receipt whose answers are wrong in a known way, with the cost to insert each node except the root: keys and
# list items cost 1, texts the number of their characters.
#   menu 1   <item 1> 1   nm 1  Nasi 4   price 1  9.000 5     12 for the first item
#            <item 2> 1   nm 1  Teh  3   price 1  4.000 5     11 for the second
#   total 1  <item>   1   total_price 1  13.000 6              9 for the total with its key
# So the distance from {} is 1 + 12 + 11 + 9 = 33.
KNOWN = {
    "menu": [{"nm": "Nasi", "price": "9.000"}, {"nm": "Teh", "price": "4.000"}],
    "total": {"total_price": "13.000"},
}
WRONG_PRICE = {**KNOWN, "menu": [KNOWN["menu"][0], {"nm": "Teh", "price": "14.500"}]}
MISSING_LINE = {**KNOWN, "menu": KNOWN["menu"][:1]}

ODD: list[dict[str, Tree]] = [
    {"menu": {"nm": "A", "sub": [{"nm": "B", "sub": {"nm": "C", "cnt": "1"}}, {"nm": "D"}]}},
    {"menu": [{"nm": "Set", "sub": {"nm": ["Es", "Teh", "Es"], "price": ["0", "0", "0"]}}, {"nm": "Set"}]},
    {"menu": [{"nm": "Roti", "price": "5.000"}] * 3, "total": {"total_price": ["15.000", "15,000", "15.000"]}},
    {"menu": {"nm": "\u9ed2\u7cd6 caf\u00e9 \U0001f35c \u00a530", "price": "1\u00a0000"}},
    {"menu": {"nm": 'a "b" \\ c / d \\n {e} [f], g: h', "etc": "'"}},
    {"menu": {"nm": "1 < 2 > 0 & </ s_nm> <s _x> <sep>", "price": "<<9>>"}},
    {"menu": {"nm": " two\nlines\tand\u2028one \u3000", "price": "\ufeff9"}},
    {"menu": {"nm": "```json\\n{}\\n```", "price": "null"}},
    {"menu": {"nm": "", "price": "9.000"}, "sub_total": {}, "total": {"total_price": []}},
    {"menu": {"nm": ""}, "total": {}},
    {"menu": [{"nm": "a"}, {}, {"nm": ""}], "void_menu": [{"nm": "b"}]},
    {"": "no key", "text_sequence": "t", "s_nm": "s", "a b": {"a b": {"a b": "deep"}}},
    {"total": "13.000", "menu": ["Nasi", "Teh"]},
]


def has_tags(tree: Tree) -> bool:
    try:
        return bool(to_tags(tree))
    except NoTagForm:
        return False


# The cases of Donut that can be raw rows: (number of the case, answer, parse of the row).
CASES = [
    (at, answer, wanted)
    for at, (answer, wanted) in enumerate(RECEIPTS)
    if isinstance(wanted, dict) and wanted and has_tags(wanted) and has_tags(answer)
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Made:
    """The output of convert with one target."""

    target: str
    root: Path  # for the later stages
    converted: Artifact
    samples: dict[str, Sample]  # by key, of both splits

    def text(self, tree: Tree) -> str:
        """Return a tree as a model writes it that was trained on the target."""
        return WRITERS[self.target](tree)


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """Make raw rows. Donut's cases come first in test, so that a case has the same index as in CASES."""
    directory = tmp_path_factory.mktemp("raw")
    drawn = [row for _, row in iter_cord_splits(0, NUM_DRAWN)]
    odd = [{"gt_parse": tree} for tree in ODD]
    cases = [{"gt_parse": wanted} for _, _, wanted in CASES]
    several = [{"gt_parses": [tree, KNOWN]} for tree in ODD]
    for split, truths, more in (
        ("train", odd, drawn[::2]),
        ("validation", [{"gt_parse": KNOWN}] * 3, []),
        ("test", [*cases, *several, {"gt_parse": {}}], drawn[1::2]),
    ):
        rows = [cord_row(png(SPLIT_SEEDS[split] + i, 80, 80), {**truth, "meta": {}}) for i, truth in enumerate(truths)]
        write_parquet(directory / "data" / f"{split}-00000-of-00001.parquet", [*rows, *more], schema=CORD_SCHEMA)
    return directory


@pytest.fixture(scope="module")
def raw(source) -> dict[str, dict[str, Any]]:
    """Return key -> raw row, read only by pyarrow."""
    found = {}
    for split in SPLIT_SEEDS:
        table = pq.read_table(source / "data" / f"{split}-00000-of-00001.parquet")
        found |= {f"cord_v2_{split}/{i:08d}": row for i, row in enumerate(table.to_pylist())}
    return found


@pytest.fixture(scope="module")
def both(source, tmp_path_factory) -> dict[str, Made]:
    return {target: convert(source, target, tmp_path_factory.mktemp(target)) for target in WRITERS}


@pytest.fixture(params=WRITERS)
def made(request, both) -> Made:
    return both[request.param]


def convert(source: Path, target: str, root: Path) -> Made:
    changes = {"convert.builder": "cord_v2", "convert.options": {"target": target}, "convert.max_skip_fraction": 0.05}
    config = load_recipe(str(SUITE_YAML), changes=changes).config.convert
    artifact = run_stage(CONVERT, config, {"raw": External(source, "raw", "0" * 16)}, root).artifact
    samples = {sample.key: sample for sample in all_samples(artifact)}
    return Made(target=target, root=root, converted=artifact, samples=samples)


def score(made: Made, answers: Mapping[str, str], metrics: Mapping[str, list[str]] | None = None) -> Artifact:
    """Return the evaluation of these answers (key -> text). Every other held-out sample is answered with its own
    reference."""
    said = {sample.key: sample.messages[-1].text for sample in heldout_samples(made.converted, None)} | dict(answers)
    lines = [GeneratedAnswer(key=key, turn=0, answer=text, stopped=True, ids=[5]) for key, text in said.items()]
    mark = hashlib.sha256("".join(map(to_line, lines)).encode()).hexdigest()[:16]
    answered = answers_artifact(made.root / "artifacts" / "answer" / mark, lines, fingerprint=mark)
    config = EvaluateConfig(max_new_tokens=1, metrics=dict(metrics or {}))
    return run_stage(EVALUATE, config, {"answers": answered, "samples": made.converted}, made.root).artifact


def wrong_answers(made: Made) -> dict[str, str]:
    """Return wrong answers: for the known receipt a wrong price, a missing line and a cut text; for Donut's cases its
    answers."""
    known = [made.text(WRONG_PRICE), made.text(MISSING_LINE), made.text(KNOWN)[:40]]
    cases = [made.text(answer) for _, answer, _ in CASES]
    return {
        f"cord_v2_{split}/{i:08d}": text
        for split, texts in (("validation", known), ("test", cases))
        for i, text in enumerate(texts)
    }


def rows_of(evaluated: Artifact, subset: str) -> list[dict[str, Any]]:
    return [row for row in read_predictions(evaluated.dir).to_pylist() if row["subset"] == subset]


def fields_of(evaluated: Artifact, subset: str) -> dict[str, float]:
    """Return path -> F1."""
    fields = evaluated.manifest.stats["fields"][subset]["cord_f1"]
    return {path: found["f1"] for path, found in fields.items()}


def parse_of(row: Mapping[str, Any]) -> Tree:
    truth = json.loads(row["ground_truth"])
    return truth["gt_parses"][0] if "gt_parses" in truth else truth["gt_parse"]


def test_the_raw_rows_have_what_receipts_have(raw):
    trees = [parse_of(row) for row in raw.values()]
    assert len(trees) >= 100 and len(CASES) >= 30
    menus = [tree["menu"] for tree in trees if "menu" in tree]
    assert {type(menu) for menu in menus} == {dict, list, str}
    items = [item for menu in menus for item in (menu if isinstance(menu, list) else [menu])]
    assert sum("sub" in item for item in items if isinstance(item, dict)) >= 10


def test_every_target_is_its_raw_parse_exactly(made, raw):
    skipped = [key for key, row in raw.items() if parse_of(row) == {}]
    assert made.converted.manifest.skips == {"empty_target": 1} and len(skipped) == 1
    assert made.samples.keys() == raw.keys() - set(skipped)
    for key, sample in made.samples.items():
        (question, answer), row = sample.messages, raw[key]
        assert READERS[made.target](answer.text) == parse_of(row), key
        assert question.text == "<image>" + PROMPTS[made.target] and sample.images == (row["image"]["bytes"],)


def test_a_reference_as_the_answer_scores_exactly_1(made):
    evaluated = score(made, {})
    for subset in HELDOUT:
        scores = evaluated.manifest.stats["scores"][subset]
        assert scores["cord_nted"] == scores["cord_f1"] == scores["score"] == 1.0
        assert scores["parse_failure_rate"] == 0.0
        assert {row["score"] for row in rows_of(evaluated, subset)} == {1.0}
        assert set(fields_of(evaluated, subset).values()) == {1.0}
    assert len(rows_of(evaluated, "cord_v2_test")) == len(CASES) + len(ODD) + NUM_DRAWN // 2


def test_wrong_answers_score_what_they_are_worth_by_hand(made):
    evaluated = score(made, wrong_answers(made))
    rows = rows_of(evaluated, "cord_v2_validation")
    # Costs out of 33: 2 for 14.500 instead of 4.000 (one letter more and one changed), 11 for the second item, and 33
    # for text that cannot be read.
    assert [row["score"] for row in rows] == pytest.approx([1 - 2 / 33, 1 - 11 / 33, 0.0], **EXACT)
    assert [row["metric"] for row in rows] == ["cord_nted"] * 3
    scores = evaluated.manifest.stats["scores"]["cord_v2_validation"]
    assert scores["cord_nted"] == scores["score"] == pytest.approx((31 + 22 + 0) / 99, **EXACT)
    # Of 3 x 5 fields 4 + 3 + 0 are right. The wrong price is one too many, and 1 + 2 + 5 are missing.
    assert scores["cord_f1"] == pytest.approx(7 / (7 + (1 + 8) / 2), **EXACT)
    assert scores["parse_failure_rate"] == pytest.approx(1 / 3, **EXACT)
    page = (evaluated.dir / "report.html").read_text()
    assert "cord_f1 of cord_v2_validation by field" in page and "menu.price" in page
    assert fields_of(evaluated, "cord_v2_validation") == {
        "menu.nm": pytest.approx(3 / (3 + (0 + 3) / 2), **EXACT),  # 2 + 1 + 0 of 6
        "menu.price": pytest.approx(2 / (2 + (1 + 4) / 2), **EXACT),  # 1 + 1 + 0 of 6, and the wrong 14.500
        "total.total_price": pytest.approx(2 / (2 + (0 + 1) / 2), **EXACT),  # 1 + 1 + 0 of 3
    }


def test_wrong_answers_score_what_donuts_evaluator_gives(made):
    recorded = json.loads(CORD_JSON.read_text())
    # The rows hold only the headline metric.
    for name, metrics in (("cord_nted", {}), ("cord_f1", {"cord_v2_test": ["cord_f1"]})):
        rows = rows_of(score(made, wrong_answers(made), metrics), "cord_v2_test")[: len(CASES)]
        assert [row["score"] for row in rows] == pytest.approx([recorded[name][at] for at, _, _ in CASES], **EXACT)
