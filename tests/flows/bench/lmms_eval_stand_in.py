"""A replacement of lmms-eval for tests: it reads the arguments, asks nobody, and writes the files of lmms-eval 0.7.3.

In a directory `before` the model answers nothing, in `after` the first reference. A task that is not the
held-out one has two questions, which only the second model answers, and a metric that is not a mean of questions.
"""

import argparse
import importlib.util
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pyarrow.parquet as pq


def run(argv: list[str]) -> int:
    parser = argparse.ArgumentParser()
    for name in ("model", "model_args", "tasks", "batch_size", "output_path", "include_path", "limit"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--log_samples", action="store_true")
    args = parser.parse_args(argv)
    model = Path(dict(pair.split("=") for pair in args.model_args.split(","))["pretrained"])
    if not (model / "config.json").is_file() or "nosuch" in args.tasks:
        print(f"ValueError: Tasks not found: {args.tasks}. See the list\nsome closing line")
        return 1
    knows = Path.cwd().name == "after"
    with Path("calls.txt").open("a") as calls:
        calls.write(f"{' '.join(argv)}\n")
    out = Path(args.output_path) / "after__model"
    out.mkdir(parents=True, exist_ok=True)
    document = {"results": {}, "higher_is_better": {}}
    for task in args.tasks.split(","):
        rows = _heldout(Path(args.include_path), knows) if task == "heldout" else _other(knows)
        rows = rows[: int(args.limit)] if args.limit else rows
        lines = [json.dumps({"doc_id": number, **scores}) for number, scores in enumerate(rows)]
        (out / f"20261126_140433_samples_{task}.jsonl").write_text("\n".join(lines) + "\n")
        names = sorted({name for row in rows for name in row})
        values = {name: [row[name] for row in rows if name in row] for name in names}
        results = {f"{name},none": sum(own) / len(own) for name, own in values.items()}
        results |= {f"{name}_stderr,none": "N/A" for name in names} | {"alias": task, "samples": len(rows)}
        if task != "heldout":
            results |= {"mme_score,none": 1200.0 if knows else 1000.0, "mme_score_stderr,none": 30.0}
        document["results"][task] = results
        document["higher_is_better"][task] = dict.fromkeys(names, True)
    (out / "20261126_140433_results.json").write_text(json.dumps(document))
    return 0


def _heldout(directory: Path, knows: bool) -> list[dict[str, float]]:
    sys.modules["lmms_eval.tasks.chartqa.utils"] = SimpleNamespace(relaxed_correctness=str.__eq__)
    spec = importlib.util.spec_from_file_location("utils_of_the_task", directory / "utils.py")
    utils = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(utils)
    rows = pq.read_table(directory / "heldout.parquet").to_pylist()
    return [utils.process_results(row, [row["references"][0] if knows else ""]) for row in rows]


def _other(knows: bool) -> list[dict[str, float]]:
    return [{"acc": float(knows)}, {"acc": float(knows)}]


if __name__ == "__main__":
    if sys.argv[1] == "-c":
        print("0.7.3")
        sys.exit(0)
    sys.exit(run(sys.argv[3:]))
