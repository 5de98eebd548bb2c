"""Pictures: how often each draft position is accepted and what that is worth in speed; tokens a second under load; tau by training time."""

import os
import tempfile
from contextlib import contextmanager
from pathlib import Path

__all__ = ["plot_load", "plot_pair", "plot_training"]

_BLUE, _GREY, _TEXT = "#2a6f97", "#b8bfc6", "#333a40"
_LINES = ("#8a939c", "#b08968", _BLUE, "#d1495b", "#e9a03b", "#3b8b5c", "#7b5ea7")
_MOST_COLUMNS = 4


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
            _tidy(axes)
        figure.savefig(path, dpi=150)
    return Path(path)


def plot_load(path: str | os.PathLike, panels: dict[str, dict[str, dict[int, float]]]) -> Path:
    """Draws tokens a second in total against concurrent requests and saves it at `path`.

    Args:
        panels: by title; each has, by way of decoding (a line), tokens a second by number of requests.

    Raises:
        OSError: the file can't be written.
    """
    with _without_font_cache():
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        num_columns = min(len(panels), _MOST_COLUMNS)
        num_rows = -(-len(panels) // num_columns)
        figure = Figure(figsize=(10 if num_columns == 1 else 5 * num_columns, 4.6 * num_rows), layout="constrained")
        FigureCanvasAgg(figure)
        ways = list(dict.fromkeys(way for lines in panels.values() for way in lines))
        colours = {way: _LINES[index % len(_LINES)] for index, way in enumerate(ways)}
        for index, (title, lines) in enumerate(panels.items()):
            _draw_load(figure.add_subplot(num_rows, num_columns, index + 1), title, lines, colours)
        figure.savefig(path, dpi=150)
    return Path(path)


def plot_training(path: str | os.PathLike, lines: dict[str, list[tuple[float, float]]]) -> Path:
    """Draws tokens a round against training time and saves it at `path`.

    Args:
        lines: by label, points (minutes, tokens a round); the first is the one that counts.

    Raises:
        OSError: the file can't be written.
    """
    with _without_font_cache():
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        figure = Figure(figsize=(7, 4), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots()
        for (label, points), colour in zip(lines.items(), (_BLUE, "#d1495b", _GREY)):
            minutes, tau = zip(*points)
            axes.plot(minutes, tau, color=colour, marker="o", markersize=4, linewidth=1.6, label=label)
        axes.set_xlim(left=0)
        axes.set(xlabel="minutes of training", ylabel="tokens a round (1: no draft accepted)")
        axes.set_title("Held-out text", loc="left", fontsize=11, color=_TEXT)
        axes.legend(frameon=False, fontsize=9, labelcolor=_TEXT)
        _tidy(axes)
        figure.savefig(path, dpi=150)
    return Path(path)


def _draw_load(axes, title: str, lines: dict[str, dict[int, float]], colours: dict[str, str]) -> None:
    for way, speeds in lines.items():
        axes.plot(list(speeds), list(speeds.values()), color=colours[way], marker="o", markersize=4, linewidth=1.6, label=way)
    ticks = sorted({count for speeds in lines.values() for count in speeds})
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, labels=[str(count) for count in ticks])
    axes.set_ylim(bottom=0)
    axes.set(xlabel="concurrent requests", ylabel="tokens a second, all requests together")
    axes.set_title(title, loc="left", fontsize=11, color=_TEXT)
    axes.legend(frameon=False, fontsize=9, labelcolor=_TEXT)
    _tidy(axes)


def _tidy(axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(which="both", colors=_TEXT, length=0)


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
