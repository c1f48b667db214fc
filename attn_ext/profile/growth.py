"""How a figure grows with the length of the sequences: the power law that fits it best."""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import linear_regression
from typing import NamedTuple


class Growth(NamedTuple):
    """figure = c * length ** exponent.

    `residual` is the root mean square of the points' relative distances from the fit: 0.1 says that
    a typical point lies 10 % off. `local` is the exponent between the two longest lengths: where it
    differs from `exponent`, the growth has not settled at these lengths.
    """

    exponent: float
    residual: float
    local: float
    points: int


def growth(figures: Mapping[int, float]) -> Growth | None:
    """The fit, by least squares on both logarithms; None for fewer than 3 positive figures.

    Args:
        figures: length of the sequences -> the figure, in any unit.
    """
    points = sorted((math.log(at), math.log(value)) for at, value in figures.items() if value > 0)
    if len(points) < 3:
        return None
    lengths, values = zip(*points, strict=True)
    slope, start = linear_regression(lengths, values)
    squares = [(value - start - slope * at) ** 2 for at, value in points]
    (x0, y0), (x1, y1) = points[-2:]
    residual = math.expm1(math.sqrt(sum(squares) / len(squares)))
    return Growth(slope, residual, (y1 - y0) / (x1 - x0), len(points))
