"""The law of sampled output equals the target's: every outcome is walked through generate(), with its exact probability."""

import pytest
import torch
from oracle import chain_law, largest_difference, tiny_draft, tiny_target, walk_every_outcome
from transformers import set_seed

from hf_dspark import DSparkDraftModel, record_generation
from hf_dspark.generation.acceptance import accept_or_replace, choose
from hf_dspark.generation.candidates import DSparkCandidateGenerator

PROMPT = torch.tensor([[1, 0]])


def small_target(vocab: int, seed: int = 0):
    shape = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=1, num_key_value_heads=1, head_dim=8)
    return tiny_target(seed, vocab_size=vocab, initializer_range=0.7, **shape)


def small_draft(target, block_size: int = 2, seed: int = 5, draft_class=DSparkDraftModel, **options):
    """A random draft of which no part is zero."""
    shape = dict(num_hidden_layers=1, num_attention_heads=1, intermediate_size=8, target_layer_ids=[0], markov_rank=2)
    draft = tiny_draft(target, draft_class, seed, block_size=block_size, **{**shape, **options})
    with torch.no_grad():
        for parameter in draft.parameters():
            if parameter.ndim > 1 or parameter.abs().sum() == 0:
                parameter.normal_(std=0.7)
    return draft


def assert_law_is_the_targets(monkeypatch, target, draft, num_tokens: int, first_token: int = 0, **options):
    """Walks every outcome of `num_tokens` new tokens, the first of which is given so that the walk spends its outcomes on rounds."""
    vocab = range(target.config.vocab_size)

    def allowed(_, ids: torch.Tensor) -> list[int]:
        return [first_token] if ids.shape[0] == PROMPT.shape[1] else list(vocab)

    options = dict(top_k=0, prefix_allowed_tokens_fn=allowed) | options
    expected = chain_law(target, PROMPT, num_tokens, **options)
    with record_generation() as report:

        def run() -> tuple:
            output = target.generate(PROMPT, do_sample=True, max_new_tokens=num_tokens, assistant_model=draft, **options)
            return tuple(output[0, PROMPT.shape[1] :].tolist())

        law = walk_every_outcome(monkeypatch, run)
    assert sum(expected.values()) == pytest.approx(1.0, abs=1e-5)
    assert sum(law.values()) == pytest.approx(1.0, abs=1e-5)
    assert largest_difference(law, expected) < 1e-5
    assert all(request.draft_failure is None for request in report.requests)
    return report


def assert_accepted_and_rejected(report):
    accepted = sum(round_.accepted for round_ in report.rounds)
    assert 0 < accepted < sum(round_.verified for round_ in report.rounds)


@pytest.mark.parametrize("sampling", ["chain", "argmax"])
@pytest.mark.parametrize("block_size", [1, 2, 3, 4])
def test_blocks(monkeypatch, block_size, sampling):
    target = small_target(2)
    draft = small_draft(target, block_size)
    draft.generation_config.draft_sampling = sampling
    num_tokens = {"argmax": block_size + 2, "chain": min(block_size + 2, 4)}[sampling]
    report = assert_law_is_the_targets(monkeypatch, target, draft, num_tokens)
    assert max(round_.drafted for round_ in report.rounds) == num_tokens - 2
    assert_accepted_and_rejected(report)


def test_a_whole_block_of_three_drawn_from_the_chain(monkeypatch):
    target = small_target(2, seed=2)
    report = assert_law_is_the_targets(monkeypatch, target, small_draft(target, 3), 5)
    assert {round_.accepted for round_ in report.rounds if round_.drafted == 3} == {0, 1, 2, 3}


def test_chain_of_two_over_three_tokens(monkeypatch):
    target = small_target(3)
    report = assert_law_is_the_targets(monkeypatch, target, small_draft(target), 4)
    assert {round_.accepted for round_ in report.rounds if round_.drafted == 2} == {0, 1, 2}


@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
@pytest.mark.parametrize("seed", [1, 2])
def test_heads(monkeypatch, head, seed):
    target = small_target(2, seed)
    assert_accepted_and_rejected(assert_law_is_the_targets(monkeypatch, target, small_draft(target, markov_head_type=head), 4))


@pytest.mark.parametrize("sampling", ["chain", "argmax", None])
def test_rank_0(monkeypatch, sampling):
    target = small_target(3)
    draft = small_draft(target, markov_rank=0, enable_confidence_head=False, confidence_head_with_markov=False)
    draft.generation_config.draft_sampling = sampling
    report = assert_law_is_the_targets(monkeypatch, target, draft, 3)
    assert_accepted_and_rejected(report)
    # Without a Markov head the default is the most likely tokens: nothing is drawn for the draft.
    assert (len(report.requests) < 12) == (sampling != "chain")


@pytest.mark.parametrize("sampling", ["chain", "argmax"])
def test_reduced_draft_vocabulary(monkeypatch, sampling):
    target = small_target(4)
    draft = small_draft(target, draft_vocab_size=2)
    draft.d2t.copy_(torch.tensor([1, 2]))  # the target's tokens 1 and 3
    draft.generation_config.draft_sampling = sampling
    report = assert_law_is_the_targets(monkeypatch, target, draft, 4 if sampling == "argmax" else 3)
    assert_accepted_and_rejected(report)


PROCESSORS = {
    "temperature": dict(temperature=0.6),
    "high-temperature": dict(temperature=1.7),
    "top-k": dict(top_k=2),
    "top-p": dict(top_p=0.75),
    "min-p": dict(min_p=0.3),
    "together": dict(temperature=0.8, top_k=3, top_p=0.9, min_p=0.05),
    "repetition": dict(repetition_penalty=1.5),
    "no-repeat": dict(no_repeat_ngram_size=2),
    "bad-words": dict(bad_words_ids=[[2, 1]]),
}


@pytest.mark.parametrize("sampling", ["chain", "argmax"])
@pytest.mark.parametrize("name", PROCESSORS)
def test_processors(monkeypatch, name, sampling):
    target = small_target(4, seed=3)
    draft = small_draft(target)
    draft.generation_config.draft_sampling = sampling
    assert_law_is_the_targets(monkeypatch, target, draft, 3, **PROCESSORS[name])


def test_top_k_over_two_drafts(monkeypatch):
    """The two best tokens of the draft are not the target's everywhere, so that drafts of no chance at all are met."""
    target = small_target(4, seed=4)
    assert_accepted_and_rejected(assert_law_is_the_targets(monkeypatch, target, small_draft(target), 4, top_k=2))


@pytest.mark.parametrize("name", ["assistant_confidence_threshold", "conditional_confidence_threshold"])
@pytest.mark.parametrize("sampling", ["chain", "argmax"])
def test_thresholds(monkeypatch, name, sampling):
    """The draft is sure of itself after token 0 and unsure after token 1, so that cuts depend on the tokens drawn before."""
    target = small_target(2, seed=1)
    draft = small_draft(target)
    draft.generation_config.draft_sampling = sampling
    setattr(draft.generation_config, name, 0.5)
    with torch.no_grad():
        draft.markov_head.markov_w1.weight.copy_(torch.tensor([[1.0, 0.5], [-1.0, 0.5]]))
        draft.confidence_head.proj.weight.mul_(0.2)[0, -2] = 3.0
    widths = set()
    for anchor in (0, 1):
        report = assert_law_is_the_targets(monkeypatch, target, draft, 4, first_token=anchor)
        widths |= {request.rounds[0].drafted for request in report.requests}
    assert widths == {0, 1, 2} if sampling == "chain" else len(widths) > 1
    for round_ in report.rounds:
        survival = torch.tensor(round_.confidence or []).cumprod(0)
        kept = survival if name == "assistant_confidence_threshold" else torch.tensor(round_.confidence or [])
        assert (kept >= 0.5).all()


def test_tokens_after_a_stop_token_are_nobodys(monkeypatch):
    """With a stop token the law is the target's over texts of different lengths."""
    target, options = small_target(3, seed=1), dict(top_k=0, eos_token_id=2, pad_token_id=2)

    def stopping_law(prompt, budget):
        if budget == 0:
            return {(): 1.0}
        step = chain_law(target, prompt, 1, **options)
        law = {}
        for (token,), share in step.items():
            rest = {(): 1.0} if token == 2 else stopping_law(torch.cat([prompt, torch.tensor([[token]])], dim=1), budget - 1)
            law |= {(token, *tokens): share * probability for tokens, probability in rest.items()}
        return law

    draft = small_draft(target, mask_token_id=1)
    run = lambda: tuple(target.generate(PROMPT, do_sample=True, max_new_tokens=3, assistant_model=draft, **options)[0, 2:].tolist())  # noqa: E731
    assert largest_difference(walk_every_outcome(monkeypatch, run), stopping_law(PROMPT, 3)) < 1e-5


# The counterexample of the paper's appendix A, over the tokens A = 0 and B = 1.
TARGET_LAW = (0.7, 0.3)
STEPS_PER_SECOND = {1: 1.0, 2: 0.5, 3: 0.45}


class EvenDraft(DSparkDraftModel):
    """Draft law (0.5, 0.5); c_1 = 0.8, c_2 = 0.9 after A and 0 after B."""

    def base_logits(self, hidden):
        return hidden.new_zeros(hidden.shape[0], 2)


class StatedConfidence(torch.nn.Module):
    with_markov = True

    def forward(self, hidden, previous_embedding):
        after_a = previous_embedding[:, 0] > 0
        stated = [0.8, 0.9 if len(after_a) > 1 and after_a[1] else 1e-9]
        return torch.logit(torch.tensor(stated[: len(hidden)]))


def even_pair():
    target = small_target(2)
    with torch.no_grad():
        # Equal embeddings make every hidden state the same h; the head's rows are then chosen for the law wanted.
        target.model.embed_tokens.weight[1] = target.model.embed_tokens.weight[0]
        hidden = target.model(PROMPT).last_hidden_state[0, -1]
        target.lm_head.weight.copy_(torch.tensor(TARGET_LAW).log()[:, None] * hidden / hidden.pow(2).sum())
    draft = small_draft(target, 2, draft_class=EvenDraft, mask_token_id=1)
    with torch.no_grad():
        draft.markov_head.markov_w2.weight.zero_()
        draft.markov_head.markov_w1.weight.copy_(torch.tensor([[1.0, 0.0], [-1.0, 0.0]]))
    draft.confidence_head = StatedConfidence()
    draft.generation_config.conditional_confidence_threshold = 0.5
    return target, draft


def throughput(confidence: list[float], num_drafts: int) -> float:
    """Theta of algorithm 1 for one request."""
    survival, tokens = 1.0, 1.0
    for conditional in confidence[:num_drafts]:
        survival *= conditional
        tokens += survival
    return tokens * STEPS_PER_SECOND[1 + num_drafts]


def looking_back(_, confidence: list[float]) -> int:
    return max(range(len(confidence) + 1), key=lambda drafts: throughput(confidence, drafts))


def stopping_early(_, confidence: list[float]) -> int:
    drafts = 0
    while drafts < len(confidence) and throughput(confidence, drafts + 1) > throughput(confidence, drafts):
        drafts += 1
    return drafts


@pytest.mark.parametrize(
    "cut, expected", [(None, 0.7), (stopping_early, 0.7), (looking_back, 0.85)], ids=["threshold", "scheduler", "scheduler-that-looks-back"]
)
def test_counterexample_of_appendix_a(monkeypatch, cut, expected):
    target, draft = even_pair()
    if cut is not None:
        monkeypatch.setattr(DSparkCandidateGenerator, "_confident_prefix", cut)
    first_is_b = lambda _, ids: [1] if ids.shape[0] == 2 else [0, 1]  # noqa: E731
    options = dict(do_sample=True, top_k=0, max_new_tokens=4, assistant_model=draft, prefix_allowed_tokens_fn=first_is_b)
    law = walk_every_outcome(monkeypatch, lambda: tuple(target.generate(PROMPT, **options)[0, 2:].tolist()))
    assert sum(probability for tokens, probability in law.items() if tokens[1] == 0) == pytest.approx(expected, abs=1e-5)


def test_a_seed_repeats_a_run():
    target = tiny_target()
    draft = small_draft(target, 4)
    outputs = []
    for seed in (0, 0, 1):
        set_seed(seed)
        outputs.append(target.generate(PROMPT, do_sample=True, max_new_tokens=30, assistant_model=draft).tolist())
    assert outputs[0] == outputs[1] != outputs[2]


def test_sampling_returns_scores_and_logits_of_the_text():
    target = tiny_target()
    draft = small_draft(target, 4)
    options = dict(return_dict_in_generate=True, output_scores=True, output_logits=True)
    outputs = target.generate(PROMPT, do_sample=True, temperature=0.7, max_new_tokens=30, assistant_model=draft, **options)
    expected = target(outputs.sequences).logits[0, 1:-1]
    assert torch.allclose(torch.cat(outputs.logits), expected, atol=1e-4)
    finite = torch.cat(outputs.scores).isfinite()  # top-k, by transformers' default
    assert torch.allclose(torch.cat(outputs.scores)[finite], (expected / 0.7)[finite], atol=1e-3)
    assert finite.gather(1, outputs.sequences[0, 2:, None]).all()


def test_choose_draws_by_weight():
    torch.manual_seed(0)
    drawn = choose(torch.tensor([[1.0, 0.0, 3.0]]).expand(4000, 3))
    assert drawn.shape == (4000,) and drawn.dtype == torch.long
    shares = torch.bincount(drawn, minlength=3) / 4000
    assert shares[1] == 0 and abs(shares[2].item() - 0.75) < 4 * (0.75 * 0.25 / 4000) ** 0.5


def accepted_law(monkeypatch, target_law, draft_law, one_hot=False) -> list[float]:
    """Exact law of one position, the draft drawn from `draft_law` (or its argmax)."""
    total = [0.0] * len(target_law)
    scores, law = torch.tensor([target_law]).log(), torch.tensor(draft_law)
    drafts = [(int(law.argmax()), 1.0)] if one_hot else list(enumerate(draft_law))
    for draft_id, share in drafts:
        if share > 0:

            def run(draft_id=draft_id):
                return (accept_or_replace(scores, draft_id, None if one_hot else law),)

            for (token,), probability in walk_every_outcome(monkeypatch, run).items():
                total[token] += share * probability
    return total


@pytest.mark.parametrize("one_hot", [False, True], ids=["drawn", "argmax"])
@pytest.mark.parametrize(
    "target_law, draft_law",
    [
        ((0.2, 0.3, 0.5), (0.6, 0.1, 0.3)),
        ((0.0, 0.3, 0.7), (0.9, 0.1, 0.0)),  # a draft without any chance
        ((1.0, 0.0, 0.0), (0.0, 0.5, 0.5)),
        ((0.2, 0.3, 0.5), (0.2, 0.3, 0.5)),  # equal laws: nothing is rejected
    ],
)
def test_one_position_by_hand(monkeypatch, target_law, draft_law, one_hot):
    assert accepted_law(monkeypatch, target_law, draft_law, one_hot) == pytest.approx(target_law, abs=1e-6)


def test_a_zero_residual_falls_back_to_the_targets_law(monkeypatch):
    """Rounding can reject where both laws are the same; there is nothing positive to draw from then."""
    seen = []

    def scripted(weights, generator=None):
        seen.append(weights[0].tolist())
        return torch.tensor([0])

    monkeypatch.setattr("hf_dspark.generation.acceptance.choose", scripted)
    assert accept_or_replace(torch.tensor([[0.5, 0.5]]).log(), 1, torch.tensor([0.5, 0.5])) == 0
    assert seen[1] == pytest.approx([0.5, 0.5])
