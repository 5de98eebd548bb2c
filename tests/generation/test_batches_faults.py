"""What a batch refuses, what is decoded in turn, faults of one row, and what calls leave behind: nothing."""

import copy
import gc
import logging
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from oracle import ALL_KINDS, VOCAB, ScriptedDraft, kinds_of_acceptance, tiny_draft, tiny_target
from peft import LoraConfig, get_peft_model
from test_batches import PROMPTS, compare_rows, let_it_follow, padded
from test_decoding import Collector
from test_steps import target_of_kind
from transformers import LogitsProcessor, LogitsProcessorList

from hf_dspark import GenerationReport, record_generation
from hf_dspark.generation import batches
from hf_dspark.generation.key_values import KeyValues
from hf_dspark.generation.packing import packing_failure


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.fixture
def draft(target):
    return tiny_draft(target, ScriptedDraft)


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


def test_memory_is_constant_over_200_calls(target):
    draft = tiny_draft(target)
    options = dict(do_sample=False, max_new_tokens=3, return_dict_in_generate=True, output_scores=True, assistant_model=draft)

    def living(calls: int) -> tuple[int, int]:
        for _ in range(calls):
            target.generate(**padded(*PROMPTS[:2]), **options)
        gc.collect()
        things = gc.get_objects()
        return sum(issubclass(type(thing), torch.Tensor) for thing in things), sum(type(thing) is KeyValues for thing in things)

    (tensors, stores), (more_tensors, more_stores) = living(10), living(190)
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
