"""Showing which tokens of a text the draft wrote: in colour, or with carets under them."""

import os
import shutil
import sys

from transformers import PreTrainedTokenizerBase

from hf_dspark.generation.report import RequestRecord

__all__ = ["PROMPT_END", "accepted_marks", "render_marked", "terminal_has_colour"]

PROMPT_END = "<|>"
_GREEN, _DIM, _RESET = "\x1b[32m", "\x1b[2m", "\x1b[0m"


def accepted_marks(request: RequestRecord) -> list[bool]:
    """For each new token, whether it is a draft that the target accepted; the first one comes from the prefill."""
    marks = [False]
    for round_ in request.rounds:
        marks += [True] * round_.accepted + [False] * (round_.tokens - round_.accepted)
    return marks


def render_marked(tokenizer: PreTrainedTokenizerBase, prompt_ids: list[int], new_ids: list[int], marks: list[bool], colour: bool) -> str:
    """Prompt and completion; accepted drafts in green on a terminal, else with a caret below each character and `PROMPT_END` after the prompt."""
    prompt = tokenizer.decode(prompt_ids, skip_special_tokens=True)
    pieces = _pieces(tokenizer, new_ids)
    if colour:
        return f"{_DIM}{prompt}{_RESET}" + "".join(f"{_GREEN}{piece}{_RESET}" if mark else piece for piece, mark in zip(pieces, marks))
    text = prompt + PROMPT_END
    carets = " " * len(text)
    for piece, mark in zip(pieces, marks):
        text += piece
        carets += ("^" if mark else " ") * len(piece)
    return _with_lines_below(text, carets)


def terminal_has_colour() -> bool:
    """Whether stdout is a terminal whose user does not object to colour (the NO_COLOR convention)."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _pieces(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> list[str]:
    """The text that each token adds; the bytes of a character that spans tokens are shown with the last of them."""
    pieces, shown = [], 0
    for end in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[:end], clean_up_tokenization_spaces=False)
        complete = len(text) if end == len(ids) else len(text.rstrip("\ufffd"))
        pieces.append(text[shown:complete])
        shown = max(shown, complete)
    return pieces


def _with_lines_below(text: str, carets: str) -> str:
    """Lines no wider than the terminal, so that carets stay below their characters."""
    width, lines, start = shutil.get_terminal_size().columns, [], 0
    for line in text.split("\n"):
        below = carets[start : start + len(line)]
        start += len(line) + 1
        # A tab is wider than its caret.
        below = "".join(mark * 4 if character == "\t" else mark for character, mark in zip(line, below))
        line = line.replace("\t", "    ")
        for column in range(0, max(len(line), 1), width):
            lines.append(line[column : column + width])
            if "^" in (marks := below[column : column + width]):
                lines.append(marks.rstrip())
    return "\n".join(lines)
