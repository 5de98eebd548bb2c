"""What a batch refuses, what is decoded in turn, faults of one row, and what calls leave behind: nothing."""

import copy
import gc
import logging
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from oracle import ALL_KINDS, VOCAB, ScriptedDraft, build, kinds_of_acceptance, tiny_draft, tiny_target
from peft import LoraConfig, PrefixTuningConfig, PromptTuningConfig, get_peft_model
from test_batches import PROMPTS, compare_rows, let_it_follow, padded
from test_decoding import Collector
from test_steps import target_of_kind
from transformers import DynamicCache, LogitsProcessor, LogitsProcessorList, Qwen3ForCausalLM

from hf_dspark import GenerationReport, generate_many, record_generation
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


# Arguments of other shapes.


def a_mask(num_rows: int, length: int) -> torch.Tensor:
    """One with padding."""
    mask = torch.ones(num_rows, length, dtype=torch.long)
    mask[0, 0] = 0
    return mask


SHAPES = {
    "mask of 3 rows": (dict(attention_mask=a_mask(3, 3)), r"attention_mask.*\(3, 3\).*input_ids.*\(2, 3\)"),
    "mask of one row": (dict(attention_mask=a_mask(1, 3)), r"attention_mask.*\(1, 3\).*\(2, 3\)"),
    "longer mask": (dict(attention_mask=a_mask(2, 4)), r"attention_mask.*\(2, 4\).*\(2, 3\)"),
    "shorter mask": (dict(attention_mask=a_mask(2, 2)), r"attention_mask.*\(2, 2\).*\(2, 3\)"),
    "mask of 3 rows of ones": (dict(attention_mask=torch.ones(3, 3)), r"attention_mask.*\(3, 3\).*\(2, 3\)"),
    "longer mask of ones": (dict(attention_mask=torch.ones(2, 4)), r"attention_mask.*\(2, 4\).*\(2, 3\)"),
    "positions of 3 rows": (dict(position_ids=torch.arange(9).view(3, 3)), r"position_ids.*\(3, 3\).*\(2, 3\)"),
    "longer positions": (dict(position_ids=torch.arange(4)[None]), r"position_ids.*\(1, 4\).*\(2, 3\)"),
    "token types of 3 rows": (dict(token_type_ids=torch.zeros(3, 3).long()), r"token_type_ids.*\(3, 3\).*\(2, 3\)"),
}


@pytest.mark.parametrize("own, message", SHAPES.values(), ids=SHAPES.keys())
def test_arguments_of_other_shapes_are_refused(own, message):
    gpt2 = target_of_kind("gpt2")
    ids = torch.tensor([[5, 9, 3], [17, 22, 8]])
    with pytest.raises(ValueError, match=message):
        gpt2.generate(ids, **own, max_new_tokens=4, assistant_model=tiny_draft(gpt2))


@pytest.mark.parametrize("shape", [(1, 2), (1, 4), (2, 3)])
def test_a_mask_of_another_shape_is_refused_for_one_text(target, draft, shape):
    with pytest.raises(ValueError, match=rf"attention_mask.*\({shape[0]}, {shape[1]}\).*\(1, 3\)"):
        target.generate(torch.tensor([[5, 9, 3]]), attention_mask=a_mask(*shape), max_new_tokens=4, assistant_model=draft)


def test_a_mask_of_another_shape_than_embeddings(target, draft):
    inputs = embedded(target) | dict(attention_mask=a_mask(4, 10))
    with pytest.raises(ValueError, match=r"attention_mask.*\(4, 10\).*inputs_embeds.*\(4, 11, 32\)"):
        target.generate(**inputs, max_new_tokens=4, assistant_model=draft)


def test_positions_shared_by_all_rows(target, draft):
    ids, positions = torch.tensor([[5, 9, 3], [17, 22, 8]]), torch.arange(3, 6)[None]
    expected = [target.generate(row[None], position_ids=positions, do_sample=False, max_new_tokens=8)[0].tolist() for row in ids]
    draft.script = lambda position, slot: 5
    assert target.generate(ids, position_ids=positions, do_sample=False, max_new_tokens=8, assistant_model=draft).tolist() == expected


def test_positions_of_several_axes_are_cut_by_row():
    """As vision-language models make them: (axes, batch, tokens), here as many axes as rows."""
    positions = torch.arange(18).view(3, 3, 2)
    for row in range(3):
        assert torch.equal(batches._row_kwargs({"position_ids": positions}, row, 3)["position_ids"], positions[:, row : row + 1])


def test_a_batch_of_no_rows_is_refused(target, draft):
    with pytest.raises(ValueError, match=r"no rows.*\(0, 3\)"):
        target.generate(torch.zeros(0, 3, dtype=torch.long), max_new_tokens=4, assistant_model=draft)


def test_an_offloaded_cache_is_refused_for_a_batch(target, draft):
    cache = DynamicCache(config=target.config)
    cache.offloading = True  # as cache_implementation="offloaded" makes it, where there is a GPU
    with pytest.raises(ValueError, match=r"2 rows.*cache_implementation='offloaded'.*generate_many"):
        target.generate(**padded(*PROMPTS[:2]), cache=cache, max_new_tokens=4, assistant_model=draft)


# Targets that prepare their inputs in a way of their own.


def own_preparation(kind: str):
    """A target whose generate() runs on embeddings 1.5 times as large, by its class or by a replaced method."""

    class Scaled(Qwen3ForCausalLM):
        def prepare_inputs_for_generation(self, input_ids, attention_mask=None, **kwargs):
            return scaled(self, super().prepare_inputs_for_generation(input_ids, attention_mask=attention_mask, **kwargs))

    def scaled(model, inputs):
        return inputs | dict(inputs_embeds=model.get_input_embeddings()(inputs.pop("input_ids")) * 1.5)

    if kind == "class":
        return build(Scaled, tiny_target().config)
    model = tiny_target()
    assert packing_failure(model) is None  # what is found out before the method is replaced does not count
    original = type(model).prepare_inputs_for_generation

    def replaced(input_ids, attention_mask=None, **kwargs):
        return scaled(model, original(model, input_ids, attention_mask=attention_mask, **kwargs))

    model.prepare_inputs_for_generation = replaced
    return model


@pytest.mark.parametrize("kind", ["class", "instance"])
def test_a_target_that_prepares_its_inputs_otherwise_is_not_packed(monkeypatch, caplog, kind):
    monkeypatch.setattr(batches, "_warned", set())
    model = own_preparation(kind)
    with caplog.at_level(logging.WARNING, "hf_dspark"):
        # The hidden states that the draft reads are of the scaled text, too.
        result = compare_rows(model, tiny_draft(model, ScriptedDraft), padded(*PROMPTS), max_new_tokens=12)
    assert result.kinds == ALL_KINDS and "in turn" in caplog.messages[0]
    for draft in (None, tiny_draft(model)):
        for row, completion in enumerate(generate_many(model, draft, PROMPTS, do_sample=False, max_new_tokens=12, show_progress=False)):
            assert completion.output[0, -12:].tolist() == result.plain[row].sequences[0, -12:].tolist()
    if kind == "instance":
        del model.prepare_inputs_for_generation
        assert packing_failure(model) is None


def test_a_replaced_preparation_is_not_kept_alive():
    model = own_preparation("instance")
    assert packing_failure(model) is not None
    reference = weakref.ref(model)
    del model
    gc.collect()
    assert reference() is None


@pytest.mark.parametrize("config_class", [PromptTuningConfig, PrefixTuningConfig])
def test_virtual_tokens_are_refused_by_name(config_class):
    """What is drafted is verified without them, and a queue runs outside of PEFT's generate()."""
    model = tiny_target()
    draft = tiny_draft(model)
    adapted = get_peft_model(model, config_class(task_type="CAUSAL_LM", num_virtual_tokens=3)).eval()
    for inputs in (padded(PROMPTS[1]), padded(*PROMPTS[:2])):
        with pytest.raises(ValueError, match=rf"virtual tokens.*{config_class.__name__}"):
            adapted.generate(**inputs, max_new_tokens=4, assistant_model=draft)
    for own in (None, draft):
        with pytest.raises(ValueError, match=rf"virtual tokens.*{config_class.__name__}"):
            generate_many(adapted, own, PROMPTS[:2], max_new_tokens=4)
    # The model itself, which PEFT has given back, is as ever.
    compare_rows(model, draft, padded(*PROMPTS[:2]), max_new_tokens=4)


def test_a_target_that_adds_to_its_cache_is_refused():
    """At one text, too: taken back is what was drafted, not what came along."""
    model = tiny_target()
    original = type(model).prepare_inputs_for_generation

    def with_one_more(input_ids, **kwargs):
        inputs = original(model, input_ids, **kwargs)
        embeds = model.get_input_embeddings()(inputs.pop("input_ids"))
        return inputs | dict(inputs_embeds=torch.cat([embeds[:, :1], embeds], dim=1), attention_mask=None, position_ids=None)

    model.prepare_inputs_for_generation = with_one_more
    model.generation_config.eos_token_id = None
    with pytest.raises(ValueError, match=r"adds 6 tokens to its cache in a forward of 5"):
        model.generate(torch.tensor([[5, 9, 3]]), do_sample=False, max_new_tokens=12, assistant_model=tiny_draft(model))
