"""What is asked of conversations, prompts and texts, and verdicts on answers, counted by hand."""

import pytest
from datasets import Dataset

from hf_dspark.distillation.corpus import train_tokenizer
from hf_dspark.distillation.dialogues import Dialogue, checked_rows, find_prompts, judge_answer, read_dialogues


def messages(*roles: str) -> list[dict]:
    """One message a role; its content is the role's first letter and its place."""
    return [{"role": role, "content": f"{role[0]}{i}"} for i, role in enumerate(roles)]


def asked(value, turns="all") -> list[list[str]] | None:
    [dialogue] = read_dialogues([{"messages": value}], "messages", turns)
    return dialogue and [[message["content"] for message in question] for question in dialogue.questions]


@pytest.mark.parametrize(
    ("roles", "all_turns", "last_turn"),
    [
        (("user",), [["u0"]], [["u0"]]),
        (("system", "user", "assistant"), [["s0", "u1"]], [["s0", "u1"]]),
        (("user", "assistant", "user", "assistant", "user"), [["u0"], ["u2"], ["u4"]], [["u0", "a1", "u2", "a3", "u4"]]),
        (("system", "assistant", "user", "user", "assistant"), [["s0", "u2", "u3"]], [["s0", "a1", "u2", "u3"]]),
        (("user", "assistant", "assistant", "user"), [["u0"], ["u3"]], [["u0", "a1", "a2", "u3"]]),
        (("user", "assistant", "tool", "assistant", "user"), [["u0"]], [["u0", "a1", "t2", "a3", "u4"]]),
        (("user", "assistant", "system"), [["u0"]], [["u0"]]),
        (("system", "assistant"), None, None),
        ((), None, None),
    ],
    ids=lambda value: "-".join(role[0] for role in value) if isinstance(value, tuple) else "",
)
def test_questions_of_a_conversation(roles, all_turns, last_turn):
    assert asked(messages(*roles)) == all_turns and asked(messages(*roles), "last") == last_turn


def test_other_spellings_of_a_conversation():
    value = [{"from": "human", "value": "h"}, {"from": "gpt", "value": "g"}, {"role": "user", "content": "u", "tool_calls": None}]
    [dialogue] = read_dialogues([{"c": value}], "c", "all")
    assert dialogue.questions == [[{"role": "user", "content": "h"}], [{"role": "user", "content": "u"}]]
    assert asked(["How?", "Why?"]) == [["How?"], ["Why?"]] == asked(["How?", "Why?"], "last")
    assert asked("How?") == [["How?"]] and asked(" \n") is None and asked(None) is None and asked([{"text": "x"}]) is None


def test_a_dialogue_goes_on_until_a_bad_answer():
    [dialogue] = read_dialogues([{"c": messages("user", "assistant", "user", "assistant", "user")}], "c", "all")
    assert [m["content"] for m in dialogue.asked_messages()] == ["u0"]
    assert dialogue.take_answer("looping", 5, drop_degenerate=False) and not dialogue.is_finished
    dialogue.messages = messages("user", "assistant")
    assert [m["content"] for m in dialogue.asked_messages()] == ["u0", "a1", "u2"]
    assert not dialogue.take_answer("empty", 1, drop_degenerate=False) and dialogue.is_finished
    assert (dialogue.verdicts, dialogue.num_new_tokens) == (["looping", "empty"], 6)
    assert not Dialogue(0, [[], []]).take_answer("cut", 1, drop_degenerate=True)


def test_texts_are_continued_from_their_first_tokens():
    tokenizer = train_tokenizer(["a b c d e f"] * 10, vocab_size=280)
    plain = tokenizer("a b c d")["input_ids"]
    short, whole = ([d and d.prompt_ids for d in read_dialogues([{"t": "a b c d"}, {"t": " "}], "t", "all", tokenizer, n)] for n in (3, None))
    assert short == [plain[:3], None] and whole[0] == [i for i in plain if i != tokenizer.eos_token_id]


def test_rows_are_checked_one_by_one():
    mixed = [{"turns": ["a"], "prompt": None}, {"turns": None, "prompt": None}, {"turns": None, "prompt": "p"}]
    rows = checked_rows(mixed, "turns", "d", is_named=False, is_chat=True)
    assert [next(rows), next(rows)] == mixed[:2]
    with pytest.raises(ValueError, match=r"dataset 'd', row 2: expected the column 'turns', .*, got 'prompt' alone; .* set dataset_column"):
        next(rows)
    assert list(checked_rows(mixed, "turns", "d", is_named=True, is_chat=True)) == mixed
    texts = [{"t": "a"}, {"t": None}, {"t": ["b"]}]
    assert list(checked_rows(texts, "t", "d", is_named=True, is_chat=True)) == texts
    with pytest.raises(ValueError, match=r"dataset 'd', row 2: the column 't' must hold text to be continued, got \"\['b'\]\"; .* chat template"):
        list(checked_rows(texts, "t", "d", is_named=True, is_chat=False))


def test_fingerprints_tell_prompts_apart():
    prints = {
        Dialogue(0, prompt_ids=[1, 2]).fingerprint(),
        Dialogue(0, prompt_ids=[1, 3]).fingerprint(),
        Dialogue(0, [messages("user")]).fingerprint(),
    }
    assert len(prints) == 3 and Dialogue(7, prompt_ids=[1, 2], verdicts=["whole"]).fingerprint() in prints


def test_the_column_with_the_prompts():
    both = Dataset.from_list(
        [{"prompt": "p", "text": "t", "n": 1, "messages": None}, {"prompt": "p", "text": "t", "n": 1, "messages": messages("user")}]
    )
    assert find_prompts(both, None, "d") == ("messages", False) and find_prompts(both, "prompt", "d") == ("prompt", True)
    assert find_prompts(Dataset.from_list([{"prompt": messages("user")}]), None, "d") == ("prompt", False)
    assert find_prompts(Dataset.from_list([{"prompt": None}, {"prompt": "p"}]), None, "d") == ("prompt", True)
    with pytest.raises(
        ValueError, match=r"dataset 'd' needs the column 'question', it has \['messages', 'n', 'prompt', 'text'\]; set dataset_column"
    ):
        find_prompts(both, "question", "d")
    with pytest.raises(ValueError, match="needs a column 'messages', 'conversations', 'turns', 'prompt' or 'text', it has"):
        find_prompts(Dataset.from_list([{"n": 1}]), None, "d")
    with pytest.raises(ValueError, match=r"the column 'n' must hold text, lists of \{role, content\} or lists of questions, its first value is '1'"):
        find_prompts(both, "n", "d")
    with pytest.raises(ValueError, match="dataset 'd' is empty"):
        find_prompts(Dataset.from_list([]), None, "d")


LOOP = [1, 2, 3, 4] * 8  # 25 8-grams, 4 of them distinct: 84 % repeated
VARIED = list(range(32))


@pytest.mark.parametrize(
    ("ids", "facts", "verdict"),
    [
        (VARIED, {}, "whole"),
        (VARIED, {"is_ended": False}, "cut"),
        (LOOP, {}, "looping"),
        (LOOP, {"is_ended": False}, "looping"),
        (LOOP, {"looping_share": 0.84}, "looping"),
        (LOOP, {"looping_share": 0.85}, "whole"),
        (VARIED + VARIED[:10], {}, "whole"),  # 3 of 35 repeated
        ([7] * 8, {}, "whole"),  # one 8-gram
        ([2], {"is_blank": True}, "empty"),
        (LOOP, {"is_blank": True}, "empty"),
    ],
    ids=["whole", "cut", "looping", "looping and cut", "at the threshold", "below it", "a little repeated", "short", "empty", "blanks"],
)
def test_verdicts(ids, facts, verdict):
    assert judge_answer(ids, **{"is_blank": False, "is_ended": True, **facts}) == verdict
