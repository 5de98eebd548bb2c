"""Text written by the target itself, to train a draft on what it will have to predict: `hf-dspark regenerate RECIPE.yaml`."""

import json
import os
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed
from transformers.utils import logging

from hf_dspark.distillation.corpus import held_out_split, stdlib_modules

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
    """Writes `args.output_file`, and nothing under that name before all rows are there."""
    set_seed(args.seed)
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    target = AutoModelForCausalLM.from_pretrained(args.target, dtype="float32").eval()
    train, _ = held_out_split(stdlib_modules(), args.num_held_out)
    stream = [token for ids in tokenizer(list(train.values()), add_special_tokens=False)["input_ids"] for token in [tokenizer.bos_token_id, *ids]]
    starts = torch.randint(len(stream) - args.prompt_tokens, (args.num_rows,)).tolist()
    output = Path(args.output_file)
    output.parent.mkdir(parents=True, exist_ok=True)
    unfinished = output.with_name(output.name + ".unfinished")
    with unfinished.open("w", encoding="utf-8") as file:
        for first in logging.tqdm(range(0, args.num_rows, args.batch_size), desc="regenerating"):
            prompts = torch.tensor([stream[start : start + args.prompt_tokens] for start in starts[first : first + args.batch_size]])
            greedy = first < args.greedy_share * args.num_rows
            sampling = {"do_sample": False} if greedy else {"do_sample": True, "top_k": 0, "temperature": 1.0}
            rows = target.generate(prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=args.new_tokens, **sampling)
            for row in rows.tolist():
                # What follows the stop token is padding.
                ends = [i + 1 for i in range(args.prompt_tokens, len(row)) if row[i] == tokenizer.eos_token_id]
                file.write(json.dumps({"input_ids": row[: ends[0] if ends else None]}) + "\n")
    os.replace(unfinished, output)
    print(f"wrote {args.num_rows} rows to {output}")
    return output
