"""Conversations as token ids through the tokenizer's own chat template, and which of the tokens the assistant writes.

A template says where the assistant's text lies with `{% generation %}` marks. For one without them the text is found by rendering the
conversation as it was when a turn was asked for (with the generation prompt) and when the turn had just been written: the tokens
in between are the turn's. They are supervised where the whole conversation has the same tokens at the same place, and only there.
"""

import os
import re
import sys
from dataclasses import dataclass
from itertools import groupby

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

__all__ = ["ChatTemplate", "EncodedConversation", "read_messages", "show_sample"]

_SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"}
_QUESTION = {"role": "user", "content": "Is it?"}
_GREEN, _PLAIN = "\033[32m", "\033[0m"


@dataclass(slots=True)
class EncodedConversation:
    """input_ids and loss_mask: (tokens,) lists, the mask True on what the assistant writes. left_out: indices of the assistant
    messages that stay unsupervised, as the template renders them differently later, or the tokens before them."""

    input_ids: list[int]
    loss_mask: list[bool]
    left_out: list[int]


class ChatTemplate:
    """The chat template of `tokenizer`, asked for a conversation's tokens and for those that the assistant writes.

    Supervised are a turn's text, with its reasoning, tool calls and channel headers where the model writes them, and the token that ends
    the turn; not its role header, nor anything else that the generation prompt brings, nor blank tokens behind the end.

    Args:
        enable_thinking: passed to the template where it isn't None.

    Raises:
        ValueError: the tokenizer has no chat template; the template fails on a plain question and answer, drops the answer, doesn't read
            `enable_thinking`, or has no generation prompt although it puts a header before an answer.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, enable_thinking: bool | None = None):
        if tokenizer.chat_template is None:
            raise ValueError(
                f"the tokenizer {tokenizer.name_or_path!r} has no chat template to render conversations with; set tokenizer.chat_template and "
                "save the tokenizer, take the one of the instruction-tuned model, or train on a column of text"
            )
        source = tokenizer.get_chat_template()
        reads_thinking = "enable_thinking" in source
        if enable_thinking is not None and not reads_thinking:
            raise ValueError(f"enable_thinking={enable_thinking}, but the chat template of {tokenizer.name_or_path!r} never reads it; leave it out")
        self.tokenizer = tokenizer
        self.options = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
        # A prompt of the other mode may be what stands before a turn: reasoning that is closed at once is the template's text, not the model's.
        self.prompt_options = [self.options, *({"enable_thinking": value} for value in (True, False) if reads_thinking)]
        self.is_marked = re.search(r"\{%-?\s*generation\s*-?%\}", source) is not None and tokenizer.is_fast
        self.special_ids = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
        self.closing_ids = self._closing_ids()

    def encode(self, messages: list[dict], turns: list[int] | None = None) -> EncodedConversation:
        """The tokens of `messages` and the mask of its assistant messages, or of those at the indices `turns` alone.

        Raises:
            jinja2.TemplateError, TypeError: the template can't render these messages.
        """
        if self.is_marked:
            return self._encode_marked(messages)
        if turns is None:
            turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        text = self._render(messages)
        input_ids = self._tokenize([text])[0]
        loss_mask, left_out = [False] * len(input_ids), []
        for turn in turns:
            span = self._turn_span(messages, turn, text, input_ids)
            if span is None:
                left_out.append(turn)
            else:
                loss_mask[slice(*span)] = [True] * (span[1] - span[0])
        return EncodedConversation(input_ids, loss_mask, left_out)

    def encode_turns(self, messages: list[dict]) -> list[EncodedConversation]:
        """`encode`, and one more conversation for each turn that it leaves out, ending with that turn, where nothing has been rewritten yet."""
        whole = self.encode(messages)
        alone = [self.encode(messages[: turn + 1], [turn]) for turn in whole.left_out if turn + 1 < len(messages)]
        whole.left_out = [turn for turn in whole.left_out if turn + 1 == len(messages)]
        return [whole, *alone]

    def _turn_span(self, messages: list[dict], turn: int, text: str, input_ids: list[int]) -> tuple[int, int] | None:
        """(start, stop) of the turn in `input_ids`; None where the whole isn't what the model saw and wrote."""
        try:
            prompts = {self._render(messages[:turn], add_generation_prompt=True, **options) for options in self.prompt_options} if turn else set()
            written = self._render(messages[: turn + 1])
        except (TemplateError, TypeError):
            return None
        prompts = [prompt for prompt in prompts if text.startswith(prompt) and written.startswith(prompt)]
        if not prompts:
            return None
        *prompt_ids, written_ids = self._tokenize([*prompts, written]) if written != text else [*self._tokenize(prompts), input_ids]
        starts = [len(ids) for ids in prompt_ids if input_ids[: len(ids)] == ids == written_ids[: len(ids)]]
        if not starts:
            return None
        start = max(starts)
        text_stop, stop = self._end_of_turn(written_ids, start)
        if input_ids[:text_stop] != written_ids[:text_stop]:
            return None
        # A turn may end with another token in the history than when it has just been written.
        return start, stop if input_ids[:stop] == written_ids[:stop] else text_stop

    def _end_of_turn(self, ids: list[int], start: int) -> tuple[int, int]:
        """Where the text of a conversation's last turn stops, without and with the token that ends the turn."""
        text_stop = len(ids) - len(self.closing_ids)
        if text_stop >= start and ids[text_stop:] == self.closing_ids:
            return text_stop, text_stop + self._num_ending(self.closing_ids)
        # A tool call may be closed by another token than an answer.
        stop = len(ids)
        while stop > start and self._is_blank(ids[stop - 1]):
            stop -= 1
        return stop, stop

    def _encode_marked(self, messages: list[dict]) -> EncodedConversation:
        """By the template's own marks; the token that ends a turn is added where they leave it out, blanks behind it are taken out."""
        encoded = self.tokenizer.apply_chat_template(messages, return_assistant_tokens_mask=True, **self.options)
        input_ids, marks = encoded["input_ids"], encoded["assistant_masks"]
        loss_mask, position = [False] * len(input_ids), 0
        num_ending = self._num_ending(self.closing_ids)
        for is_marked, run in groupby(marks):
            start, position = position, position + len(list(run))
            if not is_marked:
                continue
            stop = position
            while stop > start and self._is_blank(input_ids[stop - 1]):
                stop -= 1
            if stop == start or input_ids[stop - 1] not in self.special_ids:
                stop = position
                if num_ending and input_ids[stop : stop + num_ending] == self.closing_ids[:num_ending]:
                    stop += num_ending
            loss_mask[start:stop] = [True] * (stop - start)
        return EncodedConversation(input_ids, loss_mask, [])

    def _closing_ids(self) -> list[int]:
        """The tokens behind an answer, found by what the renderings of two answers have in common at their ends."""
        answers = [[_QUESTION, {"role": "assistant", "content": word}] for word in ("yes", "no")]
        try:
            first, second = map(self._render, answers)
            asked, prompt = self._render([_QUESTION]), self._render([_QUESTION], add_generation_prompt=True)
        except (TemplateError, TypeError) as error:
            raise ValueError(f"the chat template of {self.tokenizer.name_or_path!r} fails on a question and an answer: {error}") from error
        if first == second:
            raise ValueError(
                f"the chat template of {self.tokenizer.name_or_path!r} has no assistant turn: it drops the content of messages with the role "
                "'assistant'; set tokenizer.chat_template to one that renders them and save the tokenizer"
            )
        header = _common_start(first, second).removeprefix(prompt)
        if asked == prompt and header.strip() and not self.is_marked:
            raise ValueError(
                f"the chat template of {self.tokenizer.name_or_path!r} ignores add_generation_prompt, so that its header {header!r} can't be told "
                "from the assistant's text; let the template add the header there, or mark the text with {% generation %}"
            )
        closing = _common_start(first[::-1], second[::-1])[::-1]
        return self._tokenize([closing])[0] if closing else []

    def _num_ending(self, closing_ids: list[int]) -> int:
        """How many of the tokens behind an answer the model itself writes: up to the first that isn't blank; 0: all are blank."""
        return next((i + 1 for i, token in enumerate(closing_ids) if not self._is_blank(token)), 0)

    def _render(self, messages: list[dict], **options) -> str:
        return self.tokenizer.apply_chat_template(messages, tokenize=False, **{**self.options, **options})

    def _tokenize(self, texts: list[str]) -> list[list[int]]:
        return self.tokenizer(texts, add_special_tokens=False)["input_ids"]

    def _is_blank(self, token: int) -> bool:
        return not self.tokenizer.decode([token]).strip()


def read_messages(value) -> list[dict] | None:
    """Messages of `role` and `content` from a row's value, up to the last of the assistant's; those of `from` and `value` are renamed.

    Keys that are None, which tables fill in, are dropped: templates ask whether a key is there. None: no list of messages. Empty: the
    assistant says nothing in it.
    """
    if not isinstance(value, list) or not all(isinstance(message, dict) for message in value):
        return None
    messages = []
    for message in map(_without_none, value):
        if "role" not in message and "from" in message:
            role = message.pop("from")
            message |= {"role": _SHAREGPT_ROLES.get(role, role), "content": message.pop("value", "")}
        if not isinstance(message.get("role"), str):
            return None
        messages.append(message)
    while messages and messages[-1]["role"] != "assistant":
        messages.pop()
    return messages


def show_sample(row: dict, tokenizer: PreTrainedTokenizerBase, max_characters: int = 1500) -> str:
    """The text of `row`, {input_ids (tokens,), loss_mask (tokens,)}, with what is supervised in green, or in [[ ]] where stdout is no terminal.

    Of a stretch longer than `max_characters` the middle is left out.
    """
    is_coloured = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    before, after = (_GREEN, _PLAIN) if is_coloured else ("[[", "]]")
    pieces = []
    for is_supervised, run in groupby(zip(row["input_ids"], row["loss_mask"]), key=lambda token: bool(token[1])):
        text = tokenizer.decode([token for token, _ in run])
        if len(text) > max_characters:
            text = f"{text[: max_characters // 2]} (...) {text[-(max_characters // 2) :]}"
        pieces.append(before + text + after if is_supervised else text)
    num_supervised = sum(map(bool, row["loss_mask"]))
    head = f"a training row, {num_supervised} of its {len(row['input_ids'])} tokens supervised ({'green' if is_coloured else 'in [[ ]]'}):"
    return head + "\n" + "".join(pieces)


def _common_start(first: str, second: str) -> str:
    return first[: next((i for i, (a, b) in enumerate(zip(first, second)) if a != b), min(len(first), len(second)))]


def _without_none(value):
    if isinstance(value, dict):
        return {key: _without_none(entry) for key, entry in value.items() if entry is not None}
    return [_without_none(entry) for entry in value] if isinstance(value, list) else value
