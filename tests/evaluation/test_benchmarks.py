"""Timing in turn, paired ratios, repetition, decoding without a draft, and many requests at a time."""

import pytest
import torch
from oracle import tiny_draft, tiny_target

from hf_dspark import record_generation
from hf_dspark.evaluation import benchmarks
from hf_dspark.evaluation.benchmarks import (
    DRAFTED,
    OWN_LOOP,
    PLAIN,
    PROMPT_LOOKUP,
    Load,
    decode_continuously,
    decode_padded,
    decode_queue,
    decoding_variants,
    distinct_ngram_share,
    fixed_draft_length,
    generate_without_draft,
    paired_ratio,
    repeated_ngram_share,
    time_interleaved,
    timed,
)
from hf_dspark.generation.queue import Completion

PROMPT = torch.tensor([[3, 1, 4, 1, 5, 9]])
PROMPTS = [PROMPT, torch.tensor([[2, 7, 1]]), torch.tensor([[8, 2, 8, 1]])]


def test_generate_without_draft_is_generate_in_everything_it_returns():
    target = tiny_target()
    options = dict(input_ids=PROMPT, max_new_tokens=12, do_sample=False, repetition_penalty=1.3, return_dict_in_generate=True, output_logits=True)
    plain, own = target.generate(**options), generate_without_draft(target, **options)
    assert own.sequences.tolist() == plain.sequences.tolist()
    torch.testing.assert_close(own.logits, plain.logits)
    assert own.cache.get_seq_length() == plain.cache.get_seq_length() == 17


def test_generate_without_draft_samples_and_stops_as_generate_does():
    target = tiny_target()
    outputs = []
    for write in (target.generate, lambda **arguments: generate_without_draft(target, **arguments)):
        torch.manual_seed(5)
        outputs.append(write(input_ids=PROMPT, max_new_tokens=30, do_sample=True, top_k=4, eos_token_id=[7, 11, 13]).tolist())
    assert outputs[0] == outputs[1]


def test_generate_without_draft_goes_through_our_loop_and_drafts_nothing():
    with record_generation() as report:
        generate_without_draft(tiny_target(), input_ids=PROMPT, max_new_tokens=5, do_sample=False)
    assert [(r.tokens, r.drafted, r.accepted) for r in report.rounds] == [(1, 0, 0)] * 4


def test_all_variants_write_the_same_text():
    target = tiny_target()
    variants = decoding_variants(target, tiny_draft(target), prompt_lookup_tokens=10)
    assert list(variants) == [PLAIN, OWN_LOOP, DRAFTED, PROMPT_LOOKUP]
    texts = [write(input_ids=PROMPT, max_new_tokens=20, do_sample=False).tolist() for write in variants.values()]
    assert texts == [texts[0]] * 4
    assert PROMPT_LOOKUP not in decoding_variants(target, tiny_draft(target))


def test_runs_are_interleaved():
    order = []
    seconds = time_interleaved({name: lambda name=name: order.append(name) for name in "ABC"}, num_runs=3)
    assert "".join(order) == "ABCABCABC"
    assert list(seconds) == ["A", "B", "C"] and all(len(runs) == 3 and min(runs) >= 0 for runs in seconds.values())


def test_a_ratio_is_the_median_over_pairs_and_not_of_medians():
    # Ratios 2, 1.5, 10; the medians' ratio would be 3 / 2.
    assert paired_ratio([2.0, 3.0, 20.0], [1.0, 2.0, 2.0]) == 2.0
    with pytest.raises(ValueError):
        paired_ratio([1.0], [1.0, 2.0])


@pytest.mark.parametrize(
    ("ids", "n", "repeated"),
    [
        (list(range(20)), 8, 0.0),
        ([7] * 20, 8, 12 / 13),  # 13 8-grams, one distinct
        ([1, 2, 3, 4] * 4, 8, 5 / 9),  # 9 8-grams, 4 distinct
        ([1, 2, 3], 8, 0.0),
        ([1, 2, 1, 2, 3], 2, 1 / 4),  # 12 21 12 23
    ],
)
def test_repeated_ngrams_by_hand(ids, n, repeated):
    assert repeated_ngram_share(ids, n) == pytest.approx(repeated)
    assert distinct_ngram_share(ids, n) == pytest.approx(1 - repeated)


def test_what_was_asked_for_ends_with_the_budget_or_the_first_stop_token():
    load = Load(PROMPTS, [5, 2, 3], {}, {9, 7})
    assert load.committed([[1, 9, 7, 0, 0], [1, 2, 3, 4, 9], [1, 2, 9, 0, 0]]) == [[1, 9], [1, 2], [1, 2, 9]]
    assert Load(PROMPTS[:1], [4], {}, set()).committed([[9, 9, 9, 9, 9]]) == [[9, 9, 9, 9]]
    with pytest.raises(ValueError):
        load.committed([[1]])


def test_every_way_of_decoding_many_writes_each_request_as_alone():
    target = tiny_target()
    draft, budgets = tiny_draft(target), [12, 3, 7]
    expected = [target.generate(prompt, max_new_tokens=budget, do_sample=False) for prompt, budget in zip(PROMPTS, budgets)]
    expected = [text[0, prompt.shape[1] :].tolist() for text, prompt in zip(expected, PROMPTS)]
    # The first text ends with its fifth token, or before where that occurred before; the others may end early too.
    for stop_ids in (set(), {expected[0][4], 1}):
        target.generation_config.eos_token_id = sorted(stop_ids) or None
        target.generation_config.pad_token_id = 0
        load = Load(PROMPTS, budgets, {"do_sample": False}, stop_ids)
        ways = (
            decode_padded(target, load),
            decode_continuously(target, load),
            decode_queue(target, None, load),
            decode_queue(target, draft, load),
            decode_queue(target, draft, load, num_drafts=1),
        )
        assert [texts for texts, _ in ways] == [load.committed(expected)] * 5
        assert all(seconds > 0 for _, seconds in ways)
    assert len(load.committed(expected)[0]) <= 5


def test_a_request_that_fails_fails_the_load():
    load = Load([PROMPT, torch.zeros(1, 0, dtype=torch.long)], [2, 2], {"do_sample": False}, set())
    with pytest.raises(ValueError, match="request 1: the prompt is empty"):
        decode_queue(tiny_target(), None, load)


def test_a_queue_that_was_interrupted_is_no_result(monkeypatch):
    monkeypatch.setattr(benchmarks, "generate_many", lambda *args, **kwargs: iter([Completion(0, new_ids=torch.tensor([1]))]))
    with pytest.raises(KeyboardInterrupt):
        decode_queue(tiny_target(), None, Load(PROMPTS, [2, 2, 2], {"do_sample": False}, set()))


class FailingManager:
    """Hands out `results` of two requests, then its thread has ended."""

    def __init__(self, *results):
        self.results, self.ids = list(results), iter("ab")
        self.background_thread_status = type("Status", (), {"fatal_error": "out of pages"})

    def add_request(self, ids, **_):
        return next(self.ids)

    def get_result(self, timeout):
        return self.results.pop(0) if self.results else None

    def is_running(self):
        return bool(self.results)


@pytest.mark.parametrize("error", [None, "too long"])
def test_continuous_batching_that_fails_says_why(error):
    result = type("Result", (), {"request_id": "a", "error": error, "generated_tokens": [1]})
    with pytest.raises(RuntimeError, match=error or "its thread ended early: out of pages"):
        benchmarks._served(FailingManager(result), Load(PROMPTS[:2], [1, 1], {}, set()), -1)


def test_a_fixed_draft_length_is_restored():
    target = tiny_target()
    draft = tiny_draft(target)
    before = draft.generation_config
    before.num_assistant_tokens, before.assistant_confidence_threshold = 2, 1.0
    with record_generation() as report, fixed_draft_length(draft, 3):
        target.generate(PROMPT, assistant_model=draft, max_new_tokens=20, do_sample=False)
    # The threshold would have cut them all, and the budget cuts the last ones only.
    assert {round_.drafted for round_ in report.rounds[:3]} == {3}
    assert draft.generation_config is before and (before.num_assistant_tokens, before.assistant_confidence_threshold) == (2, 1.0)
    with pytest.raises(KeyError), fixed_draft_length(draft, 1):
        raise KeyError
    assert draft.generation_config is before and before.num_assistant_tokens == 2


def test_a_draft_that_fails_is_no_plain_decoding_in_a_benchmark(monkeypatch):
    target = tiny_target()
    draft = tiny_draft(target)

    def failing(*args, **kwargs):
        raise RuntimeError("no draft today")

    monkeypatch.setattr(draft, "forward", failing)
    with pytest.raises(RuntimeError, match="no draft today"):
        decode_queue(target, draft, Load(PROMPTS, [4, 4, 4], {"do_sample": False}, set()), num_drafts=1)


def test_a_timed_run_returns_what_it_did():
    result, seconds = timed(lambda: "text")
    assert result == "text" and seconds >= 0
