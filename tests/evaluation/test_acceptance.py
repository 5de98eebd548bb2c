"""tau on held-out modules."""

import math

import pytest
import torch

from hf_dspark.evaluation.acceptance import Acceptance, acceptance_table, evaluate_pair, held_out_prompts, render_evaluation
from hf_dspark.evaluation.pairs import load_pair
from hf_dspark.generation.report import GenerationReport, RequestRecord, RoundRecord


@pytest.fixture(scope="module")
def pair(pair_folder):
    return load_pair(str(pair_folder / "draft"), device="cpu")


def test_prompts_are_the_beginnings_of_modules_after_bos(pair):
    prompts = held_out_prompts(pair, 2, 16)
    assert [prompt.shape for prompt in prompts] == [(1, 17), (1, 17)]
    assert prompts[0][0, 0] == pair.tokenizer.bos_token_id
    assert pair.tokenizer.decode(prompts[0][0, 1:]).startswith('"""Bisection')
    with pytest.raises(ValueError, match="prompt_tokens must be at least 1, got 0"):
        held_out_prompts(pair, 2, 0)


def test_both_ways_of_decoding_are_summarised(pair):
    state = torch.get_rng_state()
    prompts = held_out_prompts(pair, 3, 8)
    summaries = evaluate_pair(pair, prompts, max_new_tokens=10)
    assert torch.equal(torch.get_rng_state(), state)
    assert summaries == evaluate_pair(pair, prompts, max_new_tokens=10)
    for summary in summaries.values():
        assert summary["completions"] == 3 and 1 <= summary["tokens_per_round"] <= 5 and summary["new_tokens_mean"] <= 10
    rendered = render_evaluation(summaries, 1.0)
    assert "greedy " in rendered and "temperature 1 " in rendered and "conditional acceptance by draft position" in rendered


def test_a_mean_over_texts_leaves_out_loops_and_texts_without_a_round():
    rounds = [RoundRecord(4, 4, 3), RoundRecord(2, 4, 1), RoundRecord(1, 4, 0)]
    report = GenerationReport([RequestRecord(5, rounds=rounds[:2]), RequestRecord(5, rounds=rounds[2:]), RequestRecord(5)])
    acceptance = Acceptance(
        report, tokens_per_round=[3.0, 1.0, math.nan], repeated_shares=[0.5, 0.1, 0.0], distinct_bigrams=[0.6, 0.9, 0.0], new_tokens=[7, 2, 1]
    )
    summary = acceptance.summary()
    assert summary["tokens_per_round"] == 2.0 and summary["tokens_per_round_pooled"] == pytest.approx(7 / 3)
    assert summary["tokens_per_round_below_30_percent_repeated"] == 1.0 and summary["completions_below_30_percent_repeated"] == 2
    assert summary["distinct_bigram_share"] == pytest.approx(0.5)
    assert summary["repeated_8gram_share"] == pytest.approx(0.2) and summary["new_tokens_mean"] == pytest.approx(10 / 3)
    # Decided at position 1: all three rounds, accepted in two; at 2: two, accepted in one; at 3: one, accepted; at 4: one, rejected.
    assert summary["conditional_acceptance"] == pytest.approx([2 / 3, 1 / 2, 1.0, 0.0])


def test_options_outside_their_range_are_named(pair):
    prompts = held_out_prompts(pair, 1, 8)
    with pytest.raises(ValueError, match="temperature must be positive, got 0"):
        evaluate_pair(pair, prompts, 8, temperature=0.0)
    with pytest.raises(ValueError, match=r"max_new_tokens must be at least 2 .*got 1"):
        evaluate_pair(pair, prompts, 1)
    with pytest.raises(ValueError, match="a prompt of 9 tokens and max_new_tokens=2000 do not fit into the target's context of 1024"):
        evaluate_pair(pair, prompts, 2000)


def test_a_table_of_acceptance_is_aligned():
    assert acceptance_table({"greedy": [0.5, 0.25], "sampled": [1.0]}).splitlines() == [
        "            1     2",
        "greedy   0.50  0.25",
        "sampled  1.00     -",
    ]
