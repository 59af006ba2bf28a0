"""The division of the time of traced steps: every moment of a step belongs to one part.

Read from torch.profiler's Chrome trace. What runs on the GPU belongs to the part whose mark came last before the host
launched it (tests/bench/traced_trainer.py sets the marks). Where things run at once, computation hides communication,
and both hide copies from the host; what is left over is idle. Communication includes waiting for other ranks inside its
kernels, so for a pipeline its bubble. A trace without GPU shows the host's own time between marks.
"""

import bisect
import itertools
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

MARK = "athanor-part:"
STEP_BEGINS, STEP_ENDS = "step-begins", "step-ends"
COMMUNICATION, HOST_TO_DEVICE = "communication", "host to device"
DATA_WAIT, IDLE = "data wait", "idle"
COMPUTED = ("vision", "language", "loss", "optimizer", "other")
SHARES = (DATA_WAIT, HOST_TO_DEVICE, *COMPUTED, COMMUNICATION, IDLE)
_PRECEDENCE = (*COMPUTED, COMMUNICATION, HOST_TO_DEVICE, DATA_WAIT)

# (kind, texts in the names of its kernels); the first that fits counts
KINDS = (
    ("delta rule", ("prepare_chunks", "chunk_gradients", "forward_states", "backward_states")),
    ("delta layer's own", ("_convolve_", "_gates_forward", "_gates_backward", "_norm_forward", "_norm_backward")),
    ("attention", ("sdpa", "fmha", "flash", "attention", "attn", "mha_")),
    ("matrix products", ("gemm", "nvjet", "xmma", "cutlass", "gemv", "splitk", "cublas", "dot_kernel")),
    ("optimizer's own", ("adam", "multi_tensor")),
    ("query/key kernel", ("split_forward", "split_backward")),
    ("norms", ("norm", "ln_fwd", "ln_bwd")),
    ("gathers and scatters", ("index", "gather", "scatter", "embedding")),
    ("copies and fills", ("memcpy", "memset", "fill", "copy", "cat", "transpose")),
    ("reductions", ("reduce", "softmax", "cross_entropy")),
)
ELEMENTWISE = "elementwise and rest"
HOST = "on the host"


@dataclass(frozen=True, slots=True)
class Activity:
    """An activity that ran from `start` to `stop` (us). `part` is the mark under which it was launched."""

    start: float
    stop: float
    label: str
    part: str
    name: str


@dataclass(slots=True)
class Parts:
    """The parts of a step, in seconds.

    Attributes:
        seconds: seconds of a whole step.
        shares: seconds by SHARES, which add up to the step.
        hidden: communication during computation.
        collectives: all communication, by kind; overlapping communication is counted twice.
        kinds: computation by (part, kind of kernel).
    """

    seconds: float = 0.0
    shares: dict[str, float] = field(default_factory=lambda: dict.fromkeys(SHARES, 0.0))
    hidden: float = 0.0
    collectives: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    kinds: dict[tuple[str, str], float] = field(default_factory=lambda: defaultdict(float))


def kind_of(name: str) -> str:
    if name == HOST:
        return HOST
    lowered = name.lower()
    return next((kind for kind, words in KINDS if any(word in lowered for word in words)), ELEMENTWISE)


def read_parts(path: Path) -> Parts:
    """Return the mean over the traced steps of a Chrome trace.

    Raises:
        ValueError: the trace has no traced step.
    """
    events = [event for event in json.loads(path.read_text())["traceEvents"] if event.get("ph") == "X"]
    marks = sorted(
        (event["ts"], event["name"].removeprefix(MARK))
        for event in events
        if event.get("cat") == "user_annotation" and event["name"].startswith(MARK)
    )
    begins, ends = ([ts for ts, name in marks if name == which] for which in (STEP_BEGINS, STEP_ENDS))
    if not ends or len(begins) != len(ends):
        raise ValueError(f"{path}: {len(begins)} steps begin and {len(ends)} end")
    activities = list(_of_device(events, marks)) or list(_of_host(events, marks))
    return divide(activities, begins[0], ends[-1], len(begins))


def divide(activities: Iterable[Activity], begin: float, end: float, steps: int) -> Parts:
    """Return the seconds per step, as the mean over the steps between two times (us). The host launches a step before
    the device has done the step before, so only the beginning of the first and the end of the last are known."""
    parts = Parts(seconds=end - begin)
    inside = [a for a in activities if a.stop > max(begin, a.start) and a.start < end]
    _sweep(inside, begin, end, parts)
    for activity in inside:
        seconds = activity.stop - activity.start
        if activity.label == COMMUNICATION:
            parts.collectives[_collective(activity.name)] += seconds
        elif activity.label in COMPUTED:
            parts.kinds[activity.label, kind_of(activity.name)] += seconds
    scale = 1 / (1e6 * steps)
    parts.seconds *= scale
    parts.hidden *= scale
    for sums in (parts.shares, parts.collectives, parts.kinds):
        sums.update({key: value * scale for key, value in sums.items()})
    return parts


def _sweep(activities: Sequence[Activity], begin: float, end: float, parts: Parts) -> None:
    """Assign every moment between `begin` and `end` to one of SHARES."""
    edges = [(max(a.start, begin), 1, place) for place, a in enumerate(activities)]
    edges += [(min(a.stop, end), -1, place) for place, a in enumerate(activities)]
    running: dict[str, int] = defaultdict(int)
    now = begin
    for ts, change, place in sorted(edges):
        label = next((name for name in _PRECEDENCE if running[name]), None)
        if label is None:
            # Nothing runs. The activity that ends the gap is the one that was waited for.
            label = DATA_WAIT if activities[place].part == "data" else IDLE
        elif label in COMPUTED and running[COMMUNICATION]:
            parts.hidden += ts - now
        parts.shares[label] += ts - now
        running[activities[place].label] += change
        now = ts
    parts.shares[IDLE] += end - now


def _of_device(events: Iterable[dict], marks: Sequence[tuple[float, str]]) -> Iterator[Activity]:
    launches, ran = {}, []
    for event in events:
        category, correlation = event.get("cat"), event.get("args", {}).get("correlation")
        if category in ("cuda_runtime", "cuda_driver") and correlation is not None:
            launches[correlation] = event["ts"]
        elif category in ("kernel", "gpu_memcpy", "gpu_memset"):
            ran.append((event["ts"], event["ts"] + event["dur"], event["name"], correlation))
    times = [ts for ts, _ in marks]
    part = "other"
    for start, stop, name, correlation in sorted(ran, key=lambda it: it[:2]):
        if correlation in launches:
            part = _part_at(launches[correlation], times, marks)
        yield Activity(start, stop, _label(name, part), part, name)


def _of_host(events: Iterable[dict], marks: Sequence[tuple[float, str]]) -> Iterator[Activity]:
    """Return the host's time between marks, minus the time of gloo."""
    busy = [
        (event["ts"], event["ts"] + event["dur"], event["name"])
        for event in events
        if event["name"].startswith("gloo:")
    ]
    cuts = sorted({ts for ts, _ in marks} | {edge for start, stop, _ in busy for edge in (start, stop)})
    times = [ts for ts, _ in marks]
    for start, stop in itertools.pairwise(cuts):
        part = _part_at(start, times, marks)
        name = next((name for first, last, name in busy if first <= start < last), "")
        if name:
            yield Activity(start, stop, COMMUNICATION, part, name)
        elif part != "data":
            yield Activity(start, stop, _label("", part), part, HOST)
        else:
            yield Activity(start, stop, DATA_WAIT, part, HOST)


def _part_at(ts: float, times: Sequence[float], marks: Sequence[tuple[float, str]]) -> str:
    place = bisect.bisect_right(times, ts) - 1
    return marks[place][1] if place >= 0 else "other"


def _label(name: str, part: str) -> str:
    if "nccl" in name.lower():
        return COMMUNICATION
    if "HtoD" in name:
        return HOST_TO_DEVICE
    return part if part in COMPUTED else "other"


def _collective(name: str) -> str:
    """Return the name of a collective: ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(...) -> ReduceScatter;
    gloo:all_reduce -> all_reduce."""
    found = re.match(r"nccl(?:Dev)?Kernel_([A-Za-z]+)", name)
    return found[1] if found else name.removeprefix("gloo:")
