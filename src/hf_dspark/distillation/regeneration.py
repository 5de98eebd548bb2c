"""Text written by the target itself, to train a draft on what it will have to predict: `hf-dspark regenerate RECIPE.yaml`."""

import json
import os
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_dspark.distillation.corpus import held_out_split, stdlib_modules
from hf_dspark.generation.queue import generate_many

__all__ = ["RegenerationArguments", "regenerate"]


@dataclass
class RegenerationArguments:
    """Options of `hf-dspark regenerate`: the training modules of the standard library, continued by the target."""

    target: str = field(metadata={"help": "Folder or hub id of the target model."})
    output_file: str = field(metadata={"help": "JSONL file to write: one row of `input_ids` a line, prompt and continuation."})
    num_rows: int = field(default=4096, metadata={"help": "Rows to write."})
    prompt_tokens: int = field(default=32, metadata={"help": "Tokens of corpus text that a row starts with, cut at random places."})
    new_tokens: int = field(default=224, metadata={"help": "Tokens that the target adds."})
    greedy_share: float = field(default=0.5, metadata={"help": "Share of the rows written greedily; the others are sampled at temperature 1."})
    batch_size: int = field(default=128, metadata={"help": "Rows written at a time."})
    num_held_out: int = field(default=96, metadata={"help": "Modules of the corpus that are left alone (as in the target's recipe)."})
    seed: int = field(default=0, metadata={"help": "Seed of prompts and sampling."})

    def __post_init__(self):
        if not 0.0 <= self.greedy_share <= 1.0:
            raise ValueError(f"greedy_share must lie in [0, 1], got {self.greedy_share}")
        for name in ("num_rows", "prompt_tokens", "new_tokens", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")


def regenerate(args: RegenerationArguments) -> Path:
    """Writes `args.output_file`, and nothing under that name before all rows are there; an interrupted run goes on where it stopped.

    A row depends on its number, the seed and the target alone.

    Raises:
        OSError: there is no such target.
    """
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    target = AutoModelForCausalLM.from_pretrained(args.target, dtype="float32").eval()
    prompts = _prompts(tokenizer, args)
    output = Path(args.output_file)
    output.parent.mkdir(parents=True, exist_ok=True)
    unfinished = output.with_name(output.name + ".unfinished")
    num_done = _keep_whole_rows(unfinished, prompts)
    num_greedy = int(args.greedy_share * args.num_rows)
    waiting = [{"input_ids": prompts[i], "do_sample": i >= num_greedy, "seed": args.seed * args.num_rows + i} for i in range(num_done, args.num_rows)]
    options = dict(max_new_tokens=args.new_tokens, top_k=0, top_p=1.0, temperature=1.0)
    with unfinished.open("a", encoding="utf-8") as file:
        for completion in generate_many(target, None, waiting, max_concurrency=args.batch_size, **options):
            if completion.error is not None:
                raise completion.error
            file.write(json.dumps({"input_ids": completion.output[0].tolist()}) + "\n")
            num_done += 1
    if num_done < args.num_rows:
        raise KeyboardInterrupt(f"{num_done} of {args.num_rows} rows are kept in {unfinished}; the same command goes on with the others")
    os.replace(unfinished, output)
    print(f"wrote {args.num_rows} rows to {output}")
    return output


def _prompts(tokenizer, args: RegenerationArguments) -> list[list[int]]:
    """Pieces of the corpus, cut at random places."""
    train, _ = held_out_split(stdlib_modules(), args.num_held_out)
    stream = [token for ids in tokenizer(list(train.values()), add_special_tokens=False)["input_ids"] for token in [tokenizer.bos_token_id, *ids]]
    places = torch.Generator().manual_seed(args.seed)
    starts = torch.randint(len(stream) - args.prompt_tokens, (args.num_rows,), generator=places).tolist()
    return [stream[start : start + args.prompt_tokens] for start in starts]


def _keep_whole_rows(unfinished: Path, prompts: list[list[int]]) -> int:
    """Cuts what an interrupted run wrote after its last whole row that continues its prompt; returns how many rows stay."""
    if not unfinished.exists():
        return 0
    kept = []
    for line, prompt in zip(unfinished.read_text(encoding="utf-8").split("\n")[:-1], prompts):
        try:
            if json.loads(line)["input_ids"][: len(prompt)] != prompt:
                break
        except (ValueError, KeyError, TypeError):
            break
        kept.append(line + "\n")
    unfinished.write_text("".join(kept), encoding="utf-8")
    return len(kept)
