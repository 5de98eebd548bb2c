"""Tiny pairs for the tests of what a person sees: one on disk with a real tokenizer, one in memory over eight tokens."""

import json
from pathlib import Path

from oracle import tiny_draft, tiny_target

from hf_dspark.distillation.corpus import train_tokenizer
from hf_dspark.evaluation.pairs import Pair

TEXTS = [f"def add{i}(a, b):\n    return a + b + {i}\n" for i in range(30)]
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
HELD_OUT = ["bisect.py", "heapq.py", "keyword.py", "this.py", "stat.py"]
VOCAB = 280


def save_pair(folder: Path) -> Path:
    """Writes a random pair over 280 byte-level tokens into `folder`/target and `folder`/draft; the draft names its target."""
    tokenizer = train_tokenizer(TEXTS, vocab_size=VOCAB)
    tokenizer.save_pretrained(folder / "target")
    target = tiny_target(vocab_size=VOCAB, **SPECIAL)
    target.save_pretrained(folder / "target")
    (folder / "target" / "pretraining.json").write_text(json.dumps({"held_out_modules": HELD_OUT}))
    tiny_draft(target, mask_token_id=3, base_model_name_or_path=str(folder / "target"), **SPECIAL).save_pretrained(folder / "draft")
    return folder


class LetterTokenizer:
    """Seven letters, a to g, as tokens 0 to 6; token 7 is the draft's mask."""

    chat_template = None
    bos_token_id = None

    def __call__(self, text, **_):
        return {"input_ids": [(ord(letter) - ord("a")) % 7 for letter in text]}

    def decode(self, ids, **_):
        return "".join("abcdefg#"[token] for token in ids)


def letter_pair(**draft_options) -> Pair:
    """A pair over eight tokens, whose laws are broad enough to test with few samples and whose draft is often wrong."""
    target = tiny_target(vocab_size=8, initializer_range=0.1, num_hidden_layers=2)
    draft = tiny_draft(target, initializer_range=0.1, num_hidden_layers=1, target_layer_ids=[0], **draft_options)
    draft.markov_head.markov_w2.weight.data.normal_(std=1.0)
    return Pair(target, draft.bind(target), LetterTokenizer(), "letters", "letters-draft")
