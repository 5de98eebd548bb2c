"""A batch through generate(): each row equals its own plain generate() with the same padded row and mask, whatever its neighbours do."""

import copy
import gc
import logging
import types
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product

import pytest
import torch
from oracle import (
    ALL_KINDS,
    VOCAB,
    ScriptedDraft,
    chain_law,
    kinds_of_acceptance,
    largest_difference,
    right_with_probability,
    spy,
    tiny_draft,
    tiny_target,
    walk_every_outcome,
)
from peft import LoraConfig, get_peft_model
from test_acceptance import small_draft, small_target
from test_decoding import Collector, SeenTokens, given, tokenizer_of_pairs
from test_steps import target_of_kind
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, set_seed
from transformers.generation.stopping_criteria import MaxLengthCriteria

from hf_dspark import GenerationReport, record_generation
from hf_dspark.generation import batches, candidates
from hf_dspark.generation.hook import as_draft
from hf_dspark.generation.packing import KeyValues, packing_failure

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
        kept.append(sum(type(thing) is KeyValues and thing.length > 0 for thing in gc.get_objects()))

    spy(monkeypatch, target, "forward", note)
    gc.collect()
    with record_generation() as report:
        target.generate(**padded(*PROMPTS), do_sample=False, max_new_tokens=24, eos_token_id=stops, pad_token_id=0, assistant_model=draft)
    rounds = [request.rounds for request in report.requests]
    steps = [[own[k] for own in rounds if k < len(own)] for k in range(max(map(len, rounds)))]
    assert len({len(step) for step in steps}) > 2
    assert widths == [(1, sum(map(len, PROMPTS)))] + [(1, sum(1 + round_.drafted for round_ in step)) for step in steps]
    assert kept[1:] == [len(step) for step in steps]


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


# Random numbers.


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


def test_num_return_sequences(target):
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


# What a batch can't do.


@pytest.mark.parametrize(
    "mask, message",
    [([[1, 1, 1], [1, 1, 0]], "row 1 .*padded on the right.*left"), ([[0, 0, 0], [0, 1, 1]], "row 0 .*empty")],
    ids=["right padding", "empty row"],
)
def test_rows_that_are_refused(target, draft, mask, message):
    with pytest.raises(ValueError, match=message):
        target.generate(torch.tensor([[5, 9, 3], [17, 22, 8]]), attention_mask=torch.tensor(mask), max_new_tokens=4, assistant_model=draft)


def test_a_cache_that_goes_on_is_refused(target, draft):
    inputs = padded(*PROMPTS[:2])
    first = target.generate(**inputs, do_sample=False, max_new_tokens=4, return_dict_in_generate=True)
    with pytest.raises(ValueError, match=r"2 rows can't continue a cache.*7"):
        target.generate(first.sequences, cache=first.cache, max_new_tokens=4, assistant_model=draft)


def test_a_streamer_is_refused(target, draft):
    with pytest.raises(ValueError, match=r"streamer.*batch of 2"):
        target.generate(**padded(*PROMPTS[:2]), max_new_tokens=4, streamer=Collector(), assistant_model=draft)


def embedded(target) -> dict:
    inputs = padded(*PROMPTS)
    return dict(inputs_embeds=target.get_input_embeddings()(inputs["input_ids"]).detach(), attention_mask=inputs["attention_mask"])


UNPACKED = {
    "Bloom": ("bloom", lambda target: padded(*PROMPTS), {}, "position_ids"),
    "Gemma 2": ("gemma2-soft-cap", lambda target: padded(*PROMPTS), {}, "softcap"),
    "GPT-OSS": ("gpt-oss", lambda target: padded(*PROMPTS), {}, "s_aux"),
    "token types": ("gpt2", lambda target: padded(*PROMPTS) | dict(token_type_ids=padded(*PROMPTS)["input_ids"] % 3), {}, "token_type_ids"),
    "positions": ("qwen3", lambda target: padded(*PROMPTS) | dict(position_ids=torch.arange(44).view(4, 11)), {}, "position_ids"),
    "embeddings": ("qwen3", embedded, {}, "inputs_embeds"),
    "static cache": ("llama", lambda target: padded(*PROMPTS), dict(cache_implementation="static"), "static"),
}


@pytest.mark.parametrize("kind, make_inputs, options, reason", UNPACKED.values(), ids=UNPACKED.keys())
def test_what_can_not_be_packed_is_decoded_in_turn(monkeypatch, caplog, kind, make_inputs, options, reason):
    monkeypatch.setattr(batches, "_warned", set())
    target = target_of_kind(kind)
    draft = tiny_draft(target, ScriptedDraft)
    with caplog.at_level(logging.WARNING, "hf_dspark"):
        result = compare_rows(target, draft, make_inputs(target), max_new_tokens=20, **options)
        assert result.kinds == ALL_KINDS
        texts = [output.sequences[0].tolist() for output in result.plain]
        compare_rows(target, draft, make_inputs(target), max_new_tokens=20, eos_token_id=[texts[0][-9], texts[1][-4]], pad_token_id=0, **options)
    (warning,) = caplog.messages
    assert "in turn" in warning and reason in warning


# Faults.


class FaultyForOneRow(ScriptedDraft):
    """Goes wrong for blocks of row `row` from its fourth new token on."""

    row = 1
    fault = "NaN law"

    def at_fault(self) -> list[int]:
        first = len(PROMPTS[self.row]) + 3
        text = self.texts[self.row]
        return [i for i, (position, token) in enumerate(self.anchors) if position >= first and text[position : position + 1] == [token]]

    def forward(self, *args, **kwargs):
        hidden = super().forward(*args, **kwargs)
        if self.fault == "out of memory" and self.at_fault():
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return hidden

    def base_logits(self, hidden):
        logits = super().base_logits(hidden)
        if self.fault == "NaN law":
            for i in self.at_fault():
                logits.view(len(self.anchors), -1, VOCAB)[i] = torch.nan
        return logits


@pytest.mark.parametrize("fault", ["NaN law", "out of memory"])
def test_a_draft_that_fails_for_one_row(target, caplog, fault):
    draft = tiny_draft(target, FaultyForOneRow)
    draft.fault = fault
    with caplog.at_level(logging.WARNING, "hf_dspark"):
        result = compare_rows(target, draft, padded(*PROMPTS[:3]), max_new_tokens=20)
    failures = [request.draft_failure for request in result.report.requests]
    assert failures[0] is failures[2] is None and failures[1] is not None
    (warning,) = caplog.messages
    assert failures[1] in warning
    first, failed, third = (request.rounds for request in result.report.requests)
    assert any(round_.drafted for round_ in failed) and not any(round_.drafted for round_ in failed[5:])
    assert all(round_.drafted for round_ in (*first[:-1], *third[:-1]))
    assert kinds_of_acceptance(GenerationReport([result.report.requests[0], result.report.requests[2]])) == ALL_KINDS
    draft.generation_config.raise_on_draft_failure = True
    with pytest.raises((FloatingPointError, torch.OutOfMemoryError), match=r"finite|memory"):
        target.generate(**padded(*PROMPTS[:3]), do_sample=False, max_new_tokens=20, assistant_model=draft)


class FailingAt(LogitsProcessor):
    def __init__(self, error):
        self.error = error

    def __call__(self, input_ids, scores):
        if input_ids.shape[1] == 12 and input_ids[0, -1 - 5] == PROMPTS[2][-1]:
            raise self.error("no such state")
        return scores


@pytest.mark.parametrize("error", [KeyError, KeyboardInterrupt])
def test_what_the_target_s_side_raises_goes_through(target, error):
    """And the next call is as ever."""
    inputs, draft = padded(*PROMPTS[:3]), tiny_draft(target)
    with record_generation(), pytest.raises(error, match="no such state"):
        target.generate(**inputs, do_sample=False, max_new_tokens=20, logits_processor=LogitsProcessorList([FailingAt(error)]), assistant_model=draft)
    assert target.config._attn_implementation == "sdpa"
    compare_rows(target, draft, inputs, max_new_tokens=6)


# Nothing is left behind.


def test_two_calls_leave_everything_as_it_was(target, draft):
    result = compare_rows(target, draft, padded(*PROMPTS), max_new_tokens=12)
    models_, results = (target, draft), []
    before = [copy.deepcopy(model) for model in models_]
    for _ in range(2):
        draft.drafted.clear()
        with record_generation() as report:
            ids = target.generate(**padded(*PROMPTS), do_sample=False, max_new_tokens=12, assistant_model=draft)
        results.append((ids.tolist(), report.rounds, list(draft.drafted)))
    assert results[0] == results[1] and results[0][0] == result.drafted.sequences.tolist()
    for model, copied in zip(models_, before):
        assert copied.config.to_dict() == model.config.to_dict() and copied.generation_config.to_dict() == model.generation_config.to_dict()
        assert copied.config._attn_implementation == model.config._attn_implementation and copied.training == model.training
        assert [p.requires_grad for p in copied.parameters()] == [p.requires_grad for p in model.parameters()]
        assert all(torch.equal(copied.state_dict()[name], tensor) for name, tensor in model.state_dict().items())


def test_memory_is_constant_over_100_calls(target):
    draft = tiny_draft(target)
    options = dict(do_sample=False, max_new_tokens=3, return_dict_in_generate=True, output_scores=True, assistant_model=draft)

    def living(calls: int) -> tuple[int, int]:
        for _ in range(calls):
            target.generate(**padded(*PROMPTS[:2]), **options)
        gc.collect()
        things = gc.get_objects()
        return sum(issubclass(type(thing), torch.Tensor) for thing in things), sum(type(thing) is KeyValues for thing in things)

    (tensors, stores), (more_tensors, more_stores) = living(10), living(90)
    assert more_tensors <= tensors and stores == more_stores == 0


def test_threads_share_one_target_and_one_draft(target):
    draft = tiny_draft(target)
    torch.nn.init.normal_(draft.markov_head.markov_w2.weight)
    pairs = [(PROMPTS[i], PROMPTS[j]) for i, j in ((0, 1), (2, 3), (1, 2), (3, 0))]
    options = dict(do_sample=False, max_new_tokens=12)
    expected = [target.generate(**padded(*pair), **options).tolist() for pair in pairs]
    with_draft = dict(assistant_model=draft)
    with ThreadPoolExecutor(3) as pool:
        drafted = list(pool.map(lambda pair: target.generate(**padded(*pair), **options, **with_draft).tolist(), pairs))
        mixed = list(pool.map(lambda assistant: target.generate(**padded(*pairs[0]), **options, **assistant).tolist(), [{}, with_draft] * 3))
    assert drafted == expected and mixed == [expected[0]] * 6


def test_a_draft_under_peft(target):
    draft = tiny_draft(target, ScriptedDraft)
    adapted = get_peft_model(draft, LoraConfig(r=2, target_modules=r".*layers\.\d+\.(self_attn|mlp)\..*_proj")).eval()
    assert compare_rows(target, adapted, padded(*PROMPTS), max_new_tokens=20).kinds == ALL_KINDS


@pytest.mark.parametrize("seed", range(2))
def test_bf16_parts_from_plain_at_near_ties_only(seed):
    target = tiny_target(seed).to(torch.bfloat16)
    draft = tiny_draft(target, ScriptedDraft).to(torch.bfloat16)
    plain = [target.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=40) for prompt in PROMPTS]
    let_it_follow(draft, padded(*PROMPTS), plain, [40] * 4)
    with record_generation() as report:
        drafted = target.generate(**padded(*PROMPTS), do_sample=False, max_new_tokens=40, assistant_model=draft)
    assert packing_failure(target) is None and any(round_.accepted for round_ in report.rounds)
    for prompt, text, row in zip(PROMPTS, plain, drafted):
        ours, theirs = row[-40 - len(prompt) :].tolist(), text[0].tolist()
        if ours != theirs:
            first = next(index for index, (one, other) in enumerate(zip(ours, theirs)) if one != other)
            best = target(torch.tensor([theirs[:first]])).logits[0, -1].float().topk(2)
            assert set(best.indices.tolist()) == {ours[first], theirs[first]}
            assert best.values[0] - best.values[1] <= 4 * torch.finfo(torch.bfloat16).eps * best.values.abs().max()
