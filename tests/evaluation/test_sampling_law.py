"""What the sampling check notes of a text, and that it leaves no trace. Faults are planted in test_lossless.py."""

import copy

import pytest
import torch

from evaluation.tiny_pair import letter_pair
from hf_dspark.evaluation.sampling_law import SampledText, _laws_along, _note, _wrong_ending, check_sampling, sample
from hf_dspark.generation.candidates import Proposal

PROMPT = torch.tensor([[0, 1, 2]])
OPTIONS = dict(do_sample=True, temperature=0.5, max_new_tokens=6)


def test_a_draft_is_noted_up_to_its_first_replacement():
    law = torch.tensor([[0.1, 0.6, 0.3], [0.5, 0.2, 0.3], [0.2, 0.2, 0.6]])
    text = SampledText(PROMPT, ids=[2, 1, 2, 0])
    _note(text, 1, Proposal([1, 0, 2], law))
    # Token 1 was accepted, token 0 replaced by 2; the third draft was sent and not decided.
    assert text.draft_choices == {1: [1, 2, 0], 2: [0, 2, 1]}
    assert [place for _, place in text.draft_laws] == [0, 0, 0]
    assert text.draft_laws[0][0].tolist() == pytest.approx([0.6, 0.3, 0.1])


def test_an_argmax_draft_is_its_own_only_choice_and_has_no_law():
    text = SampledText(PROMPT, ids=[2, 1, 2, 0])
    _note(text, 3, Proposal([0, 1]))
    assert text.draft_choices == {3: [0]} and text.draft_laws == []


def test_the_laws_are_the_scores_of_plain_sampling():
    pair = letter_pair()
    torch.manual_seed(0)
    options = {**OPTIONS, "top_k": 5, "repetition_penalty": 1.2}
    plain = pair.target.generate(input_ids=PROMPT, **options, return_dict_in_generate=True, output_scores=True)
    text = SampledText(PROMPT, plain.sequences[0, 3:].tolist())
    top_ids, probs, slots = _laws_along(pair.target, text, options)
    expected = torch.softmax(torch.cat(plain.scores).double(), dim=-1)
    torch.testing.assert_close(probs, expected.gather(1, top_ids), rtol=1e-5, atol=1e-7)
    assert top_ids.gather(1, slots[:, None])[:, 0].tolist() == text.ids


def test_a_watched_text_is_generates_own():
    pair = letter_pair()
    torch.manual_seed(3)
    expected = pair.target.generate(input_ids=PROMPT, assistant_model=pair.draft, **OPTIONS)[0, 3:].tolist()
    torch.manual_seed(3)
    text = sample(pair.target, pair.draft, PROMPT, OPTIONS)
    assert text.ids == expected and 1 in text.draft_choices and text.draft_laws


def test_texts_end_where_they_should():
    target = letter_pair().target
    target.generation_config.eos_token_id = [5, 6]
    texts = [SampledText(PROMPT, ids) for ids in ([1, 2, 3, 4], [1, 5])]
    assert _wrong_ending(target, texts, 4) is None
    assert "goes on after a stop token: [1, 5, 2, 6]" in _wrong_ending(target, [SampledText(PROMPT, [1, 5, 2, 6])], 4)
    assert "neither a stop token nor the budget of 4" in _wrong_ending(target, [SampledText(PROMPT, [1, 2, 3])], 4)


def test_knobs_and_random_state_are_left_as_they_were():
    pair = letter_pair()
    pair.draft.generation_config.num_assistant_tokens = 2
    knobs, state = copy.deepcopy(pair.draft.generation_config.to_dict()), torch.get_rng_state()
    checks = list(check_sampling(pair.target, pair.draft, [PROMPT], 6, 3, 0.5, 0, str))
    assert [check.name for check in checks] == ["chain", "argmax", "cut by confidence"] and all(check.passed for check in checks)
    assert pair.draft.generation_config.to_dict() == knobs and torch.equal(torch.get_rng_state(), state)


def test_a_draft_without_confidence_head_has_two_ways():
    pair = letter_pair(enable_confidence_head=False)
    checks = list(check_sampling(pair.target, pair.draft, [PROMPT], 6, 1, 0.5, 0, str))
    assert [check.name for check in checks] == ["chain", "argmax"]
    assert "too few choices" in checks[0].words
