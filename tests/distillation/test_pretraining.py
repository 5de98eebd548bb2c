"""A target from scratch: the rows it reads and the folder it leaves."""

import json
import math

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_dspark.distillation import pretraining
from hf_dspark.distillation.pretraining import PretrainArguments, pack, pretrain

TEXTS = {f"module_{i}.py": f"def function_{i}(x):\n    return x + {i}\n" * 120 for i in range(6)}


@pytest.fixture
def small_corpus(monkeypatch):
    monkeypatch.setattr(pretraining, "stdlib_modules", lambda: TEXTS)


def options(folder, **changes):
    shape = dict(vocab_size=300, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=8)
    training = dict(sequence_length=32, num_held_out=2, per_device_train_batch_size=4, max_steps=2, use_cpu=True, report_to="none", disable_tqdm=True)
    return PretrainArguments(output_dir=str(folder), **{**shape, **training, **changes})


def test_rows_hold_the_documents_between_their_marks(small_corpus, tmp_path):
    class Letters:
        bos_token_id, eos_token_id = 1, 2

        def __call__(self, texts, add_special_tokens):
            return {"input_ids": [[ord(letter) for letter in text] for text in texts]}

    rows = [row["input_ids"].tolist() for row in pack(Letters(), ["ab", "c", "dd"], 4)]
    assert rows == [[1, 97, 98, 2], [1, 99, 2, 1]]


def test_the_folder_loads_and_reports_its_bits(small_corpus, tmp_path):
    folder = pretrain(options(tmp_path / "target"))
    target, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert target.dtype == torch.bfloat16 and target.config.use_cache and target.config.vocab_size == 300
    assert target.generation_config.eos_token_id == tokenizer.eos_token_id
    report = json.loads((folder / "pretraining.json").read_text())
    assert report["train_tokens_seen"] == 2 * 4 * 32 and len(report["held_out_modules"]) == 2
    rows = pack(tokenizer, [TEXTS[name] for name in report["held_out_modules"]], 32)
    num_bytes = sum(len(tokenizer.decode(row["input_ids"], skip_special_tokens=True).encode()) for row in rows)
    assert report["held_out_bits_per_byte"] == pytest.approx(report["held_out_loss"] * 32 * len(rows) / num_bytes / math.log(2))


def test_an_impossible_number_of_held_out_modules_is_refused(small_corpus, tmp_path):
    with pytest.raises(ValueError, match="num_held_out"):
        pretrain(options(tmp_path / "target", num_held_out=6))
