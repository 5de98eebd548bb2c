"""One picture of a pair: how often each draft position is accepted, and what that is worth in speed."""

import os
import tempfile
from contextlib import contextmanager
from pathlib import Path

__all__ = ["plot_pair"]

_BLUE, _GREY, _TEXT = "#2a6f97", "#b8bfc6", "#333a40"


def plot_pair(path: str | os.PathLike, conditional_acceptance: list[float], speeds: dict[str, float]) -> Path:
    """Draws conditional acceptance by draft position beside `speeds` (ratio to the first, which is 1) and saves it at `path`.

    Raises:
        OSError: the file can't be written.
    """
    with _without_font_cache():
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        figure = Figure(figsize=(10, 3.6), layout="constrained")
        FigureCanvasAgg(figure)
        left, right = figure.subplots(1, 2, width_ratios=[1.15, 1])
        _draw_acceptance(left, conditional_acceptance)
        _draw_speeds(right, speeds)
        for axes in (left, right):
            axes.spines[["top", "right"]].set_visible(False)
            axes.tick_params(colors=_TEXT, length=0)
        figure.savefig(path, dpi=150)
    return Path(path)


def _draw_acceptance(axes, rates: list[float]) -> None:
    positions = range(1, len(rates) + 1)
    axes.bar(positions, rates, color=_BLUE, width=0.7)
    for position, rate in zip(positions, rates):
        axes.text(position, rate + 0.015, f"{rate:.2f}", ha="center", color=_TEXT, fontsize=9)
    axes.set(ylim=(0, 1.08), xticks=list(positions), xlabel="draft position", ylabel="share accepted")
    axes.set_title("Accepted, given that all before it were", loc="left", fontsize=11, color=_TEXT)


def _draw_speeds(axes, speeds: dict[str, float]) -> None:
    names, ratios = list(speeds), list(speeds.values())
    axes.barh(names, ratios, color=[_GREY] * (len(names) - 1) + [_BLUE], height=0.55)
    for row, ratio in enumerate(ratios):
        axes.text(ratio + 0.02 * max(ratios), row, f"{ratio:.2f}", va="center", color=_TEXT, fontsize=9)
    axes.invert_yaxis()
    axes.axvline(1.0, color=_TEXT, linewidth=0.8, linestyle=":")
    axes.set(xlim=(0, 1.15 * max(ratios)), xlabel=f"times the speed of {names[0]}")
    axes.set_title("Speed, paired runs", loc="left", fontsize=11, color=_TEXT)


@contextmanager
def _without_font_cache():
    """matplotlib writes a list of fonts into the user's cache folder when it is first imported; here it goes where it is deleted."""
    if "MPLCONFIGDIR" in os.environ:
        yield
        return
    with tempfile.TemporaryDirectory() as folder:
        os.environ["MPLCONFIGDIR"] = folder
        try:
            yield
        finally:
            del os.environ["MPLCONFIGDIR"]
