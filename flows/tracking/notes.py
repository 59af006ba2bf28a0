"""The texts for people in MLflow: a run's name and description, an experiment's link to the compare page."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from flows.tracking.store import compare_url

NOTE_TAG = "mlflow.note.content"
WARNING_TAG = "athanor.warning"  # what the evaluation warns of
MAX_NAME = 250
_MAX_VALUE = 48
MAX_VERSION_NOTE = 5000  # characters that MLflow stores
_ROOM = "&emsp;"  # MLflow's pages draw a table without room between its columns
_MAX_NOTE = 7500  # MLflow cuts a tag at 8000 characters


def run_name(recipe: str, differs: Mapping[str, object]) -> str:
    """Return the name of a run, for example `embedded lr=1e-05`: the recipe and the settings that differ from it.

    A field has its shortest unambiguous name. Long values are cut in their middle. A name that would be too long ends
    with the number of fields that were left out.
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
    head: str,
    page: str,
    stages: Mapping[str, tuple[str, Collection[str]]],
    scores: Mapping[str, Mapping[str, Any]],
    verdict: str | None,
    headline: Sequence[str] = (),
    warning: str | None = None,
) -> str:
    """Return a run's description in Markdown.

    MLflow shows only the first lines of a description until the user unfolds it: these have the headline, the links to
    the reports and the verdict.

    Args:
        headline: score, gain, losses and speed, each with its name.
        head: the part that is known from the start: recipe, differences, command.
        page: address of the run's own page, for links to its artifacts.
        stages: name of a stage -> directory of its artifact, and names of the artifact's files that the run holds.
        scores: subset -> metric -> value.
        verdict: why the run's model is champion, or why not.
        warning: what the evaluation warns of.
    """
    reports = [link for name, (_, files) in stages.items() if (link := _link(page, name, files, name))]
    paragraphs = [
        f"**{', '.join(headline)}**" if headline else "",
        f"Reports: {', '.join(reversed(reports))}" if reports else "",
        f"Registered model: {verdict}." if verdict else "",
        f"**Warning**: {warning}" if warning else "",
        head,
        _score_table(scores) if scores else "",
    ]
    if stages:
        rows = [(name, _link(page, name, files, "report"), f"`{path}`") for name, (path, files) in stages.items()]
        paragraphs.append(markdown_table(("stage", "report", "directory"), rows))
    return "\n\n".join(paragraph for paragraph in paragraphs if paragraph)[:_MAX_NOTE]


def model_note(name: str) -> str:
    """Return the description of the registered model `name` in Markdown: what it is, its aliases, how to load it."""
    return (
        "Vision-language models that athanor has fine-tuned: one version for each run whose scores passed the gates. "
        "The tags of a version say its recipe, data, base model, score and fingerprint. Its description links its run "
        "and its logged model, which has all scores as metrics.\n\n"
        "`@candidate` is the newest version. `@champion` is the best one: a version becomes champion if its score "
        "(`execution.registry.metric` of its recipe) is better than the champion's by `margin` on the same held-out "
        "samples, from at least `min_answers` answers, and if the interval of its lead is above 0. The description of "
        "each version says why it became champion, or why not.\n\n"
        "```python\n"
        f'mlflow.pyfunc.load_model("models:/{name}@champion")  # questions with images in, answers out\n'
        f'mlflow.artifacts.download_artifacts("models:/{name}@champion/hf")  # a directory for transformers\n'
        "```"
    )


def version_note(
    verdict: str, scores: Mapping[str, Mapping[str, Any]], page: str, model_page: str, directory: str
) -> str:
    """Return a version's description in Markdown: the decision, the run that made it, its files and its scores.

    Args:
        page, model_page: addresses of the pages of the run and of the logged model.
        directory: directory of the model's files.
    """
    links = f"[Run]({page}), [all scores]({model_page}), files: `{directory}`"
    return f"{verdict}\n\n{links}\n\n{_score_table(scores)}"[:MAX_VERSION_NOTE]


def _link(page: str, stage: str, files: Collection[str], text: str) -> str:
    return f"[{text}]({page}/artifacts/stages/{stage}/report.html)" if "report.html" in files else ""


def _score_table(scores: Mapping[str, Mapping[str, Any]]) -> str:
    metrics = [m for m in dict.fromkeys(m for values in scores.values() for m in values) if not m.startswith("mean_")]
    order = sorted(scores, key=lambda subset: subset != "overall")
    rows = [(f"{name}{_ROOM}", *(score_text(scores[name].get(metric)) for metric in metrics)) for name in order]
    heads = [f"{name}{_ROOM}" for name in ("held-out", *metrics)]
    return markdown_table(heads, rows, numbers=range(1, len(heads)))


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]], numbers: Collection[int] = ()) -> str:
    """Return a table in Markdown. The columns with the indexes `numbers` are aligned to the right."""
    rule = ["---:" if i in numbers else "---" for i in range(len(columns))]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (columns, rule, *rows))


def score_text(value: float | None, ends: tuple[float, float] | None = None) -> str:
    """Return a score with four decimals and the ends of its interval, `0.9328 (0.91 to 0.95)`; "" for None."""
    interval = ""
    if ends is not None:
        # Two decimals would say "0.9979 (1.00 to 1.00)" of a narrow interval.
        is_within = value is None or round(ends[0], 2) <= round(value, 4) <= round(ends[1], 2)
        decimals = 2 if is_within else 4
        interval = f" ({ends[0]:.{decimals}f} to {ends[1]:.{decimals}f})"
    return "" if value is None else f"{value:.4f}{interval}"


def experiment_note(names: Sequence[str], run_ids: Sequence[str], experiment_id: str) -> str:
    """Return an experiment's description: a link to the page that compares the newest runs, and their names."""
    link = compare_url(run_ids, experiment_id, "").removeprefix("/")  # relative, so that a server may have any prefix
    view = f"#/experiments/{experiment_id}/runs?viewStateShareKey=athanor&compareRunsMode=CHART"
    answers = f"#/experiments/{experiment_id}/runs?compareRunsMode=ARTIFACT"
    newest = "\n".join(f"- {name}" for name in names)
    return (
        f"[Score and loss of all runs]({view}), [their answers side by side]({answers}), "
        f"[what differs between the {len(run_ids)} newest]({link})\n\n{newest}"
    )[:_MAX_NOTE]
