"""The gates of the registry: whether a model's scores pass them."""

from collections.abc import Mapping

from flows.tracking.config import Gate


def refusals(
    gates: Mapping[str, Gate], scores: Mapping[str, float], gains: Mapping[str, tuple[float, float]] | None = None
) -> list[str]:
    """One line per gate that failed; empty if the model passes all of them. A missing score fails its gate.

    Args:
        scores: name, as the gates spell it, -> value.
        gains: the same names -> low and high end of the interval of the gain over the model before training, in the
            direction that is better; None if there was no comparison.
    """
    failures = []
    for name, gate in gates.items():
        failures += _on_score(name, gate, scores)
        if gate.min_gain is not None:
            failures += _on_gain(name, gate.min_gain, gains)
    return failures


def _on_score(name: str, gate: Gate, scores: Mapping[str, float]) -> list[str]:
    if gate.min is None and gate.max is None:
        return []
    value = scores.get(name)
    if value is None:
        return [f"{name} was not measured; there are {', '.join(scores) or 'no scores'}"]
    if gate.min is not None and not value >= gate.min:
        return [f"{name} {value:.4f} is below {gate.min:g}"]
    if gate.max is not None and not value <= gate.max:
        return [f"{name} {value:.4f} is above {gate.max:g}"]
    return []


def _on_gain(name: str, least: float, gains: Mapping[str, tuple[float, float]] | None) -> list[str]:
    if gains is None or name not in gains:
        return [f"{name} was not compared with the model before training"]
    low, high = gains[name]
    if low > least:
        return []
    return [f"the gain in {name}, {low:+.4f} to {high:+.4f}, does not lie above {least:g}"]
