"""The knobs in draft.generation_config: defaults by head, every validation, when they are read."""

import math

import pytest
import torch
from oracle import tiny_draft, tiny_target
from transformers import GenerationConfig

from hf_dspark import record_generation
from hf_dspark.generation.options import DraftOptions, draft_options

PROMPT = torch.tensor([[3, 14, 15, 9, 26]])


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.fixture
def draft(target):
    return tiny_draft(target)


def test_defaults_cut_nothing_and_draft_the_whole_block(draft):
    assert draft_options(draft) == DraftOptions(4, 0.0, 0.0, "chain", False)


@pytest.mark.parametrize(("rank", "expected"), [(4, "chain"), (0, "argmax")])
def test_sampling_by_default_follows_the_heads(target, rank, expected):
    draft = tiny_draft(target, markov_rank=rank, enable_confidence_head=False)
    assert draft_options(draft).draft_sampling == expected
    for asked in ("chain", "argmax"):
        draft.generation_config.draft_sampling = asked
        assert draft_options(draft).draft_sampling == asked


ACCEPTED = [
    ("num_assistant_tokens", [None, 1, 4], "num_assistant_tokens", {None: 4}),
    ("assistant_confidence_threshold", [0.0, 0.25, 1, 1.0, None], "survival_threshold", {None: 0.0}),
    ("conditional_confidence_threshold", [0, 0.5, 1.0, None], "conditional_threshold", {None: 0.0}),
    ("draft_sampling", ["chain", "argmax", None], "draft_sampling", {None: "chain"}),
    ("raise_on_draft_failure", [True, False], "raise_on_draft_failure", {}),
    ("num_assistant_tokens_schedule", [None, "constant"], "num_assistant_tokens", {None: 4, "constant": 4}),
]


@pytest.mark.parametrize(
    ("name", "value", "option", "read"),
    [(name, value, option, table.get(value, value)) for name, values, option, table in ACCEPTED for value in values],
)
def test_values_that_are_read(draft, name, value, option, read):
    setattr(draft.generation_config, name, value)
    assert getattr(draft_options(draft), option) == read


REFUSED = {
    "num_assistant_tokens": [0, -1, 5, 2.0, "2", True, math.nan, [2]],
    "assistant_confidence_threshold": [-0.1, 1.1, math.nan, math.inf, "0.5", True, False, [0.5], ""],
    "conditional_confidence_threshold": [-0.1, 1.0001, math.nan, "0.5", True, False],
    "draft_sampling": ["greedy", "", 0, True, ["chain"]],
    "raise_on_draft_failure": [1, 0, "yes", None],
    "num_assistant_tokens_schedule": ["heuristic", "heuristic_transient", 1],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in REFUSED.items() for value in values])
def test_values_that_cannot_be_meant_are_refused_with_name_and_value(draft, name, value):
    setattr(draft.generation_config, name, value)
    with pytest.raises(ValueError) as refusal:
        draft_options(draft)
    assert f"draft.generation_config.{name}" in str(refusal.value) and repr(value) in str(refusal.value)


def test_more_tokens_than_the_block_has_slots_says_how_many_there_are(draft):
    draft.generation_config.num_assistant_tokens = 7
    with pytest.raises(ValueError, match=r"between 1 and the draft's block_size 4 .*got 7"):
        draft_options(draft)


@pytest.mark.parametrize("name", ["assistant_confidence_threshold", "conditional_confidence_threshold"])
def test_a_threshold_needs_a_confidence_head(target, name):
    draft = tiny_draft(target, enable_confidence_head=False)
    setattr(draft.generation_config, name, 0.0)
    assert draft_options(draft)
    setattr(draft.generation_config, name, 0.3)
    with pytest.raises(ValueError, match=rf"{name}=0\.3 needs a confidence head"):
        draft_options(draft)


@pytest.mark.parametrize(
    ("misspelt", "meant"),
    [
        ("assistant_confidence_treshold", "assistant_confidence_threshold"),
        ("conditional_confidence_threshhold", "conditional_confidence_threshold"),
        ("num_assistant_token", "num_assistant_tokens"),
        ("draft_sampler", "draft_sampling"),
        ("raise_on_failure", "raise_on_draft_failure"),
    ],
)
def test_a_misspelt_knob_is_named_with_the_true_one(draft, misspelt, meant):
    setattr(draft.generation_config, misspelt, 0.5)
    with pytest.raises(ValueError, match=rf"{misspelt!r} \(value 0\.5\); did you mean {meant!r}"):
        draft_options(draft)


def test_an_unknown_knob_without_a_likeness_is_named(draft):
    draft.generation_config.xyzzy = 3
    with pytest.raises(ValueError, match=r"unknown option 'xyzzy' \(value 3\)$"):
        draft_options(draft)


def test_transformers_own_options_beside_the_knobs_are_no_error(draft):
    """A generation config copied from the target's."""
    draft.generation_config = GenerationConfig(temperature=0.6, top_k=20, eos_token_id=[1, 2], do_sample=True, pad_token_id=0, max_new_tokens=7)
    assert draft_options(draft) == DraftOptions(4, 0.0, 0.0, "chain", False)


def test_knobs_are_read_and_checked_at_every_generate(target, draft):
    for tokens in (1, 3):
        draft.generation_config.num_assistant_tokens = tokens
        with record_generation() as report:
            target.generate(PROMPT, assistant_model=draft, max_new_tokens=12)
        assert max(round_.drafted for round_ in report.rounds) == tokens
    draft.generation_config.num_assistant_tokens = 5
    with pytest.raises(ValueError, match=r"num_assistant_tokens must lie between 1 and .* 4"):
        target.generate(PROMPT, assistant_model=draft, max_new_tokens=12)
    draft.generation_config.num_assistant_tokens = None
    draft.generation_config.assistant_confidence_treshold = 0.5
    with pytest.raises(ValueError, match=r"assistant_confidence_treshold"):
        target.generate(PROMPT, assistant_model=draft, max_new_tokens=12)


def test_generating_changes_no_knob(target, draft):
    draft.generation_config.assistant_confidence_threshold = 0.2
    before, targets = draft.generation_config.to_dict(), target.generation_config.to_dict()
    target.generate(PROMPT, assistant_model=draft, max_new_tokens=8, do_sample=True)
    assert draft.generation_config.to_dict() == before and target.generation_config.to_dict() == targets


@pytest.mark.parametrize("value", [None, {"num_assistant_tokens": 2}], ids=str)
def test_something_else_in_place_of_the_knobs_is_refused(draft, value):
    draft.generation_config = value
    with pytest.raises(ValueError, match="must be a GenerationConfig"):
        draft_options(draft)
