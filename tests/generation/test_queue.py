"""generate_many: every request as generate() decodes it alone, whatever its neighbours do."""

import gc
import io
import itertools
import logging
import re
import sys
import weakref
from collections.abc import Iterator
from functools import cache

import numpy as np
import pytest
import torch
from oracle import (
    ScriptedDraft,
    build,
    chain_law,
    largest_difference,
    right_with_probability,
    spy,
    tiny_draft,
    tiny_target,
    walk_every_outcome,
)
from peft import LoraConfig, get_peft_model
from test_decoding import tokenizer_of_pairs
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MaxLengthCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
)

from hf_dspark import DSparkDraftModel, generate_many, record_generation
from hf_dspark.generation import batches, key_values, queue, steps
from hf_dspark.modeling import context_cache

PROMPTS = [[5, 9, 3], [17], [22, 8, 40, 2, 11, 6, 31], [7, 7], [1, 2, 3, 4, 50], [60, 12, 33, 4, 25, 16, 7, 8, 19, 30, 21], [44, 3, 14, 15], [2, 9]]
BUDGET = 9
KINDS = ["plain", "drafted"]


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@cache
def greedy_text(target, prompt: tuple[int, ...]) -> list[int]:
    """The first new tokens of transformers' own generate(), as many as most tests ask for."""
    return target.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=21)[0, len(prompt) :].tolist()


def alone(target, prompt, max_new_tokens: int | None = BUDGET, **options) -> list[int]:
    """New tokens of transformers' own generate()."""
    if not options and max_new_tokens <= 21 and len(prompt) < 100:
        return greedy_text(target, tuple(prompt))[:max_new_tokens]
    options = dict(do_sample=False, max_new_tokens=max_new_tokens) | options
    return target.generate(torch.tensor([prompt]), **options)[0, len(prompt) :].tolist()


def many(target, draft, prompts, **options) -> list[queue.Completion]:
    options = dict(do_sample=False, max_new_tokens=BUDGET, show_progress=False) | options
    return list(generate_many(target, draft, prompts, **options))


def new_ids(completions) -> list[list[int]]:
    for completion in completions:
        if completion.error is not None:
            raise completion.error
    return [completion.new_ids.tolist() for completion in completions]


def scripted_draft(target, prompts=PROMPTS, draft_class=ScriptedDraft, **options) -> ScriptedDraft:
    """Right seven times in ten about each prompt's own greedy text."""
    draft = tiny_draft(target, draft_class, **options)
    draft.texts = [[*prompt, *alone(target, prompt, max_new_tokens=21)] for prompt in prompts]
    draft.scripts = [right_with_probability(text, seed=row) for row, text in enumerate(draft.texts)]
    return draft


def draft_of(kind: str, target) -> ScriptedDraft | None:
    return None if kind == "plain" else scripted_draft(target)


@pytest.fixture
def widths(monkeypatch) -> list[list[int]]:
    """Rows of every request in each packed forward."""
    noted: list[list[int]] = []
    spy(monkeypatch, steps, "packed_forward", lambda target, segments, *_: noted.append([len(segment.ids) for segment in segments]))
    return noted


@pytest.fixture
def stores(monkeypatch) -> list[key_values.KeyValueStore]:
    """Where the calls inside a test keep their keys and values."""
    made = []

    class Noted(key_values.KeyValueStore):
        def __init__(self):
            super().__init__()
            made.append(self)

    monkeypatch.setattr(queue, "KeyValueStore", Noted)
    return made


@pytest.fixture
def nothing_warned(monkeypatch):
    monkeypatch.setattr(batches, "_warned", set())


def assert_nothing_held(stores):
    assert stores
    for pool in (pool for store in stores for pool in store.pools.values()):
        assert not pool.held and not pool.layers


def assert_refused(completion, message: str):
    assert completion.output is completion.new_ids is None
    assert isinstance(completion.error, ValueError) and re.search(message, str(completion.error)), completion.error


class At(LogitsProcessor):
    """Calls `act` with the scores of the position after `length` tokens."""

    def __init__(self, length, act):
        self.length, self.act = length, act

    def __call__(self, input_ids, scores):
        return self.act(scores) if input_ids.shape[1] == self.length else scores


class StopAt(StoppingCriteria):
    """Ends, or raises, where the text has `length` tokens."""

    def __init__(self, length, error: BaseException | None = None):
        self.length, self.error = length, error

    def __call__(self, input_ids, scores, **kwargs):
        reached = input_ids.shape[1] >= self.length
        if reached and self.error is not None:
            raise self.error
        return torch.full((input_ids.shape[0],), reached)


def raising(error: BaseException):
    def act(*_, **__):
        raise error

    return act


# Equal to generate() alone


def various_requests(target) -> list[dict]:
    """A request of every kind, each with options of its own; processors and criteria are made anew by each call."""
    third = alone(target, PROMPTS[2])[2]

    def favour(token):
        return lambda scores: scores.index_fill(-1, torch.tensor([token]), 50.0)

    return [
        {"input_ids": PROMPTS[0]},
        {"input_ids": PROMPTS[1], "max_new_tokens": 1},
        {"input_ids": PROMPTS[2], "eos_token_id": third, "pad_token_id": 0},
        {"input_ids": PROMPTS[3], "max_new_tokens": 21},
        {"input_ids": PROMPTS[4], "repetition_penalty": 1.4, "max_new_tokens": 14},
        {"input_ids": PROMPTS[5], "logits_processor": LogitsProcessorList([At(14, favour(6))])},
        {"input_ids": PROMPTS[6], "stopping_criteria": StoppingCriteriaList([StopAt(8)])},
        {"input_ids": PROMPTS[7], "max_new_tokens": None, "max_length": 7},
        {"input_ids": PROMPTS[0], "no_repeat_ngram_size": 2, "suppress_tokens": [3, 4], "max_new_tokens": 12},
        {"input_ids": PROMPTS[2], "prefix_allowed_tokens_fn": lambda batch_id, ids: [len(ids) % 60, 5], "max_new_tokens": 5},
        {"input_ids": PROMPTS[3], "min_new_tokens": 4, "eos_token_id": [2, 13], "pad_token_id": 0},
    ]


def alone_with_own(target, request: dict, **options) -> list[int]:
    own = dict(request)
    own.pop("seed", None)
    return alone(target, own.pop("input_ids"), **{**options, **own})


@pytest.mark.parametrize("max_concurrency", [1, 2, 3, 16])
@pytest.mark.parametrize("kind", KINDS)
def test_every_request_is_as_alone(target, kind, max_concurrency):
    expected = [alone_with_own(target, request) for request in various_requests(target)]
    assert len({len(text) for text in expected}) > 6
    with record_generation() as report:
        completions = many(target, draft_of(kind, target), various_requests(target), max_concurrency=max_concurrency)
    assert new_ids(completions) == expected
    assert [completion.index for completion in completions] == list(range(len(expected)))
    for completion, request in zip(completions, various_requests(target)):
        assert completion.output.tolist() == [[*request["input_ids"], *completion.new_ids.tolist()]]
        assert completion.output.dtype == completion.new_ids.dtype == torch.long
    if kind == "drafted":
        assert 0 < sum(round_.accepted for round_ in report.rounds) < sum(round_.verified for round_ in report.rounds)
        assert all(request.draft_failure is None for request in report.requests)


@pytest.mark.parametrize("kind", KINDS)
def test_neighbours_that_sample_change_nothing(target, kind):
    expected = [alone(target, prompt) for prompt in PROMPTS]
    sampling = [{"input_ids": prompt, "do_sample": True, "temperature": 1.5, "max_new_tokens": k + 1} for k, prompt in enumerate(PROMPTS)]
    requests = [request for pair in zip(PROMPTS, sampling) for request in pair]
    texts = new_ids(many(target, draft_of(kind, target), requests, max_concurrency=5))
    assert texts[::2] == expected
    assert [len(text) for text in texts[1::2]] == [k + 1 for k in range(len(PROMPTS))]


def test_forms_of_prompts(target):
    ids = PROMPTS[0]
    forms = [ids, tuple(ids), torch.tensor(ids), torch.tensor([ids]), np.array(ids), torch.tensor(ids, dtype=torch.int32), {"input_ids": ids}, [ids]]
    forms.append({"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids), dtype=torch.long)})
    completions = many(target, None, forms)
    assert new_ids(completions) == [alone(target, ids)] * len(forms)
    assert {completion.output.shape for completion in completions} == {(1, len(ids) + BUDGET)}


def test_rows_of_a_tensor_are_prompts(target):
    prompts = torch.tensor([[1, 2], [3, 4], [5, 6]])
    assert new_ids(many(target, None, prompts)) == [alone(target, prompt) for prompt in prompts.tolist()]


def test_no_prompts(target):
    assert many(target, None, []) == []
    assert many(target, None, iter(())) == []


@pytest.mark.parametrize("way", ["config", "options", "own", "the target's own"])
def test_where_options_come_from(way):
    target = tiny_target()
    wanted = GenerationConfig(max_new_tokens=4, do_sample=False, repetition_penalty=1.7)
    expected = [alone(target, prompt, max_new_tokens=4, repetition_penalty=1.7) for prompt in PROMPTS]
    assert expected != [alone(target, prompt, max_new_tokens=4) for prompt in PROMPTS]
    given, prompts = {}, PROMPTS
    if way == "config":
        given = {"generation_config": wanted}
    elif way == "options":
        given = {"max_new_tokens": 4, "do_sample": False, "repetition_penalty": 1.7}
    elif way == "own":
        prompts = [{"input_ids": prompt, "generation_config": wanted} for prompt in PROMPTS]
    else:
        target.generation_config = wanted
    before = wanted.to_dict()
    assert new_ids(list(generate_many(target, None, prompts, show_progress=False, **given))) == expected
    assert wanted.to_dict() == before


def test_own_options_go_before_those_of_all(target):
    requests = [{"input_ids": PROMPTS[0], "max_new_tokens": 2}, PROMPTS[1]]
    before = [dict(requests[0]), list(requests[1])]
    assert [len(text) for text in new_ids(many(target, None, requests, max_new_tokens=5))] == [2, 5]
    assert requests == before


@pytest.mark.parametrize("kind", KINDS)
def test_dictionaries_of_generate(target, kind):
    wanted = dict(return_dict_in_generate=True, output_scores=True, output_logits=True, do_sample=False, repetition_penalty=1.2)
    requests = [{"input_ids": prompt, "max_new_tokens": 3 + k, **wanted} for k, prompt in enumerate(PROMPTS[:4])]
    for request, completion in zip(requests, many(target, draft_of(kind, target), [*requests, PROMPTS[4]], max_concurrency=3)):
        expected = target.generate(torch.tensor([request["input_ids"]]), max_new_tokens=request["max_new_tokens"], **wanted)
        assert completion.output.sequences.tolist() == expected.sequences.tolist()
        assert completion.new_ids.tolist() == expected.sequences[0, len(request["input_ids"]) :].tolist()
        for name in ("scores", "logits"):
            assert len(completion.output[name]) == len(expected[name])
            for row, expected_row in zip(completion.output[name], expected[name]):
                torch.testing.assert_close(row, expected_row, rtol=1e-4, atol=1e-4)
                assert not row.requires_grad
        # The keys and values of a packed request end with it.
        assert completion.output.cache is None


def test_scores_of_one_request_alone(target):
    requests = [PROMPTS[0], {"input_ids": PROMPTS[1], "return_dict_in_generate": True, "output_scores": True}]
    first, second = many(target, None, requests)
    assert isinstance(first.output, torch.Tensor)
    assert len(second.output.scores) == BUDGET and second.output.logits is None


@pytest.mark.parametrize("kind", KINDS)
def test_padding_on_the_left(target, kind):
    requests = []
    for num_padded, prompt in enumerate(PROMPTS[:4]):
        mask = torch.tensor([[0] * num_padded + [1] * len(prompt)])
        requests.append({"input_ids": torch.tensor([[0] * num_padded + prompt]), "attention_mask": mask})
    expected = [target.generate(**request, do_sample=False, max_new_tokens=BUDGET)[0].tolist() for request in requests]
    completions = many(target, draft_of(kind, target), requests)
    assert [completion.output[0].tolist() for completion in completions] == expected


OTHER_OPTIONS = {
    "a hole in the mask": dict(attention_mask=torch.tensor([[1, 0, 1]])),
    "positions": dict(position_ids=torch.tensor([[5, 9, 10]])),
    "guidance": dict(guidance_scale=1.7, negative_prompt_ids=torch.tensor([[9, 3]])),
    "a longer length criterion": dict(max_new_tokens=None, max_length=6, stopping_criteria=StoppingCriteriaList([MaxLengthCriteria(10)])),
    "a shorter length criterion": dict(stopping_criteria=StoppingCriteriaList([MaxLengthCriteria(5)])),
    "a list of criteria": dict(stopping_criteria=[StopAt(6)], max_new_tokens=8),
    "no time": dict(max_time=0.0),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", OTHER_OPTIONS)
def test_other_options_of_one_request(target, nothing_warned, name, kind):
    own = OTHER_OPTIONS[name]
    texts = new_ids(many(target, draft_of(kind, target), [PROMPTS[1], {"input_ids": PROMPTS[0], **own}, PROMPTS[2]]))
    assert texts == [alone(target, PROMPTS[1]), alone(target, PROMPTS[0], **own), alone(target, PROMPTS[2])]


@pytest.mark.parametrize("whose", ["all", "own", "config", "the target's", "the target's others"])
@pytest.mark.parametrize("kind", KINDS)
def test_stop_strings(target, kind, whose, monkeypatch):
    tokenizer = tokenizer_of_pairs()
    letters = [[tokenizer.convert_ids_to_tokens(token) for token in alone(target, prompt)] for prompt in PROMPTS[:3]]
    # Each begins inside one token and ends inside the next.
    stops = [row[2 + k][-1] + row[3 + k][0] for k, row in enumerate(letters)]
    expected = [alone(target, prompt, stop_strings=stops, tokenizer=tokenizer) for prompt in PROMPTS[:3]]
    assert max(map(len, expected)) < BUDGET
    requests, options = PROMPTS[:3], dict(stop_strings=stops, tokenizer=tokenizer)
    if whose == "own":
        requests, options = [{"input_ids": prompt, **options} for prompt in requests], {}
    elif whose == "config":
        options = dict(generation_config=GenerationConfig(stop_strings=stops), tokenizer=tokenizer)
    elif whose == "the target's":
        monkeypatch.setattr(target.generation_config, "stop_strings", stops)
        options = dict(tokenizer=tokenizer)
    elif whose == "the target's others":
        monkeypatch.setattr(target.generation_config, "stop_strings", ["zz"])
    assert new_ids(many(target, draft_of(kind, target), requests, **options)) == expected


def test_stop_strings_beside_a_criterion(target):
    options = dict(stop_strings=["zz"], tokenizer=tokenizer_of_pairs(), stopping_criteria=StoppingCriteriaList([StopAt(8)]))
    expected = [alone(target, prompt, **options) for prompt in PROMPTS[:3]]
    assert [len(text) for text in expected] == [5, 7, 1]
    assert new_ids(many(target, None, PROMPTS[:3], **options)) == expected


def test_stop_strings_without_a_tokenizer(target):
    with pytest.raises(ValueError, match=r"zz.*tokenizer"):
        many(target, None, PROMPTS[:1], stop_strings=["zz"])
    (failed,) = many(target, None, [{"input_ids": PROMPTS[0], "stop_strings": ["zz"]}])
    assert_refused(failed, "request 0.*zz.*tokenizer")


@pytest.mark.parametrize(
    "options", [dict(max_new_token=3), dict(num_beams=2), dict(temperature=-1.0, do_sample=True), dict(use_cache=False)], ids=str
)
def test_options_that_fit_no_request_are_refused_at_once(target, options):
    """Before a prompt is read, and by the name of the option."""

    def prompts():
        raise AssertionError("a prompt was read")
        yield

    name = "beam" if "num_beams" in options else next(iter(options))
    with pytest.raises(ValueError, match=name) as raised:
        generate_many(target, None, prompts(), show_progress=False, **options)
    assert "request" not in str(raised.value)
    first, failed, last = many(target, None, [PROMPTS[0], {"input_ids": PROMPTS[1], **options}, PROMPTS[2]])
    assert_refused(failed, f"^request 1: .*{name}")
    assert new_ids([first, last]) == [alone(target, PROMPTS[0]), alone(target, PROMPTS[2])]


NO_PROMPTS = {
    "one text": ("def f():", "got one"),
    "texts": (["def f():"], "got texts such as 'def f.*tokenizer"),
    "one prompt": ([1, 2], "got one"),
    "a row of numbers": (np.array([1, 2]), "got one"),
    "a list of NumPy's numbers": (list(np.array([1, 2])), "got one"),
    "a list of tensors without dimensions": (list(torch.tensor([1, 2])), "got one"),
    "what a tokenizer returns": ({"input_ids": [[1, 2]], "attention_mask": [[1, 1]]}, r"one dictionary of \['attention_mask', 'input_ids'\]"),
    "nothing": (None, "got None"),
    "a number": (3, "got 3"),
}


@pytest.mark.parametrize("prompts, message", NO_PROMPTS.values(), ids=NO_PROMPTS)
def test_what_is_no_list_of_prompts_is_refused_at_once(target, prompts, message):
    with pytest.raises(ValueError, match=message):
        generate_many(target, None, prompts, show_progress=False)


@pytest.mark.parametrize("name, value", [("seed", 3), ("input_ids", [[1]]), ("attention_mask", [[1]]), ("synced_gpus", True)])
def test_options_of_one_request_are_not_those_of_all(target, name, value):
    with pytest.raises(ValueError, match=f"^{name} "):
        generate_many(target, None, PROMPTS, show_progress=False, **{name: value})


def test_a_target_that_is_no_model(target):
    with pytest.raises(ValueError, match="target must be a model, got str"):
        generate_many("gpt2", None, PROMPTS)


@pytest.mark.parametrize("dtype", [np.uint16, np.int32, np.uint8])
def test_ids_of_any_integer_type(target, dtype):
    """As files of tokens have them."""
    assert new_ids(many(target, None, [np.array(prompt, dtype=dtype) for prompt in PROMPTS[:2]])) == [alone(target, p) for p in PROMPTS[:2]]
    assert_refused(many(target, None, [torch.tensor([True, False])])[0], "request 0: input_ids must be whole numbers")


@pytest.mark.parametrize("options", [dict(max_new_tokens="5"), dict(eos_token_id="a")], ids=str)
def test_an_option_of_the_wrong_type_names_its_request(target, options):
    first, failed = many(target, None, [PROMPTS[0], {"input_ids": PROMPTS[1], **options}])
    assert_refused(failed, "^request 1: ")
    assert new_ids([first]) == [alone(target, PROMPTS[0])]


@pytest.mark.parametrize("pad_token_id", [0, 1, None])
def test_checking_the_options_leaves_no_trace(target, pad_token_id, nothing_warned, monkeypatch):
    """Neither a warning, nor a random number, nor a change of the target's configuration."""
    monkeypatch.setattr(target.generation_config, "pad_token_id", pad_token_id)
    before, state = target.generation_config.to_dict(), torch.get_rng_state()
    assert many(target, None, [], do_sample=True) == []
    assert target.generation_config.to_dict() == before and torch.equal(torch.get_rng_state(), state)


def test_attention_mask_as_a_list(target):
    """What a tokenizer returns for one text."""
    requests = [{"input_ids": prompt, "attention_mask": [1] * len(prompt)} for prompt in PROMPTS[:3]]
    assert new_ids(many(target, None, requests)) == [alone(target, prompt) for prompt in PROMPTS[:3]]


def test_two_queues_and_a_generate_take_turns(target):
    expected = [alone(target, prompt) for prompt in PROMPTS]
    options = dict(do_sample=False, max_new_tokens=BUDGET, show_progress=False, max_concurrency=2)
    first, second = generate_many(target, scripted_draft(target), PROMPTS, **options), generate_many(target, None, PROMPTS[::-1], **options)
    for k, (one, other) in enumerate(zip(first, second)):
        assert target.config._attn_implementation == "sdpa"
        assert torch.is_grad_enabled()
        assert alone(target, PROMPTS[k]) == one.new_ids.tolist() == expected[k]
        assert other.new_ids.tolist() == expected[-1 - k]


def test_a_draft_that_was_bound_to_another_target(target):
    draft, other = scripted_draft(target), tiny_target(seed=8)
    assert new_ids(many(target, draft, PROMPTS[:3])) == [alone(target, prompt) for prompt in PROMPTS[:3]]
    assert new_ids(many(other, draft, PROMPTS[:3])) == [alone(other, prompt) for prompt in PROMPTS[:3]]


def test_a_wrapped_draft(target):
    wrapped = torch.nn.DataParallel(scripted_draft(target))
    assert new_ids(many(target, wrapped, PROMPTS[:3])) == [alone(target, prompt) for prompt in PROMPTS[:3]]


class CountingFavourite(LogitsProcessor):
    """Keeps count of the text's own tokens: the third is always 5."""

    def __init__(self):
        self.calls = 0

    def __call__(self, input_ids, scores):
        self.calls += 1
        return scores.index_fill(-1, torch.tensor([5]), 1e4) if self.calls == 3 else scores


class CountingStop(StoppingCriteria):
    """Ends a text after its fourth token, by count."""

    def __init__(self):
        self.calls = 0

    def __call__(self, input_ids, scores, **kwargs):
        self.calls += 1
        return torch.full((input_ids.shape[0],), self.calls >= 4)


@pytest.mark.parametrize("kind", KINDS)
def test_processors_for_all_requests_keep_apart(target, kind):
    """One that counts serves each request as if it were made for it."""

    def fresh():
        return dict(logits_processor=LogitsProcessorList([CountingFavourite()]), stopping_criteria=StoppingCriteriaList([CountingStop()]))

    expected = [alone(target, prompt, **fresh()) for prompt in PROMPTS]
    assert {len(text) for text in expected} == {4} and {text[2] for text in expected} == {5}
    assert new_ids(many(target, draft_of(kind, target), PROMPTS, max_concurrency=3, **fresh())) == expected


# Order, laziness, admission


def test_order(target):
    requests = [{"input_ids": PROMPTS[k], "max_new_tokens": budget} for k, budget in enumerate([6, 1, 3, 1, 2])]
    assert [completion.index for completion in many(target, None, requests, max_concurrency=3)] == [0, 1, 2, 3, 4]
    # 0, 1 and 2 start; 3 joins in round 2, in which nothing else ends, and 4 in round 3, in which 2 ends.
    unordered = many(target, None, requests, max_concurrency=3, ordered=False)
    assert [completion.index for completion in unordered] == [1, 3, 2, 4, 0]
    assert [len(completion.new_ids) for completion in unordered] == [1, 1, 3, 2, 6]


@pytest.mark.parametrize("kind", KINDS)
def test_unordered_texts_are_as_alone(target, kind):
    completions = many(target, draft_of(kind, target), PROMPTS, max_concurrency=3, ordered=False)
    assert sorted(completion.index for completion in completions) == list(range(len(PROMPTS)))
    for completion in completions:
        assert completion.new_ids.tolist() == alone(target, PROMPTS[completion.index])


def test_a_waiting_prompt_joins_in_the_round_after_a_place_got_free(target, widths):
    batches.packing_failure(target)
    widths.clear()
    requests = [
        {"input_ids": ids, "max_new_tokens": budget} for ids, budget in (([1, 2, 3], 2), ([4, 5], 4), ([6, 7, 8, 9], 2), ([10], 1), ([11], 2))
    ]
    many(target, None, requests, max_concurrency=2)
    assert widths == [[3, 2], [1, 1], [1, 4], [1, 1], [1, 1], [1]]


def test_the_width_is_the_sum_of_what_each_request_drafts(target, widths):
    class Right(ScriptedDraft):
        pass

    draft = scripted_draft(target, draft_class=Right)
    draft.scripts = [right_with_probability(text, 1.0) for text in draft.texts]
    draft.generation_config.num_assistant_tokens = 2
    batches.packing_failure(target)
    widths.clear()
    requests = [
        {"input_ids": PROMPTS[0], "max_new_tokens": 6},
        {"input_ids": PROMPTS[2], "max_new_tokens": 2},
        {"input_ids": PROMPTS[1], "max_new_tokens": 4},
    ]
    assert new_ids(many(target, draft, requests, max_concurrency=2)) == [alone_with_own(target, request) for request in requests]
    # A first token each; then two drafts, where the budget leaves room for them, and one token of the target's own.
    assert widths == [[3, 7], [3, 1], [2, 1], [3]]


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("max_concurrency", [1, 3])
def test_prompts_are_read_as_places_become_free(target, ordered, max_concurrency):
    budgets = [4, 1, 2, 7, 1, 1, 3, 2]
    written = [0] * len(budgets)
    ahead = []

    def prompts():
        for k, budget in enumerate(budgets):
            num_ended = sum(count == budget for count, budget in zip(written, budgets))
            ahead.append(k + 1 - num_ended)
            yield {"input_ids": PROMPTS[k], "max_new_tokens": budget}

    def on_tokens(index, tokens):
        written[index] += len(tokens)

    texts = generate_many(
        target, None, prompts(), do_sample=False, max_concurrency=max_concurrency, ordered=ordered, on_tokens=on_tokens, show_progress=False
    )
    assert ahead == []  # nothing happens before the first one is asked for
    assert len(list(texts)) == len(ahead) == len(budgets)
    assert max(ahead) <= max_concurrency + 1


@pytest.mark.parametrize("ordered", [True, False])
def test_an_endless_iterator(target, stores, ordered):
    read = []

    def prompts():
        for k in itertools.count():
            read.append(k)
            yield [k % 60, 3]

    texts = generate_many(target, None, prompts(), do_sample=False, max_new_tokens=3, max_concurrency=4, ordered=ordered, show_progress=False)
    for completion in itertools.islice(texts, 10):
        assert completion.new_ids.tolist() == alone(target, [completion.index % 60, 3], max_new_tokens=3)
    assert len(read) <= 10 + 2 * 4
    texts.close()
    assert_nothing_held(stores)
    assert next(texts, None) is None


def test_failing_prompts_are_read_one_by_one(target):
    """They hold nothing up, and an endless row of them is no trap."""

    def prompts():
        yield PROMPTS[0]
        for k in itertools.count():
            assert k < 100, "reads on without yielding"
            yield []

    texts = generate_many(target, None, prompts(), do_sample=False, max_new_tokens=3, max_concurrency=2, show_progress=False)
    assert next(texts).new_ids.tolist() == alone(target, PROMPTS[0], max_new_tokens=3)
    assert all(completion.error is not None for completion in itertools.islice(texts, 50))
    texts.close()


def test_an_error_of_the_iterator_reaches_the_caller(target, stores):
    def prompts():
        yield PROMPTS[0]
        yield PROMPTS[1]
        raise OSError("the file is gone")

    texts = generate_many(target, None, prompts(), do_sample=False, max_new_tokens=BUDGET, max_concurrency=3, show_progress=False)
    assert [next(texts).new_ids.tolist() for _ in range(2)] == [alone(target, PROMPTS[0]), alone(target, PROMPTS[1])]
    with pytest.raises(OSError, match="the file is gone"):
        next(texts)
    assert_nothing_held(stores)


def test_prompts_join_in_bounded_forwards(target, widths, monkeypatch):
    """At most this many prompt tokens a round, so that the running texts don't stand still; a longer prompt comes alone."""
    monkeypatch.setattr(queue, "_PREFILL_ROWS", 10)
    batches.packing_failure(target)
    widths.clear()
    prompts = [[1] * 6, [2] * 4, [3] * 3, [4] * 12, [5] * 2]
    assert new_ids(many(target, None, prompts, max_new_tokens=3)) == [alone(target, prompt, max_new_tokens=3) for prompt in prompts]
    joined = [[width for width in row if width > 1] for row in widths]
    assert [row for row in joined if row] == [[6, 4], [3], [12], [2]]


# Failing requests


FAILING = {
    "empty": ([], "request 1: the prompt is empty"),
    "none": (None, "request 1: .*NoneType"),
    "text": ("a text", "request 1: .*str"),
    "numbers that are not whole": ([1.0, 2.0], "request 1: .*float32"),
    "two rows": ([[1, 2], [3, 4]], r"request 1: .*\(2, 2\)"),
    "ragged": ([[1, 2], [3]], "request 1: "),
    "a number": (3, r"request 1: .*\(\)"),
    "beyond the vocabulary": ([1, 64], "request 1: .*below 64, got 1 to 64"),
    "negative": ([1, -1], "request 1: .*got -1 to 1"),
    "longer than the context": ([1] * 1025, "request 1: the prompt has 1025 tokens, .*1024"),
    "no room in the context": ([1] * 1024, "request 1: the prompt has 1024 tokens, .*1024"),
    "no ids": ({"max_new_tokens": 3}, "request 1: .*input_ids"),
    "no ids in them": ({"input_ids": []}, "request 1: the prompt is empty"),
    "beams": ({"input_ids": [1], "num_beams": 2}, "request 1: .*beam"),
    "many of one": ({"input_ids": [1], "num_return_sequences": 3, "do_sample": True}, "request 1: num_return_sequences=3"),
    "misspelt": ({"input_ids": [1], "max_new_token": 3}, "max_new_token"),
    "no budget": ({"input_ids": [1], "max_new_tokens": 0}, "max_new_tokens.*0"),
    "no cache": ({"input_ids": [1], "use_cache": False}, "use_cache"),
    "bad seed": ({"input_ids": [1], "do_sample": True, "seed": "three"}, "request 1: .*three"),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FAILING)
def test_a_prompt_that_fails_disturbs_nobody(target, stores, name, kind):
    prompt, message = FAILING[name]
    first, failed, last = many(target, draft_of(kind, target), [PROMPTS[0], prompt, PROMPTS[2]])
    assert new_ids([first, last]) == [alone(target, PROMPTS[0]), alone(target, PROMPTS[2])]
    assert [first.index, failed.index, last.index] == [0, 1, 2]
    assert_refused(failed, message)
    assert_nothing_held(stores)


def test_a_prompt_that_leaves_room_for_one_token(target):
    completions = many(target, None, [[1] * 1023, PROMPTS[0]], max_new_tokens=1)
    assert new_ids(completions) == [alone(target, [1] * 1023, max_new_tokens=1), alone(target, PROMPTS[0], max_new_tokens=1)]


def test_requests_that_fail_early_hold_no_place(target, stores):
    bad = {"input_ids": [1], "do_sample": True, "seed": "three"}
    texts = generate_many(
        target, scripted_draft(target), [bad] * 5 + [PROMPTS[0], PROMPTS[1]], do_sample=False, max_new_tokens=2, show_progress=False
    )
    assert [completion.error is not None for completion in texts] == [True] * 5 + [False] * 2
    assert_nothing_held(stores)


def mid_way(kind: str) -> dict:
    """Options of a request that raises after a few tokens of PROMPTS[1], which is one token long."""
    error = RuntimeError("mid-way")
    if kind == "processor":
        return {"logits_processor": LogitsProcessorList([At(5, raising(error))])}
    if kind == "criterion":
        return {"stopping_criteria": StoppingCriteriaList([StopAt(5, error)])}
    return {"prefix_allowed_tokens_fn": lambda _, ids: [1, 2] if len(ids) < 5 else raising(error)(None)}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("source", ["processor", "criterion", "allowed tokens"])
def test_a_request_that_raises_mid_way_disturbs_nobody(target, stores, widths, source, kind):
    requests = [PROMPTS[0], {"input_ids": PROMPTS[1], **mid_way(source)}, PROMPTS[2], PROMPTS[3]]
    first, failed, *others = many(target, draft_of(kind, target), requests, max_concurrency=3)
    assert new_ids([first, *others]) == [alone(target, PROMPTS[k]) for k in (0, 2, 3)]
    assert type(failed.error) is RuntimeError and str(failed.error) == "mid-way" and failed.output is failed.new_ids is None
    assert max(map(len, widths)) == 3
    assert_nothing_held(stores)


def test_an_error_of_on_tokens_ends_the_request_it_was_called_for(target, stores):
    def on_tokens(index, tokens):
        if index == 1:
            raise ConnectionError("the reader is gone")

    first, failed, last = many(target, None, PROMPTS[:3], on_tokens=on_tokens)
    assert isinstance(failed.error, ConnectionError)
    assert new_ids([first, last]) == [alone(target, PROMPTS[0]), alone(target, PROMPTS[2])]
    assert_nothing_held(stores)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("when", ["at once", "mid-way"])
def test_a_forward_that_raises_for_one_request(target, monkeypatch, stores, when, kind):
    prompts = [list(prompt) for prompt in PROMPTS[:4]]
    met = {token for k in (0, 1, 3) for token in [*prompts[k], *alone(target, prompts[k], max_new_tokens=20)]}
    poison = next(token for token in alone(target, prompts[2], max_new_tokens=20)[4:] if token not in met)
    if when == "at once":
        prompts[2] = [poison, 1]
    expected = [alone(target, prompt, max_new_tokens=20) for prompt in prompts]
    draft = None
    if kind == "drafted":
        draft = scripted_draft(target, prompts)
        # Right drafts alone, so that no one is handed the token that the others must not meet.
        draft.scripts = [right_with_probability(text, 1.0) for text in draft.texts]

    def note(input_ids=None, **_):
        if (input_ids == poison).any():
            raise RuntimeError("out of memory")

    batches.packing_failure(target)
    spy(monkeypatch, target, "forward", note)
    completions = many(target, draft, prompts, max_new_tokens=20)
    failed = completions.pop(2)
    assert isinstance(failed.error, RuntimeError) and failed.error.args == ("out of memory",)
    assert new_ids(completions) == [expected[k] for k in (0, 1, 3)]
    assert_nothing_held(stores)


@pytest.mark.parametrize("max_concurrency", [2, 3])
def test_a_text_without_finite_logits_disturbs_nobody(max_concurrency):
    target = tiny_target()
    with torch.no_grad():
        target.get_input_embeddings().weight[63] = float("nan")
    good = [prompt for prompt in PROMPTS if 63 not in [*prompt, *alone(target, prompt)]]
    assert len(good) > 4
    bad = {"input_ids": [3, 63, 4], "max_new_tokens": 3}
    requests = [bad, good[0], bad, *good[1:3], bad, *good[3:]]
    completions = many(target, None, requests, max_concurrency=max_concurrency)
    texts = [completion for completion, request in zip(completions, requests) if request is not bad]
    assert new_ids(texts) == [alone(target, prompt) for prompt in good]


def test_sampling_without_a_law_ends_the_request_alone():
    """The logits are NaN: torch refuses to draw."""
    target = tiny_target()
    with torch.no_grad():
        target.get_input_embeddings().weight[63] = float("nan")
    requests = [{"input_ids": prompt, "seed": k} for k, prompt in enumerate([PROMPTS[0], [3, 63, 4], PROMPTS[2]])]
    first, failed, last = many(target, None, requests, do_sample=True, suppress_tokens=[63])
    assert isinstance(failed.error, RuntimeError)
    assert len(first.new_ids) == len(last.new_ids) == BUDGET


def test_a_caller_that_raises_while_it_reads(target, stores):
    def read():
        for completion in generate_many(target, None, PROMPTS, do_sample=False, max_new_tokens=3, max_concurrency=2, show_progress=False):
            raise LookupError(completion.index)

    with pytest.raises(LookupError):
        read()
    gc.collect()
    assert_nothing_held(stores)


# A draft that fails


class FailingDraft(ScriptedDraft):
    """Fails in every block with an anchor that follows `fails_after`."""

    fails_after: int | None = None

    def forward(self, block_ids, context_features, position_ids, *args, **kwargs):
        size = self.config.block_size
        if self.fails_after is None or (position_ids[0, -block_ids.shape[1] :: size] == self.fails_after).any():
            raise RuntimeError("the draft is broken")
        return super().forward(block_ids, context_features, position_ids, *args, **kwargs)


def test_a_failing_draft_costs_speed_alone(target):
    draft = scripted_draft(target, draft_class=FailingDraft)
    with record_generation() as report:
        assert new_ids(many(target, draft, PROMPTS, max_concurrency=3)) == [alone(target, prompt) for prompt in PROMPTS]
    assert all("the draft is broken" in request.draft_failure for request in report.requests)


def test_a_draft_that_fails_for_one_request(target):
    """All have the same length, but the one that has come further."""
    prompts = [[1, 2], [3, 4], [5, 6, 7, 8, 9, 10, 11], [7, 8]]
    draft = scripted_draft(target, prompts, draft_class=FailingDraft)
    draft.fails_after = 7
    with record_generation() as report:
        texts = new_ids(many(target, draft, prompts, max_new_tokens=4))
    assert texts == [alone(target, prompt, max_new_tokens=4) for prompt in prompts]
    assert [request.draft_failure is not None for request in report.requests] == [False, False, True, False]
    assert sum(round_.accepted for round_ in report.rounds) > 0


def test_raise_on_draft_failure_ends_the_request_alone(target, stores):
    prompts = [[1, 2], [3, 4], [5, 6, 7, 8, 9, 10, 11], [7, 8]]
    draft = scripted_draft(target, prompts, draft_class=FailingDraft)
    draft.fails_after = 7
    draft.generation_config.raise_on_draft_failure = True
    completions = many(target, draft, prompts, max_new_tokens=4)
    failed = completions.pop(2)
    assert isinstance(failed.error, RuntimeError) and "the draft is broken" in str(failed.error)
    assert new_ids(completions) == [alone(target, prompts[k], max_new_tokens=4) for k in (0, 1, 3)]
    assert_nothing_held(stores)


def test_raise_on_draft_failure_where_it_fails_for_all(target, stores):
    draft = scripted_draft(target, draft_class=FailingDraft)
    draft.generation_config.raise_on_draft_failure = True
    requests = [*PROMPTS[:2], {"input_ids": PROMPTS[2], "max_new_tokens": 1}, PROMPTS[3]]
    completions = many(target, draft, requests, max_concurrency=2)
    assert ["the draft is broken" in str(completion.error) for completion in completions] == [True, True, False, True]
    assert completions[2].new_ids.tolist() == alone(target, PROMPTS[2], max_new_tokens=1)
    assert_nothing_held(stores)


# Ctrl-C


def interrupted(source: str, target, monkeypatch) -> tuple[list, dict]:
    """Requests and options of a queue in which request 3 is interrupted after a few tokens, when 1 and 2 have ended."""
    stop = KeyboardInterrupt()
    requests = [{"input_ids": PROMPTS[k], "max_new_tokens": budget} for k, budget in enumerate([20, 2, 1, 20, 20, 20])]
    options = {}
    if source == "on_tokens":
        written = []

        def on_tokens(index, tokens):
            written.extend([index] * len(tokens))
            if written.count(3) == 4:
                raise stop

        options["on_tokens"] = on_tokens
    elif source == "criterion":
        requests[3]["stopping_criteria"] = StoppingCriteriaList([StopAt(len(PROMPTS[3]) + 4, stop)])
    elif source == "processor":
        requests[3]["logits_processor"] = LogitsProcessorList([At(len(PROMPTS[3]) + 4, raising(stop))])
    elif source == "forward":
        forwards = []

        def note(**_):
            forwards.append(1)
            if len(forwards) == 5:
                raise stop

        batches.packing_failure(target)
        spy(monkeypatch, target, "forward", note)
    else:
        listed = requests[:4]

        def prompts():
            yield from listed
            raise stop

        return prompts(), options
    return requests, options


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("source", ["on_tokens", "criterion", "processor", "forward", "prompts"])
def test_ctrl_c_yields_what_is_finished(target, monkeypatch, caplog, stores, source, kind, ordered):
    draft, expected = draft_of(kind, target), [alone(target, prompt, max_new_tokens=20) for prompt in PROMPTS]
    if draft is not None:
        draft.generation_config.num_assistant_tokens = 1
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, logger="hf_dspark"):
        requests, options = interrupted(source, target, patch)
        texts = generate_many(target, draft, requests, do_sample=False, max_concurrency=3, ordered=ordered, show_progress=False, **options)
        completions = list(texts)
    assert sorted(completion.index for completion in completions) == [1, 2]
    for completion in completions:
        assert completion.new_ids.tolist() == expected[completion.index][: len(completion.new_ids)]
        assert len(completion.new_ids) == {1: 2, 2: 1}[completion.index]
    (record,) = [record for record in caplog.records if "interrupted" in record.getMessage()]
    assert record.levelno == logging.WARNING
    assert next(texts, None) is None
    assert_nothing_held(stores)
    assert target.config._attn_implementation == "sdpa"
    assert new_ids(many(target, draft, PROMPTS[:3])) == [text[:BUDGET] for text in expected[:3]]


@pytest.mark.parametrize("ordered", [True, False])
def test_ctrl_c_keeps_what_finished_in_the_same_round(target, ordered):
    def on_tokens(index, tokens):
        if index == 1:
            raise KeyboardInterrupt

    (completion,) = many(target, None, PROMPTS[:3], max_new_tokens=1, on_tokens=on_tokens, ordered=ordered)
    assert completion.index == 0 and completion.new_ids.tolist() == alone(target, PROMPTS[0], max_new_tokens=1)


def test_ctrl_c_keeps_the_errors_of_requests(target):
    def on_tokens(index, tokens):
        if index == 2:
            raise KeyboardInterrupt

    completions = many(target, None, [[], PROMPTS[0], PROMPTS[1], []], on_tokens=on_tokens)
    assert [(completion.index, completion.error is None) for completion in completions] in ([(0, False)], [(0, False), (3, False)])


# Sampling


def sampled(kind: str, target) -> DSparkDraftModel | None:
    if kind == "plain":
        return None
    draft = tiny_draft(target)
    draft.generation_config.draft_sampling = kind
    return draft


@pytest.mark.parametrize("kind", ["plain", "chain", "argmax"])
def test_a_seed_gives_the_same_text_whatever_the_neighbours(target, kind):
    draft = sampled(kind, target)
    options = dict(do_sample=True, temperature=1.3)
    own = {"input_ids": PROMPTS[0], "seed": 7, "max_new_tokens": 10}
    (expected,) = new_ids(many(target, draft, [own], **options))
    others = [{"input_ids": prompt, "max_new_tokens": 1 + 3 * k} for k, prompt in enumerate(PROMPTS[:4])]
    seeded = [{**request, "seed": k} for k, request in enumerate(others)]
    for neighbours, max_concurrency in (
        (others, 1),
        (others[:1], 2),
        (seeded, 3),
        (others, 8),
        ([{**others[3], "do_sample": False}, [], others[2]], 8),
    ):
        place = len(neighbours) // 2
        texts = many(target, draft, [*neighbours[:place], own, *neighbours[place:]], max_concurrency=max_concurrency, **options)
        assert texts[place].new_ids.tolist() == expected
    texts = new_ids(many(target, draft, [{**own, "seed": seed} for seed in range(6)], **options))
    assert len({tuple(text) for text in texts}) == 6


@pytest.mark.parametrize("kind", ["plain", "chain", "argmax"])
def test_who_has_a_seed_leaves_the_global_source_alone(target, kind):
    draft = sampled(kind, target)
    torch.manual_seed(3)
    before = torch.get_rng_state()
    many(target, draft, [{"input_ids": prompt, "seed": k} for k, prompt in enumerate(PROMPTS)], do_sample=True)
    assert torch.equal(torch.get_rng_state(), before)
    many(target, draft, PROMPTS[:1], do_sample=True)
    assert not torch.equal(torch.get_rng_state(), before)


def test_without_seeds_the_global_source_gives_the_same_texts_again(target):
    def run() -> list[list[int]]:
        torch.manual_seed(11)
        return new_ids(many(target, sampled("chain", target), PROMPTS, do_sample=True, max_concurrency=3))

    assert run() == run()


@pytest.mark.parametrize("kind", ["plain", "chain", "argmax"])
def test_law_of_two_requests(monkeypatch, kind):
    """Each has the law that it has alone, and they don't depend on one another."""
    shape = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=1, num_key_value_heads=1, head_dim=8)
    target = tiny_target(1, vocab_size=2, initializer_range=0.7, **shape)
    draft = None
    if kind != "plain":
        shape = dict(num_hidden_layers=1, num_attention_heads=1, intermediate_size=8, target_layer_ids=[0], markov_rank=2, block_size=2)
        draft = tiny_draft(target, seed=5, **shape)
        draft.generation_config.draft_sampling = kind
    prompts, budgets = [[1, 0], [0]], [3, 2] if kind == "chain" else [4, 3]
    options = dict(do_sample=True, top_k=0, temperature=0.8)
    laws = [chain_law(target, torch.tensor([prompt]), budget, top_k=0, temperature=0.8) for prompt, budget in zip(prompts, budgets)]
    expected = {(first, second): p * q for first, p in laws[0].items() for second, q in laws[1].items()}
    with record_generation() as report:

        def run() -> tuple:
            requests = [{"input_ids": prompt, "max_new_tokens": budget} for prompt, budget in zip(prompts, budgets)]
            return tuple(tuple(text) for text in new_ids(many(target, draft, requests, **options)))

        law = walk_every_outcome(monkeypatch, run)
    assert sum(law.values()) == pytest.approx(1.0, abs=1e-5)
    assert largest_difference(law, expected) < 1e-5
    if draft is not None:
        assert 0 < sum(round_.accepted for round_ in report.rounds) < sum(round_.verified for round_ in report.rounds)


# on_tokens


@pytest.mark.parametrize("max_concurrency", [1, 3, 16])
@pytest.mark.parametrize("kind", KINDS)
def test_on_tokens_gets_every_token_once_in_order(target, kind, max_concurrency):
    events: list[tuple[int, list[int]]] = []
    completions = many(
        target, draft_of(kind, target), various_requests(target), max_concurrency=max_concurrency, on_tokens=lambda *event: events.append(event)
    )
    for completion, text in zip(completions, new_ids(completions)):
        assert [token for index, tokens in events if index == completion.index for token in tokens] == text
    assert all(isinstance(token, int) for _, tokens in events for token in tokens)
    assert all(tokens for _, tokens in events)


@pytest.mark.parametrize("kind", KINDS)
def test_first_tokens_come_early(target, kind):
    events: list[int] = []
    texts = generate_many(
        target, draft_of(kind, target), PROMPTS, do_sample=False, max_new_tokens=BUDGET, max_concurrency=3, show_progress=False,
        on_tokens=lambda index, tokens: events.extend([index] * len(tokens)),
    )  # fmt: skip
    next(texts)
    assert events[:3] == [0, 1, 2]
    texts.close()


def test_a_request_that_fails_has_its_tokens_up_to_there(target):
    events: list[tuple[int, list[int]]] = []
    failing = {"input_ids": PROMPTS[1], "logits_processor": LogitsProcessorList([At(5, raising(RuntimeError("mid-way")))])}
    many(target, None, [PROMPTS[0], failing], on_tokens=lambda *event: events.append(event))
    assert [token for index, tokens in events if index == 1 for token in tokens] == alone(target, PROMPTS[1], max_new_tokens=4)


# Keys and values


@pytest.mark.parametrize("kind", KINDS)
def test_max_cached_tokens_bounds_what_is_held(target, monkeypatch, kind):
    draft = draft_of(kind, target)
    held, together = [], []

    def note(_, segments, *__):
        held.append(sum(segment.place.length + len(segment.ids) for segment in segments))
        together.append(len(segments))

    batches.packing_failure(target)
    spy(monkeypatch, steps, "packed_forward", note)
    expected = [alone(target, prompt) for prompt in PROMPTS]
    assert new_ids(many(target, draft, PROMPTS, max_cached_tokens=30)) == expected
    assert max(held) <= 30
    # Prompts of 3, 1, 7, .. tokens and 9 new ones each: two of the first requests fit, three do not.
    assert max(together) == 2
    held.clear(), together.clear()
    assert new_ids(many(target, draft, PROMPTS, max_cached_tokens=20, max_concurrency=5)) == expected
    assert max(held) <= 20 and set(together) == {1}
    together.clear()
    assert new_ids(many(target, draft, PROMPTS, max_cached_tokens=1000, max_concurrency=5)) == expected
    assert max(together) == 5


def test_a_long_request_waits_until_it_fits(target, widths):
    """And nobody overtakes it, so that its turn comes."""
    requests = [{"input_ids": [k + 1], "max_new_tokens": budget} for k, budget in enumerate([3, 7, 15, 1])]
    batches.packing_failure(target)
    widths.clear()
    completions = many(target, None, requests, max_cached_tokens=16, ordered=False)
    assert [completion.index for completion in completions] == [0, 1, 2, 3]
    assert [len(row) for row in widths] == [2] * 3 + [1] * 4 + [1] * 15 + [1]


def test_a_request_that_can_never_fit(target, stores):
    requests = [PROMPTS[0], {"input_ids": PROMPTS[1], "max_new_tokens": 50}, PROMPTS[2]]
    first, failed, last = many(target, None, requests, max_cached_tokens=40)
    assert new_ids([first, last]) == [alone(target, PROMPTS[0]), alone(target, PROMPTS[2])]
    assert_refused(failed, r"request 1: .*\b51\b.*max_cached_tokens=40")
    assert_nothing_held(stores)
    # As long as the bound is not beyond it.
    assert len(new_ids(many(target, None, [requests[1]], max_cached_tokens=51))[0]) == 50


def test_a_length_criterion_counts_against_max_cached_tokens(target):
    """It takes the place of the length that generate() is given."""
    own = {"input_ids": PROMPTS[1], "stopping_criteria": StoppingCriteriaList([MaxLengthCriteria(50)])}
    first, failed, last = many(target, None, [PROMPTS[0], own, PROMPTS[2]], max_cached_tokens=40)
    assert new_ids([first, last]) == [alone(target, PROMPTS[0]), alone(target, PROMPTS[2])]
    assert_refused(failed, r"request 1: .*\b50\b.*max_cached_tokens=40")


@pytest.fixture
def live(monkeypatch) -> Iterator[dict[type, weakref.WeakSet]]:
    """Living places of keys and values, of the target's and of drafts."""
    sets = {}
    for owner in (key_values.KeyValues, context_cache.ContextCache):
        sets[owner] = weakref.WeakSet()
        spy(monkeypatch, owner, "__init__", lambda self, *_, own=sets[owner]: own.add(self))
    gc.collect()
    gc.freeze()  # a collection then looks at what the test makes
    yield sets
    gc.unfreeze()


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_request_holds_ends_with_it(target, monkeypatch, live, kind):
    draft = draft_of(kind, target)
    batches.packing_failure(target)
    noted = []

    def note(_, segments, *__):
        gc.collect()
        places = [place for place in live[key_values.KeyValues] if place.length]
        noted.append(
            (len(places), len([cache for cache in live[context_cache.ContextCache] if cache.length]), sum(s.place.length > 0 for s in segments))
        )

    spy(monkeypatch, steps, "packed_forward", note)
    requests = [{"input_ids": prompt, "max_new_tokens": 1 + 3 * k} for k, prompt in enumerate(PROMPTS[:5])]
    completions = many(target, draft, requests, max_concurrency=3)
    assert all(places == going and caches <= going for places, caches, going in noted)
    assert {going for *_, going in noted} >= {0, 1, 2}
    gc.collect()
    assert len(completions) == 5
    assert all(len(own) == 0 for own in live.values())


@pytest.mark.parametrize("kind", KINDS)
def test_memory_is_constant_over_many_calls(target, live, kind):
    draft = None if kind == "plain" else tiny_draft(target)

    def calls(count: int) -> int:
        for k in range(count):
            many(target, draft, [PROMPTS[k % 8] if k % 5 else []], max_new_tokens=3 if k % 2 else 1)
        gc.collect()
        return len(gc.get_objects())

    calls(10)
    before = calls(10)
    assert calls(180) < before + 100
    assert all(len(own) == 0 for own in live.values())


def test_memory_is_constant_over_one_long_queue(target, stores, live):
    texts = generate_many(target, None, ([k % 60] for k in range(90)), do_sample=False, max_new_tokens=2, max_concurrency=4, show_progress=False)
    sizes = []
    for completion in texts:
        if completion.index % 30 == 29:
            gc.collect()
            sizes.append(len(gc.get_objects()))
    assert max(sizes) - min(sizes) < 200
    assert_nothing_held(stores)


@pytest.mark.parametrize("kind", KINDS)
def test_closing_early_releases_everything(target, stores, live, kind):
    requests = [{"input_ids": prompt, "max_new_tokens": BUDGET + 3 * k} for k, prompt in enumerate(PROMPTS)]
    texts = generate_many(target, draft_of(kind, target), requests, do_sample=False, max_concurrency=3, show_progress=False)
    completion = next(texts)
    assert any(pool.held for store in stores for pool in store.pools.values())
    texts.close()
    assert_nothing_held(stores)
    assert completion.new_ids.tolist() == alone(target, PROMPTS[0])
    del texts
    gc.collect()
    assert all(len(own) == 0 for own in live.values())
    assert target.config._attn_implementation == "sdpa"


def test_closing_while_a_request_waits_for_room(target, stores):
    texts = generate_many(target, None, PROMPTS, do_sample=False, max_new_tokens=BUDGET, max_cached_tokens=30, show_progress=False)
    next(texts)
    texts.close()
    assert_nothing_held(stores)


def test_closing_before_the_first_one_reads_nothing(target):
    read = []
    texts = generate_many(target, None, (read.append(prompt) or prompt for prompt in PROMPTS), do_sample=False, show_progress=False)
    texts.close()
    assert read == []


# Targets and requests that are not packed


def bloom():
    sizes = dict(vocab_size=64, hidden_size=32, n_layer=3, n_head=4, initializer_range=0.5)
    return build(BloomForCausalLM, BloomConfig(**sizes, bos_token_id=None, eos_token_id=None, pad_token_id=None))


@pytest.mark.parametrize("kind", KINDS)
def test_a_target_that_is_not_packed_is_decoded_in_turn(caplog, widths, nothing_warned, kind):
    target = bloom()
    prompts = PROMPTS[:5]
    expected = [alone(target, prompt) for prompt in prompts]
    draft = draft_of(kind, target)
    with caplog.at_level(logging.WARNING, logger="hf_dspark"), record_generation() as report:
        assert new_ids(many(target, draft, prompts, max_concurrency=3)) == expected
        assert new_ids(many(target, draft, prompts, max_concurrency=3)) == expected
    assert widths == []
    (record,) = [record for record in caplog.records if "in turn" in record.getMessage()]
    assert "BloomForCausalLM" in record.getMessage()
    if draft is not None:
        assert sum(round_.accepted for round_ in report.rounds) > 0


def test_closing_early_with_a_target_that_is_not_packed(nothing_warned):
    target = bloom()
    texts = generate_many(target, None, PROMPTS, do_sample=False, max_new_tokens=BUDGET, max_concurrency=3, show_progress=False)
    next(texts)
    texts.close()
    assert alone(target, PROMPTS[0]) == new_ids(many(target, None, PROMPTS[:1]))[0]


@pytest.mark.parametrize("kind", KINDS)
def test_a_request_that_is_not_packed_beside_others(target, widths, nothing_warned, kind):
    requests = [PROMPTS[0], {"input_ids": PROMPTS[1], "cache_implementation": "static"}, PROMPTS[2]]
    assert new_ids(many(target, draft_of(kind, target), requests)) == [alone(target, prompt) for prompt in PROMPTS[:3]]
    assert max(map(len, widths)) == 2


# Reports and the progress bar


@pytest.mark.parametrize("kind", KINDS)
def test_report(target, kind):
    with record_generation() as report:
        completions = many(target, draft_of(kind, target), various_requests(target), max_concurrency=3)
    assert [request.prompt_tokens for request in report.requests] == [len(request["input_ids"]) for request in various_requests(target)]
    for request, completion in zip(report.requests, completions):
        assert request.new_tokens == len(completion.new_ids) == 1 + sum(round_.tokens for round_ in request.rounds)
        assert request.time_to_first_token_seconds > 0
        assert 0 < request.target_seconds <= request.total_seconds
        assert (request.draft_seconds > 0) == (kind == "drafted" and len(completion.new_ids) > 2)
        assert request.missing_context_tokens == 0
    assert report.seconds("rest") >= 0
    assert report.seconds("total") == pytest.approx(sum(report.seconds(part) for part in ("target", "draft", "rest")))
    if kind == "plain":
        assert {round_.drafted for round_ in report.rounds} == {0}


def test_nothing_is_recorded_of_prompts_that_fail(target):
    with record_generation() as report:
        many(target, None, [[], PROMPTS[0]])
    assert [request.new_tokens for request in report.requests] == [BUDGET]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("sized", [True, False])
def test_progress_bar(target, monkeypatch, sized):
    def shown(**options) -> str:
        monkeypatch.setattr(sys, "stderr", Terminal())
        prompts = [PROMPTS[0], [], PROMPTS[1]]
        list(generate_many(target, None, prompts if sized else iter(prompts), do_sample=False, max_new_tokens=2, **options))
        return sys.stderr.getvalue()

    for options in (dict(show_progress=True), dict()):
        text = shown(**options)
        assert "generating" in text
        assert ("3/3" if sized else "3text") in text
        assert text.endswith("\n")
    assert shown(show_progress=False) == ""


def test_no_progress_bar_outside_a_terminal(target, capsys):
    list(generate_many(target, None, PROMPTS[:2], do_sample=False, max_new_tokens=2))
    captured = capsys.readouterr()
    assert "generating" not in captured.err and captured.out == ""


# Targets that are wrapped


WRAPPED = {
    "PEFT": lambda: get_peft_model(tiny_target(), LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)).eval(),
    "PEFT, causal LM": lambda: get_peft_model(
        tiny_target(), LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    ).eval(),
    "torch.compile": lambda: torch.compile(tiny_target(), backend="eager"),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("make", WRAPPED.values(), ids=WRAPPED)
def test_a_wrapped_target_is_packed(widths, nothing_warned, caplog, make, kind):
    target, prompts = make(), PROMPTS[:4]
    expected = [target.generate(input_ids=torch.tensor([ids]), do_sample=False, max_new_tokens=BUDGET)[0, len(ids) :].tolist() for ids in prompts]
    draft = None if kind == "plain" else tiny_draft(tiny_target())
    with caplog.at_level(logging.WARNING, "hf_dspark"):
        assert new_ids(many(target, draft, prompts)) == expected
    assert [len(ids) for ids in prompts] in widths and not caplog.messages
    if not isinstance(target, torch._dynamo.OptimizedModule):
        assert expected != [alone(tiny_target(), ids) for ids in prompts]


def test_an_adapter_for_each_request_is_refused(target):
    with pytest.raises(ValueError, match=r"adapter_names.*set_adapter"):
        generate_many(target, None, PROMPTS, adapter_names=["default"])


# Bad input, refused at once


@pytest.mark.parametrize("value", [3, "print"])
def test_on_tokens_is_checked_at_once(target, value):
    with pytest.raises(ValueError, match=f"on_tokens.*{value!r}"):
        generate_many(target, None, PROMPTS, on_tokens=value)


@pytest.mark.parametrize("kind", KINDS)
def test_stop_tokens_of_a_wrong_shape_are_refused(target, kind):
    (completion,) = many(target, draft_of(kind, target), [{"input_ids": PROMPTS[0], "eos_token_id": [[3]]}])
    assert_refused(completion, r"eos_token_id.*\[\[3\]\]")


@pytest.mark.parametrize("value", [0, -1, 2.5, True, False, "3", None])
def test_max_concurrency_is_checked_at_once(target, value):
    with pytest.raises(ValueError, match=f"max_concurrency.*{value!r}"):
        generate_many(target, None, PROMPTS, max_concurrency=value)


@pytest.mark.parametrize("value", [0, -5, 2.5, True, "3"])
def test_max_cached_tokens_is_checked_at_once(target, value):
    with pytest.raises(ValueError, match=f"max_cached_tokens.*{value!r}"):
        generate_many(target, None, PROMPTS, max_cached_tokens=value)


OF_GENERATE = {"streamer": object(), "assistant_model": object(), "custom_generate": print}


@pytest.mark.parametrize("name", OF_GENERATE)
def test_options_of_generate_alone_are_refused_at_once(target, name):
    with pytest.raises(ValueError, match=f"{name}.*generate_many"):
        generate_many(target, None, PROMPTS, **{name: OF_GENERATE[name]})


@pytest.mark.parametrize("name", OF_GENERATE)
def test_options_of_generate_alone_are_refused_for_one_request(target, name):
    first, failed = many(target, None, [PROMPTS[0], {"input_ids": PROMPTS[1], name: OF_GENERATE[name]}])
    assert new_ids([first]) == [alone(target, PROMPTS[0])]
    assert_refused(failed, f"request 1.*{name}")


def test_one_attention_mask_for_all_is_refused_at_once(target):
    with pytest.raises(ValueError, match="attention_mask belongs to one request"):
        generate_many(target, None, PROMPTS, attention_mask=torch.ones(1, 3))


def test_drafts_that_are_none(target):
    for draft in (tiny_target(1), torch.nn.Linear(2, 2), "a path", object()):
        with pytest.raises(ValueError, match=f"draft.*{type(draft).__name__}"):
            generate_many(target, draft, PROMPTS)


def test_a_draft_that_does_not_fit(target):
    draft = tiny_draft(tiny_target(hidden_size=24, num_attention_heads=3, num_key_value_heads=1))
    with pytest.raises(ValueError, match=r"hidden_size.*(24.*32|32.*24)"):
        generate_many(target, draft, PROMPTS)
    with pytest.raises(ValueError, match=r"vocab_size.*(50.*64|64.*50)"):
        generate_many(target, tiny_draft(tiny_target(vocab_size=50)), PROMPTS)


def test_prompts_that_are_no_iterable(target):
    with pytest.raises((TypeError, ValueError)):
        generate_many(target, None, 5)


def full_cache(target) -> DynamicCache:
    cache = DynamicCache(config=target.config)
    target(torch.tensor([[1, 2]]), cache=cache)
    return cache


@pytest.mark.parametrize("make", [full_cache, lambda target: DynamicCache(config=target.config)], ids=["full", "empty"])
def test_a_cache_is_refused(target, make):
    """Each text has its own, which ends with it."""
    first, failed = many(target, None, [PROMPTS[0], {"input_ids": PROMPTS[1], "cache": make(target)}])
    assert new_ids([first]) == [alone(target, PROMPTS[0])]
    assert_refused(failed, r"request 1.*cache")


def test_a_cache_for_all_requests_is_refused(nothing_warned):
    target = bloom()
    try:
        completions = many(target, None, PROMPTS[:2], cache=DynamicCache(config=target.config))
    except ValueError as error:
        assert "cache" in str(error)
    else:
        assert all(isinstance(completion.error, ValueError) and "cache" in str(completion.error) for completion in completions)


def refusal(target, own: dict, draft=None) -> Exception:
    """The error of a request with these options, beside one without."""
    first, failed = many(target, draft, [PROMPTS[0], {"input_ids": PROMPTS[1], **own}])
    assert new_ids([first]) == [alone(target, PROMPTS[0])]
    assert failed.output is failed.new_ids is None
    return failed.error


def test_paged_is_refused(target, monkeypatch):
    """It is transformers' own way of decoding many, which generate() would start before anything else."""
    monkeypatch.setattr(type(target), "generate_batch", raising(AssertionError("started")))
    error = refusal(target, {"cache_implementation": "paged"})
    assert isinstance(error, ValueError) and "paged" in str(error)


@pytest.mark.parametrize("own", [dict(dola_layers="low"), dict(penalty_alpha=0.6, top_k=4)], ids=str)
def test_other_ways_of_decoding_are_refused(target, own):
    """They would change the text, and generate_many does not know them."""
    for draft in (None, scripted_draft(target)):
        error = refusal(target, own, draft)
        assert isinstance(error, ValueError)
        assert next(iter(own)) in str(error) or "dola" in str(error) or "contrastive" in str(error)


@pytest.mark.parametrize("name", ["output_hidden_states", "output_attentions"])
def test_extra_outputs_are_refused(target, name):
    for draft in (None, scripted_draft(target)):
        error = refusal(target, {"return_dict_in_generate": True, name: True}, draft)
        assert isinstance(error, ValueError) and name in str(error)


@pytest.mark.parametrize(
    "mask, message",
    [
        ([[1, 1, 0]], "request 1.*padded on the right.*left"),
        ([[0, 0, 0]], "request 1.*empty"),
        ([[1, 1]], "request 1.*attention_mask"),
        ([[1, 1, 1, 1]], "request 1.*attention_mask"),
    ],
    ids=str,
)
def test_attention_masks_that_are_refused(target, mask, message):
    for form in (torch.tensor(mask), mask[0]):
        completions = many(target, None, [PROMPTS[0], {"input_ids": [5, 9, 3], "attention_mask": form}])
        assert new_ids(completions[:1]) == [alone(target, PROMPTS[0])]
        assert_refused(completions[1], message)


def test_a_stop_token_of_one_request_that_is_the_mask_token(target):
    error = refusal(target, {"eos_token_id": 63, "pad_token_id": 0}, scripted_draft(target))
    assert isinstance(error, ValueError) and "63" in str(error)


def test_the_queue_is_an_iterator(target):
    texts = generate_many(target, None, PROMPTS[:2], do_sample=False, max_new_tokens=2, show_progress=False)
    assert iter(texts) is texts
    assert [completion.index for completion in texts] == [0, 1]
    assert list(texts) == []


@pytest.mark.parametrize("prompts", ["import os", [5, 9, 3], torch.tensor([5, 9, 3])], ids=["text", "ids", "tensor"])
def test_one_prompt_in_place_of_many_is_refused_at_once(target, prompts):
    with pytest.raises(ValueError, match="prompts must be several prompts"):
        generate_many(target, None, prompts)
