"""Training text as rows of token ids, and batches of them."""

from pathlib import Path

from datasets import Dataset, Features, List, Value, concatenate_datasets, load_dataset
from transformers import PreTrainedTokenizerBase

from hf_dspark.distillation.arguments import DistillationArguments
from hf_dspark.distillation.corpus import held_out_split, stdlib_modules

__all__ = ["cut_rows", "load_rows"]

_ROWS = Features({"input_ids": List(Value("int32"))})


def load_rows(args: DistillationArguments, tokenizer: PreTrainedTokenizerBase) -> tuple[Dataset, Dataset | None]:
    """(training, held-out) rows of `args.dataset`, column `input_ids`; at most `args.max_eval_rows` of the latter, None without any.

    Raises:
        ValueError: the dataset is unknown, has neither a column `text` nor `input_ids`, or leaves no rows to train on.
    """
    if args.dataset == "stdlib":
        train, held_out = (list(modules.values()) for modules in held_out_split(stdlib_modules(), args.num_held_out))
        parts = [Dataset.from_dict({"text": texts}) for texts in (train, held_out)]
    else:
        parts = _split_file(args.dataset, args.num_held_out)
    shortest = args.block_size + 2
    train, held_out = (cut_rows(part, tokenizer, args.max_length, shortest) for part in parts)
    extra = [cut_rows(_read_rows(file), tokenizer, args.max_length, shortest) for file in args.extra_rows or []]
    train = concatenate_datasets([train, *extra])
    if not len(train):
        raise ValueError(f"dataset {args.dataset!r} has no text of {shortest} tokens (block_size + 2) or more to train on")
    num_eval = min(args.max_eval_rows, len(held_out))
    return train, held_out.select(_spread(num_eval, len(held_out))) if num_eval else None


def cut_rows(texts: Dataset, tokenizer: PreTrainedTokenizerBase, max_length: int, shortest: int) -> Dataset:
    """Each text cut into rows of at most `max_length` ids: the column `input_ids` as it is, else `text` between its bos and eos token.

    A row never holds two texts, so no block crosses from one into another. Rows of fewer than `shortest` ids are left out.
    """

    def cut(batch: dict) -> dict:
        texts = batch["input_ids"] if "input_ids" in batch else [_with_ends(ids, tokenizer) for ids in tokenizer(batch["text"])["input_ids"]]
        rows = [ids[i : i + max_length] for ids in texts for i in range(0, len(ids), max_length)]
        return {"input_ids": [row for row in rows if len(row) >= shortest]}

    return texts.map(cut, batched=True, batch_size=64, remove_columns=texts.column_names, features=_ROWS)


def _with_ends(ids: list[int], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    start = [bos] if bos is not None and ids[:1] != [bos] else []
    end = [eos] if eos is not None and ids[-1:] != [eos] else []
    return [*start, *ids, *end]


def _spread(count: int, length: int) -> list[int]:
    """`count` indices spread evenly over `length`."""
    return [i * length // count for i in range(count)]


def _read_rows(name: str) -> Dataset:
    if not Path(name).is_file():
        raise ValueError(f"extra_rows must be an existing .jsonl file of input_ids, got {name!r}")
    rows = load_dataset("json", data_files=name, split="train")
    if "input_ids" not in rows.column_names:
        raise ValueError(f"extra_rows {name!r} needs a column 'input_ids', it has {rows.column_names}")
    return rows


def _split_file(name: str, num_held_out: int) -> tuple[Dataset, Dataset]:
    path = Path(name)
    builders = {".jsonl": ("json", {}), ".txt": ("text", {"sample_by": "paragraph"})}
    if path.suffix not in builders or not path.is_file():
        raise ValueError(f"dataset must be 'stdlib' or an existing .jsonl or .txt file, got {name!r}")
    builder, options = builders[path.suffix]
    texts = load_dataset(builder, data_files=str(path), split="train", **options)
    if not {"text", "input_ids"} & set(texts.column_names):
        raise ValueError(f"dataset {name!r} needs a column 'text' or 'input_ids', it has {texts.column_names}")
    if num_held_out >= len(texts):
        raise ValueError(
            f"num_held_out={num_held_out} leaves nothing to train on of the {len(texts)} texts of {name!r}; lower it (0: no held-out texts)"
        )
    held_out = _spread(num_held_out, len(texts))
    return texts.select(sorted(set(range(len(texts))) - set(held_out))), texts.select(held_out)
