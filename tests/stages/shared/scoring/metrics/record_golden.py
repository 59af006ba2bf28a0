"""Fill in the references' scores of the golden cases.

    python -m tests.stages.shared.scoring.metrics.record_golden DIRECTORY

DIRECTORY holds the references as published, each unpacked into its own directory:

    lmms_eval     the wheel lmms-eval 0.7.3, from PyPI
    VLMEvalKit    open-compass/VLMEvalKit at e8e78f05
    wtq           ppasupat/WikiTableQuestions at 7d455a5a (evaluator.py 1.0.2, Python 2, translated by lib2to3)
    tatqa         NExTplusplus/TAT-QA at 870accc4
    PromptPG      lupantech/PromptPG at 7cf61b1b (TabMWP's own scores)

jiwer and anls are imported. Only what a case needs is taken out of a file, since most import a whole framework. A
golden file keeps its inputs; `score` of a case and `reference_score` of a difference are written again.
"""

import __future__

import ast
import copy
import json
import os
import re
import statistics
import string
import sys
from collections import Counter
from collections.abc import Callable
from lib2to3.refactor import RefactoringTool, get_fixers_from_package
from logging import getLogger
from pathlib import Path
from typing import Any

import jiwer
import numpy as np
from anls import anls_score

GOLDEN = Path(__file__).parent / "golden"
Case = dict[str, Any]
Reference = Callable[[Case], float]


def names_of(text: str, names: tuple[str, ...], **given: object) -> dict[str, Any]:
    """Return these functions, classes and constants of a module's text, executed with the names in `given`."""
    body = [node for node in ast.parse(text).body if names_in(node) & set(names)]
    space: dict[str, Any] = {"re": re, "string": string, "np": np, "os": os, **given}
    # Annotations are lazy, because their names are not defined here.
    module = ast.Module(body=body, type_ignores=[])
    exec(compile(module, "reference", "exec", flags=__future__.annotations.compiler_flag), space)
    return space


def names_in(node: ast.stmt) -> set[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else []
    return {target.id for target in targets if isinstance(target, ast.Name)}


def whole(text: str) -> dict[str, Any]:
    space: dict[str, Any] = {"__name__": "reference"}
    exec(compile(text, "reference", "exec"), space)
    return space


def lmms_references(root: Path) -> dict[str, Reference]:
    tasks = root / "lmms_eval" / "tasks"
    metrics = (root / "lmms_eval" / "api" / "metrics.py").read_text()
    metrics = re.sub(r"@register_\w+\((?:[^()]|\([^()]*\))*\)\n", "", metrics)
    made = names_of(metrics, ("exact_match_hf_evaluate", "levenshtein_distance", "anls"))
    processor = whole((tasks / "_task_utils" / "vqa_eval_metric.py").read_text())["EvalAIAnswerProcessor"]
    given = {"EvalAIAnswerProcessor": processor, "statistics": statistics}
    textvqa = names_of((tasks / "textvqa" / "utils.py").read_text(), ("textvqa_process_results",), **given)
    relaxed = whole((tasks / "chartqa" / "utils.py").read_text())["relaxed_correctness"]
    extract = whole((tasks / "_task_utils" / "mcq_extract.py").read_text())["extract_mcq_answer"]

    def exact(case: Case) -> float:
        pairs = [
            made["exact_match_hf_evaluate"](predictions=[case["answer"]], references=[reference], ignore_case=True)
            for reference in case["references"]
        ]
        return float(max(pair["exact_match"] for pair in pairs))

    def vqa(case: Case) -> float:
        document = {"answers": list(case["references"]), "question_id": 0}
        return float(textvqa["textvqa_process_results"](document, [case["answer"]])["exact_match"])

    def vqa_em(case: Case) -> float:
        said = processor()(case["answer"])
        return float(any(said == processor()(reference) for reference in case["references"]))

    return {
        "exact_match": exact,
        "vqa_accuracy": vqa,
        "vqa_em": vqa_em,
        "anls": lambda case: float(made["anls"](case["references"], [case["answer"]])["anls"]),
        "relaxed_accuracy": lambda case: float(any(relaxed(case["answer"], r) for r in case["references"])),
        "multiple_choice": lambda case: float(extract(case["answer"], list(case["options"])) == case["right"]),
    }


def other_references(root: Path) -> dict[str, Reference]:
    matching = (root / "VLMEvalKit" / "vlmeval" / "utils" / "matching_util.py").read_text()
    names = ("_VERBOSE_ANSWER_RE", "can_infer_option", "can_infer_text", "can_infer")
    can_infer = names_of(matching, names, cp=copy, logger=getLogger(), get_logger=getLogger, Counter=Counter)[
        "can_infer"
    ]
    fixers = RefactoringTool(get_fixers_from_package("lib2to3.fixes"))
    python2 = re.sub(r"\bur'", "r'", (root / "wtq" / "evaluator.py").read_text())
    wtq = whole(str(fixers.refactor_string(python2 + "\n", "evaluator.py")))
    tatqa = whole((root / "tatqa" / "tatqa_utils.py").read_text())
    names = ("_answer_to_bags", "get_answer_str", "add_percent_pred")
    tatqa |= names_of((root / "tatqa" / "tatqa_metric.py").read_text(), names, **tatqa)
    promptpg = whole((root / "PromptPG" / "run_gpt3_rl" / "utilities.py").read_text())

    def denotation(case: Case) -> float:
        right, said = (wtq["to_value_list"](case[side]) for side in ("right_items", "said_items"))
        return float(wtq["check_denotation"](right, said))

    def tat(case: Case) -> float:
        right, said = (
            tatqa["_answer_to_bags"](tatqa["get_answer_str"](case[side], "")[0])[0]
            for side in ("right_items", "said_items")
        )
        return float(right == said)

    def tabmwp(case: Case) -> float:
        right, said = (
            promptpg["normalize_answer"](promptpg["extract_prediction"](text, None, None), "")
            for text in (case["references"][0], case["answer"])
        )
        return float(right == said)

    return {
        "can_infer": lambda case: float(can_infer(case["answer"], dict(case["options"])) == case["right"]),
        "WikiTableQuestions": denotation,
        "TAT-QA": tat,
        "TabMWP": tabmwp,
        "anls 0.0.2": lambda case: float(anls_score(case["answer"], case["references"])),
        "cer": lambda case: min(jiwer.cer(reference, case["answer"]) for reference in case["references"]),
        "wer": lambda case: min(jiwer.wer(reference, case["answer"]) for reference in case["references"]),
    }


def record(path: Path, references: dict[str, Reference]) -> None:
    golden = json.loads(path.read_text())
    for case in golden["cases"]:
        case["score"] = references[case.get("by", path.stem)](case)
    for case in golden["differences"]:
        case["reference_score"] = references[case.get("by", path.stem)](case)
    if "corpus" in golden:
        single = [case for case in golden["cases"] if len(case["references"]) == 1]
        rate = {"cer": jiwer.cer, "wer": jiwer.wer}[path.stem]
        golden["corpus"] = rate([case["references"][0] for case in single], [case["answer"] for case in single])
    lists = {key: golden.pop(key) for key in ("cases", "differences")}
    lines = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in golden.items()]
    for key, cases in lists.items():
        lines.append(f" {json.dumps(key)}: [\n" + ",\n".join(f"  {json.dumps(case)}" for case in cases) + "\n ]")
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    found = lmms_references(Path(sys.argv[1])) | other_references(Path(sys.argv[1]))
    for golden_path in sorted(GOLDEN.glob("*.json")):
        record(golden_path, found)
