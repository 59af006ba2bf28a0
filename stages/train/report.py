"""The report of a training: curves of loss, held-out loss, learning rate, gradient norm and speed."""

import io
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from stages.shared.pages.report import Drawing, Table, write_report
from trainer.contract.result import LAYERS, MetricsRow
from trainer.plan.placement import Placement

# title on the page -> (fields of MetricsRow in one plot, whether the axis is logarithmic)
_CURVES: dict[str, tuple[tuple[str, ...], bool]] = {
    "Loss": (("loss", "heldout_loss", "mtp_loss"), True),
    "Learning rate": (("lr",), False),
    "Gradient norm before clipping": (("grad_norm",), True),
    "Tokens per second": (("tokens_per_second",), False),
}
# Grey on a transparent background is readable on a light and on a dark page.
_GREYS = dict.fromkeys(("axes.edgecolor", "axes.labelcolor", "text.color", "xtick.color", "ytick.color"), "#7d8798")


def write_train_report(
    directory: Path,
    rows: Sequence[MetricsRow],
    stats: dict[str, Any],
    prediction: Placement | None = None,
) -> None:
    """Write report.json of a training to `directory`.

    Args:
        prediction: the predicted costs of a step, if there is a prediction.
    """
    summary = {name: value for name, value in stats.items() if value is not None}
    if rows:
        summary["tokens_per_second"] = round(statistics.median(row.tokens_per_second for row in rows), 1)
    reported = tuple(name for name in rows[-1].model_extra if name.startswith(LAYERS)) if rows else ()
    shown = _CURVES | ({"Figures of the layers": (reported, False)} if reported else {})
    curves = [Drawing(title, _curve_svg(rows, fields, log)) for title, (fields, log) in shown.items() if rows]
    times = [*_time_table(rows), *(_prediction_table(rows, prediction) if prediction else [])]
    write_report(directory, title="Training", summary=summary, sections=[*curves, *times])


def _curve_svg(rows: Sequence[MetricsRow], fields: Sequence[str], is_log: bool) -> str:
    """Return an SVG file with one line per field over the steps; the same rows give the same bytes."""
    with matplotlib.rc_context({"svg.hashsalt": "athanor", "font.size": 9, **_GREYS}):
        figure = Figure(figsize=(7, 2.6), layout="constrained")
        axes = figure.add_subplot()
        for name in fields:
            points = [(row.step, value) for row in rows if (value := getattr(row, name, None)) is not None]
            if points:
                marker = "o" if len(points) < 30 else None
                axes.plot(*zip(*points), label=name, marker=marker, markersize=3, linewidth=1.2)
        if is_log and all(value > 0 for line in axes.get_lines() for value in line.get_ydata()):
            axes.set_yscale("log")
        axes.set_xlabel("step")
        axes.grid(alpha=0.25)
        if len(fields) > 1:
            axes.legend(frameon=False)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None}, transparent=True)
    return text.getvalue()


def _time_table(rows: Sequence[MetricsRow]) -> list[Table]:
    if not rows:
        return []
    whole = statistics.median(row.step_seconds for row in rows)
    names = ["data_seconds", *(name for name in rows[-1].model_extra if name.endswith("_seconds")), "optimizer_seconds"]
    parts = [(name, statistics.median(getattr(row, name, 0.0) for row in rows)) for name in names]
    lines = [(name, round(seconds, 4), round(seconds / whole, 3) if whole else None) for name, seconds in parts]
    return [Table("Where a step's time goes (medians)", ("part", "seconds", "fraction"), lines)]


def _prediction_table(rows: Sequence[MetricsRow], prediction: Placement) -> list[Table]:
    """Return a table of the plan's prediction and the measurement on rank 0. Rank 0's clock counts its waiting time for
    other ranks as the language model's time."""
    if not rows:
        return []
    first = prediction.ranks[0]
    waiting = prediction.step - first.vision - first.language
    predicted = {
        "vision_seconds": first.vision,
        "language_seconds": first.language + waiting,
        "step_seconds": prediction.step,
    }
    lines = [
        (name, float(f"{seconds:.3g}"), float(f"{statistics.median(getattr(row, name, 0.0) for row in rows):.3g}"))
        for name, seconds in predicted.items()
    ]
    memory = sum(prediction.memory.values()) / 1e9
    lines.append(("memory_gb", float(f"{memory:.3g}"), float(f"{max(row.memory_gb for row in rows):.3g}")))
    title = f"What the plan predicted for an H200: rank 0, {waiting / prediction.step:.0%} of the step waiting"
    return [Table(title, ("", "predicted", "measured (medians, memory the most)"), lines)]
