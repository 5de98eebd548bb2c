"""A small target language model from scratch, for machines where no hub can be reached: `hf-dspark pretrain RECIPE.yaml`."""

import json
import math
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM, Trainer, TrainingArguments, set_seed

from hf_dspark.distillation.corpus import held_out_split, stdlib_modules, train_tokenizer

__all__ = ["PretrainArguments", "pretrain"]


@dataclass
class PretrainArguments(TrainingArguments):
    """Options of `hf-dspark pretrain`: transformers' TrainingArguments and the shape of a Qwen3 model."""

    vocab_size: int = field(default=1024, metadata={"help": "Entries of the byte-level BPE vocabulary, special tokens included."})
    hidden_size: int = field(default=192, metadata={"help": "Width of the model."})
    intermediate_size: int = field(default=448, metadata={"help": "Width of the feed-forward layers."})
    num_hidden_layers: int = field(default=12, metadata={"help": "Number of layers."})
    num_attention_heads: int = field(default=6, metadata={"help": "Query heads of a layer."})
    num_key_value_heads: int = field(default=2, metadata={"help": "Key and value heads of a layer."})
    head_dim: int = field(default=32, metadata={"help": "Width of a head."})
    # The Trainer writes this into the model's config.
    use_cache: bool = field(default=True, metadata={"help": "Written into the model's config; training uses no cache."})
    max_position_embeddings: int = field(default=1024, metadata={"help": "Longest context the config declares."})
    sequence_length: int = field(default=512, metadata={"help": "Tokens of a training row."})
    num_held_out: int = field(default=96, metadata={"help": "Modules of the corpus kept out of training, for measurements."})


def pack(tokenizer, texts: list[str], sequence_length: int) -> list[dict[str, torch.Tensor]]:
    """Rows of `sequence_length` ids: bos, text, eos of every document, one after the other; the last, incomplete row is left out."""
    stream = []
    for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]:
        stream += [tokenizer.bos_token_id, *ids, tokenizer.eos_token_id]
    rows = torch.tensor(stream[: len(stream) // sequence_length * sequence_length]).view(-1, sequence_length)
    return [{"input_ids": row, "labels": row} for row in rows]


def pretrain(args: PretrainArguments) -> Path:
    """Trains the tokenizer and the model, writes both with `pretraining.json` (held-out loss and bits a byte) to `args.output_dir`."""
    set_seed(args.seed)
    train, held_out = held_out_split(stdlib_modules(), args.num_held_out)
    tokenizer = train_tokenizer(list(train.values()), args.vocab_size)
    config = Qwen3Config(
        vocab_size=args.vocab_size,
        hidden_size=args.hidden_size,
        intermediate_size=args.intermediate_size,
        num_hidden_layers=args.num_hidden_layers,
        num_attention_heads=args.num_attention_heads,
        num_key_value_heads=args.num_key_value_heads,
        head_dim=args.head_dim,
        max_position_embeddings=args.max_position_embeddings,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = Qwen3ForCausalLM(config)
    held_out_rows = pack(tokenizer, list(held_out.values()), args.sequence_length)
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=pack(tokenizer, list(train.values()), args.sequence_length),
        eval_dataset=held_out_rows,
        processing_class=tokenizer,
    )
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    loss = trainer.evaluate()["eval_loss"]
    num_bytes = sum(len(tokenizer.decode(row["input_ids"], skip_special_tokens=True).encode()) for row in held_out_rows)
    num_tokens = sum(len(row["input_ids"]) for row in held_out_rows)
    report = {
        "held_out_loss": loss,
        "held_out_bits_per_byte": loss * num_tokens / num_bytes / math.log(2),
        "held_out_modules": sorted(held_out),
        "num_train_modules": len(train),
        "num_train_rows": len(trainer.train_dataset),
        "train_tokens_seen": trainer.state.global_step * args.train_batch_size * args.gradient_accumulation_steps * args.sequence_length,
    }
    output = Path(args.output_dir)
    model.to(torch.bfloat16).save_pretrained(output)
    tokenizer.save_pretrained(output)
    (output / "pretraining.json").write_text(json.dumps(report, indent=1))
    print(f"held-out loss {loss:.3f} nats a token, {report['held_out_bits_per_byte']:.3f} bits a byte; wrote {output}")
    return output
