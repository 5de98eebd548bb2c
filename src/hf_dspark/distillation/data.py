"""Training data as rows of token ids with their loss mask: from conversations, plain text or ids; from files, folders or the Hub."""

import json
import logging
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pyarrow.compute as pc
from datasets import Dataset, Features, IterableDataset, List, Value, concatenate_datasets, load_dataset
from datasets.exceptions import DatasetsError
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from hf_dspark.distillation.arguments import DistillationArguments
from hf_dspark.distillation.conversations import ChatTemplate, read_messages
from hf_dspark.distillation.corpus import held_out_split, stdlib_modules
from hf_dspark.distillation.provenance import NUMBER_COLUMN, PROVENANCE_COLUMN, chat_template_sha256, conversation, conversations

__all__ = ["RowEncoder", "encode_rows", "load_rows", "load_source", "warn_of_mask_token"]

logger = logging.getLogger(__name__)

_ROWS = Features({"input_ids": List(Value("int32")), "loss_mask": List(Value("bool"))})
# What became of each row beside its tokens: why it can't be used (empty: it can), its assistant turns left out, whether it was too long.
_NOTES = Features({"problem": Value("string"), "num_left_out": Value("int32"), "is_cut": Value("bool")})
# How the row came about (provenance.py); it stays with the training rows where any of them says it.
_PROVENANCE = Features({PROVENANCE_COLUMN: Value("string")})
_READERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".txt": "text"}
_KINDS = {"messages": "messages", "conversations": "messages", "input_ids": "ids", "text": "text"}
_HOLDS = {"messages": "lists of {role, content}", "ids": "lists of token ids", "text": "text"}
# Rows of a stream that are read beforehand, to see what they hold; rows shuffled at a time.
_NUM_HEAD, _SHUFFLED_ROWS = 64, 1000

_NO_ANSWER = "without an assistant message"
_REWRITTEN = "rewritten by the template"
_REFUSED = "refused by the template"
_ADVICE = {
    _NO_ANSWER: "there are only prompts: let the target answer them first (hf-dspark regenerate), and train on what it writes",
    _REWRITTEN: "the prompt that the chat template makes is not how its own conversations begin; mark the assistant's text in the template "
    "with {% generation %}, or train on input_ids with a loss_mask",
    _REFUSED: "the messages lack what the chat template needs (their roles, their order, a content that is text)",
}


def load_rows(
    args: DistillationArguments, tokenizer: PreTrainedTokenizerBase, vocab_size: int | None = None
) -> tuple[Dataset | IterableDataset, Dataset | None]:
    """(training, held-out) rows of `args.dataset`: `input_ids` (tokens,) int32 and `loss_mask` (tokens,) bool, at most `args.max_length` tokens.

    At most `args.max_eval_rows` of the held-out ones, None without any; with `args.streaming` the training rows are an IterableDataset
    that is encoded as it is read. Rows that were regenerated for one conversation are held out together (of a stream, those that follow later
    are left out). The main process prints one line of counts.

    Args:
        vocab_size: rows of the target's embedding, which token ids of datasets must be; None: they are not checked.

    Raises:
        ValueError: the dataset is unknown or unreadable, has no column to read, or leaves no rows to train on; its conversations can't be
            rendered by the tokenizer's chat template; a token id outside the vocabulary.
    """
    with args.main_process_first(desc="reading the dataset"):
        if args.streaming:
            return _stream_rows(args, tokenizer, vocab_size)
        train, held_out = _split(args, vocab_size)
        parts = [(train, args.dataset), *((_extra_rows(file, args, held_out, vocab_size), file) for file in args.extra_rows or [])]
        encoded = concatenate_datasets([encode_rows(part, tokenizer, args, name) for part, name in parts])
        rows, line = _usable(encoded, args)
        eval_rows = _held_out_rows(encode_rows(held_out, tokenizer, args, args.dataset), args) if len(held_out) else None
    if args.process_index == 0:
        print(f"{line}; held-out rows {len(eval_rows or [])}")
    return rows, eval_rows


def encode_rows(
    source: Dataset | IterableDataset, tokenizer: PreTrainedTokenizerBase, args: DistillationArguments, name: str, head: Dataset | None = None
) -> Dataset | IterableDataset:
    """Encodes `source`, called `name` in errors: columns `input_ids`, `loss_mask`, and notes on each row.

    Args:
        head: the first rows of a stream, which tell what its columns hold.
    """
    known = source if head is None else head
    column, kind = _find_column(known, args, name)
    chat = ChatTemplate(tokenizer, args.enable_thinking) if kind == "messages" else None
    rendered = json.dumps({"chat_template_sha256": chat_template_sha256(tokenizer)}) if chat else ""
    encoder = RowEncoder(tokenizer, column, kind, args.max_length, args.block_size + 2, chat, args.split_turns, rendered)
    options = dict(batched=True, batch_size=64, remove_columns=known.column_names, features=Features({**_ROWS, **_NOTES, **_PROVENANCE}))
    if isinstance(source, Dataset):
        options["num_proc"] = args.dataset_num_proc
    return source.map(encoder, **options)


@dataclass(frozen=True, slots=True)
class RowEncoder:
    """Encodes batches of a dataset's rows: `column` of the `kind` messages, ids or text.

    Text gets its bos and eos token and is cut into rows of at most `max_length` tokens, and so are ids with their `loss_mask`, where the
    dataset has one; a row never holds two texts. Of a conversation the first `max_length` tokens are taken. Rows of fewer than
    `shortest` tokens, or without two neighbouring supervised ones, come out empty with the reason in `problem`.

    A row keeps what its column `provenance` says, or gets `provenance`.

    Raises:
        ValueError: a row's loss_mask and input_ids differ in length.
    """

    tokenizer: PreTrainedTokenizerBase
    column: str
    kind: str
    max_length: int
    shortest: int
    chat: ChatTemplate | None = None
    split_turns: bool = False
    provenance: str = ""

    def __call__(self, batch: dict[str, list]) -> dict[str, list]:
        values = batch[self.column]
        if self.kind == "messages":
            groups = [self._conversation_rows(value) for value in values]
        elif self.kind == "ids":
            masks = batch["loss_mask"] if "loss_mask" in batch else [None] * len(values)
            groups = [self._pieces(ids or [], mask) for ids, mask in zip(values, masks)]
        else:
            texts = self.tokenizer([text or "" for text in values])["input_ids"]
            groups = [self._pieces(_with_ends(ids, self.tokenizer), None) for ids in texts]
        stated = batch.get(PROVENANCE_COLUMN) or [None] * len(values)
        origins = [text if text and isinstance(text, str) else self.provenance for text in stated]
        rows = [{**row, PROVENANCE_COLUMN: origin} for group, origin in zip(groups, origins) for row in group]
        return {name: [row[name] for row in rows] for name in (*_ROWS, *_NOTES, *_PROVENANCE)}

    def _conversation_rows(self, value) -> list[dict]:
        messages = read_messages(value)
        if not messages:
            return [_row([], [], "that are no list of messages with a role" if messages is None else _NO_ANSWER)]
        try:
            conversations = self.chat.encode_turns(messages) if self.split_turns else [self.chat.encode(messages)]
        except (TemplateError, TypeError) as error:
            return [_row([], [], f"{_REFUSED} ({str(error)[:100]})")]
        rows = []
        for encoded in conversations:
            ids, mask = encoded.input_ids[: self.max_length], encoded.loss_mask[: self.max_length]
            problem = self._problem(ids, mask)
            if problem and encoded.left_out and not any(encoded.loss_mask):
                problem = _REWRITTEN
            rows.append(_row(ids, mask, problem, len(encoded.left_out), len(encoded.input_ids) > self.max_length))
        # A conversation whose turns have rows of their own needs none itself.
        return rows[1:] if len(rows) > 1 and rows[0]["problem"] else rows

    def _pieces(self, ids: list[int], mask: list | None) -> list[dict]:
        mask = [True] * len(ids) if mask is None else list(map(bool, mask))
        if len(mask) != len(ids):
            raise ValueError(f"a row has {len(ids)} input_ids and a loss_mask of {len(mask)}; each token needs its own entry in the mask")
        starts = range(0, max(1, len(ids)), self.max_length)
        pieces = [(ids[i : i + self.max_length], mask[i : i + self.max_length]) for i in starts]
        return [_row(*piece, self._problem(*piece)) for piece in pieces]

    def _problem(self, ids: list[int], mask: list[bool]) -> str:
        if len(ids) < self.shortest:
            return f"of fewer than {self.shortest} tokens (block_size + 2)"
        if not any(here and there for here, there in pairwise(mask)):
            return f"without two neighbouring supervised tokens in max_length={self.max_length}"
        return ""


def _row(ids: list[int], mask: list[bool], problem: str, num_left_out: int = 0, is_cut: bool = False) -> dict:
    tokens = {"input_ids": [], "loss_mask": []} if problem else {"input_ids": ids, "loss_mask": mask}
    return {**tokens, "problem": problem, "num_left_out": num_left_out, "is_cut": is_cut and not problem}


def _usable(encoded: Dataset, args: DistillationArguments) -> tuple[Dataset, str]:
    """The rows without a problem, and a line of counts."""
    problems = encoded["problem"][:]
    skipped = Counter(problem for problem in problems if problem)
    reasons = ", ".join(f"{count:,} {problem}" for problem, count in skipped.most_common(3))
    if skipped.total() == len(problems):
        advice = next((advice for start, advice in _ADVICE.items() if skipped and skipped.most_common(1)[0][0].startswith(start)), None)
        raise ValueError(f"dataset {args.dataset!r} has no row to train on: {reasons or 'it is empty'}" + (f"; {advice}" if advice else ""))
    table = encoded.data
    num_tokens = pc.sum(pc.list_value_length(table["input_ids"])).as_py()
    num_supervised = pc.sum(pc.list_flatten(table["loss_mask"])).as_py()
    line = f"training rows {len(problems) - skipped.total():,}: {num_tokens:,} tokens, {num_supervised / num_tokens:.1%} supervised"
    line += f"; skipped {skipped.total():,}" + (f" ({reasons})" if reasons else "")
    if num_left_out := pc.sum(table["num_left_out"]).as_py():
        line += f"; assistant turns left out {num_left_out:,}, as the template rewrites them later"
        line += "" if args.split_turns else " (split_turns: true gives them rows of their own)"
    if num_cut := pc.sum(table["is_cut"]).as_py():
        line += f"; conversations cut at max_length {num_cut:,}"
    says_nothing = not any(table[PROVENANCE_COLUMN].unique().to_pylist())
    rows = encoded.remove_columns([*_NOTES, *(_PROVENANCE if says_nothing else ())])
    return (rows.select([i for i, problem in enumerate(problems) if not problem]) if skipped else rows), line


def _held_out_rows(encoded: Dataset, args: DistillationArguments) -> Dataset | None:
    """At most `max_eval_rows`, spread over the usable ones; None: none is usable."""
    usable = [i for i, problem in enumerate(encoded["problem"]) if not problem]
    count = min(args.max_eval_rows, len(usable))
    return encoded.remove_columns([*_NOTES, *_PROVENANCE]).select([usable[i] for i in _spread(count, len(usable))]) if count else None


def _stream_rows(args: DistillationArguments, tokenizer: PreTrainedTokenizerBase, vocab_size: int | None) -> tuple[IterableDataset, Dataset | None]:
    stream = load_source(args.dataset, args)
    with _errors_named(args.dataset):
        head = list(stream.take(max(args.num_held_out, _NUM_HEAD)))
    if len(head) <= args.num_held_out:
        raise ValueError(f"num_held_out={args.num_held_out} leaves nothing to train on of the {len(head)} rows of {args.dataset!r}; lower it")
    head = Dataset.from_list(head, features=stream.features)
    _check_ids(head, args, args.dataset, vocab_size)
    first_rows, line = _usable(encode_rows(head, tokenizer, args, args.dataset), args)
    held_out = head.select(range(args.num_held_out))
    eval_rows = _held_out_rows(encode_rows(held_out, tokenizer, args, args.dataset), args) if len(held_out) else None
    if args.process_index == 0:
        print(f"streaming {args.dataset}; of its first {len(head)} rows: {line}; held-out rows {len(eval_rows or [])}")
    column, kind = _find_column(head, args, args.dataset)
    if kind == "ids" and vocab_size is not None:
        check = _IdCheck(args.dataset, column, vocab_size)
        stream = stream.map(check, batched=True, batch_size=64, with_indices=True)  # before the shuffling: it names the row
    rest, held = stream.skip(args.num_held_out), set(conversations(held_out)) - {None}
    if held:
        rest = rest.filter(lambda row: conversation(row[PROVENANCE_COLUMN], row[NUMBER_COLUMN]) not in held)
    rest = rest.shuffle(seed=args.seed, buffer_size=_SHUFFLED_ROWS)
    encoded = encode_rows(rest, tokenizer, args, args.dataset, head)
    dropped = sorted({*_NOTES, *_PROVENANCE} - set(first_rows.column_names))
    return encoded.filter(lambda row: not row["problem"]).remove_columns(dropped), eval_rows


def warn_of_mask_token(rows: Dataset | IterableDataset, mask_token_id: int) -> None:
    """Warns where `mask_token_id`, which fills a draft's blocks, occurs in the text of `rows`, of a stream in its first ones."""
    part = "" if isinstance(rows, Dataset) else "first "
    known = Dataset.from_list(list(rows.take(_NUM_HEAD))) if part else rows
    num_found, num_tokens = 0, 0
    for batch in known.select_columns(["input_ids"]).with_format("arrow").iter(10_000):
        ids = pc.list_flatten(batch["input_ids"])
        num_found, num_tokens = num_found + (pc.sum(pc.equal(ids, mask_token_id)).as_py() or 0), num_tokens + len(ids)
    if num_found:
        logger.warning(
            f"mask_token_id={mask_token_id} occurs {num_found:,} times among the {num_tokens:,} tokens of the {part}training rows; blocks of the "
            "draft are filled with it, so it should never occur in text: train a draft with another mask_token_id, such as a reserved special token, "
            "or leave those rows out"
        )


def _split(args: DistillationArguments, vocab_size: int | None) -> tuple[Dataset, Dataset]:
    """The dataset's rows as (training, held-out): of the standard library by module, else held-out rows spread over all, each with the other
    rows of its conversation."""
    if args.dataset == "stdlib":
        train, held_out = (list(modules.values()) for modules in held_out_split(stdlib_modules(), args.num_held_out))
        return Dataset.from_dict({"text": train}), Dataset.from_dict({"text": held_out})
    rows = load_source(args.dataset, args)
    _check_ids(rows, args, args.dataset, vocab_size)
    held_out, of_rows = set(_spread(min(args.num_held_out, len(rows)), len(rows))), conversations(rows)
    shared = {of_rows[i] for i in held_out} - {None}
    held_out |= {i for i, of_row in enumerate(of_rows) if of_row in shared}
    if len(held_out) == len(rows):
        raise ValueError(
            f"num_held_out={args.num_held_out} leaves nothing to train on of the {len(rows)} rows of {args.dataset!r}; lower it (0: no held-out rows)"
        )
    return rows.select([i for i in range(len(rows)) if i not in held_out]), rows.select(sorted(held_out))


def _extra_rows(name: str, args: DistillationArguments, held_out: Dataset, vocab_size: int | None) -> Dataset:
    """The rows of the dataset `name`, without those of a held-out conversation."""
    rows, held = load_source(name, args), set(conversations(held_out)) - {None}
    _check_ids(rows, args, name, vocab_size)
    return rows.select([i for i, of_row in enumerate(conversations(rows)) if of_row not in held]) if held else rows


@dataclass(frozen=True, slots=True)
class _IdCheck:
    """Raises ValueError for a batch of rows of the dataset `name` with an id that is no row of the target's embedding."""

    name: str
    column: str
    vocab_size: int

    def __call__(self, batch: dict[str, list], numbers: list[int]) -> dict:
        for ids, number in zip(batch[self.column], numbers):
            bad = next((id_ for id_ in ids or [] if not 0 <= id_ < self.vocab_size), None)
            if bad is not None:
                raise ValueError(
                    f"dataset {self.name!r}: row {number} holds the token id {bad}, but the target's vocabulary has {self.vocab_size} tokens "
                    f"(0 to {self.vocab_size - 1}); these ids are another tokenizer's"
                )
        return {}


def _check_ids(rows: Dataset, args: DistillationArguments, name: str, vocab_size: int | None) -> None:
    """Raises ValueError where rows of token ids hold one outside the vocabulary."""
    if vocab_size is None or len(rows) == 0:
        return
    column, kind = _find_column(rows, args, name)
    if kind != "ids":
        return
    check, start = _IdCheck(name, column, vocab_size), 0
    for batch in rows.select_columns([column]).with_format("arrow").iter(1000):
        span = pc.min_max(pc.list_flatten(batch[column])).as_py()
        if span["min"] is not None and not 0 <= span["min"] <= span["max"] < vocab_size:
            check(batch.to_pydict(), range(start, start + len(batch)))
        start += len(batch)


def load_source(name: str, args) -> Dataset | IterableDataset:
    """The rows of a local file, of the split of a local folder, or of the split of a dataset on the Hub.

    Args:
        args: options with `dataset_split`, `dataset_config` and `streaming`.

    Raises:
        ValueError: there is no such dataset, or it can't be read.
    """
    path, split = Path(name), args.dataset_split
    paragraphs = {"sample_by": "paragraph"}
    if path.is_dir():
        readers = {_READERS[file.suffix] for file in path.rglob("*") if file.suffix in _READERS}
        if len(readers) != 1:
            raise ValueError(f"the folder {name!r} must hold files of one kind ({', '.join(_READERS)}), it has {sorted(readers) or 'none'}")
        where, options = (str(path), args.dataset_config), paragraphs if "text" in readers else {}
    elif path.suffix in _READERS or path.is_file():
        if path.suffix not in _READERS or not path.is_file():
            raise ValueError(f"dataset must be an existing file of the kind {', '.join(_READERS)}, got {name!r}")
        # Only named splits of folders and of the Hub can be chosen.
        where, options, split = (_READERS[path.suffix],), {"data_files": str(path), **(paragraphs if path.suffix == ".txt" else {})}, "train"
    else:
        where, options = (name, args.dataset_config), {}
    with _errors_named(name):
        return load_dataset(*where, split=split, streaming=args.streaming, **options)


@contextmanager
def _errors_named(name: str):
    try:
        yield
    except StopIteration:
        raise ValueError(f"dataset {name!r} is empty") from None
    except (DatasetsError, ValueError, FileNotFoundError, ConnectionError) as error:
        cause = f"{error} ({error.__cause__})" if error.__cause__ else str(error)
        if Path(name).exists():
            raise ValueError(f"dataset {name!r} cannot be read: {cause}") from error
        raise ValueError(
            f"dataset {name!r} is neither 'stdlib', nor a file or folder here, nor a dataset of the Hub that can be read: {cause}"
        ) from error


def _find_column(rows: Dataset, args: DistillationArguments, name: str) -> tuple[str, str]:
    """(column, kind) to read of the dataset `name`: `args.dataset_column`, or the first of the known names."""
    # The column that the dataset names need not be in the extra rows.
    column = args.dataset_column if name == args.dataset or args.dataset_column in rows.column_names else None
    found = column or next((known for known in _KINDS if known in rows.column_names), None)
    if found not in rows.column_names:
        wanted = f"the column {column!r}" if column else "a column 'messages', 'conversations', 'input_ids' or 'text'"
        raise ValueError(f"dataset {name!r} needs {wanted}, it has {rows.column_names}; set dataset_column to the one to read")
    value = next((value for value in rows[found][:1000] if value), None)
    kind = _kind(value)
    if kind is None or kind != _KINDS.get(found, kind):
        wanted = _HOLDS[_KINDS[found]] if found in _KINDS else " or ".join(_HOLDS.values())
        raise ValueError(f"dataset {name!r}: the column {found!r} must hold {wanted}, its first value is {str(value)[:80]!r}")
    return found, kind


def _kind(value) -> str | None:
    if isinstance(value, str):
        return "text"
    if not isinstance(value, list):
        return None
    return "ids" if isinstance(value[0], int) else "messages" if isinstance(value[0], dict) else None


def _with_ends(ids: list[int], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    start = [bos] if bos is not None and ids[:1] != [bos] else []
    end = [eos] if eos is not None and ids[-1:] != [eos] else []
    return [*start, *ids, *end]


def _spread(count: int, length: int) -> list[int]:
    """`count` indices spread evenly over `length`."""
    return [i * length // count for i in range(count)]
