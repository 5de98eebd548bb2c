"""Text by the target itself."""

import json
from functools import wraps

import pytest
import torch
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from hf_dspark.distillation import regeneration
from hf_dspark.distillation.corpus import train_tokenizer
from hf_dspark.distillation.regeneration import RegenerationArguments, regenerate

TEXTS = {f"module_{i}.py": f"def function_{i}(x):\n    return x + {i}\n" * 120 for i in range(6)}


@pytest.fixture
def target_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(regeneration, "stdlib_modules", lambda: TEXTS)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=300, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=8,
        initializer_range=0.5, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(tmp_path / "target")
    train_tokenizer(list(TEXTS.values()), 300).save_pretrained(tmp_path / "target")
    return tmp_path / "target"


def arguments(target_folder, **changes):
    values = dict(num_rows=6, prompt_tokens=5, new_tokens=20, greedy_share=0.5, batch_size=3, num_held_out=2, seed=1)
    return RegenerationArguments(target=str(target_folder), output_file=str(target_folder.parent / "out" / "rows.jsonl"), **{**values, **changes})


def test_greedy_rows_continue_their_prompts_as_the_target_does(target_folder):
    path = regenerate(arguments(target_folder))
    rows = [json.loads(line)["input_ids"] for line in path.read_text().splitlines()]
    assert len(rows) == 6
    target, tokenizer = Qwen3ForCausalLM.from_pretrained(target_folder), AutoTokenizer.from_pretrained(target_folder)
    for row in rows[:3]:
        alone = target.generate(torch.tensor([row[:5]]), attention_mask=torch.ones(1, 5), max_new_tokens=20, do_sample=False)
        assert row == alone[0].tolist()
    for row in rows:
        assert tokenizer.pad_token_id not in row[5:] or len(row) == 25
        assert tokenizer.eos_token_id not in row[5:-1]


def test_rows_are_repeatable_and_sampled_ones_depend_on_the_seed(target_folder):
    first = regenerate(arguments(target_folder)).read_text()
    assert regenerate(arguments(target_folder)).read_text() == first
    assert regenerate(arguments(target_folder, seed=2)).read_text() != first


def test_an_interrupted_run_leaves_no_file_and_goes_on_where_it_stopped(target_folder, monkeypatch):
    whole = regenerate(arguments(target_folder)).read_text()
    path = target_folder.parent / "out" / "rows.jsonl"
    path.unlink()
    calls = iter(range(100))
    forward = Qwen3ForCausalLM.forward

    @wraps(forward)  # generate() reads its signature
    def stopping(self, *args, **kwargs):
        if next(calls) == 30:  # the first rows are done after 20 steps
            raise KeyboardInterrupt
        return forward(self, *args, **kwargs)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt, match="3 of 6 rows are kept"):
        patch.setattr(Qwen3ForCausalLM, "forward", stopping)
        regenerate(arguments(target_folder, batch_size=3))
    unfinished = path.with_name("rows.jsonl.unfinished")
    assert not path.exists() and len(unfinished.read_text().splitlines()) == 3
    unfinished.write_text(unfinished.read_text() + '{"input_ids": [1, 2')  # a row that was being written
    assert regenerate(arguments(target_folder)).read_text() == whole and not unfinished.exists()


def test_rows_of_another_run_are_not_kept(target_folder):
    path = target_folder.parent / "out" / "rows.jsonl"
    path.parent.mkdir()
    path.with_name("rows.jsonl.unfinished").write_text('{"input_ids": [7, 7, 7, 7, 7, 7]}\n')
    assert [7] * 6 not in [json.loads(line)["input_ids"] for line in regenerate(arguments(target_folder)).read_text().splitlines()]


@pytest.mark.parametrize("change", [{"greedy_share": 1.5}, {"num_rows": 0}, {"new_tokens": -1}], ids=str)
def test_impossible_options_are_refused(target_folder, change):
    with pytest.raises(ValueError, match=next(iter(change))):
        arguments(target_folder, **change)
