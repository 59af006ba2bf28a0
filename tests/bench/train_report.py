"""The tables of bench_train_step: numbers by row and column first, and then their Markdown."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tests.bench.host import Host
from tests.bench.mix import Mix
from tests.bench.peer import PeerRow
from tests.bench.trace_parts import COMMUNICATION, IDLE, SHARES, Parts
from trainer.contract.result import MetricsRow
from trainer.data.balance import CostModel

PEER = "transformers"
Column = Mapping[str, float]


@dataclass(slots=True, kw_only=True)
class Measured:
    """All measurements of a run of the benchmark.

    Attributes:
        gpus: number of GPUs of each layout.
        pieces: number of language layers of each piece of the pipeline, of each layout.
        rows: metrics of the counted steps of each layout, with the step before them first.
        parts: traced steps of each layout and rank.
        failed: what could not be measured, and why.
        new_shapes: seconds of steps on new bins, and on the same bins again.
    """

    host: Host
    command: str
    model: str
    mix: Mix
    cost: CostModel
    gpus: dict[str, int] = field(default_factory=dict)
    pieces: dict[str, list[int]] = field(default_factory=dict)
    rows: dict[str, list[MetricsRow]] = field(default_factory=dict)
    parts: dict[str, dict[int, Parts]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    peer: list[PeerRow] = field(default_factory=list)
    new_shapes: tuple[list[float], list[float]] | None = None

    @property
    def best_peer(self) -> PeerRow | None:
        return max((row for row in self.peer if row.fits), key=lambda row: row.tokens_per_second, default=None)


def column_of_layout(measured: Measured, name: str) -> Column:
    """Return sums over the counted steps in wall-clock time, including the time between them, without padding. Parts
    are medians per step."""
    before, *rows = measured.rows[name]
    last, gpus = rows[-1], measured.gpus[name]
    seconds = (last.time_ms - before.time_ms) / 1e3
    rate, single = (last.tokens - before.tokens) / seconds / gpus, [row.tokens_per_second / gpus for row in rows]
    column = {
        "useful tokens/s/GPU": rate,
        "the same, slowest step": min(single),
        "the same, fastest step": max(single),
        "loss tokens/s/GPU": (last.loss_tokens - before.loss_tokens) / seconds / gpus,
        **_arithmetic(measured, 1e12 * sum(_tflops(row) * row.step_seconds for row in rows) / seconds / gpus),
        "padding, %": 100 * statistics.mean(row.padding_fraction for row in rows),
        "useful tokens a step": (last.tokens - before.tokens) / len(rows),
        "step, s": statistics.median(row.step_seconds for row in rows),
        "wall clock a step, s": seconds / len(rows),
        "peak memory of rank 0, GB": max(row.memory_gb for row in rows),
        "data wait with its copies, s": statistics.median(row.data_seconds for row in rows),
        "data wait with its copies, % of the step": 100 * sum(row.data_seconds for row in rows) / seconds,
    }
    # A layout whose images are encoded on other ranks reports no seconds of vision.
    parts = {
        "vision, s": "vision_seconds",
        "language and loss, s": "language_seconds",
        "optimizer, s": "optimizer_seconds",
    }
    for title, key in parts.items():
        values = [getattr(row, key, None) for row in rows]
        if None not in values:
            column[title] = statistics.median(values)
    if measured.best_peer:
        column["times transformers"] = rate / measured.best_peer.tokens_per_second
    return column


def _tflops(row: MetricsRow) -> float:
    return sum(value or 0.0 for name, value in row.model_extra.items() if name.endswith("_tflops"))


def column_of_peer(measured: Measured, row: PeerRow) -> Column:
    """Return the same figures of transformers, as far as it has them."""
    seconds, single = sum(row.seconds), [tokens / s for tokens, s in zip(row.tokens, row.seconds)]
    flops = measured.cost.vision(row.mix.work) + measured.cost.language(row.mix.work)
    return {
        "useful tokens/s/GPU": row.tokens_per_second,
        "the same, slowest step": min(single),
        "the same, fastest step": max(single),
        "loss tokens/s/GPU": row.mix.work.loss_tokens / seconds,
        **_arithmetic(measured, flops / seconds),
        "padding, %": 100 * (1 - sum(row.tokens) / row.slots),
        "useful tokens a step": sum(row.tokens) / len(row.tokens),
        "step, s": statistics.median(row.seconds),
        "wall clock a step, s": seconds / len(row.seconds),
        "peak memory of rank 0, GB": row.memory_gb,
        "times transformers": 1.0,
    }


def _arithmetic(measured: Measured, flops: float) -> Column:
    host = measured.host
    mfu = {"MFU, %": 100 * flops / host.peak} if host.peak else {}
    share = {
        f"of the host's {host.product} rate, %": 100 * flops / host.rate,
        "of the sustained rate, %": 100 * flops / host.sustained,
    }
    return {"TFLOP/s/GPU, vision + language": flops / 1e12, **mfu, **share}


def column_of_trace(parts: Parts) -> Column:
    """Return the seconds of a traced step: the shares that add up to it, and parts of these shares."""
    hidden = {"communication beside computation": parts.hidden}
    return {"step, s": parts.seconds, **{f"{name}, s": parts.shares[name] for name in SHARES}, **hidden} | {
        f"{IDLE}, %": 100 * parts.shares[IDLE] / parts.seconds,
        f"{COMMUNICATION} nothing hides, %": 100 * parts.shares[COMMUNICATION] / parts.seconds,
    }


def kinds_column(parts: Parts) -> Column:
    """Return the milliseconds per step by part and kind of kernel, if above a thousandth of the step; and by
    collective."""
    kinds = {f"{part}: {kind}": 1e3 * s for (part, kind), s in parts.kinds.items() if s > 1e-3 * parts.seconds}
    collectives = {f"{COMMUNICATION}: {name}": 1e3 * seconds for name, seconds in parts.collectives.items()}
    return dict(sorted(kinds.items())) | dict(sorted(collectives.items()))


def table(head: str, columns: Mapping[str, Column]) -> str:
    """Return the table in Markdown, with a dash where a column has no such row."""
    names = list(dict.fromkeys(name for column in columns.values() for name in column))
    lines = [f"| {head} | {' | '.join(columns)} |", "| --- |" + " ---: |" * len(columns)]
    for name in names:
        lines.append(f"| {name} | {' | '.join(_shown(column.get(name)) for column in columns.values())} |")
    return "\n".join(lines)


def _shown(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:,.1f}" if abs(value) >= 100 else f"{value:.4g}"


def report(measured: Measured) -> str:
    """Return all measurements as Markdown."""
    columns = {name: column_of_layout(measured, name) for name in measured.rows}
    if measured.best_peer:
        columns[f"{PEER}, {measured.best_peer.micro_batch} samples a micro batch"] = column_of_peer(
            measured, measured.best_peer
        )
    traced = {f"{name}, rank {rank}": parts for name, ranks in measured.parts.items() for rank, parts in ranks.items()}
    sections = [_heading(measured), table("sums over the counted steps; parts: medians", columns)]
    sections += [
        f"Layers of the pieces of {name}: {' + '.join(map(str, layers))}."
        for name, layers in measured.pieces.items()
        if len(layers) > 1
    ]
    sections += [_against_one_gpu(measured)] if len(set(measured.gpus.values())) > 1 else []
    if traced:
        sections.append(table("a traced step", {name: column_of_trace(parts) for name, parts in traced.items()}))
        sections.append(table("ms of its kernels", {name: kinds_column(parts) for name, parts in traced.items()}))
    sections += [_peer_sizes(measured)] if measured.peer else []
    sections += [_new_shapes(*measured.new_shapes)] if measured.new_shapes else []
    sections += [_model_arithmetic(measured, columns)]
    sections += [f"Not measured: {name}: {why}" for name, why in measured.failed.items()]
    return "\n\n".join(sections) + "\n"


def _heading(measured: Measured) -> str:
    mix = measured.mix
    return "\n\n".join(
        [
            f"# Training steps, {measured.model}, {measured.host.device}",
            f"    {measured.command}",
            f"{measured.host.versions}. Random weights.",
            f"{mix.samples} samples on disk: {mix.work.tokens / mix.samples:.0f} tokens, "
            f"{mix.work.loss_tokens / mix.samples:.0f} loss tokens, {mix.images / mix.samples:.2f} images, "
            f"{mix.work.patches / mix.samples:.0f} patches a sample.",
            f"{measured.host.product} matrix product of this host: {measured.host.rate / 1e12:,.4g} TFLOP/s at once, "
            f"{measured.host.sustained / 1e12:,.4g} sustained (on a GPU after five seconds of products).",
        ]
    )


def _against_one_gpu(measured: Measured) -> str:
    rates = {name: column_of_layout(measured, name)["useful tokens/s/GPU"] for name in measured.rows}
    single = next((rate for name, rate in rates.items() if measured.gpus[name] == 1), None)
    if single is None:
        return "One GPU by itself was not measured."
    several = {name: rate for name, rate in rates.items() if measured.gpus[name] > 1}
    return "Useful tokens/s/GPU against one GPU of the same host by itself: " + ", ".join(
        f"{name}: {100 * rate / single:.1f}%" for name, rate in several.items()
    )


def _peer_sizes(measured: Measured) -> str:
    columns = {
        f"micro batch {row.micro_batch}": column_of_peer(measured, row) if row.fits else {} for row in measured.peer
    }
    rules = "".join(f"\n\nIts gated delta rule: {rule}." for rule in {row.delta_rule for row in measured.peer} if rule)
    missing = "".join(f"\n\nMicro batch {row.micro_batch}: {row.why}." for row in measured.peer if not row.fits)
    counted = [row for row in measured.peer if row.fits]
    steps = f"{len(counted[0].seconds)} counted steps a size" if counted else "no size fits"
    return table(f"{PEER}, {steps}", columns) + rules + missing


def _new_shapes(first: Sequence[float], again: Sequence[float]) -> str:
    columns = {}
    for name, seconds in (("first time", first), ("again", again)):
        ms = [1e3 * value for value in seconds]
        columns[name] = {
            "bins": len(ms),
            "median, ms": statistics.median(ms),
            "mean, ms": statistics.mean(ms),
            "max, ms": max(ms),
            "sum, s": sum(seconds),
        }
    return table("one bin a step", columns) + f"\n\nFirst time against again: {sum(first) / sum(again):.4f}."


def _model_arithmetic(measured: Measured, columns: Mapping[str, Column]) -> str:
    work, cost = measured.mix.work, measured.cost
    whole = (cost.language(work) + cost.vision(work)) / work.tokens
    without = work._replace(tokens_squared=0, patches_squared=0)
    plain = (cost.language(without) + cost.vision(without)) / work.tokens
    everywhere = cost.language(without._replace(loss_tokens=work.tokens)) + cost.vision(without)
    lines = [
        f"Model arithmetic, GFLOP a useful token of this mix: {plain / 1e9:.4g} without attention, {whole / 1e9:.4g} "
        f"with; logits counted at loss tokens alone (at every token: {everywhere / work.tokens / 1e9:.4g} without "
        "attention).",
    ]
    for name, column in columns.items():
        rate = column["useful tokens/s/GPU"]
        reached = f"{rate * plain / 1e12:.4g} TFLOP/s/GPU of it without attention, {rate * whole / 1e12:.4g} with"
        share = f"{100 * rate * plain / measured.host.rate:.4g}% and {100 * rate * whole / measured.host.rate:.4g}%"
        lines.append(f"- {name}: {reached}: {share} of the host's matrix rate.")
    return "\n".join(lines)
