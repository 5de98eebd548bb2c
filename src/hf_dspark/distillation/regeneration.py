"""Text written by the target itself, to train a draft on what it will have to predict: `hf-dspark regenerate RECIPE.yaml`."""

from collections import Counter, deque
from collections.abc import Iterator
from contextlib import closing
from itertools import islice
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase
from transformers.utils import logging

from hf_dspark.distillation.conversations import ChatTemplate
from hf_dspark.distillation.corpus import held_out_split, stdlib_modules
from hf_dspark.distillation.data import load_source
from hf_dspark.distillation.dialogues import CUT, EMPTY, LOOPING, Dialogue, checked_rows, find_prompts, read_dialogues
from hf_dspark.distillation.features import weights_fingerprint
from hf_dspark.distillation.provenance import NUMBER_COLUMN, PROVENANCE_COLUMN, chat_template_sha256, row_provenance, sampling_in_words
from hf_dspark.distillation.regeneration_arguments import RegenerationArguments
from hf_dspark.distillation.row_journal import RowJournal
from hf_dspark.distillation.sampling import Sampling
from hf_dspark.distillation.server import ChatServer, read_api_key
from hf_dspark.distillation.writers import ServerWriter, TargetWriter
from hf_dspark.evaluation.pairs import errors_named, usable_device
from hf_dspark.generation.context_limits import ContextLimits
from hf_dspark.modeling import DSparkDraftModel
from hf_dspark.modeling.uploading import public_name

__all__ = ["RegenerationArguments", "regenerate"]

# If so many rows fail before the first succeeds, the others would not fare better.
_HOPELESS_FAILURES = 32


def regenerate(args: RegenerationArguments) -> Path:
    """Writes `args.output_file`, and nothing under that name before all rows are there; an interrupted run goes on where it stopped.

    Rows of conversations and prompts: in process `input_ids` (tokens,) with a `loss_mask` (tokens,) of 0 and 1, the very tokens that the
    target read and wrote, since its text may be split otherwise when it is read again, and chat templates end cut answers and drop
    reasoning; through a server `messages`. Rows of 'stdlib': `input_ids` alone. All have their `provenance` (provenance.py). A row depends
    on its number, the seed and the target alone, as far as the target's forward does not round otherwise in another batch.

    A row that can't be answered is written to `<output_file>.failures.jsonl`; the same command asks for these again.

    Raises:
        ValueError: options, data or an output file that don't work; no row could be answered.
        OSError: there is no such target, or nobody answers at the server.
        KeyboardInterrupt: after Ctrl-C; the rows that were finished are kept.
    """
    run = _Run(args)
    try:
        with (
            logging.tqdm(total=run.num_rows, desc="answering", unit="row", disable=None) as bar,
            # A server must not be asked on behind an error, which may be held for long.
            closing(run.writer().answer_all(run.dialogues(bar))) as answered,
        ):
            for dialogue, error in answered:
                run.keep(dialogue, error)
                bar.update()
        if not run.is_complete:
            raise KeyboardInterrupt(run.journal.resume_hint(run.num_rows))
        return run.finish()
    except (KeyboardInterrupt, OSError):
        if len(run.journal):
            print(run.journal.resume_hint(run.num_rows))
        raise
    finally:
        run.journal.close()


class _Run:
    """What a run reads, and what has come of it so far."""

    def __init__(self, args: RegenerationArguments):
        self.args, self.is_stdlib = args, args.dataset == "stdlib"
        api_key = read_api_key(args.api_key_env)
        self.device = usable_device(args.device) if args.server is None else None
        with errors_named("target", args.target):
            config = AutoConfig.from_pretrained(args.target)
            self.revision = getattr(config, "_commit_hash", None)
            self.tokenizer = AutoTokenizer.from_pretrained(args.target)
        self.target_weights = None
        self.sampling = Sampling.of_run(_generation_config(args.target), args)
        self.rows = None if self.is_stdlib else load_source(args.dataset, args)
        self.column, is_text = (None, True) if self.is_stdlib else find_prompts(self.rows, args.dataset_column, args.dataset)
        self.chat = ChatTemplate(self.tokenizer, args.enable_thinking) if self._is_chat(is_text) else None
        if args.server is None:
            self._check_context(ContextLimits.of(config).context)
        available = len(self.rows) if hasattr(self.rows, "__len__") else None
        self.num_rows = args.num_rows if available is None else min(available, args.num_rows or available)
        if available is not None:  # a stream is read once, and looked at then
            deque(islice(self._checked_rows(), self.num_rows), maxlen=0)
        self.num_asked = self.num_answered = self.num_without_prompt = 0
        self.is_read, self.first_error = False, None
        settings = self._facts(args.dataset, target=args.target, target_revision=self.revision, prompt_tokens=args.prompt_tokens)
        self.journal = RowJournal(Path(args.output_file), settings)
        self.server = None
        if args.server is not None:
            options = dict(api_key=api_key, timeout=args.request_timeout, max_retries=args.max_retries)
            self.server = ChatServer(args.server, args.server_model or args.target, **options)
        print(f"answers: {sampling_in_words(self._facts(args.dataset))}, up to {args.new_tokens} new tokens")

    @property
    def is_complete(self) -> bool:
        """Whether every row was read and has been answered, or has failed."""
        return self.is_read and self.num_answered == self.num_asked

    def dialogues(self, bar) -> Iterator[Dialogue]:
        """What is not answered yet; `bar` moves on by what is."""
        if self.is_stdlib:
            read = (Dialogue(i, prompt_ids=ids) for i, ids in enumerate(_stdlib_prompts(self.tokenizer, self.args)))
        else:
            continued = self.tokenizer if self.chat is None else None
            read = read_dialogues(self._checked_rows(), self.column, self.args.answered_turns, continued, self.args.prompt_tokens)
        for number, dialogue in enumerate(islice(read, self.num_rows)):
            if dialogue is None or self.journal.fingerprints.get(number) != dialogue.fingerprint():
                self.journal.forget(number)
            if dialogue is not None and number not in self.journal.fingerprints:
                self.num_asked += 1
                yield dialogue
                continue
            self.num_without_prompt += dialogue is None
            bar.update()
        self.is_read = True

    def writer(self) -> TargetWriter | ServerWriter:
        """Who answers: the server, if it is there, or the target, loaded."""
        if self.server is not None:
            self.server.check()
            return ServerWriter(self.server, self.tokenizer, self.chat, self.sampling, self.args)
        dtype, draft = self.args.dtype if self.args.dtype == "auto" else getattr(torch, self.args.dtype), None
        target = AutoModelForCausalLM.from_pretrained(self.args.target, dtype=dtype).eval()
        if self.args.dtype != "float16":  # which may have rounded the weights in a way of its own
            self.target_weights = weights_fingerprint(target, rounded=True)
        target.to(self.device)
        if self.args.draft is not None:
            with errors_named("draft", self.args.draft):
                draft = DSparkDraftModel.from_pretrained(self.args.draft, dtype=target.dtype).to(self.device)
        return TargetWriter(target, self.tokenizer, self.chat, self.sampling, self.args, draft)

    def keep(self, dialogue: Dialogue, error: Exception | None) -> None:
        """Writes down what has come of a dialogue.

        Raises:
            ValueError: nothing but failures so far, in earlier runs neither.
        """
        self.num_answered += 1
        if error is None:
            entry = {"rows": dialogue.rows, "verdicts": dialogue.verdicts, "num_new_tokens": dialogue.num_new_tokens}
            self.journal.add(dialogue.row, dialogue.fingerprint(), entry)
            return
        words = f"{type(error).__name__}: {error}" if self.server is None else str(error)
        self.journal.add_failure(dialogue.row, words)
        self.first_error = self.first_error or words
        # What failed before is asked first again, so rows of an earlier run count as well.
        if not len(self.journal) and self.journal.num_failed >= _HOPELESS_FAILURES:
            raise ValueError(f"none of the first {_HOPELESS_FAILURES} rows could be answered; the first failed with {self.first_error}")

    def finish(self) -> Path:
        """Makes the output file of all rows that have come, and says what they are.

        Raises:
            ValueError: there are none.
        """
        counts, num_rows, num_tokens = Counter(), 0, 0
        for entry in self._entries():
            counts.update(entry["verdicts"])
            num_rows += len(entry["rows"])
            num_tokens += entry["num_new_tokens"]
        if num_rows == 0:
            causes = f"{self.num_without_prompt} of {self.num_asked + self.num_without_prompt} rows have no user turn, or no text; "
            causes += f"{counts[EMPTY]} answers are empty, {counts[LOOPING]} loop, {counts[CUT]} are cut at new_tokens={self.args.new_tokens}; "
            causes += f"{self.journal.num_failed} rows failed" + (f", first with {self.first_error}" if self.first_error else "")
            if self.args.drop_degenerate and counts[LOOPING] + counts[CUT]:
                advice = "raise new_tokens, or set it to False" if counts[CUT] else "set it to False to keep them"
                causes += f"; drop_degenerate=True leaves out what loops or is cut: {advice}, and delete {self.journal.unfinished}"
            raise ValueError(f"no row of {self.args.dataset!r} was answered: {causes}")
        known = {"rows": num_rows, "answers": counts.total(), **{name: counts[name] for name in (LOOPING, CUT, EMPTY)}}
        counted = {**known, "failed": self.journal.num_failed}
        facts = self._facts(public_name(self.args.dataset), counts=counted, target_weights=self.target_weights)
        self.journal.finish(self._output_rows(row_provenance(self.args.target, self.revision, **facts)))
        print(f"wrote {num_rows:,} rows to {self.journal.output}: {counts.total():,} answers, {num_tokens:,} new tokens{self._remarks(counts)}")
        return self.journal.output

    def _output_rows(self, provenance: str) -> Iterator[dict]:
        for entry in self._entries():
            number = {} if self.is_stdlib else {NUMBER_COLUMN: entry["row"]}
            for row in entry["rows"]:
                yield {**number, **row, PROVENANCE_COLUMN: provenance}

    def _entries(self) -> Iterator[dict]:
        return (entry for entry in self.journal.entries() if self.num_rows is None or entry["row"] < self.num_rows)

    def _remarks(self, counts: Counter) -> str:
        dropped, kept = " (left out)", " (kept; drop_degenerate: true leaves them out)"
        what = dropped if self.args.drop_degenerate else kept
        remarks = [f"{counts[LOOPING]:,} loop{what if counts[LOOPING] else ''}"]
        if self.chat is not None:
            remarks.append(f"{counts[CUT]:,} cut at new_tokens={self.args.new_tokens}{what if counts[CUT] else ''}")
        remarks.append(f"{counts[EMPTY]:,} empty{dropped if counts[EMPTY] else ''}")
        if self.num_without_prompt:
            remarks.append(f"{self.num_without_prompt:,} rows without a user turn or text (left out)")
        if failed := self.journal.num_failed:
            remarks.append(f"{failed:,} rows failed, see {self.journal.failures}; the same command asks for these again")
        return "; " + "; ".join(remarks)

    def _is_chat(self, is_text: bool) -> bool:
        args, has_template = self.args, self.tokenizer.chat_template is not None
        if self.is_stdlib or (is_text and args.apply_chat_template is False):
            return False
        is_chat = not is_text or has_template or args.apply_chat_template is True or args.server is not None
        if is_chat and not has_template:
            holds, advice = "messages or questions", "name a column of texts to continue with dataset_column"
            if is_text:
                holds, advice = "texts", "leave apply_chat_template and server out to continue them as they are"
            raise ValueError(
                f"the tokenizer of {args.target!r} has no chat template to render conversations with, and the column {self.column!r} of "
                f"{args.dataset!r} holds {holds}; {advice}, or save the tokenizer with a chat template"
            )
        if args.apply_chat_template is False:
            raise ValueError(
                f"apply_chat_template=False continues texts, and the column {self.column!r} of {args.dataset!r} holds messages, which need a chat "
                f"template; {args.target!r} has one: leave apply_chat_template out"
            )
        return is_chat

    def _checked_rows(self) -> Iterator[dict]:
        options = dict(is_named=self.args.dataset_column is not None, is_chat=self.chat is not None)
        return checked_rows(self.rows, self.column, self.args.dataset, **options)

    def _check_context(self, context: int | None) -> None:
        """Of what is known before the rows are read: of a conversation, that it has a token."""
        args = self.args
        num_prompt = 1 if self.chat is not None else args.prompt_tokens or 1
        if context is not None and num_prompt + args.new_tokens > context:
            raise ValueError(
                f"a prompt of {num_prompt} tokens and new_tokens={args.new_tokens} do not fit into the context of {args.target!r}, {context} tokens "
                f"(max_position_embeddings); lower new_tokens" + (" or prompt_tokens" if num_prompt > 1 else ", and leave room for the prompts")
            )

    def _facts(self, dataset: str, **more) -> dict:
        """What the rows depend on."""
        args = self.args
        facts = {
            "mode": "in process" if args.server is None else "server",
            "dataset": dataset,
            "dataset_config": args.dataset_config,
            "dataset_split": None if self.is_stdlib else args.dataset_split,
            "dataset_column": self.column,
            "num_rows": args.num_rows if self.is_stdlib else None,
            "answered_turns": None if self.chat is None else args.answered_turns,
            "sampling": self.sampling.options,
            "greedy_share": args.greedy_share,
            "new_tokens": args.new_tokens,
            "enable_thinking": args.enable_thinking,
            "chat_template_sha256": None if self.chat is None else chat_template_sha256(self.tokenizer),
            "drop_degenerate": args.drop_degenerate,
            "degenerate_share": args.degenerate_share,
            "seed": args.seed,
        }
        return {**facts, **more}


def _generation_config(target: str) -> GenerationConfig:
    try:
        return GenerationConfig.from_pretrained(target)
    except OSError:
        return GenerationConfig()  # the target has none


def _stdlib_prompts(tokenizer: PreTrainedTokenizerBase, args: RegenerationArguments) -> list[list[int]]:
    """Pieces of the corpus, cut at random places among all its tokens, which must be counted for that."""
    texts, stream = list(held_out_split(stdlib_modules(), args.num_held_out)[0].values()), []
    with logging.tqdm(total=len(texts), desc="tokenizing the standard library", unit="module", disable=None, leave=False) as bar:
        for start in range(0, len(texts), 32):
            encoded = tokenizer(texts[start : start + 32], add_special_tokens=False)["input_ids"]
            stream += [token for ids in encoded for token in [tokenizer.bos_token_id, *ids]]
            bar.update(len(encoded))
    places = torch.Generator().manual_seed(args.seed)
    starts = torch.randint(len(stream) - args.prompt_tokens, (args.num_rows,), generator=places).tolist()
    return [stream[start : start + args.prompt_tokens] for start in starts]
