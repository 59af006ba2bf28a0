"""Whether a model's scores let it into the registry."""

from collections.abc import Mapping

from stages.registry_config import Gate


def refusals(
    gates: Mapping[str, Gate], scores: Mapping[str, float], gains: Mapping[str, tuple[float, float]] | None = None
) -> list[str]:
    """Why a model is not registered, a line a gate that does not hold; empty where all hold.

    A score that is not there is no score that holds.

    Args:
        scores: name, as the gates spell it, -> value.
        gains: the same names -> low and high end of the interval of the gain over the model before training, in the
            direction that is better; None where there was no such comparison.
    """
    found = []
    for name, gate in gates.items():
        found += _on_score(name, gate, scores)
        if gate.min_gain is not None:
            found += _on_gain(name, gate.min_gain, gains)
    return found


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
