"""What a target is to answer: the questions of conversations and prompts, or texts to be continued, each row of a dataset a dialogue; and what its
answers are good for."""

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice

from datasets import Dataset, IterableDataset
from transformers import PreTrainedTokenizerBase

from hf_dspark.distillation.conversations import read_messages
from hf_dspark.evaluation.acceptance import LOOPING_SHARE, REPEATED_NGRAM
from hf_dspark.evaluation.benchmarks import repeated_ngram_share

__all__ = ["CUT", "EMPTY", "LOOPING", "WHOLE", "Dialogue", "checked_rows", "find_prompts", "judge_answer", "read_dialogues"]

# What an answer is good for: it came to its end, went on to the length limit, repeats itself, or says nothing.
WHOLE, CUT, LOOPING, EMPTY = "whole", "cut", "looping", "empty"

# Columns that are read where none is named, the first that is there.
_COLUMNS = ("messages", "conversations", "turns", "prompt", "text")


@dataclass(slots=True)
class Dialogue:
    """One row of a dataset: what is asked, and what has been answered so far.

    row: its number. questions: for each answer, the messages of {role, content} that come before it and after the answer before.
    prompt_ids: tokens of a text to be continued, in place of questions. messages: the conversation so far. rows: what is written
    of it. verdicts: of each answer, num_new_tokens of all together. is_over: nothing more is asked, although questions
    may be left.
    """

    row: int
    questions: list[list[dict]] = field(default_factory=list)
    prompt_ids: list[int] | None = None
    messages: list[dict] = field(default_factory=list)
    rows: list[dict] = field(default_factory=list)
    verdicts: list[str] = field(default_factory=list)
    num_new_tokens: int = 0
    is_over: bool = False

    @property
    def turn(self) -> int:
        """Number of the answer that is asked for, from 0."""
        return len(self.verdicts)

    @property
    def is_finished(self) -> bool:
        """Whether there is nothing more to ask."""
        return self.is_over or self.turn >= max(1, len(self.questions))

    def asked_messages(self) -> list[dict]:
        """The conversation up to and with the question that is not answered yet."""
        return [*self.messages, *self.questions[self.turn]]

    def take_answer(self, verdict: str, num_tokens: int, drop_degenerate: bool) -> bool:
        """Counts an answer; False: it isn't kept, and the dialogue ends before it."""
        self.verdicts.append(verdict)
        self.num_new_tokens += num_tokens
        is_kept = verdict == WHOLE or (verdict != EMPTY and not drop_degenerate)
        self.is_over = self.is_over or not is_kept
        return is_kept

    def fingerprint(self) -> str:
        """Of what is asked: another dataset under the same name has others."""
        asked = self.questions if self.prompt_ids is None else self.prompt_ids
        return hashlib.sha256(json.dumps(asked, sort_keys=True, default=str).encode()).hexdigest()[:16]


def judge_answer(ids: list[int], *, is_blank: bool, is_ended: bool, looping_share: float = LOOPING_SHARE) -> str:
    """One word for the answer of the tokens `ids`, the end token among them or not.

    Args:
        is_blank: there is no text in it.
        is_ended: the target ended it itself; False: it went on to the length limit.
        looping_share: from this share of 8-grams that had occurred before the answer is a loop, cut or not.
    """
    if is_blank:
        return EMPTY
    if repeated_ngram_share(ids, REPEATED_NGRAM) >= looping_share:
        return LOOPING
    return WHOLE if is_ended else CUT


def find_prompts(rows: Dataset | IterableDataset, column: str | None, name: str) -> tuple[str, bool]:
    """The column of `rows`, called `name` in errors, to read prompts from: `column`, or the first of the known ones; whether it holds text.

    Raises:
        ValueError: there is no such column, or it holds neither text nor lists of messages.
    """
    first = next(iter(rows), None)
    if first is None:
        raise ValueError(f"dataset {name!r} is empty")
    found = column or next((known for known in _COLUMNS if known in first), None)
    if found not in first:
        wanted = f"the column {column!r}" if column else f"a column {', '.join(map(repr, _COLUMNS[:-1]))} or {_COLUMNS[-1]!r}"
        raise ValueError(f"dataset {name!r} needs {wanted}, it has {sorted(first)}; set dataset_column to the one with the prompts")
    value = next((row[found] for row in islice(rows, 1000) if row[found]), None)
    if not isinstance(value, str) and not (isinstance(value, list) and isinstance(value[0], dict | str)):
        wanted = "text, lists of {role, content} or lists of questions"
        raise ValueError(f"dataset {name!r}: the column {found!r} must hold {wanted}, its first value is {str(value)[:80]!r}")
    return found, isinstance(value, str)


def checked_rows(rows: Iterable[dict], column: str, name: str, *, is_named: bool, is_chat: bool) -> Iterator[dict]:
    """`rows` of the dataset called `name` in errors, each after a look at what `column`, and the other known ones, hold.

    Args:
        is_named: the column was named by the user, who knows that the rows without it are left out.
        is_chat: what a user says; False: texts are to be continued.

    Raises:
        ValueError: a row has its prompt in another column; it holds no text, where texts are to be continued.
    """
    for number, row in enumerate(rows):
        value = row[column]
        other = next((known for known in _COLUMNS if row.get(known)), None) if value is None and not is_named else None
        if other is not None:
            raise ValueError(
                f"dataset {name!r}, row {number}: expected the column {column!r}, as other rows have it, got {other!r} alone; write all rows with "
                "one of them, or set dataset_column to the one to read (rows without it are left out)"
            )
        if not is_chat and not isinstance(value, str | None):
            raise ValueError(
                f"dataset {name!r}, row {number}: the column {column!r} must hold text to be continued, got {str(value)[:80]!r}; lists of messages "
                "or questions need a target with a chat template, and apply_chat_template left out"
            )
        yield row


def read_dialogues(
    rows: Iterable[dict], column: str, turns: str, tokenizer: PreTrainedTokenizerBase | None = None, prompt_tokens: int | None = None
) -> Iterator[Dialogue | None]:
    """A dialogue for each row, in order; None where a row has no user turn, or no text.

    Args:
        turns: of a conversation, "all": every answer is asked for anew, each after the new ones before it; "last": only the answer to
            the last user turn, after the conversation as it is.
        tokenizer: continues texts as they are, without a chat template; None: a text is what a user says.
        prompt_tokens: of a text to be continued, at most.
    """
    for number, row in enumerate(rows):
        value = row[column]
        if tokenizer is not None:
            ids = tokenizer(value)["input_ids"] if value and value.strip() else []
            ids = ids[:-1] if ids[-1:] == [tokenizer.eos_token_id] else ids
            yield Dialogue(number, prompt_ids=ids[:prompt_tokens]) if ids else None
            continue
        questions = _questions([{"role": "user", "content": value}] if isinstance(value, str) and value.strip() else value, turns)
        yield Dialogue(number, questions) if questions else None


def _questions(value, turns: str) -> list[list[dict]]:
    """The messages before each answer; empty: nobody asks."""
    if isinstance(value, list) and value and all(isinstance(text, str) for text in value):
        return [[{"role": "user", "content": text}] for text in value]
    # Behind an answer nothing is dropped.
    messages = read_messages([*value, {"role": "assistant", "content": ""}]) if isinstance(value, list) else None
    users = [i for i, message in enumerate(messages or []) if message["role"] == "user"]
    if not users or turns == "last":
        return [messages[: users[-1] + 1]] if users else []
    questions, waiting = [], []
    for message in messages:
        if message["role"] == "tool":  # answers a call that nobody makes any more
            break
        if message["role"] != "assistant":
            waiting.append(message)
        elif any(part["role"] == "user" for part in waiting):
            questions.append(waiting)
            waiting = []
    return questions
