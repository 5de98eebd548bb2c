"""Which tokens the draft wrote, in colour and with carets."""

import pytest

from evaluation.tiny_pair import TEXTS, VOCAB
from hf_dspark.distillation.corpus import train_tokenizer
from hf_dspark.evaluation.marking import accepted_marks, render_marked, terminal_has_colour
from hf_dspark.generation.report import RequestRecord, RoundRecord


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(TEXTS, VOCAB)


def test_marks_follow_the_rounds():
    # The prefill's token; two drafts and the target's; the target's alone; two drafts of which the second ended the text.
    request = RequestRecord(3, new_tokens=7, rounds=[RoundRecord(3, 4, 2), RoundRecord(1, 4, 0), RoundRecord(2, 4, 2)])
    assert accepted_marks(request) == [False, True, True, False, False, True, True]


def test_carets_stand_below_drafted_characters(tokenizer):
    ids = [tokenizer.convert_tokens_to_ids(letter) for letter in "abcd"]
    prompt = [tokenizer.convert_tokens_to_ids(letter) for letter in "xy"]
    assert render_marked(tokenizer, prompt, ids, [False, True, True, False], colour=False) == "xy<|>abcd\n      ^^"


def test_carets_survive_line_breaks_tabs_and_narrow_terminals(tokenizer, monkeypatch):
    monkeypatch.setenv("COLUMNS", "8")
    ids = tokenizer("a\n\tb" + "c" * 9, add_special_tokens=False)["input_ids"]
    rendered = render_marked(tokenizer, [], ids, [True] * len(ids), colour=False).splitlines()
    assert rendered == ["<|>a", "   ^", "    bccc", "^" * 8, "cccccc", "^" * 6]


def test_colour_wraps_drafted_tokens(tokenizer):
    ids = [tokenizer.convert_tokens_to_ids(letter) for letter in "ab"]
    assert render_marked(tokenizer, [], ids, [False, True], colour=True) == "\x1b[2m\x1b[0ma\x1b[32mb\x1b[0m"


def test_a_character_of_several_tokens_is_shown_once(tokenizer):
    ids = tokenizer("é=€", add_special_tokens=False)["input_ids"]
    assert len(ids) == 6
    rendered = render_marked(tokenizer, [], ids, [False, True, False, False, False, True], colour=False)
    assert rendered == "<|>é=€\n   ^ ^"


def test_colour_needs_a_terminal_that_wants_it(monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert terminal_has_colour()
    monkeypatch.setenv("NO_COLOR", "1")
    assert not terminal_has_colour()
