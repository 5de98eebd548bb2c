"""What the evaluations of a training found, in order: as data, as a table, and as a plot of tau by training time."""

import os
from pathlib import Path

from hf_dspark.evaluation.output import table
from hf_dspark.evaluation.plots import plot_training

__all__ = ["evaluations", "plot_history", "summary_table"]

_PREFIX = "eval_"
_SPEED = ("runtime", "samples_per_second", "steps_per_second", "model_preparation_time", "train_seconds")
# Of an evaluation: heading and format.
_COLUMNS = {
    "step": ("step", "{:d}"),
    "minutes": ("minutes", "{:.1f}"),
    "loss": ("loss", "{:.3f}"),
    "tau": ("tau by laws", "{:.2f}"),
    "tokens_per_round": ("tokens a round", "{:.2f}"),
    "repeated_8gram_share": ("repeated 8-grams", "{:.1%}"),
    "sampled_tokens_per_round": ("sampled", "{:.2f}"),
    "confidence_bias": ("confidence bias", "{:+.3f}"),
}
_LINES = {"tokens_per_round": "greedy decoding", "sampled_tokens_per_round": "sampled decoding", "tau": "estimated from the laws"}


def evaluations(log_history: list[dict]) -> list[dict]:
    """The first evaluation of each step in a Trainer's `state.log_history`, which checkpoints carry.

    Returns:
        For each `step`, `minutes` (training time so far, over all runs, evaluations left out) and all that was reported, such as `loss`,
        `tau` (estimated), `tokens_per_round` (decoded), `acceptance_1`.
    """
    found: dict[int, dict] = {}
    for entry in log_history:
        if f"{_PREFIX}loss" in entry and entry["step"] not in found:
            metrics = {name.removeprefix(_PREFIX): value for name, value in entry.items() if name.startswith(_PREFIX)}
            minutes = metrics.get("train_seconds", float("nan")) / 60
            reported = {name: value for name, value in metrics.items() if name not in _SPEED}
            found[entry["step"]] = {"step": entry["step"], "minutes": minutes, **reported}
    return [found[step] for step in sorted(found)]


def summary_table(history: list[dict]) -> str:
    """A row for each of `evaluations`; columns that none of them has are left out."""
    columns = {name: column for name, column in _COLUMNS.items() if any(name in entry for entry in history)}
    rows = [[form.format(entry[name]) if name in entry else "-" for name, (_, form) in columns.items()] for entry in history]
    return table([heading for heading, _ in columns.values()], rows)


def plot_history(path: str | os.PathLike, history: list[dict]) -> Path | None:
    """Draws tau of `evaluations` by training time and saves it at `path`; None, and nothing is written, where there are fewer than two.

    Raises:
        OSError: the file can't be written.
    """
    if len(history) < 2:
        return None
    lines = {label: [(entry["minutes"], entry[name]) for entry in history if name in entry] for name, label in _LINES.items()}
    return plot_training(path, {label: points for label, points in lines.items() if points})
