"""Timing in turn, paired ratios, repetition, and decoding without a draft."""

import pytest
import torch
from oracle import tiny_draft, tiny_target

from hf_dspark import record_generation
from hf_dspark.evaluation.benchmarks import (
    DRAFTED,
    OWN_LOOP,
    PLAIN,
    PROMPT_LOOKUP,
    decoding_variants,
    distinct_ngram_share,
    generate_without_draft,
    paired_ratio,
    repeated_ngram_share,
    time_interleaved,
)

PROMPT = torch.tensor([[3, 1, 4, 1, 5, 9]])


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
