"""Where training rows come from: written, gathered, compared with the target at hand."""

import json
import logging

import pytest
from datasets import Dataset
from test_conversations import LLAMA3, QWEN3, tokenizer_with

from hf_dspark.distillation.arguments import DistillationArguments
from hf_dspark.distillation.data import load_rows
from hf_dspark.distillation.provenance import chat_template_sha256, conversations, row_provenance, sampling_in_words, take_provenance, training_data

SAMPLING = {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 1.0, "repetition_penalty": 1.05}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def arguments(folder, **options) -> DistillationArguments:
    values = dict(target="Qwen/Qwen3-4B", num_held_out=0, block_size=4, output_dir=str(folder / "draft"), use_cpu=True)
    return DistillationArguments(**{**values, **options})


def stated(**facts) -> dict:
    return json.loads(row_provenance(facts.pop("target", "Qwen/Qwen3-4B"), facts.pop("revision", "abc"), facts.pop("mode", "in process"), **facts))


def test_what_is_written_beside_a_row(tmp_path):
    (tmp_path / "my-target").mkdir()
    facts = json.loads(row_provenance(str(tmp_path / "my-target"), None, "server", sampling=SAMPLING, enable_thinking=None, seed=0))
    assert facts.pop("hf_dspark_version")
    assert facts == {"target": "./my-target", "mode": "server", "sampling": SAMPLING, "seed": 0}


def test_shares_are_of_rows_and_tokens_that_are_trained_on(tmp_path):
    """Three rows of a file (one too short to train on) beside two of the target's, by hand: 2 of 4 rows, 30 of 50 tokens."""
    mine = row_provenance("Qwen/Qwen3-4B", "abc", "in process", sampling=SAMPLING, chat_template_sha256="ff")
    (tmp_path / "plain.jsonl").write_text("".join(json.dumps({"input_ids": [5] * n}) + "\n" for n in (8, 12, 3)))
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps({"input_ids": [6] * n, "provenance": mine}) + "\n" for n in (10, 20)))
    args = arguments(tmp_path, dataset=str(tmp_path / "plain.jsonl"), extra_rows=[str(tmp_path / "mine.jsonl")])
    rows, _ = load_rows(args, tokenizer_with(None))
    rows, sources = take_provenance(rows)
    assert rows.column_names == ["input_ids", "loss_mask"] and len(rows) == 4
    assert sorted(sources, key=len) == [{"share": 0.5, "token_share": 0.4}, {**json.loads(mine), "share": 0.5, "token_share": 0.6}]
    data = training_data(sources, args, tokenizer_with(None), "abc")
    assert (data["regenerated_share"], data["regenerated_token_share"]) == (0.5, 0.6)
    assert data["sampling"] == "temperature 0.7, top-k 20, repetition penalty 1.05" and data["chat_template_sha256"] == "ff"
    assert data["sources"] == [{**json.loads(mine), "share": 0.5, "token_share": 0.6}]


def test_only_what_the_target_itself_wrote_counts_as_its_own(tmp_path):
    """The card says of this share that the base model wrote it."""
    others = {**stated(target="Qwen/Qwen3-8B", sampling={"do_sample": False}), "share": 0.75, "token_share": 0.5}
    mine = {**stated(sampling=SAMPLING), "share": 0.25, "token_share": 0.5}
    data = training_data([others, mine], arguments(tmp_path), tokenizer_with(None), "abc")
    assert (data["regenerated_share"], data["regenerated_token_share"], data["sources"]) == (0.25, 0.5, [others, mine])
    assert data["sampling"] == "temperature 0.7, top-k 20, repetition penalty 1.05"
    assert training_data([others], arguments(tmp_path), tokenizer_with(None), "abc") == {"sources": [others]}


def test_rows_without_provenance_say_nothing():
    rows = Dataset.from_list([{"input_ids": [1, 2]}])
    assert take_provenance(rows) == (rows, []) and training_data([], None, None, None) == {}


def test_conversations_that_are_rendered_here_say_by_which_template(tmp_path):
    row = {"messages": [{"role": "user", "content": "What is it?"}, {"role": "assistant", "content": "It is four. It is so."}]}
    (tmp_path / "chats.jsonl").write_text(json.dumps(row) + "\n")
    args, tokenizer = arguments(tmp_path, dataset=str(tmp_path / "chats.jsonl")), tokenizer_with(QWEN3)
    _, sources = take_provenance(load_rows(args, tokenizer)[0])
    assert training_data(sources, args, tokenizer, None) == {"chat_template_sha256": chat_template_sha256(tokenizer)}
    assert chat_template_sha256(tokenizer) != chat_template_sha256(tokenizer_with(LLAMA3)) and chat_template_sha256(tokenizer_with(None)) is None


def test_a_stream_speaks_with_its_first_row(tmp_path):
    mine = row_provenance("Qwen/Qwen3-4B", "abc", "in process", sampling=SAMPLING)
    (tmp_path / "mine.jsonl").write_text((json.dumps({"input_ids": [6] * 9, "provenance": mine}) + "\n") * 4)
    args = arguments(tmp_path, dataset=str(tmp_path / "mine.jsonl"), streaming=True, max_steps=1)
    rows, sources = take_provenance(load_rows(args, tokenizer_with(None))[0])
    assert sources == [json.loads(mine)] and set(next(iter(rows))) == {"input_ids", "loss_mask"}
    assert "regenerated_share" not in training_data(sources, args, tokenizer_with(None), "abc")


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"target": "Qwen/Qwen3-8B"}, ["Qwen/Qwen3-8B wrote them, but the draft is trained for Qwen/Qwen3-4B"]),
        ({"revision": "def"}, ["revision def of Qwen/Qwen3-4B wrote them, the draft is trained for revision abc"]),
        ({"chat_template_sha256": "00"}, ["their chat template has the SHA-256 00, that of Qwen/Qwen3-4B is "]),
        ({"mode": "server", "enable_thinking": True}, ["written with enable_thinking=True, and are rendered with None"]),
        ({"enable_thinking": True}, []),  # tokens are not rendered again
        ({"revision": None}, []),
    ],
    ids=["target", "revision", "template", "thinking", "tokens", "unknown revision"],
)
def test_rows_of_another_target_are_warned_of(facts, words, tmp_path, caplog):
    tokenizer = tokenizer_with(QWEN3)
    source = stated(**{"chat_template_sha256": chat_template_sha256(tokenizer), **facts})
    with caplog.at_level(logging.WARNING, logger="hf_dspark"):
        training_data([source], arguments(tmp_path), tokenizer, "abc")
    assert len(caplog.messages) == len(words) and all(word in message for word, message in zip(words, caplog.messages)), caplog.messages


@pytest.mark.parametrize(
    ("name", "theirs", "ours", "is_own"),
    [
        ("target", "aa", "aa", True),
        ("target", "aa", "bb", False),
        ("renamed", "aa", "aa", True),
        ("renamed", "aa", "bb", False),
        ("target", None, "bb", True),  # rows of a server, or of an earlier version
        ("target", "aa", None, True),
        ("renamed", None, "bb", False),
    ],
)
def test_local_targets_are_told_apart_by_their_weights(name, theirs, ours, is_own, tmp_path, caplog):
    (tmp_path / "target").mkdir()
    source = {**stated(target=f"./{name}", target_weights=theirs), "share": 1.0, "token_share": 1.0}
    with caplog.at_level(logging.WARNING, logger="hf_dspark"):
        data = training_data([source], arguments(tmp_path, target=str(tmp_path / "target")), tokenizer_with(None), None, ours)
    assert ("regenerated_share" in data) == is_own == (not caplog.messages)
    words = {"target": "another ./target wrote them, whose weights are not", "renamed": "./renamed wrote them, but the draft is trained for ./target"}
    assert all(words[name] in message for message in caplog.messages)


def test_names_on_the_hub_are_told_apart_by_revision_not_by_weights(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, logger="hf_dspark"):
        training_data([stated(target_weights="aa")], arguments(tmp_path), tokenizer_with(None), "abc", "bb")
    assert caplog.messages == []


def test_conversations_are_known_by_run_and_number():
    columns = {"provenance": ["a", "a", "b", "", None, "a"], "row": [0, 0, 0, 0, 0, None]}
    assert conversations(Dataset.from_dict(columns)) == [("a", 0), ("a", 0), ("b", 0), None, None, None]
    assert conversations(Dataset.from_dict({"provenance": ["a"]})) == [None] == conversations(Dataset.from_dict({"row": [0]}))
    assert conversations(Dataset.from_dict({"provenance": ["a"], "row": ["first"]})) == [None]  # a column that others filled


def test_sampling_in_words():
    assert sampling_in_words({"sampling": {"do_sample": False}, "greedy_share": 0.5}) == "greedy"
    law = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    assert sampling_in_words({"sampling": law, "greedy_share": 0.5}) == "temperature 1, 50% of the rows greedy"
    assert sampling_in_words({"sampling": {**law, "top_p": 0.9, "min_p": 0.05}}) == "temperature 1, top-p 0.9, min-p 0.05"


def test_a_column_that_others_filled_is_taken_for_nothing(tmp_path):
    lines = [{"input_ids": [6] * 9, "provenance": "a shelf"}, {"input_ids": [6] * 9, "provenance": "[1]"}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    args = arguments(tmp_path, dataset=str(tmp_path / "rows.jsonl"))
    _, sources = take_provenance(load_rows(args, tokenizer_with(None))[0])
    assert training_data(sources, args, tokenizer_with(None), None) == {}
