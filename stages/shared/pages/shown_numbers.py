"""Numbers as text for people, alike on every page and card: four significant digits, thousands separators."""

import math


def show_value(value: object) -> str:
    """Return a value as text for people: 12,345; 0.1235; yes."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        if not math.isfinite(value):
            return str(value)
        if float(value).is_integer() and abs(value) < 1e15:
            return f"{int(value):,}"
        return f"{value:,.1f}" if abs(value) >= 1000 else f"{value:.4g}"
    return str(value)


def show_gain(value: float) -> str:
    """Return a difference with its sign: +0.1235; -2; 0."""
    return f"+{show_value(value)}" if value > 0 else show_value(value)


def show_share(value: float) -> str:
    """Return a fraction in percent: 99.87%."""
    return f"{show_value(100 * value)}%"


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: 1 image, 2 images."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
