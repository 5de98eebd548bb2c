"""Positions: no drafted row beyond the target's context, no forward across a border of its rope, the text always plain decoding's."""

from functools import partial

import pytest
import torch
from oracle import VOCAB, ScriptedDraft, build, compare_greedy, right_for, right_with_probability, spy, tiny_draft
from test_batches import compare_rows, padded
from test_steps import COMMON, MIXED_LAYERS
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    StoppingCriteria,
    StoppingCriteriaList,
)

from hf_dspark import generate_many, record_generation
from hf_dspark.generation import batches, steps
from hf_dspark.generation.candidates import DSparkCandidateGenerator
from hf_dspark.generation.context_limits import ContextLimits

CONTEXT, BORDER = 32, 24
PROMPT = [5, 9, 3, 17, 22, 8]
LONGROPE = dict(
    rope_type="longrope", rope_theta=10000.0, short_factor=[1.0] * 4, long_factor=[4.0] * 4, original_max_position_embeddings=BORDER, factor=8.0
)
DYNAMIC = dict(rope_type="dynamic", rope_theta=10000.0, factor=4.0)
DEFAULT = dict(rope_type="default", rope_theta=10000.0)


def learned():
    return build(GPT2LMHeadModel, GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=4, n_head=4, n_positions=CONTEXT, initializer_range=0.5,
                                             bos_token_id=None, eos_token_id=None))  # fmt: skip


def llama(rope=DEFAULT, context=256):
    return build(LlamaForCausalLM, LlamaConfig(**COMMON | dict(max_position_embeddings=context), rope_parameters=dict(rope)))


def gemma3():
    ropes = {"full_attention": LONGROPE, "sliding_attention": DEFAULT}
    own = dict(head_dim=8, sliding_window=6, layer_types=MIXED_LAYERS, query_pre_attn_scalar=8, rope_parameters=ropes)
    target = build(Gemma3ForCausalLM, Gemma3TextConfig(**COMMON, **own))
    with torch.no_grad():
        target.get_input_embeddings().weight.mul_(0.05)
    return target


def phi3(sliding_window=None):
    """Computes the whole text anew when it is one token longer than the border."""
    own = dict(original_max_position_embeddings=BORDER, rope_parameters=dict(LONGROPE), sliding_window=sliding_window)
    return build(Phi3ForCausalLM, Phi3Config(**COMMON | dict(pad_token_id=0), **own))


ROPES = {
    "longrope": partial(llama, LONGROPE),
    "longrope of one type of layer": gemma3,
    "Phi-3": phi3,
    "Phi-3, sliding window": partial(phi3, sliding_window=6),
    "dynamic": partial(llama, DYNAMIC, CONTEXT),
}
SCRIPTS = {
    "right": lambda text, vocab: right_with_probability(text, 1.0, vocab=vocab),
    "0.7": lambda text, vocab: right_with_probability(text, vocab=vocab),
    "wrong": lambda text, vocab: right_for(text, 0, vocab),
}


class StopAt(StoppingCriteria):
    def __init__(self, length: int):
        self.length = length

    def __call__(self, input_ids, scores, **kwargs):
        return torch.full((input_ids.shape[0],), input_ids.shape[1] >= self.length)


@pytest.fixture
def positions(monkeypatch) -> list[tuple[int, int]]:
    """(first, last) position of the rows of every verification."""
    noted = []

    def note(target, input_ids, draft_ids, model_kwargs, overrides):
        first = int(model_kwargs["position_ids"][0, -1])
        noted.append((first, first + len(draft_ids)))

    spy(monkeypatch, steps, "verify", note)
    return noted


# By hand


@pytest.mark.parametrize(
    "limits, num_positions, expected",
    [
        (ContextLimits(None, (), False), 1000, 7),
        (ContextLimits(32, (), False), 20, 7),
        (ContextLimits(32, (), False), 29, 3),  # the anchor at 28, drafts at 29, 30 and 31
        (ContextLimits(32, (), False), 32, 0),
        (ContextLimits(32, (), False), 50, 0),
        (ContextLimits(256, (24,), False), 22, 2),
        (ContextLimits(256, (24,), False), 24, 0),
        (ContextLimits(256, (24,), False), 25, 7),
        (ContextLimits(256, (24, 28), False), 26, 2),
        (ContextLimits(32, (), True), 33, 0),
    ],
)
def test_num_drafts_by_hand(limits, num_positions, expected):
    assert limits.num_drafts(num_positions, 7) == expected


def test_what_a_config_says():
    assert ContextLimits.of(learned().config) == ContextLimits(CONTEXT, (), False)
    assert ContextLimits.of(llama().config) == ContextLimits(256, (), False)
    assert ContextLimits.of(llama(DYNAMIC, CONTEXT).config) == ContextLimits(CONTEXT, (), True)
    for make in (partial(llama, LONGROPE), gemma3, phi3):
        assert ContextLimits.of(make().config) == ContextLimits(256, (BORDER,), False)


# The end of the context


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("length", [CONTEXT - 2, CONTEXT - 1, CONTEXT, CONTEXT + 1])
def test_a_text_that_ends_near_the_end_of_learned_positions(length, script):
    """Plain decoding finishes, with a budget far beyond the context: so does drafted decoding, alone, in a batch and in a queue."""
    target = learned()
    draft = tiny_draft(target, ScriptedDraft)
    fresh = lambda *_: dict(stopping_criteria=StoppingCriteriaList([StopAt(length)]))  # noqa: E731
    result = compare_greedy(
        target, draft, fresh, make_script=lambda text, vocab: SCRIPTS[script](text, vocab), input_ids=torch.tensor([PROMPT]), max_new_tokens=100
    )
    text = result.plain.sequences[0].tolist()
    assert len(text) == length
    compare_rows(target, draft, padded(PROMPT, PROMPT), fresh, max_new_tokens=100)
    for own in (None, draft):
        for completion in generate_many(target, own, [PROMPT] * 2, do_sample=False, max_new_tokens=100, show_progress=False, **fresh()):
            assert completion.error is None and completion.output[0].tolist() == text


@pytest.mark.parametrize("num_padded", [0, 5])
def test_padding_takes_no_position(num_padded):
    target = learned()
    ids = torch.tensor([[0] * num_padded + PROMPT])
    mask = torch.tensor([[0] * num_padded + [1] * len(PROMPT)])
    right = lambda text, vocab: right_with_probability(text, 1.0, vocab=vocab)  # noqa: E731
    options = dict(input_ids=ids, attention_mask=mask, max_new_tokens=CONTEXT + 1 - len(PROMPT), make_script=right)
    rounds = compare_greedy(target, tiny_draft(target, ScriptedDraft), **options).report.rounds
    assert all(round_.drafted == 4 for round_ in rounds[:-2])


def test_positions_that_start_elsewhere():
    target = learned()
    places = torch.arange(12, 12 + len(PROMPT))[None]
    fresh = lambda: dict(stopping_criteria=StoppingCriteriaList([StopAt(CONTEXT - 12)]))  # noqa: E731
    right = lambda text, vocab: right_with_probability(text, 1.0, vocab=vocab)  # noqa: E731
    inputs = dict(input_ids=torch.tensor([PROMPT]), position_ids=places, max_new_tokens=100)
    compare_greedy(target, tiny_draft(target, ScriptedDraft), fresh, make_script=right, **inputs)


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_rotary_target_past_its_context(positions, script):
    target = llama(context=CONTEXT)
    draft = tiny_draft(target, ScriptedDraft)
    compare_greedy(target, draft, make_script=SCRIPTS[script], input_ids=torch.tensor([PROMPT]), max_new_tokens=50)
    assert any(first < last for first, last in positions) and all(last < CONTEXT or first == last for first, last in positions)
    compare_rows(target, draft, padded(PROMPT, PROMPT[:2]), max_new_tokens=50)


def test_a_text_that_outgrows_learned_positions_says_so():
    target = learned()
    draft = tiny_draft(target)
    with pytest.raises(IndexError):
        target.generate(torch.tensor([PROMPT]), do_sample=False, max_new_tokens=60)
    for inputs in (padded(PROMPT), padded(PROMPT, PROMPT)):
        with pytest.raises(ValueError, match=r"33 tokens.*context of GPT2LMHeadModel holds 32.*max_new_tokens"):
            target.generate(**inputs, do_sample=False, max_new_tokens=60, assistant_model=draft)
    with pytest.raises(ValueError, match=r"40 tokens.*holds 32"):
        target.generate(torch.ones(1, 40, dtype=torch.long), max_new_tokens=4, assistant_model=draft)
    requests = [PROMPT, {"input_ids": PROMPT, "max_new_tokens": 4}]
    for own in (None, draft):
        failed, fine = generate_many(target, own, requests, do_sample=False, max_new_tokens=60, show_progress=False)
        assert isinstance(failed.error, ValueError) and "holds 32" in str(failed.error) and fine.error is None


def test_other_errors_stay_as_they_are():
    error = RuntimeError("CUDA out of memory")
    assert ContextLimits(32, (), False).explained(error, 40, "T") is error
    inside = IndexError("list index out of range")
    assert ContextLimits(32, (), False).explained(inside, 32, "T") is inside and ContextLimits(None, (), False).explained(inside, 40, "T") is inside


def test_candidates_of_transformers_own_loop_stay_within_the_context():
    target = llama(context=16)
    draft = tiny_draft(target)
    target.generation_config.max_length = 100
    cases = [(14, 2), (15, 1), (16, 0), (17, 0)]
    for length, expected in cases:
        generator = DSparkCandidateGenerator(draft, target, target.generation_config, None)
        ids = torch.arange(length)[None]
        outputs = target(ids[:, :-1], use_cache=True, **generator.model_kwargs_overrides)
        candidates, _ = generator.get_candidates(ids, {}, outputs, False, 0)
        assert candidates.shape[1] - length == expected


# Ropes that depend on the length


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("kind", ROPES)
def test_a_text_across_the_border(positions, kind, script):
    target = ROPES[kind]()
    draft = tiny_draft(target, ScriptedDraft)
    border = CONTEXT if kind == "dynamic" else BORDER
    # Rounding differs by more at steps of near ties.
    result = compare_greedy(target, draft, make_script=SCRIPTS[script], tolerance=1e-3, input_ids=torch.tensor([PROMPT]), max_new_tokens=50)
    assert len(set(result.new_tokens)) > 5
    drafted = [(first, last) for first, last in positions if first < last]
    # Rows up to position border - 1 are of the short rope, in the target's words: a text of `border` tokens.
    assert all(last < border or first >= border for first, last in drafted) and any(last < border for _, last in drafted)
    assert any(first >= border for first, _ in drafted) == (kind != "dynamic")


@pytest.mark.parametrize("kind", ROPES)
def test_a_padded_text_across_the_border(kind):
    target = ROPES[kind]()
    inputs = {name: rows[:1] for name, rows in padded(PROMPT, [0] * (len(PROMPT) + 3)).items()}
    for script in SCRIPTS.values():
        compare_greedy(target, tiny_draft(target, ScriptedDraft), make_script=script, tolerance=1e-3, max_new_tokens=50, **inputs)


def test_a_text_computed_anew_keeps_the_draft_s_context():
    """At the border Phi-3 returns hidden states of the whole text, of which the draft reads the new rows."""
    target = phi3()
    seen = []

    class Watched(ScriptedDraft):
        def context_features(self, layers):
            seen.append((layers[0].shape[1], layers[0][0, -1]))
            return super().context_features(layers)

    draft = tiny_draft(target, Watched)
    right = lambda text, vocab: right_with_probability(text, 1.0, vocab=vocab)  # noqa: E731
    text = compare_greedy(target, draft, make_script=right, input_ids=torch.tensor([PROMPT]), max_new_tokens=50).plain.sequences
    widths = [width for width, _ in seen]
    assert sum(widths[:1]) == len(PROMPT) and max(widths[1:]) <= 5
    ends = torch.tensor(widths).cumsum(0).tolist()
    after = next(index for index, end in enumerate(ends) if end > BORDER)
    expected = target(text[:, : ends[after]], output_hidden_states=True).hidden_states[draft.config.target_layer_ids[0] + 1]
    assert torch.allclose(seen[after][1], expected[0, -1], atol=1e-3)


@pytest.mark.parametrize("drafted", [False, True], ids=["plain", "drafted"])
@pytest.mark.parametrize("kind", [kind for kind in ROPES if kind != "dynamic"])
def test_a_long_neighbour_changes_nothing(monkeypatch, kind, drafted):
    """Short texts beside a prompt beyond the border, in a queue."""
    monkeypatch.setattr(batches, "_warned", set())
    target = ROPES[kind]()
    draft = tiny_draft(target) if drafted else None
    requests = [{"input_ids": ids, "max_new_tokens": 10} for ids in ([5, 9, 3], [17, 4], [8, 8, 2, 1])]
    requests += [{"input_ids": [(7 * i) % 61 + 1 for i in range(CONTEXT - 1)], "max_new_tokens": 10}]
    expected = [target.generate(torch.tensor([own["input_ids"]]), do_sample=False, max_new_tokens=10)[0].tolist() for own in requests]
    completions = list(generate_many(target, draft, requests, do_sample=False, show_progress=False))
    assert [completion.error for completion in completions] == [None] * 4
    assert [completion.output[0].tolist() for completion in completions] == expected


@pytest.mark.parametrize("kind", [kind for kind in ROPES if kind != "dynamic"])
def test_a_batch_across_the_border(kind):
    target = ROPES[kind]()
    compare_rows(target, tiny_draft(target, ScriptedDraft), padded(PROMPT, PROMPT[:2], [4] * 30), tolerance=1e-3, max_new_tokens=30)


def test_texts_of_a_dynamic_rope_keep_apart():
    """The rope module keeps the length of the longest text, so that even taking turns changes a text beyond the context."""
    target = llama(DYNAMIC, CONTEXT)
    draft = tiny_draft(target, ScriptedDraft)
    fitting = CONTEXT - len(PROMPT)
    target.generate(torch.tensor([PROMPT]), do_sample=False, max_new_tokens=60)  # the module now keeps a longer one
    compare_rows(target, draft, padded(PROMPT, PROMPT[:3]), max_new_tokens=fitting)
    with pytest.raises(ValueError, match=r"33 tokens.*'dynamic'.*beyond 32.*max_new_tokens"):
        target.generate(**padded(PROMPT, PROMPT[:3]), max_new_tokens=fitting + 1, assistant_model=draft)
    requests = [PROMPT, {"input_ids": PROMPT, "max_new_tokens": 60}]
    fine, failed = generate_many(target, draft, requests, do_sample=False, max_new_tokens=fitting, show_progress=False)
    assert fine.output.tolist() == target.generate(torch.tensor([PROMPT]), do_sample=False, max_new_tokens=fitting).tolist()
    assert isinstance(failed.error, ValueError) and "request 1" in str(failed.error) and "dynamic" in str(failed.error)


def test_texts_that_stay_within_the_border_are_packed(monkeypatch, caplog):
    monkeypatch.setattr(batches, "_warned", set())
    target, packed = llama(LONGROPE), []
    draft = tiny_draft(target)
    spy(monkeypatch, steps, "packed_forward", lambda *_: packed.append(1))
    with record_generation(), caplog.at_level("WARNING", "hf_dspark"):
        target.generate(**padded(PROMPT, PROMPT), max_new_tokens=BORDER - len(PROMPT), assistant_model=draft)
        assert packed and not caplog.messages
        packed.clear()
        target.generate(**padded(PROMPT, PROMPT), max_new_tokens=BORDER - len(PROMPT) + 1, assistant_model=draft)
    assert not packed and "longrope" in caplog.messages[0]
