"""Round numbers along an axis."""

from __future__ import annotations

from math import ceil, floor, log10


def ticks(end: float, about: int) -> list[float]:
    """Round numbers from 0 up to `end`, about so many: steps of 1, 2 or 5 times a power of ten."""
    raw = end / about
    power = 10.0 ** floor(log10(raw))
    size = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * (1 - 1e-9))
    return [number * size for number in range(floor(end / size * (1 + 1e-9)) + 1)]


def decades(low: float, high: float) -> list[float]:
    """The powers of ten round positive numbers, first and last outside of them."""
    first, last = floor(log10(low)), ceil(log10(high))
    return [10.0**power for power in range(first, max(last, first + 1) + 1)]
