"""Drafting: the reference implementation's values, the best-of path for large vocabularies, thresholds, failures of the draft."""

import json

import pytest
import torch
from oracle import (
    ALL_KINDS,
    ScriptedDraft,
    assert_outputs_close,
    chain_law,
    compare_greedy,
    kinds_of_acceptance,
    largest_difference,
    right_with_probability,
    tiny_draft,
    tiny_target,
    walk_every_outcome,
    watch_proposals,
)
from reference import naive_draft
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GenerationMixin, set_seed

from hf_dspark import DSparkDraftModel, record_generation
from hf_dspark.generation import candidates
from hf_dspark.generation.candidates import DSparkCandidateGenerator
from hf_dspark.modeling.context_cache import ContextCache

PROMPT = torch.tensor([[5, 9, 3, 17]])


@pytest.fixture(params=["dspark_vanilla", "dflash"])
def reference(request, deepspec_fixtures):
    """(target, draft, expected.json, expected tensors, statistics of sampling) of the reference implementation."""
    folder = deepspec_fixtures / request.param
    target = AutoModelForCausalLM.from_pretrained(deepspec_fixtures / "target_qwen3", dtype=torch.float32).eval()
    draft = DSparkDraftModel.from_pretrained(folder, dtype=torch.float32).eval()
    return (
        target,
        draft,
        json.loads((folder / "expected.json").read_text()),
        load_file(folder / "expected.safetensors"),
        json.loads((folder / "sampled_T1.json").read_text()),
    )


def close(ours: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.allclose(ours, expected, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_first_round_of_each_prompt(reference):
    target, draft, expected, tensors, _ = reference
    draft.bind(target)
    for index, prompt in enumerate(expected["prompts"]):
        want = {name.split(".", 1)[1]: tensor for name, tensor in tensors.items() if name.startswith(f"round{index}.")}
        assert want["prompt_ids"].tolist() == [prompt]
        outputs = target(want["prompt_ids"], output_hidden_states=True)
        anchor = outputs.logits[:, -1].argmax(-1)
        assert anchor.tolist() == want["anchor_id"].tolist()
        features = draft.context_features([outputs.hidden_states[layer + 1] for layer in draft.config.target_layer_ids])
        assert features.shape[:2] == (1, len(prompt))
        # The reference keeps the layers' outputs side by side, before they are projected.
        side_by_side = torch.cat([outputs.hidden_states[layer + 1] for layer in draft.config.target_layer_ids], dim=-1)
        assert close(side_by_side, want["context_features"])
        block = torch.full((1, draft.config.block_size), draft.config.mask_token_id)
        block[0, 0] = anchor
        positions = torch.arange(len(prompt) + draft.config.block_size)[None]
        hidden = draft(block, features, positions, cache=ContextCache(draft.config.num_hidden_layers))
        assert close(hidden, want["block_hidden"]) and close(draft.base_logits(hidden), want["base_logits"])
        previous = torch.cat([anchor[:, None], want["draft_ids"][:, :-1]], dim=1)
        logits = want["base_logits"]
        if draft.markov_head is not None:
            logits = draft.base_logits(hidden) + draft.markov_head.bias(draft.markov_head.block_features(previous, hidden))
        assert close(logits, want["draft_logits"]) and logits.argmax(-1).tolist() == want["draft_ids"].tolist()
        if draft.confidence_head is not None:
            assert close(draft.confidence_head(hidden, draft.markov_head.markov_w1(previous)), want["confidence_logits"])


def test_first_proposal_of_each_prompt(reference, monkeypatch):
    target, draft, expected, tensors, _ = reference
    rounds = watch_proposals(monkeypatch)
    for index, prompt in enumerate(expected["prompts"]):
        rounds.clear()
        with record_generation():  # asks for the confidences
            target.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=16, eos_token_id=None, assistant_model=draft)
        _, proposal = rounds[0]
        assert proposal.ids == tensors[f"round{index}.draft_ids"][0].tolist()
        if draft.confidence_head is not None:
            stated = torch.tensor(proposal.confidence)
            assert close(stated, tensors[f"round{index}.confidence_logits"][0].sigmoid())


@pytest.mark.parametrize("threshold", ["0.0", "0.5", "0.8"])
def test_greedy_ids_and_rounds(reference, threshold):
    target, draft, expected, *_ = reference
    if threshold not in expected["thresholds"]:
        pytest.skip("the reference has no confidence head here")
    draft.generation_config.conditional_confidence_threshold = float(threshold)
    for prompt, want in zip(expected["prompts"], expected["thresholds"][threshold]):
        # The reference does not cap its last round, so that ours needs a larger budget to have the same rounds before.
        with record_generation() as report:
            ids = target.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=64 + 16, eos_token_id=None, assistant_model=draft)[
                0
            ].tolist()
        assert ids[: len(prompt) + 64] == want["output_ids"][: len(prompt) + 64]
        rounds = [(round_.tokens, round_.drafted, round_.accepted) for round_ in report.rounds]
        expected_rounds = list(zip(want["tokens_per_round"], want["draft_tokens_per_round"], want["accepted_drafts_per_round"]))
        assert rounds[: len(expected_rounds) - 1] == expected_rounds[:-1]


@pytest.mark.parametrize("threshold, runs", [("0.0", 5), ("0.5", 3)])
def test_sampled_tokens_per_round(reference, threshold, runs):
    """tau at temperature 1 within four standard errors of the reference's (60 texts; rounds of one text are no independent draws)."""
    target, draft, expected, _, sampled = reference
    if threshold not in sampled:
        pytest.skip("the reference has no confidence head here")
    set_seed(0)
    # The reference draws every position, also without a Markov head, where the default here is argmax.
    draft.generation_config.draft_sampling = "chain"
    draft.generation_config.conditional_confidence_threshold = float(threshold)
    counts = []
    for prompt in expected["prompts"] * runs:
        with record_generation() as report:
            target.generate(torch.tensor([prompt]), do_sample=True, top_k=0, max_new_tokens=48 + 8, eos_token_id=None, assistant_model=draft)
        # As in the reference, the round that reaches 48 tokens is whole and is the last one.
        ends = torch.tensor([round_.tokens for round_ in report.rounds]).cumsum(0) + 1
        last = int((ends < 48).sum())
        counts.append((ends[last].item() - 1, last + 1))
    tokens, rounds = torch.tensor(counts, dtype=torch.float64).unbind(1)
    tau = (tokens.sum() / rounds.sum()).item()
    deviation = (tokens - tau * rounds).std().item() / rounds.mean().item()
    assert abs(tau - sampled[threshold]["tokens_per_round"]) < 4 * deviation * (1 / len(tokens) + 1 / 60) ** 0.5


@pytest.mark.parametrize(
    "options",
    [
        dict(markov_head_type="vanilla"),
        dict(markov_head_type="gated"),
        dict(markov_head_type="rnn"),
        dict(confidence_head_with_markov=False),
        dict(enable_confidence_head=False),
        dict(draft_vocab_size=20),
    ],
    ids=str,
)
def test_every_round_drafts_what_the_naive_version_drafts_from_the_text_alone(monkeypatch, options):
    """Features that are appended round by round, cached keys and values, true positions: none of it shows in the drafts."""
    target = tiny_target()
    draft = talkative(tiny_draft(target, num_key_value_heads=1, **options))
    if draft.config.draft_vocab_size is not None:
        draft.d2t.copy_(torch.arange(20) * 2 + 3)  # the target's tokens 3, 6, 9, ..., 60
    rounds = watch_proposals(monkeypatch)
    padded, mask = torch.cat([torch.zeros(1, 2, dtype=torch.long), PROMPT], dim=1), torch.tensor([[0, 0, 1, 1, 1, 1]])
    for num_padded, inputs in ((0, dict(input_ids=PROMPT)), (2, dict(input_ids=padded, attention_mask=mask))):
        rounds.clear()
        with record_generation():  # asks for the confidences
            target.generate(**inputs, do_sample=False, max_new_tokens=14, assistant_model=draft)
        assert len(rounds) > 3
        for text, proposal in rounds:
            ids, confidence, _ = naive_draft(draft, target, text[num_padded:])
            assert proposal.ids == ids[: len(proposal.ids)]
            assert proposal.confidence == (None if confidence is None else pytest.approx(confidence[: len(proposal.ids)], abs=1e-4))


@pytest.fixture
def best_of_few(monkeypatch):
    """Makes 64 tokens a large vocabulary, of which the sequential stage sees the best six at each position."""
    monkeypatch.setattr(candidates, "LARGE_VOCABULARY", 8)
    monkeypatch.setattr(candidates, "_NUM_BEST", 6)


@pytest.mark.parametrize("options", [{}, dict(repetition_penalty=1.3), dict(no_repeat_ngram_size=2)], ids=str)
def test_large_vocabulary_in_greedy(best_of_few, options):
    target = tiny_target()
    result = compare_greedy(target, tiny_draft(target, ScriptedDraft), input_ids=PROMPT, max_new_tokens=40, **options)
    assert kinds_of_acceptance(result.report) == ALL_KINDS
    for head in ("vanilla", "gated", "rnn"):
        compare_greedy(target, talkative(tiny_draft(target, markov_head_type=head)), input_ids=PROMPT, max_new_tokens=20, **options)


def talkative(draft):
    """A draft with a Markov bias, which is zero in a new one."""
    torch.nn.init.normal_(draft.markov_head.markov_w2.weight)
    return draft


def test_large_vocabulary_drafts_what_the_whole_vocabulary_would_where_the_best_suffice(monkeypatch):
    """With as many best tokens as the vocabulary has, the two paths are the same."""
    target = tiny_target()
    draft = talkative(tiny_draft(target))
    reports = []
    for large in (10_000, 8):
        monkeypatch.setattr(candidates, "LARGE_VOCABULARY", large)
        monkeypatch.setattr(candidates, "_NUM_BEST", 64)
        reports.append(compare_greedy(target, draft, input_ids=PROMPT, max_new_tokens=30).report)
    assert [(r.drafted, r.accepted) for r in reports[0].rounds] == [(r.drafted, r.accepted) for r in reports[1].rounds]
    assert sum(r.accepted for r in reports[0].rounds) > 0 or reports[0].rounds


@pytest.mark.parametrize("options", [{}, dict(temperature=0.6, top_k=3), dict(top_p=0.8)], ids=str)
@pytest.mark.parametrize("sampling", ["chain", "argmax"])
def test_large_vocabulary_keeps_the_law(monkeypatch, sampling, options):
    monkeypatch.setattr(candidates, "LARGE_VOCABULARY", 3)
    monkeypatch.setattr(candidates, "_NUM_BEST", 2)
    target = tiny_target(2, vocab_size=4, hidden_size=8, num_attention_heads=1, num_key_value_heads=1, num_hidden_layers=2)
    draft = talkative(tiny_draft(target, block_size=2, target_layer_ids=[0]))
    draft.generation_config.draft_sampling = sampling
    options = dict(top_k=0) | options
    prompt = torch.tensor([[1, 2]])
    run = lambda: tuple(target.generate(prompt, do_sample=True, max_new_tokens=3, assistant_model=draft, **options)[0, 2:].tolist())  # noqa: E731
    with record_generation() as report:
        law = walk_every_outcome(monkeypatch, run)
    assert largest_difference(law, chain_law(target, prompt, 3, **options)) < 1e-5
    assert 0 < sum(round_.accepted for round_ in report.rounds) < sum(round_.drafted for round_ in report.rounds)


def test_large_vocabulary_of_a_draft_with_a_reduced_one(monkeypatch):
    monkeypatch.setattr(candidates, "LARGE_VOCABULARY", 3)
    monkeypatch.setattr(candidates, "_NUM_BEST", 2)
    target = tiny_target(2, vocab_size=5, hidden_size=8, num_attention_heads=1, num_key_value_heads=1, num_hidden_layers=2)
    draft = talkative(tiny_draft(target, block_size=2, target_layer_ids=[0], draft_vocab_size=4))
    draft.d2t.copy_(torch.tensor([0, 0, 1, 1]))  # the target's tokens 0, 1, 3 and 4
    prompt = torch.tensor([[1, 2]])
    run = lambda: tuple(target.generate(prompt, do_sample=True, top_k=0, max_new_tokens=3, assistant_model=draft)[0, 2:].tolist())  # noqa: E731
    law = walk_every_outcome(monkeypatch, run)
    assert largest_difference(law, chain_law(target, prompt, 3, top_k=0)) < 1e-5


@pytest.mark.parametrize(
    "survival, conditional, kept",
    [(0.0, 0.0, 3), (0.75, 0.0, 2), (0.0, 0.75, 3), (0.9, 0.0, 1), (0.0, 0.91, 0), (1.0, 0.0, 0), (0.729, 0.0, 3), (0.75, 0.91, 0), (0.82, 0.5, 1)],
)
def test_confident_prefix_by_hand(survival, conditional, kept):
    """c = (0.9, 0.9, 0.9): the survival is (0.9, 0.81, 0.729); the shorter prefix wins."""
    target = tiny_target()
    draft = tiny_draft(target)
    draft.generation_config.assistant_confidence_threshold = survival - 1e-9 if survival == 0.729 else survival
    draft.generation_config.conditional_confidence_threshold = conditional
    generator = DSparkCandidateGenerator(draft, target, target.generation_config, None)
    assert generator._confident_prefix([0.9, 0.9, 0.9]) == kept


def test_an_empty_proposal_is_an_ordinary_step_of_the_target():
    target = tiny_target()
    draft = tiny_draft(target)
    draft.generation_config.assistant_confidence_threshold = 1.0
    report = compare_greedy(target, draft, input_ids=PROMPT, max_new_tokens=12).report
    assert [(round_.tokens, round_.drafted) for round_ in report.rounds] == [(1, 0)] * 11 and report.tokens_per_round == 1.0


def test_drafts_continue_after_empty_proposals():
    """A draft that is asked again after rounds without a proposal has lost nothing of the context."""
    target = tiny_target()
    draft = tiny_draft(target, ScriptedDraft)

    def every_third(_, confidence):
        return len(confidence) if len(draft.drafted) % 3 == 0 else 0

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(DSparkCandidateGenerator, "_confident_prefix", every_third)
        report = compare_greedy(target, draft, input_ids=PROMPT, max_new_tokens=60).report
    assert kinds_of_acceptance(report) == ALL_KINDS and {round_.drafted for round_ in report.rounds} >= {0, 4}
    assert draft.widths[0] == PROMPT.shape[1] and draft.widths[1:] == [round_.tokens for round_ in report.rounds[: len(draft.widths) - 1]]


@pytest.mark.parametrize("sampling", [None, "argmax", "chain"])
@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampling"])
def test_the_generator_inside_the_loop_of_transformers(monkeypatch, sampling, do_sample):
    """transformers' own assisted loop, with the generator that the hook gives it."""
    target = tiny_target()
    draft = tiny_draft(target, ScriptedDraft)
    hooked, theirs = GenerationMixin._assisted_decoding, GenerationMixin._assisted_decoding.__wrapped__
    monkeypatch.setattr(draft.generation_config, "draft_sampling", sampling)
    # At this temperature the law is the argmax, so that sampling can be compared with plain decoding too.
    options = dict(do_sample=do_sample, max_new_tokens=40, return_dict_in_generate=True, output_scores=True, output_logits=True)
    if do_sample:
        options |= dict(top_k=1, temperature=0.7)
    plain = target.generate(PROMPT, **options)
    draft.script = right_with_probability(plain.sequences[0].tolist())
    draft.drafted.clear()
    monkeypatch.setattr(GenerationMixin, "_assisted_decoding", theirs)
    drafted = target.generate(PROMPT, assistant_model=draft, **options)
    their_rounds = list(draft.drafted)
    assert drafted.sequences.tolist() == plain.sequences.tolist()
    assert_outputs_close(drafted, plain)
    monkeypatch.setattr(GenerationMixin, "_assisted_decoding", hooked)
    draft.drafted.clear()
    target.generate(PROMPT, assistant_model=draft, **options)
    assert draft.drafted == their_rounds and len(their_rounds) < 30


@pytest.mark.parametrize("do_sample", [False, True])
def test_a_position_where_nothing_of_the_draft_is_allowed_ends_the_proposal(do_sample):
    target = tiny_target()
    draft = tiny_draft(target, draft_vocab_size=20)  # d2t of zeros: the first 20 tokens
    options = dict(prefix_allowed_tokens_fn=lambda batch_id, ids: [40] if len(ids) % 3 else list(range(20)), max_new_tokens=12)
    prompt = torch.tensor([[5, 9, 3, 17]])
    with record_generation() as report:
        ids = target.generate(prompt, assistant_model=draft, do_sample=do_sample, **options)
    assert report.requests[0].draft_failure is None and report.rounds
    assert ids[0, 4:].tolist() == [40 if length % 3 else ids[0, length].item() for length in range(4, 16)]
    if not do_sample:
        assert torch.equal(ids, target.generate(prompt, do_sample=False, **options))
