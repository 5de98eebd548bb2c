"""The law of sampled rows is the product of the target's own laws, by walking every outcome of a batch through generate()."""

from itertools import product

import pytest
import torch
from oracle import VOCAB, chain_law, largest_difference, tiny_draft, tiny_target, walk_every_outcome
from test_acceptance import small_draft, small_target
from test_batches import PROMPTS, padded
from transformers import set_seed

from hf_dspark import record_generation


def truncated(tokens: tuple, stop: int | None) -> tuple:
    return tokens[: tokens.index(stop) + 1] if stop in tokens else tokens


def assert_joint_law(monkeypatch, target, draft, prompts, num_tokens, stop=None, copies=1, **options):
    """The law of all rows together is the product of the target's own laws of each; texts end at `stop`."""
    options, inputs = dict(top_k=0) | options, padded(*prompts)
    expected = {}
    laws = [chain_law(target, torch.tensor([prompt]), num_tokens, **options) for prompt in prompts for _ in range(copies)]
    for outcomes in product(*(law.items() for law in laws)):
        key, probability = tuple(truncated(tokens, stop) for tokens, _ in outcomes), 1.0
        for _, share in outcomes:
            probability *= share
        expected[key] = expected.get(key, 0.0) + probability
    if stop is not None:
        options |= dict(eos_token_id=stop, pad_token_id=stop)

    with record_generation() as report:

        def run() -> tuple:
            ids = target.generate(**inputs, do_sample=True, max_new_tokens=num_tokens, num_return_sequences=copies, assistant_model=draft, **options)
            assert ids.shape[0] == len(prompts) * copies
            return tuple(truncated(tuple(row[inputs["input_ids"].shape[1] :].tolist()), stop) for row in ids)

        law = walk_every_outcome(monkeypatch, run)
    assert sum(law.values()) == pytest.approx(1.0, abs=1e-5)
    assert largest_difference(law, expected) < 1e-5
    assert all(request.draft_failure is None for request in report.requests)
    accepted = sum(round_.accepted for round_ in report.rounds)
    assert 0 < accepted < sum(round_.verified for round_ in report.rounds)


@pytest.mark.parametrize("sampling", ["chain", "argmax"])
@pytest.mark.parametrize("prompts", [([1, 0], [0]), ([0, 1, 1], [1, 1, 0])], ids=["padded", "of one length"])
def test_law_of_two_prompts(monkeypatch, prompts, sampling):
    target = small_target(2)
    draft = small_draft(target)
    draft.generation_config.draft_sampling = sampling
    assert_joint_law(monkeypatch, target, draft, prompts, 3)


@pytest.mark.parametrize("sampling", ["chain", "argmax"])
def test_law_of_two_prompts_that_end_on_their_own(monkeypatch, sampling):
    target = small_target(3, seed=1)
    draft = small_draft(target, mask_token_id=1)
    draft.generation_config.draft_sampling = sampling
    assert_joint_law(monkeypatch, target, draft, ([1, 0], [0]), 3, stop=2, top_p=0.8)


@pytest.mark.parametrize("sampling", ["chain", "argmax"])
@pytest.mark.parametrize("name", ["assistant_confidence_threshold", "conditional_confidence_threshold"])
def test_law_under_thresholds(monkeypatch, name, sampling):
    """The draft is sure of itself after token 0 and unsure after token 1."""
    target = small_target(2, seed=1)
    draft = small_draft(target)
    draft.generation_config.draft_sampling = sampling
    setattr(draft.generation_config, name, 0.5)
    with torch.no_grad():
        draft.markov_head.markov_w1.weight.copy_(torch.tensor([[1.0, 0.5], [-1.0, 0.5]]))
        draft.confidence_head.proj.weight.mul_(0.2)[0, -2] = 3.0
    assert_joint_law(monkeypatch, target, draft, ([1, 0], [1]), 3)


@pytest.mark.parametrize("sampling", ["chain", "argmax"])
def test_law_of_two_sequences_of_one_prompt(monkeypatch, sampling):
    target = small_target(2)
    draft = small_draft(target)
    draft.generation_config.draft_sampling = sampling
    assert_joint_law(monkeypatch, target, draft, ([1, 0],), 3, copies=2)


def test_num_return_sequences():
    target = tiny_target()
    draft = tiny_draft(target)
    options = dict(do_sample=True, max_new_tokens=9, num_return_sequences=3, return_dict_in_generate=True, output_scores=True)
    outputs = []
    for seed in (0, 0, 1):
        set_seed(seed)
        outputs.append(target.generate(**padded(*PROMPTS[:2]), **options, assistant_model=draft))
    assert outputs[0].sequences.shape == (6, 4 + 9) and len(outputs[0].scores) == 9 and outputs[0].scores[0].shape == (6, VOCAB)
    assert outputs[0].sequences[:, :4].tolist() == padded(*PROMPTS[:2])["input_ids"].repeat_interleave(3, dim=0).tolist()
    assert outputs[0].sequences.tolist() == outputs[1].sequences.tolist() != outputs[2].sequences.tolist()
    assert len({tuple(row) for row in outputs[0].sequences.tolist()}) == 6
    with pytest.raises(ValueError, match="num_return_sequences"):  # as plain refuses it
        target.generate(**padded(*PROMPTS[:2]), do_sample=False, num_return_sequences=2, max_new_tokens=4, assistant_model=draft)
