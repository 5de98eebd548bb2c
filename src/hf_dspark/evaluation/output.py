"""What a measurement prints and writes: progress, aligned tables, JSON files."""

import json
import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from transformers.utils import logging

__all__ = ["progress", "table", "write_json", "write_whole"]


def progress(items: Sequence, label: str):
    """Iterates over `items` with a bar on a terminal, unless transformers' progress bars are switched off."""
    return logging.tqdm(items, desc=label, leave=False, disable=None)


def table(header: list[str], rows: list[list[str]]) -> str:
    """Lines of aligned columns, the first flush left and the others flush right; `rows` are as long as `header`."""
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    lines = ["  ".join([row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:]))]) for row in [header, *rows]]
    return "\n".join(line.rstrip() for line in lines)


def write_json(path: str, values: dict) -> None:
    """Writes `values` to the file at `path`; a nan, which JSON does not know, becomes null."""
    Path(path).write_text(json.dumps(_without_nan(values), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_whole(path: Path, parts: Iterable[bytes]) -> None:
    """Puts a file of `parts` at `path`, whole or not at all, also where the power fails."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with temporary.open("wb") as file:
            file.writelines(parts)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _without_nan(value):
    if isinstance(value, dict):
        return {key: _without_nan(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
