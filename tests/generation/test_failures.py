"""When the draft fails, the target finishes the text: no wrong token, no lost request, one warning, the cause in the report."""

import logging
import random

import pytest
import torch
from oracle import ScriptedDraft, right_with_probability, tiny_draft, tiny_target

from hf_dspark import record_generation
from hf_dspark.generation.state import DraftState

PROMPT = torch.tensor([[5, 9, 3, 17]])
NUM_TOKENS = 8


@pytest.fixture(scope="module")
def target():
    return tiny_target(num_hidden_layers=2)


@pytest.fixture
def draft(target):
    draft = tiny_draft(target, ScriptedDraft, num_hidden_layers=1, target_layer_ids=[0])
    draft.script = right_with_probability(PROMPT[0].tolist() + text_after(target, PROMPT))
    return draft


def text_after(target, prompt) -> list[int]:
    return target.generate(prompt, do_sample=False, max_new_tokens=NUM_TOKENS)[0, prompt.shape[1] :].tolist()


def out_of_memory(value):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def device_error(value):
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


def bug(value):
    raise IndexError("index 7 is out of bounds")


def nan(value):
    return value * float("nan")


def infinite(value):
    return value / 0.0


# What goes wrong -> the place where it does (a method of the draft), and what is left of the value that it returns.
FAULTS = {
    "out of memory in the backbone": ("forward", out_of_memory),
    "device error in the backbone": ("forward", device_error),
    "NaN in the backbone": ("forward", nan),
    "infinite hidden states": ("forward", infinite),
    "bug in the features": ("context_features", bug),
    "NaN features": ("context_features", nan),
    "out of memory in the head": ("base_logits", out_of_memory),
    "NaN logits": ("base_logits", nan),
    "infinite logits": ("base_logits", infinite),
}


class FaultyOnce:
    """Breaks the `round_index`-th call of a method of the draft."""

    def __init__(self, monkeypatch, draft, place: str, fault, round_index: int):
        self.calls, self.happened = 0, False
        original = getattr(draft, place)

        def faulty(*args, **kwargs):
            value = original(*args, **kwargs)
            self.calls += 1
            if self.calls - 1 == round_index:
                self.happened = True
                return fault(value)
            return value

        monkeypatch.setattr(draft, place, faulty)


@pytest.mark.parametrize("kind", FAULTS)
@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampling"])
def test_every_fault_in_every_round(target, draft, kind, do_sample, caplog):
    expected = text_after(target, PROMPT)
    options = dict(do_sample=True, top_k=1) if do_sample else dict(do_sample=False)  # the law is the argmax, through the sampling path
    for round_index in range(3):
        caplog.clear()
        with pytest.MonkeyPatch.context() as monkeypatch, record_generation() as report, caplog.at_level(logging.WARNING, "hf_dspark"):
            # A scripted head would cover what the backbone returns.
            if FAULTS[kind][0] != "base_logits":
                monkeypatch.setattr(ScriptedDraft, "base_logits", ScriptedDraft.__mro__[1].base_logits)
            fault = FaultyOnce(monkeypatch, draft, *FAULTS[kind], round_index)
            ids = target.generate(PROMPT, max_new_tokens=NUM_TOKENS, assistant_model=draft, **options)
        assert ids[0, PROMPT.shape[1] :].tolist() == expected
        failure = report.requests[-1].draft_failure
        warnings = [record for record in caplog.records if "the draft model failed" in record.message]
        assert fault.happened
        assert failure is not None and len(warnings) == 1 and failure in warnings[0].message
        assert all(round_.drafted == 0 for round_ in report.rounds[round_index:])


def test_a_thousand_faults_in_random_rounds(target, draft, caplog):
    chance = random.Random(0)
    prompts = [torch.tensor([[chance.randrange(60) for _ in range(4)]]) for _ in range(10)]
    texts = [text_after(target, prompt) for prompt in prompts]
    num_happened = 0
    while num_happened < 1000:
        index = chance.randrange(len(prompts))
        draft.script = right_with_probability(prompts[index][0].tolist() + texts[index], 0.5, seed=chance.random())
        caplog.clear()
        with pytest.MonkeyPatch.context() as monkeypatch, record_generation() as report, caplog.at_level(logging.WARNING, "hf_dspark"):
            fault = FaultyOnce(monkeypatch, draft, *chance.choice(list(FAULTS.values())), chance.randrange(3))
            ids = target.generate(prompts[index], do_sample=False, max_new_tokens=NUM_TOKENS, assistant_model=draft)
        assert ids[0, 4:].tolist() == texts[index]
        (request,) = report.requests
        assert request.new_tokens == NUM_TOKENS and len(caplog.records) == (request.draft_failure is not None)
        num_happened += fault.happened
        draft.drafted.clear()


@pytest.mark.parametrize("name", ["append", "pending_layers", "settle", "truncate"])
def test_a_fault_in_the_drafts_own_bookkeeping(target, draft, monkeypatch, name, caplog):
    """Keeping features takes memory too."""

    def failing(self, *args):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    options = dict(do_sample=False, max_new_tokens=NUM_TOKENS, return_dict_in_generate=True)
    first = target.generate(PROMPT, assistant_model=draft, **options)
    ids = torch.cat([first.sequences, torch.tensor([[8, 30, 2]])], dim=1)
    plain = target.generate(ids, **options)
    monkeypatch.setattr(DraftState, name, failing)
    with record_generation() as report, caplog.at_level(logging.WARNING, "hf_dspark"):
        second = target.generate(ids, cache=first.cache, assistant_model=draft, **options)
    assert second.sequences.tolist() == plain.sequences.tolist()
    assert "out of memory" in report.requests[-1].draft_failure and len(caplog.records) == 1


@pytest.mark.parametrize("kind", FAULTS)
def test_an_option_raises_instead(target, draft, monkeypatch, kind):
    monkeypatch.setattr(draft.generation_config, "raise_on_draft_failure", True)
    monkeypatch.setattr(ScriptedDraft, "base_logits", ScriptedDraft.__mro__[1].base_logits)
    FaultyOnce(monkeypatch, draft, *FAULTS[kind], 1)
    with pytest.raises((RuntimeError, IndexError, ValueError, ArithmeticError), match=r"out of memory|illegal memory|out of bounds|finite|NaN|nan"):
        target.generate(PROMPT, do_sample=False, max_new_tokens=NUM_TOKENS, assistant_model=draft)


def test_a_conversation_survives_a_failure(target, draft, monkeypatch):
    options = dict(do_sample=False, max_new_tokens=NUM_TOKENS, return_dict_in_generate=True)
    plain = target.generate(PROMPT, **options)
    with pytest.MonkeyPatch.context() as patch:
        FaultyOnce(patch, draft, "forward", out_of_memory, 1)
        first = target.generate(PROMPT, assistant_model=draft, **options)
    assert first.sequences.tolist() == plain.sequences.tolist()
    assert first.cache.get_seq_length() == plain.cache.get_seq_length()
    ids = torch.cat([first.sequences, torch.tensor([[8, 30, 2]])], dim=1)
    length = first.cache.get_seq_length()
    plain = target.generate(ids, cache=plain.cache, **options)
    draft.script = right_with_probability(plain.sequences[0].tolist())
    with record_generation() as report:
        second = target.generate(ids, cache=first.cache, assistant_model=draft, **options)
    assert second.sequences.tolist() == plain.sequences.tolist()
    # What the failing draft had half written is gone; it works on what came since.
    assert report.requests[-1].missing_context_tokens == length and report.requests[-1].draft_failure is None
    assert any(round_.accepted for round_ in report.rounds)


def test_an_interrupted_request_leaves_the_draft_usable(target, draft):
    """Ctrl-C is nobody's failure: it goes through, and the next call is as ever."""

    def interrupt(value):
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as monkeypatch, pytest.raises(KeyboardInterrupt):
        FaultyOnce(monkeypatch, draft, "forward", interrupt, 1)
        target.generate(PROMPT, do_sample=False, max_new_tokens=NUM_TOKENS, assistant_model=draft)
    ids = target.generate(PROMPT, do_sample=False, max_new_tokens=NUM_TOKENS, assistant_model=draft)
    assert ids[0, 4:].tolist() == text_after(target, PROMPT)
