"""What a generation did: numbers by hand, recorded only inside record_generation()."""

import json
import math
import threading

import pytest
import torch
from oracle import ScriptedDraft, right_for, right_with_probability, tiny_draft, tiny_target

from hf_dspark import GenerationReport, record_generation
from hf_dspark.generation import decoding
from hf_dspark.generation.report import RequestRecord, RoundRecord, active_report

PROMPT = torch.tensor([[5, 9, 3, 17]])


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.fixture
def draft(target):
    draft = tiny_draft(target, ScriptedDraft)
    draft.script = right_with_probability(target.generate(PROMPT, do_sample=False, max_new_tokens=30)[0].tolist())
    return draft


def by_hand() -> GenerationReport:
    """Two requests: drafts that were all accepted, some, none, none sent, and a text that ended on an accepted draft."""
    rounds = [
        RoundRecord(tokens=4, drafted=3, accepted=3, confidence=[0.9, 0.8, 0.7]),
        RoundRecord(tokens=2, drafted=3, accepted=1, confidence=[0.9, 0.6, 0.5]),
        RoundRecord(tokens=1, drafted=2, accepted=0, confidence=[0.4, 0.3]),
    ]
    others = [RoundRecord(tokens=1, drafted=0, accepted=0), RoundRecord(tokens=2, drafted=3, accepted=2, confidence=[0.8, 0.7, 0.6])]
    first = RequestRecord(5, 8, rounds, time_to_first_token_seconds=0.1, target_seconds=2.0, draft_seconds=0.5, total_seconds=3.0)
    return GenerationReport([first, RequestRecord(9, 4, others, time_to_first_token_seconds=0.2, target_seconds=1.0, total_seconds=1.5)])


def test_tokens_per_round():
    report = by_hand()
    assert len(report.rounds) == 5
    assert report.tokens_per_round == (4 + 2 + 1 + 1 + 2) / 5 and isinstance(report.tokens_per_round, float)
    assert math.isnan(GenerationReport().tokens_per_round)


def test_conditional_acceptance_counts_decided_drafts_only():
    # Position 1: accepted, accepted, rejected, accepted. Position 2: accepted, rejected, accepted. Position 3: accepted; behind a stop: undecided.
    assert by_hand().conditional_acceptance == [3 / 4, 2 / 3, 1 / 1]
    assert GenerationReport().conditional_acceptance == []


def test_verified_drafts_of_a_round():
    assert [round_.verified for round_ in by_hand().rounds] == [3, 2, 1, 0, 2]


def test_confidence_against_outcome():
    outcomes = by_hand().confidence_outcomes
    assert outcomes == [
        [(0.9, True), (0.9, True), (0.4, False), (0.8, True)],
        [(0.8, True), (0.6, False), (0.7, True)],
        [(0.7, True)],
    ]


def test_confidence_is_absent_where_nobody_stated_it():
    report = GenerationReport([RequestRecord(1, 3, [RoundRecord(3, 3, 2)])])
    assert report.conditional_acceptance == [1.0, 1.0, 0.0] and not any(report.confidence_outcomes)


def test_seconds():
    report = by_hand()
    parts = {"target": 3.0, "draft": 0.5, "total": 4.5, "rest": 1.0, "first_token": 0.3}
    for part, seconds in parts.items():
        assert report.seconds(part) == pytest.approx(seconds)
    with pytest.raises(ValueError, match="'verification'"):
        report.seconds("verification")


def test_a_record_is_one_line_of_json(tmp_path):
    path = tmp_path / "runs.jsonl"
    for request in by_hand().requests:
        request.append_to(path)
    by_hand().requests[0].append_to(str(path))
    first, second, third = (json.loads(line) for line in path.read_text().splitlines())
    assert first == third and first["rounds"][1] == dict(tokens=2, drafted=3, accepted=1, confidence=[0.9, 0.6, 0.5])
    assert second["prompt_tokens"] == 9 and second["draft_failure"] is None and second["rounds"][0]["confidence"] is None


def test_a_recorded_generation_adds_up(target, draft):
    with record_generation() as report:
        ids = target.generate(PROMPT, do_sample=False, max_new_tokens=30, assistant_model=draft)
    (request,) = report.requests
    assert (request.prompt_tokens, request.new_tokens) == (4, 30) == (4, ids.shape[1] - 4)
    assert 1 + sum(round_.tokens for round_ in report.rounds) == 30
    for round_ in report.rounds:
        assert 0 <= round_.accepted <= round_.drafted <= 4 and round_.accepted <= round_.tokens <= round_.accepted + 1
        assert len(round_.confidence or []) == round_.drafted and all(0 <= value <= 1 for value in round_.confidence or [])
    assert len(report.confidence_outcomes) == len(report.conditional_acceptance) == 4
    assert 0 < request.time_to_first_token_seconds < request.total_seconds
    assert request.target_seconds > 0 and request.draft_seconds > 0 and report.seconds("rest") > 0
    assert request.missing_context_tokens == 0 and request.draft_failure is None


def test_a_stop_inside_a_block_leaves_the_rest_undecided(target, draft):
    text = target.generate(PROMPT, do_sample=False, max_new_tokens=10)[0].tolist()
    draft.script = right_for(text, 4)
    with record_generation() as report:
        target.generate(PROMPT, do_sample=False, max_new_tokens=10, eos_token_id=text[4 + 2], pad_token_id=0, assistant_model=draft)
    (round_,) = report.rounds
    assert (round_.tokens, round_.drafted, round_.accepted, round_.verified) == (2, 4, 2, 2)
    assert report.conditional_acceptance == [1.0, 1.0]


def test_several_generations_in_one_report(target, draft):
    with record_generation() as report:
        for budget in (1, 6):
            target.generate(PROMPT, do_sample=False, max_new_tokens=budget, assistant_model=draft)
    assert [request.new_tokens for request in report.requests] == [1, 6] and report.requests[0].rounds == []


def test_plain_generations_are_not_recorded(target):
    with record_generation() as report:
        target.generate(PROMPT, do_sample=False, max_new_tokens=4)
    assert report.requests == [] and math.isnan(report.tokens_per_round)


def test_nothing_is_recorded_outside(target, draft, monkeypatch):
    with record_generation() as report:
        pass
    monkeypatch.setattr(decoding, "_Clock", None)  # would raise where it was made
    target.generate(PROMPT, do_sample=False, max_new_tokens=6, assistant_model=draft)
    assert report.requests == [] and active_report.get() is None


def test_confidences_are_computed_only_where_somebody_asks(target, draft, monkeypatch):
    calls = []
    forward = draft.confidence_head.forward
    monkeypatch.setattr(draft.confidence_head, "forward", lambda *args: (calls.append(1), forward(*args))[1])
    target.generate(PROMPT, do_sample=False, max_new_tokens=6, assistant_model=draft)
    assert calls == []
    with record_generation():
        target.generate(PROMPT, do_sample=False, max_new_tokens=6, assistant_model=draft)
    assert calls


def test_recording_ends_with_an_exception_and_nests(target, draft):
    with pytest.raises(KeyError), record_generation():
        raise KeyError
    assert active_report.get() is None
    with record_generation() as outer:
        with record_generation() as inner:
            target.generate(PROMPT, do_sample=False, max_new_tokens=3, assistant_model=draft)
        target.generate(PROMPT, do_sample=False, max_new_tokens=3, assistant_model=draft)
    assert len(inner.requests) == len(outer.requests) == 1


def test_another_thread_records_for_itself(target, draft):
    with record_generation() as report:
        thread = threading.Thread(target=lambda: target.generate(PROMPT, do_sample=False, max_new_tokens=3, assistant_model=draft))
        thread.start()
        thread.join()
    assert report.requests == []
