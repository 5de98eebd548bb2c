"""Answers to dialogues: by the target in this process, many at a time, or by a server that has it."""

import threading
from collections import deque
from collections.abc import Iterator

from jinja2 import TemplateError
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_dspark.distillation.conversations import ChatTemplate
from hf_dspark.distillation.dialogues import Dialogue, judge_answer
from hf_dspark.distillation.regeneration_arguments import RegenerationArguments
from hf_dspark.distillation.sampling import Sampling
from hf_dspark.distillation.server import ChatServer, RequestRefused, ask_all
from hf_dspark.generation.context_limits import ContextLimits
from hf_dspark.generation.queue import generate_many
from hf_dspark.modeling import DSparkDraftModel

__all__ = ["ServerWriter", "TargetWriter"]


class TargetWriter:
    """The target in this process. Rows are token ids: those that it read and wrote.

    A conversation is one row as long as each prompt begins with the row's tokens; where the chat template renders what was written in
    another way (drops reasoning, splits the text otherwise) a new row begins, with the new answers alone in its loss_mask.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        chat: ChatTemplate | None,
        sampling: Sampling,
        args: RegenerationArguments,
        draft: DSparkDraftModel | None = None,
    ):
        self.target, self.tokenizer, self.chat, self.sampling, self.args, self.draft = target, tokenizer, chat, sampling, args, draft
        stop_ids = target.generation_config.eos_token_id
        self.stop_ids = set(stop_ids if isinstance(stop_ids, list) else [stop_ids])
        self.context = ContextLimits.of(target.config).context

    def answer_all(self, dialogues: Iterator[Dialogue]) -> Iterator[tuple[Dialogue, Exception | None]]:
        """Yields the dialogues as they are finished, with the error that ended one, or None. After Ctrl-C it ends early."""
        prompts = _Prompts(self, dialogues)
        options = dict(max_concurrency=self.args.batch_size, max_new_tokens=self.args.new_tokens, ordered=False, show_progress=False)
        for completion in generate_many(self.target, self.draft, prompts, **options):
            dialogue, error = prompts.asked.pop(completion.index), completion.error
            if error is None:
                try:
                    self._add_answer(dialogue, completion.output[0].tolist(), len(completion.new_ids))
                except Exception as unreadable:
                    error = unreadable
            if error is not None or dialogue.is_finished:
                yield dialogue, error
            else:
                prompts.following.append(dialogue)
            yield from prompts.take_settled()
        yield from prompts.take_settled()

    def request(self, dialogue: Dialogue) -> dict | None:
        """The next prompt with its options; None: the conversation fills the target's context.

        Raises:
            ValueError: the first prompt does. TemplateError, TypeError: the template refuses the messages.
        """
        ids = self._prompt_ids(dialogue) if dialogue.prompt_ids is None else dialogue.prompt_ids
        budget = self.args.new_tokens if self.context is None else min(self.args.new_tokens, self.context - len(ids))
        if budget < 1:
            if dialogue.rows:
                dialogue.is_over = True
                return None
            raise ValueError(f"the prompt has {len(ids)} tokens, the target's context holds {self.context}")
        return {"input_ids": ids, "max_new_tokens": budget, **self.sampling.row_options(dialogue.row, dialogue.turn)}

    def _prompt_ids(self, dialogue: Dialogue) -> list[int]:
        messages = dialogue.asked_messages()
        text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **self.chat.options)
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def _add_answer(self, dialogue: Dialogue, ids: list[int], num_new: int) -> None:
        new_ids, is_ended = ids[-num_new:], ids[-1] in self.stop_ids
        if self.chat is None:
            # Text that goes on to the limit is whole as it is.
            if dialogue.take_answer(self._judge(new_ids, is_blank=len(new_ids) == is_ended, is_ended=True), num_new, self.args.drop_degenerate):
                mask = {} if self.args.dataset == "stdlib" else {"loss_mask": [0] * len(dialogue.prompt_ids) + [1] * num_new}
                dialogue.rows.append({"input_ids": ids, **mask})
            return
        text = self.tokenizer.decode(new_ids, skip_special_tokens=True)
        verdict = self._judge(new_ids, is_blank=not text.strip(), is_ended=is_ended)
        messages = dialogue.asked_messages()
        if not dialogue.take_answer(verdict, num_new, self.args.drop_degenerate):
            return
        last = dialogue.rows[-1] if dialogue.rows else None
        if last is None or ids[: len(last["input_ids"])] != last["input_ids"]:
            last = {"input_ids": [], "loss_mask": []}
            dialogue.rows.append(last)
        last["loss_mask"] += [0] * (len(ids) - num_new - len(last["loss_mask"])) + [1] * num_new
        last["input_ids"] = ids
        dialogue.messages = [*messages, self._message(new_ids, text)]

    def _judge(self, ids: list[int], **facts) -> str:
        return judge_answer(ids, looping_share=self.args.degenerate_share, **facts)

    def _message(self, ids: list[int], text: str) -> dict:
        """The answer as the template is to render it in the next prompt."""
        if getattr(self.tokenizer, "response_template", None) is not None:
            return {"role": "assistant", **self.tokenizer.parse_response(ids)}
        return {"role": "assistant", "content": text}


class _Prompts:
    """Prompts for generate_many: the next of dialogues in progress before those of new ones. It may run dry and go on later, when an
    answer has brought the next question; generate_many asks again as long as anything is unfinished."""

    def __init__(self, writer: TargetWriter, dialogues: Iterator[Dialogue]):
        self.writer, self.dialogues = writer, dialogues
        self.following: deque[Dialogue] = deque()
        self.asked: dict[int, Dialogue] = {}
        self._settled: list[tuple[Dialogue, Exception | None]] = []
        self._num_asked = 0

    def __iter__(self):
        return self

    def __next__(self) -> dict:
        while True:
            dialogue = self.following.popleft() if self.following else next(self.dialogues)
            try:
                request = self.writer.request(dialogue)
            except (TemplateError, TypeError, ValueError) as error:
                self._settled.append((dialogue, error))
                continue
            if request is None:
                self._settled.append((dialogue, None))
                continue
            self.asked[self._num_asked] = dialogue
            self._num_asked += 1
            return request

    def take_settled(self) -> list[tuple[Dialogue, Exception | None]]:
        """Dialogues that ended without another answer, since the last call."""
        settled, self._settled = self._settled, []
        return settled


class ServerWriter:
    """A server that has the target. Rows are `messages`, as servers give texts and no tokens; with answered_turns="last" they are token
    ids, since only a loss_mask can leave out the answers before."""

    def __init__(self, server: ChatServer, tokenizer: PreTrainedTokenizerBase, chat: ChatTemplate, sampling: Sampling, args: RegenerationArguments):
        self.server, self.tokenizer, self.chat, self.sampling, self.args = server, tokenizer, chat, sampling, args
        self._lock = threading.Lock()  # a tokenizer serves one thread at a time

    def answer_all(self, dialogues: Iterator[Dialogue]) -> Iterator[tuple[Dialogue, Exception | None]]:
        """Yields the dialogues as they are finished, with the error that ended one, or None.

        Raises:
            ServerUnreachable: the server can't be reached, or refuses this client.
        """
        return ask_all(dialogues, self.converse, self.args.concurrency, self.server.stop)

    def converse(self, dialogue: Dialogue) -> None:
        """Asks the questions of one dialogue, one after the other.

        Raises:
            RequestFailed: one of them can't be answered.
        """
        options = {"max_tokens": self.args.new_tokens}
        if self.args.enable_thinking is not None:
            options["chat_template_kwargs"] = {"enable_thinking": self.args.enable_thinking}
        while not dialogue.is_finished:
            messages = dialogue.asked_messages()
            try:
                answer = self.server.answer(messages, {**options, **self.sampling.server_options(dialogue.row, dialogue.turn)})
            except RequestRefused:
                if not dialogue.messages:
                    raise
                break  # most likely the conversation fills the context
            with self._lock:
                ids = self.tokenizer((answer.reasoning or "") + answer.content, add_special_tokens=False)["input_ids"]
            verdict = judge_answer(ids, is_blank=not answer.content.strip(), is_ended=answer.is_ended, looping_share=self.args.degenerate_share)
            if dialogue.take_answer(verdict, len(ids), self.args.drop_degenerate):
                thought = {} if answer.reasoning is None else {"reasoning_content": answer.reasoning}
                dialogue.messages = [*messages, {"role": "assistant", "content": answer.content, **thought}]
        dialogue.is_over = True
        if dialogue.messages:
            dialogue.rows = [self._last_answer_row(dialogue.messages) if self.args.answered_turns == "last" else {"messages": dialogue.messages}]

    def _last_answer_row(self, messages: list[dict]) -> dict:
        with self._lock:
            encoded = self.chat.encode(messages, [len(messages) - 1])
            prompt = self.chat.encode(messages[:-1], [])
        start = len(prompt.input_ids)
        mask = [int(is_answer and i >= start) for i, is_answer in enumerate(encoded.loss_mask)]
        return {"input_ids": encoded.input_ids, "loss_mask": mask}
