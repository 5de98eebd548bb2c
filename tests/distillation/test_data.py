"""Rows: nothing crosses texts, masks stay with their tokens, nothing held out is trained on, what can't be used is named and counted."""

import json
import re
from pathlib import Path

import pytest
from datasets import Dataset, IterableDataset
from datasets.exceptions import DatasetNotFoundError

from hf_dspark.distillation import data
from hf_dspark.distillation.arguments import DistillationArguments
from hf_dspark.distillation.corpus import train_tokenizer
from hf_dspark.distillation.data import load_rows, warn_of_mask_token

TOKENIZER = train_tokenizer(["def add(a, b):\n    return a + b\n"] * 3, vocab_size=270)
BOS, EOS = TOKENIZER.bos_token_id, TOKENIZER.eos_token_id
CHAT = train_tokenizer(["Is it? It is."] * 3, vocab_size=270)
# Only the last answer keeps its thought; a system prompt is refused.
CHAT.chat_template = """
{{- '/think ' if enable_thinking is defined and enable_thinking else '' -}}
{%- for m in messages -%}
  {%- if m.role == 'system' -%}{{- raise_exception('no system prompts') -}}{%- endif -%}
  {{- m.role[0] + ':' + ('{' + m.thought + '}' if loop.last and m.thought is defined else '') + m.content + eos_token -}}
{%- endfor -%}
{{- 'a:' + ('{}' if enable_thinking is defined and not enable_thinking else '') if add_generation_prompt -}}
"""
USER, ANSWER = {"role": "user", "content": "Is it?"}, {"role": "assistant", "content": "It is."}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def arguments(tmp_path, **options) -> DistillationArguments:
    values = {"target": "somewhere", "output_dir": str(tmp_path), "use_cpu": True, "max_length": 12, "block_size": 4, "num_held_out": 0}
    return DistillationArguments(**{**values, **options})


def write(path: Path, rows: list[dict]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def load(tmp_path, rows: list[dict], tokenizer=TOKENIZER, **options) -> Dataset:
    """Training rows from a file of `rows`."""
    return load_rows(arguments(tmp_path, dataset=write(tmp_path / "rows.jsonl", rows), **options), tokenizer)[0]


def load_chats(tmp_path, *conversations: list[dict], **options) -> tuple[list[str], list[str]]:
    """(the rows' texts, what is supervised of each)."""
    rows = load(tmp_path, [{"messages": messages} for messages in conversations], CHAT, **{"max_length": 64, **options})
    texts = [CHAT.decode(row["input_ids"]) for row in rows]
    return texts, [CHAT.decode([token for token, kept in zip(row["input_ids"], row["loss_mask"]) if kept]) for row in rows]


def ids(start: int, length: int = 8) -> dict:
    return {"input_ids": list(range(start, start + length))}


def test_texts_get_their_ends_and_are_cut_apart(tmp_path):
    rows = load(tmp_path, [{"text": "a = 1234567890123", "other": 1}, {"text": "b = 12", "other": 2}], max_length=10)["input_ids"]
    assert [row[0] == BOS for row in rows] == [True, False, True]
    assert [row[-1] == EOS for row in rows] == [False, True, True]
    assert all(6 <= len(row) <= 10 for row in rows)
    assert TOKENIZER.decode([token for row in rows[:2] for token in row], skip_special_tokens=True) == "a = 1234567890123"


def test_all_of_a_text_is_supervised(tmp_path):
    for row in load(tmp_path, [{"text": "a = 12345"}, ids(5)]):
        assert row["loss_mask"] == [True] * len(row["input_ids"])


def test_ids_are_taken_as_they_are_and_short_rows_left_out(tmp_path):
    rows = load(tmp_path, [ids(5, 24), {"input_ids": []}, ids(50, 15), ids(90, 6), ids(7, 5)])
    assert rows["input_ids"][:] == [list(range(5, 17)), list(range(17, 29)), list(range(50, 62)), list(range(90, 96))]


def test_a_loss_mask_is_cut_with_its_ids(tmp_path, capsys):
    mask = [0] * 11 + [1, 1] + [0] * 5 + [1, 1] + [0] * 4 + [1, 0, 1, 0, 1, 0]
    rows = load(tmp_path, [{**ids(5, 30), "loss_mask": mask}, {**ids(40, 8), "loss_mask": [1, 1] + [0] * 6}])
    # The first piece has one supervised token, the third three without a neighbour.
    assert rows["input_ids"][:] == [list(range(17, 29)), list(range(40, 48))]
    assert rows["loss_mask"][:] == [[bool(value) for value in mask[12:24]], [True, True] + [False] * 6]
    line = capsys.readouterr().out
    assert "training rows 2: 20 tokens, 25.0% supervised; skipped 2 (2 without two neighbouring supervised tokens in max_length=12)" in line


def test_a_loss_mask_of_another_length_is_named(tmp_path):
    with pytest.raises(ValueError, match="a row has 8 input_ids and a loss_mask of 2"):
        load(tmp_path, [{**ids(5), "loss_mask": [1, 1]}])


def test_held_out_rows_of_a_file_are_spread_over_it_and_never_trained_on(tmp_path, capsys):
    path = write(tmp_path / "texts.jsonl", [{"input_ids": [i] * 8} for i in range(10)])
    train, held_out = load_rows(arguments(tmp_path, dataset=path, num_held_out=2), TOKENIZER)
    assert [row[0] for row in held_out["input_ids"]] == [0, 5]
    assert [row[0] for row in train["input_ids"]] == [1, 2, 3, 4, 6, 7, 8, 9]
    assert capsys.readouterr().out == "training rows 8: 64 tokens, 100.0% supervised; skipped 0; held-out rows 2\n"
    train, held_out = load_rows(arguments(tmp_path, dataset=path), TOKENIZER)
    assert len(train) == 10 and held_out is None
    _, held_out = load_rows(arguments(tmp_path, dataset=path, num_held_out=6, max_eval_rows=3), TOKENIZER)
    assert len(held_out) == 3


def answered(number: int, token: int, run: str = "run") -> dict:
    """A row that was regenerated for conversation `number`."""
    return {"input_ids": [token] * 8, "row": number, "provenance": json.dumps({"target": run})}


def tokens(rows) -> list[int]:
    return sorted({row["input_ids"][0] for row in rows})


def test_rows_of_one_conversation_are_held_out_together(tmp_path):
    """Ten rows, of which the first and the sixth are to be held out: with them go the third of the same conversation, and the ninth."""
    numbers = [0, 1, 0, 2, 3, 4, 5, 6, 4, 7]
    path = write(tmp_path / "rows.jsonl", [answered(number, i) for i, number in enumerate(numbers)])
    train, held_out = load_rows(arguments(tmp_path, dataset=path, num_held_out=2), TOKENIZER)
    assert tokens(held_out) == [0, 2, 5, 8] and tokens(train) == [1, 3, 4, 6, 7, 9]
    # The same number of another run, or none, is another conversation.
    others = [answered(0, 0), answered(0, 1, "other"), {**answered(0, 2), "row": None}, {**answered(0, 3), "provenance": None}]
    train, held_out = load_rows(arguments(tmp_path, dataset=write(tmp_path / "others.jsonl", others), num_held_out=1), TOKENIZER)
    assert tokens(held_out) == [0] and tokens(train) == [1, 2, 3]
    with pytest.raises(ValueError, match="num_held_out=1 leaves nothing to train on of the 3 rows"):
        one = write(tmp_path / "one.jsonl", [answered(0, i) for i in range(3)])
        load_rows(arguments(tmp_path, dataset=one, num_held_out=1), TOKENIZER)


def test_extra_rows_of_a_held_out_conversation_are_not_trained_on(tmp_path):
    path = write(tmp_path / "rows.jsonl", [answered(i, i) for i in range(4)])
    extra = write(tmp_path / "extra.jsonl", [answered(0, 10), answered(9, 11), answered(0, 12, "other")])
    train, held_out = load_rows(arguments(tmp_path, dataset=path, num_held_out=1, extra_rows=[extra]), TOKENIZER)
    assert tokens(held_out) == [0] and tokens(train) == [1, 2, 3, 11, 12]


def test_a_stream_leaves_out_what_belongs_to_a_held_out_conversation(tmp_path):
    numbers = [0, 1, 1, 2, 0, 3, *range(4, 80)]
    path = write(tmp_path / "rows.jsonl", [answered(number, i) for i, number in enumerate(numbers)])
    train, held_out = load_rows(arguments(tmp_path, dataset=path, streaming=True, max_steps=5, num_held_out=2), TOKENIZER)
    assert tokens(held_out) == [0, 1] and tokens(train) == [3, *range(5, 82)]


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(("row", "bad"), [(2, 300), (2, -1), (70, 299)])
def test_ids_outside_the_vocabulary_are_named(tmp_path, streaming, row, bad):
    """Also behind the rows of a stream that are read beforehand."""
    rows = [ids(5) for _ in range(80)]
    rows[row] = {"input_ids": [*range(7), bad]}
    path, options = write(tmp_path / "rows.jsonl", rows), {"streaming": True, "max_steps": 5} if streaming else {}
    args = arguments(tmp_path, dataset=path, num_held_out=1, **options)
    with pytest.raises(ValueError, match=rf"rows\.jsonl': row {row} holds the token id {bad}, but .* vocabulary has 299 tokens \(0 to 298\)"):
        list(load_rows(args, TOKENIZER, 299)[0])
    if bad > 0:
        assert len(list(load_rows(args, TOKENIZER, bad + 1)[0])) == 79


def test_ids_of_extra_rows_outside_the_vocabulary_are_named(tmp_path):
    path = write(tmp_path / "rows.jsonl", [{"text": "some text that is long enough"}])
    extra = write(tmp_path / "extra.jsonl", [ids(5), {"input_ids": []}, ids(293)])
    with pytest.raises(ValueError, match=r"extra\.jsonl': row 2 holds the token id 300"):
        load_rows(arguments(tmp_path, dataset=path, extra_rows=[extra]), TOKENIZER, 300)
    assert len(load_rows(arguments(tmp_path, dataset=path, extra_rows=[extra]), TOKENIZER, 301)[0]) >= 3


def test_held_out_modules_of_the_standard_library_are_never_trained_on(tmp_path, monkeypatch):
    modules = {f"m{i}.py": f"value{i:02d} = {i:02d}\n" * 200 for i in range(8)}
    monkeypatch.setattr(data, "stdlib_modules", lambda: modules)
    extra = write(tmp_path / "extra.jsonl", [{"input_ids": [7] * 20}])
    args = arguments(tmp_path, num_held_out=3, max_length=4096, max_eval_rows=100, extra_rows=extra)
    train, held_out = load_rows(args, TOKENIZER)
    written = [TOKENIZER.decode(row, skip_special_tokens=True) for row in [*train["input_ids"], *held_out["input_ids"]]]
    assert len(train) == 6 and len(held_out) == 3
    assert sorted(text for text in written if text.startswith("value")) == sorted(modules.values())
    assert list(train["input_ids"][-1]) == [7] * 20


def test_extra_rows_may_hold_something_else_than_the_dataset(tmp_path):
    texts = write(tmp_path / "texts.jsonl", [{"text": "a = 12345"}])
    extra = write(tmp_path / "extra.jsonl", [{"input_ids": [7] * 9, "loss_mask": [False] * 5 + [True] * 4}])
    chats = write(tmp_path / "chats.jsonl", [{"chat": [USER, ANSWER]}])
    args = arguments(tmp_path, dataset=chats, dataset_column="chat", extra_rows=[texts, extra], max_length=64)
    masks = load_rows(args, CHAT)[0]["loss_mask"][:]
    assert [any(mask) and not all(mask) for mask in masks] == [True, False, True] and masks[2] == [False] * 5 + [True] * 4


def test_all_kinds_of_files_and_folders(tmp_path):
    rows = [ids(5), ids(20), ids(40)]
    expected = [row["input_ids"] for row in rows]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    Dataset.from_list(rows).to_parquet(tmp_path / "rows.parquet")
    write(tmp_path / "folder" / "train.jsonl", rows)
    write(tmp_path / "folder" / "test.jsonl", rows[:1])
    for name in ("rows.json", "rows.parquet", "folder"):
        assert load_rows(arguments(tmp_path, dataset=str(tmp_path / name)), TOKENIZER)[0]["input_ids"][:] == expected
    assert load_rows(arguments(tmp_path, dataset=str(tmp_path / "folder"), dataset_split="test"), TOKENIZER)[0]["input_ids"][:] == expected[:1]
    (tmp_path / "texts").mkdir()
    for name, text in (("a.txt", "a = 12345\nb = 1\n\nc = 12345"), ("b.txt", "d = 12345")):
        (tmp_path / "texts" / name).write_text(text)
    read = load_rows(arguments(tmp_path, dataset=str(tmp_path / "texts"), max_length=64), TOKENIZER)[0]["input_ids"]
    assert [TOKENIZER.decode(row, skip_special_tokens=True).strip() for row in read] == ["a = 12345\nb = 1", "c = 12345", "d = 12345"]


def test_a_dataset_of_the_hub_is_asked_for_by_name_configuration_and_split(tmp_path, monkeypatch):
    asked = []

    def load_dataset(*args, **kwargs):
        asked.append((args, kwargs))
        return Dataset.from_list([{"prompt": "x", "messages": [USER, ANSWER]}] * 3)

    monkeypatch.setattr(data, "load_dataset", load_dataset)
    args = arguments(tmp_path, dataset="someone/chats", dataset_config="short", dataset_split="train_sft", num_held_out=1, max_length=64)
    train, held_out = load_rows(args, CHAT)
    assert asked == [(("someone/chats", "short"), {"split": "train_sft", "streaming": False})]
    assert (len(train), len(held_out)) == (2, 1)


def test_a_dataset_that_the_hub_does_not_have_is_named(tmp_path, monkeypatch):
    def load_dataset(*args, **kwargs):
        raise DatasetNotFoundError("no such dataset")

    monkeypatch.setattr(data, "load_dataset", load_dataset)
    with pytest.raises(ValueError, match=r"dataset 'someone/chts' is neither 'stdlib', nor a file or folder here, nor .* Hub .*: no such dataset"):
        load_rows(arguments(tmp_path, dataset="someone/chts"), TOKENIZER)


def test_streamed_rows_are_those_behind_the_held_out_ones_encoded_as_they_are_read(tmp_path, capsys):
    rows = [{"input_ids": [i] * 14, "loss_mask": [i % 2] * 14} for i in range(100)]
    args = arguments(tmp_path, dataset=write(tmp_path / "rows.jsonl", rows), streaming=True, max_steps=5, num_held_out=3, max_eval_rows=9)
    train, held_out = load_rows(args, TOKENIZER)
    assert isinstance(train, IterableDataset) and held_out["input_ids"][:] == [[1] * 12]
    assert "streaming " in (line := capsys.readouterr().out) and "of its first 64 rows: training rows 32: 384 tokens, 100.0% supervised" in line
    read = [tuple(row["input_ids"]) for row in train]
    assert sorted(read) == [(i,) * 12 for i in range(3, 100, 2)] and read != sorted(read)
    assert read == [tuple(row["input_ids"]) for row in train]
    assert set(next(iter(train))) == {"input_ids", "loss_mask"}


def test_conversations_are_streamed_from_the_hub(tmp_path, monkeypatch):
    rows = [{"messages": [{**USER, "content": f"Is {i} it?"}, {**ANSWER, "tool_calls": None}]} for i in range(70)]
    stream = IterableDataset.from_generator(lambda: iter(rows))
    monkeypatch.setattr(data, "load_dataset", lambda *args, streaming, **kwargs: stream if streaming else None)
    args = arguments(tmp_path, dataset="someone/chats", streaming=True, max_steps=5, num_held_out=2, max_length=64)
    train, held_out = load_rows(args, CHAT)
    assert [CHAT.decode(row) for row in held_out["input_ids"]] == [f"u:Is {i} it?<|eos|>a:It is.<|eos|>" for i in range(2)]
    assert {CHAT.decode(row["input_ids"])[5:7] for row in train} == {f"{i} "[:2] for i in range(2, 70)}
    with pytest.raises(ValueError, match="num_held_out=70 leaves nothing to train on of the 70 rows of 'someone/chats'"):
        load_rows(arguments(tmp_path, dataset="someone/chats", streaming=True, max_steps=5, num_held_out=70), CHAT)


def test_conversations_are_rendered_and_their_answers_supervised(tmp_path, capsys):
    texts, answers = load_chats(tmp_path, [USER, ANSWER, USER, {**ANSWER, "content": "No."}, USER])
    assert texts == ["u:Is it?<|eos|>a:It is.<|eos|>u:Is it?<|eos|>a:No.<|eos|>"] and answers == ["It is.<|eos|>No.<|eos|>"]
    assert "skipped 0; held-out rows 0" in capsys.readouterr().out


def test_conversations_of_from_and_value_in_a_column_of_any_name(tmp_path):
    rows = [{"dialogue": [{"from": "human", "value": "Is it?"}, {"from": "gpt", "value": "It is."}], "text": "not this"}]
    for name in ("dialogue", "conversations"):
        option = {"dataset_column": "dialogue"} if name == "dialogue" else {}
        read = load(tmp_path, [{name: row["dialogue"], "text": row["text"]} for row in rows], CHAT, max_length=64, **option)
        assert [CHAT.decode(row) for row in read["input_ids"]] == ["u:Is it?<|eos|>a:It is.<|eos|>"]


def test_whether_to_think_reaches_the_template(tmp_path):
    closed = [USER, {**ANSWER, "thought": ""}]
    # Without thinking the prompt has the braces, with it the model writes them.
    for option, start, answer in ((None, "", "It is.<|eos|>"), (False, "", "It is.<|eos|>"), (True, "/think ", "{}It is.<|eos|>")):
        assert load_chats(tmp_path, closed, enable_thinking=option) == ([start + "u:Is it?<|eos|>a:{}It is.<|eos|>"], [answer])


def test_a_template_that_rewrites_every_turn_is_named(tmp_path):
    tokenizer = train_tokenizer(["Is it? It is."] * 3, vocab_size=270)
    tokenizer.chat_template = CHAT.chat_template.replace("'a:' + (", "'a:>' + (")
    with pytest.raises(ValueError, match=r"no row to train on: 1 rewritten by the template; .*mark the assistant's text"):
        load(tmp_path, [{"messages": [USER, ANSWER]}], tokenizer, max_length=64)


def test_what_cannot_be_used_is_skipped_and_counted(tmp_path, capsys):
    long = {**ANSWER, "content": "It is. " * 20}
    texts, answers = load_chats(
        tmp_path,
        [USER, ANSWER],
        [USER],
        [{"role": "system", "content": "Be."}, USER, ANSWER],
        [{**USER, "content": "Is it? " * 20}, ANSWER],
        [USER, long],
        [USER, {**ANSWER, "thought": "Hm"}, USER, ANSWER],
        max_length=24,
    )
    assert len(texts) == 3 and answers[0] == "It is.<|eos|>" == answers[2] and long["content"].startswith(answers[1])
    line = capsys.readouterr().out
    for part in ("skipped 3 (", "1 without an assistant message", "1 refused by the template (no system prompts)", "1 without two neighbouring"):
        assert part in line
    assert "assistant turns left out 1, as the template rewrites them later (split_turns: true" in line
    assert "conversations cut at max_length 1" in line


def test_rewritten_turns_get_rows_of_their_own_when_asked(tmp_path, capsys):
    thoughtful = [USER, {**ANSWER, "thought": "Hm"}, USER, ANSWER]
    texts, answers = load_chats(tmp_path, thoughtful, split_turns=True)
    assert texts == ["u:Is it?<|eos|>a:It is.<|eos|>u:Is it?<|eos|>a:It is.<|eos|>", "u:Is it?<|eos|>a:{Hm}It is.<|eos|>"]
    assert answers == ["It is.<|eos|>", "{Hm}It is.<|eos|>"]
    # Of one whose last turn is cut off, the row of the earlier turn is what remains.
    texts, answers = load_chats(tmp_path, [*thoughtful[:2], {**USER, "content": "Is it? " * 20}, ANSWER], split_turns=True, max_length=24)
    assert answers == ["{Hm}It is.<|eos|>"]
    lines = capsys.readouterr().out
    assert lines.count("skipped 0;") == 2 and "left out" not in lines


def test_only_prompts_are_an_error_that_says_to_answer_them(tmp_path):
    with pytest.raises(ValueError, match=r"no row to train on: 2 without an assistant message; there are only prompts: .*hf-dspark regenerate"):
        load_chats(tmp_path, [USER], [{"role": "system", "content": "Be."}, USER])


def test_several_processes_encode_as_one_does(tmp_path):
    rows = [{"messages": [{**USER, "content": f"Is {i} it?"}, ANSWER]} for i in range(6)]
    one, two = (load(tmp_path, rows, CHAT, max_length=64, dataset_num_proc=count) for count in (None, 2))
    assert one[:] == two[:]


@pytest.mark.parametrize(
    "name, content, options, message",
    [
        ("missing.jsonl", None, {}, r"an existing file of the kind \.jsonl, \.json, \.parquet, \.txt, got"),
        ("table.csv", "text\na\n", {}, r"an existing file of the kind \.jsonl, \.json, \.parquet, \.txt, got"),
        ("nowhere", None, {}, "nowhere' is neither 'stdlib', nor a file or folder here, nor a dataset of the Hub"),
        ("broken.jsonl", "{not json\n", {}, r"broken\.jsonl' cannot be read: .*JSON parse error"),
        ("empty.jsonl", "", {}, r"empty\.jsonl' is empty"),
        ("columns.jsonl", '{"content": "a"}\n', {}, r"needs a column 'messages', .* or 'text', it has \['content'\]; set dataset_column"),
        ("named.jsonl", '{"text": "a"}\n', {"dataset_column": "code"}, r"needs the column 'code', it has \['text'\]"),
        ("kind.jsonl", '{"messages": "[]"}\n', {}, r"the column 'messages' must hold lists of \{role, content\}, its first value is '\[\]'"),
        ("number.jsonl", '{"code": 3}\n', {"dataset_column": "code"}, "the column 'code' must hold lists of .* or text, its first value is '3'"),
        ("few.jsonl", '{"text": "a"}\n{"text": "b"}\n', {"num_held_out": 2}, "num_held_out=2 leaves nothing to train on of the 2 rows"),
        ("short.jsonl", '{"text": "a"}\n', {}, r"no row to train on: 1 of fewer than 6 tokens \(block_size \+ 2\)"),
        ("chat.jsonl", json.dumps({"messages": [USER, ANSWER]}), {}, "has no chat template"),
    ],
)
def test_bad_files_are_named(tmp_path, name, content, options, message):
    path = tmp_path / name
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError, match=message):
        load_rows(arguments(tmp_path, dataset=str(path), **options), TOKENIZER)
    if not options:
        with pytest.raises(ValueError, match=message.replace("1 of fewer", ".* of fewer")):
            load_rows(arguments(tmp_path, dataset=str(path), streaming=True, max_steps=3), TOKENIZER)


def test_a_folder_of_nothing_or_of_several_kinds_is_named(tmp_path):
    (tmp_path / "empty").mkdir()
    write(tmp_path / "mixed" / "rows.jsonl", [ids(5)])
    (tmp_path / "mixed" / "text.txt").write_text("text")
    for name, has in (("empty", "none"), ("mixed", r"\['json', 'text'\]")):
        with pytest.raises(ValueError, match=rf"folder '.*{name}' must hold files of one kind \(.*\), it has {has}"):
            load_rows(arguments(tmp_path, dataset=str(tmp_path / name)), TOKENIZER)
    with pytest.raises(ValueError, match=r"cannot be read: Unknown split \"dev\""):
        (tmp_path / "mixed" / "text.txt").unlink()
        load_rows(arguments(tmp_path, dataset=str(tmp_path / "mixed"), dataset_split="dev"), TOKENIZER)


def test_bad_extra_rows_are_named(tmp_path):
    path = write(tmp_path / "rows.jsonl", [{"text": "some text that is long enough"}])
    other = write(tmp_path / "other.jsonl", [{"code": "some text"}])
    with pytest.raises(ValueError, match=r"other.jsonl' needs a column .*, it has \['code'\]"):
        load_rows(arguments(tmp_path, dataset=path, extra_rows=other), TOKENIZER)
    with pytest.raises(ValueError, match=r"an existing file .*, got 'nowhere\.jsonl'"):
        load_rows(arguments(tmp_path, dataset=path, extra_rows="nowhere.jsonl"), TOKENIZER)


@pytest.mark.parametrize(
    "options, message",
    [
        ({}, "'stdlib' is read as a whole"),
        ({"dataset": "a/b"}, "needs max_steps, .*got max_steps=-1"),
        ({"dataset": "a/b", "max_steps": 3, "extra_rows": "more.jsonl"}, r"got extra_rows=\['more.jsonl'\]"),
        ({"dataset": "a/b", "max_steps": 3, "draft_vocab_size": 100}, "draft_vocab_size=100 is chosen by counting"),
    ],
)
def test_what_a_stream_cannot_do_is_said_before_it_is_read(tmp_path, options, message):
    with pytest.raises(ValueError, match=f"{message}"):
        arguments(tmp_path, streaming=True, **options)


def test_no_process_cannot_encode(tmp_path):
    with pytest.raises(ValueError, match="dataset_num_proc must be at least 1, got 0"):
        arguments(tmp_path, dataset_num_proc=0)


def test_a_mask_token_that_occurs_is_counted(tmp_path, caplog):
    written = [*(ids(10 + 8 * i) for i in range(3)), {"input_ids": [10, 9, 9, 9, 9, 9, 9, 10]}]
    for mask_token_id in (8, 34):
        warn_of_mask_token(load(tmp_path, written), mask_token_id)
    assert caplog.messages == []
    warn_of_mask_token(load(tmp_path, written), 10)
    [message] = caplog.messages
    assert message.startswith("mask_token_id=10 occurs 3 times among the 32 tokens of the training rows; blocks of the draft are filled with it")
    caplog.clear()
    warn_of_mask_token(load(tmp_path, written * 40, streaming=True, max_steps=1), 9)
    [message] = caplog.messages
    assert re.match(r"mask_token_id=9 occurs \d+ times among the 512 tokens of the first training rows", message)
