"""The texts that a person finds in MLflow: a run's name and description, an experiment's link to the compare page."""

from collections.abc import Mapping, Sequence
from typing import Any

from stages.tracking_store import compare_url

NOTE_TAG = "mlflow.note.content"
MAX_NAME = 250
_MAX_VALUE = 48
_MAX_NOTE = 7500  # MLflow cuts a tag at 8000 characters


def run_name(recipe: str, differs: Mapping[str, object]) -> str:
    """`embedded lr=1e-05`: the recipe and what differs from it, by the shortest unambiguous field names.

    Long values are cut in their middle; of too many, how many more there are is said.
    """
    last = [key.rpartition(".")[2] for key in differs]
    names = {key: short if last.count(short) == 1 else key for key, short in zip(differs, last)}
    words = [f"{names[key]}={_short(value)}" for key, value in differs.items()]
    for count in range(len(words), -1, -1):
        more = [f"and {len(words) - count} more"] if count < len(words) else []
        if len(name := " ".join([recipe, *words[:count], *more])) <= MAX_NAME:
            return name
    return recipe[:MAX_NAME]


def _short(value: object) -> str:
    if isinstance(value, list | tuple):
        text = f"[{','.join(str(item) for item in value)}]"
    else:
        text = " ".join(str(value).split())
    half = (_MAX_VALUE - 2) // 2
    return text if len(text) <= _MAX_VALUE else f"{text[:half]}..{text[-half:]}"


def run_note(
    head: str, page: str, stages: Mapping[str, str], scores: Mapping[str, Mapping[str, Any]], verdict: str | None
) -> str:
    """A run's description, in Markdown.

    The first lines are all that the page shows before it is unfolded.

    Args:
        head: what is known when it starts: recipe, differences, command.
        page: the run's own page, for links to its artifacts.
        stages: name -> directory.
        scores: subset -> metric -> value.
        verdict: why its model is champion, or not.
    """
    overall = {name: value for name, value in scores.get("overall", {}).items() if not name.startswith("mean_")}
    summary = ", ".join(f"{name} {_number(value)}" for name, value in overall.items() if value is not None)
    said = [f"Held-out: {summary}."] if summary else []
    said += [f"Registered model: {verdict}."] if verdict else []
    parts = [*([" ".join(said)] if said else []), head, *([_score_table(scores)] if scores else [])]  # MLflow folds it
    if stages:
        rows = [
            f"| {name} | [report]({page}/artifacts/stages/{name}/report.html) | "
            f"[preview]({page}/artifacts/stages/{name}/preview.html) | `{directory}` |"
            for name, directory in stages.items()
        ]
        parts.append("\n".join(["| stage | report | preview | directory |", "| --- | --- | --- | --- |", *rows]))
    return "\n\n".join(parts)[:_MAX_NOTE]


def _score_table(scores: Mapping[str, Mapping[str, Any]]) -> str:
    metrics = [m for m in dict.fromkeys(m for values in scores.values() for m in values) if not m.startswith("mean_")]
    order = sorted(scores, key=lambda subset: subset != "overall")
    rows = [f"| {name} | {' | '.join(_number(scores[name].get(m)) for m in metrics)} |" for name in order]
    return "\n".join([f"| held-out | {' | '.join(metrics)} |", f"| --- |{' ---: |' * len(metrics)}", *rows])


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def experiment_note(names: Sequence[str], run_ids: Sequence[str], experiment_id: str) -> str:
    """An experiment's description: the newest runs, and the page that compares them."""
    link = compare_url(run_ids, experiment_id, "").removeprefix("/")  # holds under any prefix of the server
    newest = "\n".join(f"- {name}" for name in names)
    return f"[Compare the {len(run_ids)} newest runs]({link})\n\n{newest}"[:_MAX_NOTE]
