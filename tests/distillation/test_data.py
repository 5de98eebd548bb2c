"""Rows and batches: nothing crosses texts, nothing held out is trained on."""

import json

import pytest
import torch
from datasets import Dataset

from hf_dspark.distillation import data
from hf_dspark.distillation.arguments import DistillationArguments
from hf_dspark.distillation.corpus import train_tokenizer
from hf_dspark.distillation.data import BlockCollator, cut_rows, load_rows

TOKENIZER = train_tokenizer(["def add(a, b):\n    return a + b\n"] * 3, vocab_size=270)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def arguments(tmp_path, **options) -> DistillationArguments:
    values = {"target": "somewhere", "output_dir": str(tmp_path), "use_cpu": True, "max_length": 12, "block_size": 4, "num_held_out": 2}
    return DistillationArguments(**{**values, **options})


def test_texts_get_their_ends_and_are_cut_apart():
    texts = Dataset.from_dict({"text": ["a = 1234567890", "b"], "other": [1, 2]})
    rows = cut_rows(texts, TOKENIZER, max_length=6, shortest=2)["input_ids"]
    bos, eos = TOKENIZER.bos_token_id, TOKENIZER.eos_token_id
    assert [row[0] == bos for row in rows] == [True, False, False, True]
    assert [row[-1] == eos for row in rows] == [False, False, True, True]
    assert all(len(row) <= 6 for row in rows)
    assert TOKENIZER.decode([token for row in rows[:3] for token in row], skip_special_tokens=True) == "a = 1234567890"


def test_ids_are_taken_as_they_are_and_short_rows_left_out():
    rows = cut_rows(Dataset.from_dict({"input_ids": [[5] * 10, [6] * 3]}), TOKENIZER, max_length=4, shortest=3)
    assert rows["input_ids"][:] == [[5] * 4, [5] * 4, [6] * 3]


def test_batches_are_padded_on_the_right_and_padding_is_never_supervised():
    rows = [{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9], "loss_mask": [0, 1]}]
    batch = BlockCollator(pad_token_id=3)(rows)
    assert batch["input_ids"].tolist() == [[5, 6, 7], [8, 9, 3]]
    assert batch["attention_mask"].int().tolist() == [[1, 1, 1], [1, 1, 0]]
    assert batch["loss_mask"].int().tolist() == [[1, 1, 1], [0, 1, 0]]
    assert batch["input_ids"].dtype == torch.long


def test_held_out_texts_of_a_file_are_spread_over_it_and_never_trained_on(tmp_path):
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"input_ids": [i] * 8}) + "\n" for i in range(10)))
    train, held_out = load_rows(arguments(tmp_path, dataset=str(path)), TOKENIZER)
    assert [row[0] for row in held_out["input_ids"]] == [0, 5]
    assert [row[0] for row in train["input_ids"]] == [1, 2, 3, 4, 6, 7, 8, 9]
    train, held_out = load_rows(arguments(tmp_path, dataset=str(path), num_held_out=0), TOKENIZER)
    assert len(train) == 10 and held_out is None
    _, held_out = load_rows(arguments(tmp_path, dataset=str(path), num_held_out=6, max_eval_rows=3), TOKENIZER)
    assert len(held_out) == 3


def test_held_out_modules_of_the_standard_library_are_never_trained_on(tmp_path, monkeypatch):
    modules = {f"m{i}.py": f"value{i:02d} = {i:02d}\n" * 200 for i in range(8)}
    monkeypatch.setattr(data, "stdlib_modules", lambda: modules)
    extra = tmp_path / "extra.jsonl"
    extra.write_text(json.dumps({"input_ids": [7] * 20}) + "\n")
    args = arguments(tmp_path, num_held_out=3, max_length=4096, max_eval_rows=100, extra_rows=str(extra))
    train, held_out = load_rows(args, TOKENIZER)
    written = [TOKENIZER.decode(row, skip_special_tokens=True) for row in [*train["input_ids"], *held_out["input_ids"]]]
    assert len(train) == 6 and len(held_out) == 3
    assert sorted(text for text in written if text.startswith("value")) == sorted(modules.values())
    assert list(train["input_ids"][-1]) == [7] * 20


@pytest.mark.parametrize(
    "name, content, options, message",
    [
        ("missing.jsonl", None, {}, "'stdlib' or an existing .jsonl or .txt file, got"),
        ("table.csv", "text\na\n", {}, "'stdlib' or an existing .jsonl or .txt file, got"),
        ("columns.jsonl", '{"content": "a"}\n', {}, r"needs a column 'text' or 'input_ids', it has \['content'\]"),
        ("few.jsonl", '{"text": "a"}\n{"text": "b"}\n', {}, "num_held_out=2 leaves nothing to train on of the 2 texts"),
        ("short.jsonl", '{"text": "a"}\n', {"num_held_out": 0}, r"no text of 6 tokens \(block_size \+ 2\) or more"),
    ],
)
def test_bad_files_are_named(tmp_path, name, content, options, message):
    path = tmp_path / name
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError, match=message):
        load_rows(arguments(tmp_path, dataset=str(path), **options), TOKENIZER)


def test_bad_extra_rows_are_named(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"text": "some text that is long enough"}) + "\n")
    with pytest.raises(ValueError, match=r"needs a column 'input_ids', it has \['text'\]"):
        load_rows(arguments(tmp_path, dataset=str(rows), num_held_out=0, extra_rows=str(rows)), TOKENIZER)
    with pytest.raises(ValueError, match=r"extra_rows must be an existing \.jsonl file"):
        load_rows(arguments(tmp_path, dataset=str(rows), num_held_out=0, extra_rows="nowhere.jsonl"), TOKENIZER)
