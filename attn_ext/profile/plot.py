"""Pictures of a sweep, by matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from attn_ext.profile.sweep import Figure, Sweep

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: The same colour for a variant in every picture; ours are solid lines, torch's dashed.
_COLOURS = {
    "naive": "#b5651d", "inplace": "#e08e45", "flash": "#1f6fb2", "cudnn": "#2a9d5c",
    "math": "#7f7f7f", "sdpa_efficient": "#c44e8a", "sdpa_flash": "#5aa9e6",
    "sdpa_cudnn": "#7bc86c",
}  # fmt: skip
_SCALE = {"gpu_us": 1e-3, "call_us": 1e-3, "peak_bytes": 2**-20}
_LABELS = {
    "gpu_us": "device time of a call [ms]", "call_us": "time of a call [ms]",
    "peak_bytes": "peak memory beyond the inputs [MiB]",
}  # fmt: skip


def plot(sweep: Sweep, title: str, path: Path) -> None:
    """Time and memory over the length, both axes logarithmic: a power law is a straight line.

    Thin lines rise linearly and quadratically, for the eye to compare with.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure as Picture

    picture = Picture(figsize=(10, 4.4), layout="constrained")
    picture.suptitle(title, fontsize=10)
    for axes, figure in zip(picture.subplots(1, 2), sweep.figures, strict=True):
        _draw(axes, sweep, figure)
    picture.savefig(path, dpi=150)


def _draw(axes: Axes, sweep: Sweep, figure: Figure) -> None:
    scale, lengths = _SCALE[figure.key], sweep.lengths
    known = {variant: sweep.of(figure, variant) for variant in sweep.variants}
    known = {variant: found for variant, found in known.items() if any(found.values())}
    for variant, found in known.items():
        at = [length for length, value in found.items() if value > 0]
        fit = sweep.growth(figure, variant)
        law = "" if fit is None else f", seq^{fit.exponent:.2f}"
        axes.plot(
            at, [found[length] * scale for length in at], label=variant + law,
            marker="o", markersize=3, color=_COLOURS.get(variant),
            linestyle="-" if variant in ("naive", "inplace", "flash", "cudnn") else "--",
        )  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    for power, name in ((1, "linear"), (2, "quadratic")):
        guide = [low * 1.5 * (length / lengths[0]) ** power for length in lengths]
        axes.plot(lengths, guide, color="0.8", linewidth=0.8, zorder=0)
        axes.annotate(name, (lengths[-1], min(guide[-1], high)), color="0.6", fontsize=7,
                      ha="right", va="bottom", annotation_clip=False)  # fmt: skip
    axes.set_ylim(low, high)
    axes.set_xticks(lengths, [str(length) for length in lengths])
    axes.minorticks_off()
    axes.set_xlabel("length of the sequences")
    axes.set_ylabel(_LABELS[figure.key])
    axes.grid(color="0.93")
    if known:
        axes.legend(fontsize=7)
