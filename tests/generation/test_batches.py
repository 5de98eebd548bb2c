"""A batch through generate(): each row equals its own plain generate() with the same padded row and mask, whatever its neighbours do."""

import gc
import types
from dataclasses import dataclass

import pytest
import torch
from oracle import (
    ALL_KINDS,
    VOCAB,
    ScriptedDraft,
    kinds_of_acceptance,
    right_with_probability,
    spy,
    tiny_draft,
    tiny_target,
)
from test_decoding import SeenTokens, given, tokenizer_of_pairs
from test_steps import target_of_kind
from transformers import StoppingCriteria
from transformers.generation.stopping_criteria import MaxLengthCriteria

from hf_dspark import GenerationReport, record_generation
from hf_dspark.generation import candidates
from hf_dspark.generation.hook import as_draft
from hf_dspark.generation.key_values import KeyValues
from hf_dspark.generation.packing import packing_failure
from hf_dspark.modeling.context_cache import ContextCache

BLOCK = 4
PROMPTS = ([5], [9, 3, 17, 22], [8, 40, 2, 11, 6, 31, 7], [30, 1, 12, 44, 3, 9, 21, 50, 2, 33, 5])


def padded(*prompts: list[int], pad: int = 0) -> dict:
    """Ids and mask of texts padded on the left."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[pad] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    return dict(input_ids=ids, attention_mask=mask)


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.fixture
def draft(target):
    return tiny_draft(target, ScriptedDraft, block_size=BLOCK)


@dataclass
class Compared:
    """Each row's plain output, the drafted batch, and its report."""

    plain: list
    drafted: object
    report: GenerationReport

    @property
    def lengths(self) -> list[int]:
        return [request.new_tokens for request in self.report.requests]

    @property
    def kinds(self) -> set[str]:
        return kinds_of_acceptance(self.report)


def let_it_follow(draft: ScriptedDraft, inputs: dict, outputs: list, lengths: list[int]) -> None:
    """The draft writes each row's own text, right with probability 0.7 a position."""
    draft.texts = []
    for row, (output, count) in enumerate(zip(outputs, lengths)):
        prompt = inputs["input_ids"][row] if "input_ids" in inputs else torch.zeros(inputs["inputs_embeds"].shape[1])
        if "attention_mask" in inputs:
            prompt = prompt[inputs["attention_mask"][row].bool()]
        draft.texts.append(prompt.long().tolist() + output[0, -count:].tolist())
    draft.scripts = [right_with_probability(text, seed=row, vocab=draft.config.vocab_size) for row, text in enumerate(draft.texts)]


def compare_rows(target, draft, inputs: dict, fresh=lambda row: {}, *, compare_logits=True, tolerance=1e-4, **options) -> Compared:
    """Generates each row by itself and plainly, then all with `draft`, and asserts that they agree in everything generate() returns.

    `inputs`: tensors with one row a text. `fresh(row)`: arguments that a run uses up, anew for each; of row None: for the whole batch.
    """
    options = dict(do_sample=False, return_dict_in_generate=True, output_scores=True, output_logits=True) | options
    num_rows = len(next(iter(inputs.values())))
    plain = [target.generate(**{name: rows[i : i + 1] for name, rows in inputs.items()}, **options, **fresh(i)) for i in range(num_rows)]
    if isinstance(as_draft(draft), ScriptedDraft):
        let_it_follow(as_draft(draft), inputs, [output.sequences for output in plain], [len(output.logits) for output in plain])
    with record_generation() as report:
        drafted = target.generate(**inputs, **options, **fresh(None), assistant_model=draft)
    longest = max(output.sequences.shape[1] for output in plain)
    assert drafted.sequences.shape == (num_rows, longest) and drafted.cache is None and len(report.requests) == num_rows
    for row, expected in enumerate(plain):
        text, count = expected.sequences[0].tolist(), len(expected.logits)
        assert drafted.sequences[row].tolist() == text + [options.get("pad_token_id")] * (longest - len(text))
        for name in ("scores", "logits") if compare_logits else ("scores",):
            assert len(drafted[name]) == max(len(output.logits) for output in plain)
            for step, scores in enumerate(drafted[name]):
                assert scores.shape == (num_rows, expected[name][0].shape[1]) and scores.dtype == expected[name][0].dtype
                if step < count:
                    assert torch.allclose(scores[row], expected[name][step][0], rtol=tolerance, atol=tolerance), (
                        f"{name} of row {row}, step {step} differ"
                    )
                else:
                    assert not scores[row].any()  # the row has ended
        request = report.requests[row]
        assert request.new_tokens == count == 1 + sum(round_.tokens for round_ in request.rounds)
    return Compared(plain, drafted, report)


def test_rows_of_different_lengths(target, draft):
    result = compare_rows(target, draft, padded(*PROMPTS), max_new_tokens=24)
    for request in result.report.requests:
        assert any(round_.accepted for round_ in request.rounds) and request.draft_failure is None and request.missing_context_tokens == 0
    assert result.kinds == ALL_KINDS
    # Each row accepted its own number: they took different numbers of rounds.
    assert len({len(request.rounds) for request in result.report.requests}) > 1


@pytest.mark.parametrize("budget", range(1, 9))
def test_every_budget(target, draft, budget):
    result = compare_rows(target, draft, padded(*PROMPTS[:3]), max_new_tokens=budget)
    assert result.lengths == [budget] * 3
    compare_rows(target, draft, padded(*PROMPTS[1:]), max_length=len(PROMPTS[3]) + budget)  # which counts the padding


KINDS = ["llama", "qwen3-tied", "gemma3", "gemma3-all-sliding", "mistral-sliding", "mixtral", "qwen3-moe", "gpt2", "granite"]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_target(kind):
    target = target_of_kind(kind)
    assert packing_failure(target) is None
    tolerance = 1e-3 if kind in ("mixtral", "qwen3-moe") else 1e-4  # near ties of a random router magnify rounding
    result = compare_rows(target, tiny_draft(target, ScriptedDraft), padded(*PROMPTS), max_new_tokens=20, tolerance=tolerance)
    assert result.kinds == ALL_KINDS
    assert len(set(result.drafted.sequences[:, 11:].flatten().tolist())) > 8


@pytest.mark.parametrize("do_return", [True, False])
def test_what_is_returned_without_scores(target, draft, do_return):
    inputs = padded(*PROMPTS)
    plain = target.generate(**inputs, do_sample=False, max_new_tokens=6)
    drafted = target.generate(**inputs, do_sample=False, max_new_tokens=6, return_dict_in_generate=do_return, assistant_model=tiny_draft(target))
    if do_return:
        assert drafted.scores is drafted.logits is drafted.cache is None
        drafted = drafted.sequences
    assert drafted.dtype == plain.dtype and torch.equal(drafted, plain)


def test_masks(target, draft):
    """Of another dtype, with a hole, inferred from the pad token, and none."""
    inputs = padded(*PROMPTS)
    compare_rows(target, draft, inputs | dict(attention_mask=inputs["attention_mask"].bool()), max_new_tokens=8)
    inputs["attention_mask"][3, 2:4] = inputs["attention_mask"][2, 6] = 0
    compare_rows(target, draft, inputs, max_new_tokens=8)
    result = compare_rows(target, draft, dict(input_ids=padded(*PROMPTS)["input_ids"]), max_new_tokens=8, pad_token_id=0)
    with_mask = target.generate(**padded(*PROMPTS), max_new_tokens=8, do_sample=False)
    assert torch.equal(result.drafted.sequences, with_mask)
    compare_rows(target, draft, dict(input_ids=torch.tensor([[5, 9, 3], [17, 22, 8]])), max_new_tokens=8)


def test_chunked_prefill_and_positions_as_usual(target, draft):
    inputs = padded(*PROMPTS)
    compare_rows(target, draft, inputs, max_new_tokens=8, prefill_chunk_size=4)
    compare_rows(target, draft, inputs | dict(position_ids=(inputs["attention_mask"].cumsum(-1) - 1).clamp(min=0)), max_new_tokens=8)


# Rows end on their own.


def plain_texts(target, count: int, *prompts: list[int]) -> list[list[int]]:
    return [target.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=count)[0, len(prompt) :].tolist() for prompt in prompts]


@pytest.mark.parametrize("seed", range(6))
def test_rows_stop_at_different_offsets(target, draft, seed):
    texts = plain_texts(target, 20, *PROMPTS)
    stops = [text[(5 * row + 3 * seed) % 14] for row, text in enumerate(texts)]
    ends = [min(text.index(stop) for stop in stops if stop in text) + 1 for text in texts]
    result = compare_rows(target, draft, padded(*PROMPTS), max_new_tokens=20, eos_token_id=stops, pad_token_id=0)
    assert result.lengths == ends and len(set(ends)) > 1


def test_a_row_that_ends_with_its_first_token(target, draft):
    texts = plain_texts(target, 12, *PROMPTS[:3])
    result = compare_rows(target, draft, padded(*PROMPTS[:3]), max_new_tokens=12, eos_token_id=texts[1][0], pad_token_id=63)
    assert result.lengths[1] == 1 and result.report.requests[1].rounds == [] and max(result.lengths) > 6
    # And all of them at once.
    result = compare_rows(target, draft, padded(*PROMPTS[:3]), max_new_tokens=12, eos_token_id=[text[0] for text in texts], pad_token_id=63)
    assert result.lengths == [1, 1, 1]


def test_rows_that_have_ended_cost_nothing(target, draft, monkeypatch):
    """The width through the target is the anchors and drafts of those that run, and nothing is kept of those that have ended."""
    texts = plain_texts(target, 24, *PROMPTS)
    stops = [texts[0][2], texts[2][9]]
    packing_failure(target)
    let_it_follow(draft, padded(*PROMPTS), [torch.tensor([text]) for text in texts], [24] * 4)
    widths, kept = [], []

    def note(*_, **arguments):
        widths.append(arguments["input_ids"].shape)
        things = gc.get_objects()
        places = sum(type(thing) is KeyValues and thing.pool is not None and thing.length > 0 for thing in things)
        kept.append((places, sum(type(thing) is ContextCache and thing.length > 0 for thing in things)))

    spy(monkeypatch, target, "forward", note)
    gc.collect()
    with record_generation() as report:
        target.generate(**padded(*PROMPTS), do_sample=False, max_new_tokens=24, eos_token_id=stops, pad_token_id=0, assistant_model=draft)
    rounds = [request.rounds for request in report.requests]
    steps = [[own[k] for own in rounds if k < len(own)] for k in range(max(map(len, rounds)))]
    assert len({len(step) for step in steps}) > 2
    assert widths == [(1, sum(map(len, PROMPTS)))] + [(1, sum(1 + round_.drafted for round_ in step)) for step in steps]
    # The draft's context begins with the first round.
    assert kept[2:] == [(len(step), len(step)) for step in steps[1:]]


def test_stop_strings(target, draft):
    tokenizer = tokenizer_of_pairs()
    letters = [[tokenizer.convert_ids_to_tokens(token) for token in text] for text in plain_texts(target, 16, *PROMPTS)]
    kinds, lengths = set(), set()
    for position in (2, 5, 7):
        stops = [row[position + i][-1] + row[position + i + 1][0] for i, row in enumerate(letters[:2])]
        result = compare_rows(target, draft, padded(*PROMPTS), max_new_tokens=16, stop_strings=stops, tokenizer=tokenizer, pad_token_id=0)
        kinds |= result.kinds
        lengths |= set(result.lengths)
    assert kinds == ALL_KINDS and len(lengths) > 3


class OwnScores(StoppingCriteria):
    """Reads the scores; stops at a margin. It keeps nothing, and can't be copied."""

    def __init__(self, margin: float):
        self.margin = margin

    def __deepcopy__(self, memo):
        raise TypeError("no copies")

    def __call__(self, input_ids, scores, **kwargs):
        assert input_ids.shape[0] == 1 and scores[-1].shape == (1, VOCAB)
        best = scores[-1][0].topk(2).values
        return torch.tensor([bool(best[0] - best[1] > self.margin)])


@pytest.mark.parametrize(
    "criterion", [(SeenTokens, 4), (SeenTokens, 7), (MaxLengthCriteria, 17), (OwnScores, 2.0)], ids=["4-seen", "7-seen", "length", "scores"]
)
def test_criteria(target, draft, criterion):
    """A stateful one has its own state for each row: `SeenTokens` checks that it is asked once for every prefix of one text."""
    result = compare_rows(target, draft, padded(*PROMPTS), lambda row: given(*criterion), max_new_tokens=20, pad_token_id=0)
    assert criterion[0] is MaxLengthCriteria or len(set(result.lengths)) > 1


def test_max_time(target, draft, monkeypatch):
    """The clock stands still until it has been read `reads` times; then each row ends with the token it is at."""
    texts, rows = plain_texts(target, 30, *PROMPTS), len(PROMPTS)
    let_it_follow(draft, padded(*PROMPTS), [torch.tensor([text]) for text in texts], [30] * rows)
    for reads in range(2, 30, 3):
        ticks = iter([0.0] * reads + [100.0] * 1000)
        monkeypatch.setattr("transformers.generation.stopping_criteria.time", types.SimpleNamespace(time=lambda ticks=ticks: next(ticks)))
        with record_generation() as report:
            output = target.generate(**padded(*PROMPTS), do_sample=False, max_new_tokens=30, max_time=10, pad_token_id=0, assistant_model=draft)
        lengths = [request.new_tokens for request in report.requests]
        assert sum(lengths) == reads - 1 + rows  # it is read once at the start, and once for every token
        for row, (text, length) in enumerate(zip(texts, lengths)):
            assert output[row, 11 : 11 + length].tolist() == text[:length] and not output[row, 11 + length :].any()


# Neighbours.


DRAFTS = {
    "vanilla head": {},
    "gated head": dict(markov_head_type="gated"),
    "rnn head": dict(markov_head_type="rnn"),
    "no head": dict(markov_rank=0, enable_confidence_head=False, confidence_head_with_markov=False),
    "reduced vocabulary": dict(draft_vocab_size=20),
    "best of a large vocabulary": {},
    "confidence threshold": {},
    "two drafts a round": {},
}


@pytest.mark.parametrize("kind", DRAFTS)
def test_neighbours_change_nothing(target, monkeypatch, kind):
    """A row's rounds, and what the draft thinks of its drafts, are those that it has alone."""
    draft = tiny_draft(target, **DRAFTS[kind])
    if draft.markov_head is not None:
        torch.nn.init.normal_(draft.markov_head.markov_w2.weight)
    if kind == "reduced vocabulary":
        draft.d2t.copy_(torch.arange(20) * 2)
    if kind == "best of a large vocabulary":
        monkeypatch.setattr(candidates, "LARGE_VOCABULARY", 16)
        monkeypatch.setattr(candidates, "_NUM_BEST", 24)
    if kind == "confidence threshold":
        draft.generation_config.assistant_confidence_threshold = 0.3
    if kind == "two drafts a round":
        draft.generation_config.num_assistant_tokens = 2

    def rounds(*prompts):
        with record_generation() as report:
            target.generate(**padded(*prompts), do_sample=False, max_new_tokens=16, assistant_model=draft)
        assert all(request.draft_failure is None for request in report.requests)
        return [[(r.tokens, r.drafted, r.accepted, r.confidence) for r in request.rounds] for request in report.requests]

    alone = [rounds(prompt)[0] for prompt in PROMPTS]
    if kind == "confidence threshold":
        assert len({drafted for row in alone for _, drafted, _, _ in row}) > 2
    for order in ((0, 1, 2, 3), (3, 1), (2, 2, 0)):
        for row, own in zip(order, rounds(*(PROMPTS[row] for row in order))):
            assert [counts[:3] for counts in own] == [counts[:3] for counts in alone[row]]
            for (*_, confidence), (*_, expected) in zip(own, alone[row]):
                assert confidence == (None if expected is None else pytest.approx(expected, abs=1e-4))
