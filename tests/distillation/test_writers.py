"""Who writes the answers: a tiny target, whose greedy text is compared with its own generate(), and a server in this process."""

import threading
from itertools import groupby

import pytest
import torch
from fake_chat_server import FakeChatServer
from test_conversations import GEMMA, LLAMA3, QWEN3, tokenizer_with
from transformers import Qwen3Config, Qwen3ForCausalLM

from hf_dspark.distillation.conversations import ChatTemplate
from hf_dspark.distillation.dialogues import read_dialogues
from hf_dspark.distillation.regeneration_arguments import RegenerationArguments
from hf_dspark.distillation.sampling import Sampling
from hf_dspark.distillation.server import ChatServer, RequestRefused
from hf_dspark.distillation.writers import ServerWriter, TargetWriter

THREE_TURNS = [{"role": role, "content": text} for role, text in zip(("user", "assistant") * 3, ("Is it?", "OLD", "So?", "OLD", "What?", "OLD"))]


def digit_target(tokenizer, ends_with="<|im_end|>", context=256, digits="0123456789", may_end=True):
    """Writes `digits`, each a token that stays one when it is read again, and the end token."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        head_dim=8, initializer_range=0.6, max_position_embeddings=context, pad_token_id=None, bos_token_id=0,
        eos_token_id=tokenizer.convert_tokens_to_ids(ends_with), tie_word_embeddings=False,
    )  # fmt: skip
    target = Qwen3ForCausalLM(config).eval()
    allowed = {*tokenizer.convert_tokens_to_ids(list(digits)), *([config.eos_token_id] if may_end else [])}
    target.generation_config.suppress_tokens = [i for i in range(len(tokenizer)) if i not in allowed]
    return target


def arguments(**options) -> RegenerationArguments:
    values = dict(target="t", output_file="o", dataset="chats.jsonl", new_tokens=12, temperature=0.0, batch_size=2, degenerate_share=1.0)
    return RegenerationArguments(**{**values, **options})


def write(template, rows: list, target_options=None, **options):
    """({row: (rows, verdicts, error)}, target, tokenizer) of `rows` written in process."""
    args, tokenizer = arguments(**options), tokenizer_with(template)
    target = digit_target(tokenizer, **(target_options or {}))
    chat = ChatTemplate(tokenizer, args.enable_thinking) if template else None
    writer = TargetWriter(target, tokenizer, chat, Sampling.of_run(target.generation_config, args), args)
    read = read_dialogues([{"c": row} for row in rows], "c", args.answered_turns, None if chat else tokenizer, args.prompt_tokens)
    return {d.row: (d.rows, d.verdicts, error) for d, error in writer.answer_all(d for d in read if d)}, target, tokenizer


def spans(mask: list[int]) -> list[tuple[int, int]]:
    """(start, stop) of each run of ones."""
    found, position = [], 0
    for value, run in groupby(mask):
        length = len(list(run))
        found += [(position, position + length)] if value else []
        position += length
    return found


def assert_written_by(target, row: dict, num_new: int) -> None:
    """Each supervised stretch is what the target writes after all that stands before it."""
    assert len(row["input_ids"]) == len(row["loss_mask"])
    for start, stop in spans(row["loss_mask"]):
        prompt = torch.tensor([row["input_ids"][:start]])
        alone = target.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=num_new, do_sample=False)
        assert row["input_ids"][:stop] == alone[0].tolist()


def test_a_conversation_is_one_row_where_the_template_lets_it_be():
    written, target, tokenizer = write(LLAMA3, [THREE_TURNS, THREE_TURNS[:3], "Is it?"], {"ends_with": "<|eot_id|>"})
    for row, num_turns in ((0, 3), (1, 2), (2, 1)):
        [row], verdicts, error = written[row]
        assert len(spans(row["loss_mask"])) == num_turns == len(verdicts) and error is None
        assert_written_by(target, row, 12)
    [whole] = written[0][0]
    text = tokenizer.decode(whole["input_ids"])
    assert "OLD" not in text and text.index("Is it?") < text.index("So?") < text.index("What?")
    answers = [tokenizer.decode(whole["input_ids"][start:stop]).removesuffix("<|eot_id|>") for start, stop in spans(whole["loss_mask"])]
    assert all(set(answer) <= set("0123456789") for answer in answers)


def test_a_turn_that_the_template_renders_otherwise_later_begins_a_row_of_its_own():
    """Without thinking the prompt closes the reasoning, and the history has no reasoning at all."""
    written, target, tokenizer = write(QWEN3, [THREE_TURNS], enable_thinking=False)
    rows, verdicts, _ = written[0]
    assert len(rows) == len(verdicts) == 3
    for row in rows:
        [(start, stop)] = spans(row["loss_mask"])
        assert stop == len(row["input_ids"]) and tokenizer.decode(row["input_ids"][:start]).endswith("<think>\n\n</think>\n\n")
        assert_written_by(target, row, 12)


def test_only_the_last_answer_after_the_conversation_as_it_is():
    written, target, tokenizer = write(LLAMA3, [THREE_TURNS], {"ends_with": "<|eot_id|>"}, answered_turns="last")
    [row], verdicts, _ = written[0]
    [(start, stop)] = spans(row["loss_mask"])
    assert len(verdicts) == 1 and stop == len(row["input_ids"]) and tokenizer.decode(row["input_ids"][:start]).count("OLD") == 2
    assert_written_by(target, row, 12)


def test_sampled_rows_depend_on_their_number_and_the_seed_alone():
    rows, options = [THREE_TURNS, "Is it?", "So?", THREE_TURNS[:3]], dict(temperature=1.0)
    first, _, _ = write(LLAMA3, rows, **options)
    for change in ({"batch_size": 1}, {"batch_size": 4}):
        assert write(LLAMA3, rows, **options, **change)[0] == first
    assert write(LLAMA3, rows[:2], **options)[0] == {row: first[row] for row in (0, 1)}
    assert write(LLAMA3, rows, **options, seed=1)[0] != first
    same = write(LLAMA3, ["Is it?"] * 4, **options)[0]
    assert len({str(rows) for rows, _, _ in same.values()}) > 1
    mixed, target, _ = write(LLAMA3, ["Is it?"] * 4, **options, greedy_share=0.5)
    assert_written_by(target, mixed[1][0][0], 12)
    assert mixed[1] == mixed[3] and mixed[0] == same[0] != mixed[1]


def test_loops_and_cut_answers_are_left_out_when_asked():
    """One digit to the limit: 13 8-grams of 20 tokens, one of them distinct."""
    loops = dict(target_options={"digits": "7", "may_end": False}, new_tokens=20, degenerate_share=0.9)
    assert write(LLAMA3, [THREE_TURNS], **loops)[0][0][1] == ["looping"] * 3
    assert write(LLAMA3, [THREE_TURNS], **loops, drop_degenerate=True)[0] == {0: ([], ["looping"], None)}
    cut = {**loops, "new_tokens": 5}
    assert write(LLAMA3, [THREE_TURNS], **cut)[0][0][1] == ["cut"] * 3
    assert write(LLAMA3, [THREE_TURNS], **cut, drop_degenerate=True)[0] == {0: ([], ["cut"], None)}
    # Text that is continued has no end to reach.
    rows, verdicts, _ = write(None, ["Is it?"], **cut, drop_degenerate=True)[0][0]
    assert verdicts == ["whole"] and len(rows) == 1


def test_texts_are_continued_as_they_are():
    written, target, tokenizer = write(None, ["Is it so?", "Hm."], {"may_end": False}, prompt_tokens=2)
    for number, text in enumerate(("Is it so?", "Hm.")):
        [row], _, error = written[number]
        prompt = tokenizer(text)["input_ids"][:2]
        assert row["input_ids"][:2] == prompt and row["loss_mask"][:2] == [0, 0] and all(row["loss_mask"][2:]) and error is None
        assert_written_by(target, row, 12)


def test_a_row_that_cannot_be_asked_fails_alone():
    long = [{"role": "user", "content": "What is it? " * 30}]
    twice = [{"role": "user", "content": "Is it?"}] * 2
    written, _, _ = write(GEMMA, [long, "Is it?", twice, "So?", long], {"context": 60, "ends_with": "<end_of_turn>"})
    assert (
        "tokens, the target's context holds 60" in str(written[0][2]) and "roles must alternate" in str(written[2][2]) and written[4][2] is not None
    )
    assert all(written[row][2] is None and written[row][0] for row in (1, 3))
    # A conversation ends where it fills the context; what was answered stays.
    many = THREE_TURNS[:2] * 20
    rows, verdicts, error = write(LLAMA3, [many], {"context": 100, "ends_with": "<|eot_id|>"})[0][0]
    assert error is None and 1 < len(verdicts) < 20 and all(len(row["input_ids"]) <= 100 for row in rows)


def test_an_empty_answer_ends_the_conversation_before_it():
    tokenizer = tokenizer_with(LLAMA3)
    args = arguments()
    target = digit_target(tokenizer)
    target.generation_config.suppress_tokens = [i for i in range(len(tokenizer)) if i != target.generation_config.eos_token_id]
    writer = TargetWriter(target, tokenizer, ChatTemplate(tokenizer), Sampling.of_run(target.generation_config, args), args)
    [(dialogue, error)] = writer.answer_all(read_dialogues([{"c": THREE_TURNS}], "c", "all"))
    assert (dialogue.rows, dialogue.verdicts, error) == ([], ["empty"], None)


# Through a server


def converse(fake, value, template=QWEN3, **options):
    """The one dialogue of `value`, after the server has answered."""
    args, tokenizer = arguments(server=fake.url, **{"temperature": 0.7, **options}), tokenizer_with(template)
    server = ChatServer(fake.url, "target", max_retries=0, timeout=10, stop=threading.Event())
    [dialogue] = read_dialogues([{"c": value}], "c", args.answered_turns)
    chat = ChatTemplate(tokenizer, args.enable_thinking)
    ServerWriter(server, tokenizer, chat, Sampling.of_run(digit_target(tokenizer).generation_config, args), args).converse(dialogue)
    return dialogue, tokenizer


def test_a_server_answers_turn_by_turn():
    with FakeChatServer(lambda body, number: f"It is {number}.") as fake:
        dialogue, _ = converse(fake, THREE_TURNS, enable_thinking=False, seed=4)
    [row] = dialogue.rows
    assert [message["content"] for message in row["messages"]] == ["Is it?", "It is 0.", "So?", "It is 1.", "What?", "It is 2."]
    bodies = [body for _, _, body in fake.requests]
    assert [len(body["messages"]) for body in bodies] == [1, 3, 5] and bodies[2]["messages"] == row["messages"][:5]
    assert all(body["chat_template_kwargs"] == {"enable_thinking": False} and body["max_tokens"] == 12 for body in bodies)
    assert all(body["temperature"] == 0.7 and body["model"] == "target" for body in bodies) and len({body["seed"] for body in bodies}) == 3


def test_reasoning_that_the_server_keeps_apart_stays_apart():
    with FakeChatServer(lambda body, number: {"content": "Yes.", "reasoning_content": "Hm."}) as fake:
        dialogue, _ = converse(fake, "Is it?")
    assert dialogue.rows[0]["messages"][1] == {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."}
    assert "chat_template_kwargs" not in fake.requests[0][2]


def test_the_last_answer_of_a_server_is_the_only_one_supervised():
    with FakeChatServer(lambda body, number: "NEW") as fake:
        dialogue, tokenizer = converse(fake, THREE_TURNS, LLAMA3, answered_turns="last")
    [row] = dialogue.rows
    assert tokenizer.decode([i for i, kept in zip(row["input_ids"], row["loss_mask"], strict=True) if kept]) == "NEW<|eot_id|>"
    assert tokenizer.decode(row["input_ids"]).count("OLD") == 2


def test_bad_answers_of_a_server():
    loop = "yes it is " * 40
    for answer, verdicts in ((loop, ["looping"] * 3), (("It is", "length"), ["cut"] * 3), (" \n", ["empty"])):
        with FakeChatServer(lambda body, number, answer=answer: answer) as fake:
            dialogue, _ = converse(fake, THREE_TURNS, degenerate_share=0.3)
            assert dialogue.verdicts == verdicts and bool(dialogue.rows) == (verdicts != ["empty"])
            dialogue, _ = converse(fake, THREE_TURNS, degenerate_share=0.3, drop_degenerate=True)
            assert dialogue.verdicts == verdicts[:1] and dialogue.rows == []


def test_a_refusal_later_in_a_conversation_ends_it_and_keeps_what_was_answered():
    refuse = (400, {"error": "maximum context length"})
    with FakeChatServer(lambda body, number: "Yes." if number < 2 else refuse) as fake:
        dialogue, _ = converse(fake, THREE_TURNS)
    assert [message["content"] for message in dialogue.rows[0]["messages"]] == ["Is it?", "Yes.", "So?", "Yes."]
    with FakeChatServer(lambda body, number: refuse) as fake, pytest.raises(RequestRefused, match="maximum context length"):
        converse(fake, THREE_TURNS)
