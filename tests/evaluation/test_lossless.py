"""`hf-dspark verify` passes a right pair and finds planted faults; every fault is in code that the pair really runs."""

import json

import pytest
import torch

from evaluation.tiny_pair import letter_pair
from hf_dspark.cli import main
from hf_dspark.evaluation.lossless import Text, _budgets_inside_blocks, _stops_inside_blocks, first_difference, unit_in_last_place
from hf_dspark.generation import candidates, decoding, steps
from hf_dspark.generation.candidates import Proposal
from hf_dspark.generation.decoding import Request
from hf_dspark.generation.report import RequestRecord, RoundRecord

TEMPERATURE = 0.5
COMMAND = ["verify", "--prompt", "abcde", "--prompt", "gfa", "--max-new-tokens", "24", "--temperature", str(TEMPERATURE), "--device", "cpu"]


@pytest.fixture
def pair(monkeypatch):
    pair = letter_pair()
    monkeypatch.setattr("hf_dspark.evaluation.pairs.load_pair", lambda *_: pair)
    return pair


def softmax_law_for_argmax(monkeypatch):
    propose_all = decoding.propose_all

    def faulty(generators, texts, budgets):
        chosen_by_argmax = [generator for generator in generators if not generator.samples_chain]
        if not chosen_by_argmax:
            return propose_all(generators, texts, budgets)
        assert chosen_by_argmax == generators
        for generator in generators:
            generator.samples_chain = True
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(candidates, "choose", lambda weights, random=None: weights.argmax(dim=-1))
            proposals = propose_all(generators, texts, budgets)
        for generator in generators:
            generator.samples_chain = False
        return proposals

    monkeypatch.setattr(decoding, "propose_all", faulty)


def law_without_temperature(monkeypatch):
    propose_all = decoding.propose_all

    def faulty(generators, texts, budgets):
        proposals = propose_all(generators, texts, budgets)
        for proposal in proposals:
            if proposal.law is not None:
                proposal.law = torch.softmax(TEMPERATURE * proposal.law.log(), dim=-1)
        return proposals

    monkeypatch.setattr(decoding, "propose_all", faulty)


def crop_one_too_few(monkeypatch):
    monkeypatch.setattr(steps, "rollback", lambda cache, num_tokens: cache.crop(-max(0, num_tokens - 1)))


def crop_one_too_many(monkeypatch):
    monkeypatch.setattr(steps, "rollback", lambda cache, num_tokens: cache.crop(-(num_tokens + 1) if num_tokens else 0))


def overrun_of_a_stop_token(monkeypatch):
    commit, stops = Request._commit, Request._stops

    def watched_commit(self, proposal, outputs):
        self.drafted = proposal.ids
        return commit(self, proposal, outputs)

    def faulty(self, tokens):
        is_draft = len(tokens) <= len(self.drafted) and tokens[-1] == self.drafted[len(tokens) - 1]
        return False if is_draft and len(tokens) < self.budget else stops(self, tokens)

    monkeypatch.setattr(Request, "_commit", watched_commit)
    monkeypatch.setattr(Request, "_stops", faulty)


def overrun_of_the_budget(monkeypatch):
    monkeypatch.setattr(Request, "budget", property(lambda self: self.generation_config.max_length - self.input_ids.shape[1] + 1))


def scheduler_that_looks_back(monkeypatch):
    whole = candidates._Drafter.proposal

    def faulty(self):
        proposal = whole(self)
        unlikely = [k for k, token in enumerate(proposal.ids) if proposal.law is not None and proposal.law[k][token] < 0.3]
        keep = unlikely[0] if unlikely else len(proposal.ids)
        return Proposal(proposal.ids[:keep], None if proposal.law is None else proposal.law[:keep], (proposal.confidence or [])[:keep])

    monkeypatch.setattr(candidates._Drafter, "proposal", faulty)


def test_a_right_pair_passes(pair, capsys, tmp_path):
    assert main([*COMMAND, "--samples", "40", "--json", str(tmp_path / "verdict.json")]) == 0
    verdict = json.loads((tmp_path / "verdict.json").read_text())
    assert verdict["lossless"] and all(check["passed"] for check in verdict["checks"])
    names = [check["name"] for check in verdict["checks"]]
    assert names == ["draft", "greedy", "logits", "endings", "sampling, chain", "sampling, argmax", "sampling, cut by confidence"]
    greedy, endings = verdict["checks"][1], verdict["checks"][3]
    assert greedy["identical_prompts"] == 2 and greedy["tokens_per_round"] > 1 and endings["inside_a_block"] > 0
    output = capsys.readouterr().out
    assert "\nlossless on these prompts: " in output and "NOT" not in output and "1 of 1000" in output


@pytest.mark.parametrize(
    ("plant", "samples", "failing"),
    [
        (softmax_law_for_argmax, 24, "sampling, argmax"),
        (law_without_temperature, 24, "sampling, chain"),
        (crop_one_too_few, 0, "greedy"),
        (crop_one_too_many, 0, "greedy"),
        (overrun_of_a_stop_token, 0, "endings"),
        (overrun_of_the_budget, 0, "greedy"),
        (scheduler_that_looks_back, 24, "sampling, chain"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_a_planted_fault_is_found(pair, monkeypatch, capsys, tmp_path, plant, samples, failing):
    plant(monkeypatch)
    assert main([*COMMAND, "--samples", str(samples), "--json", str(tmp_path / "verdict.json")]) == 1
    verdict = json.loads((tmp_path / "verdict.json").read_text())
    assert not verdict["lossless"] and failing in [check["name"] for check in verdict["checks"] if not check["passed"]]
    assert "\nNOT lossless: " in capsys.readouterr().out


def test_half_precision_may_part_at_a_near_tie_alone():
    # bf16 has 7 bits after the leading one: at 20 its neighbours are 16 * 2^-7 = 0.125 apart.
    assert unit_in_last_place(20.0, torch.bfloat16) == 0.125
    scores = torch.tensor([[20.0, 19.5, 19.375, 1.0]])
    plain = Text([0, 0], (scores, scores), (scores, scores))
    near = first_difference(plain, [0, 1], torch.bfloat16)
    assert (near.index, near.plain_id, near.drafted_id, near.gap, near.excused) == (1, 0, 1, 0.5, True)
    assert "4.0 units in the last place" in near.words(str)
    assert not first_difference(plain, [0, 2], torch.bfloat16).excused  # 5 units
    assert not first_difference(plain, [0, 1], torch.float32).excused
    assert first_difference(plain, [0, 0], torch.bfloat16) is None


def test_a_longer_or_shorter_text_is_never_excused():
    scores = torch.zeros(1, 4)
    plain = Text([0, 0], (scores, scores), (scores, scores))
    for ids, tokens in (([0], (0, None)), ([0, 0, 1], (None, 1))):
        found = first_difference(plain, ids, torch.bfloat16)
        assert not found.excused and (found.plain_id, found.drafted_id) == tokens and "the end" in found.words(str)


def test_endings_are_looked_for_inside_blocks():
    # Token 0 is the prefill's; the rounds hold tokens 1-3, 4 and 5-6.
    request = RequestRecord(5, rounds=[RoundRecord(3, 4, 2), RoundRecord(1, 4, 0), RoundRecord(2, 4, 2)])
    assert _budgets_inside_blocks(request) == [2, 3, 6]
    # Token 1 repeats its anchor, token 2 is new since it; token 5 is new since its anchor, token 4.
    assert _stops_inside_blocks([9, 9, 8, 9, 7, 8, 7], request) == [(0, 8), (4, 8)]


def test_a_failing_draft_is_no_lossless_verdict(pair, monkeypatch, capsys):
    def broken(*_):
        raise RuntimeError("out of order")

    monkeypatch.setattr(candidates, "_block_hidden", broken)
    assert main([*COMMAND, "--samples", "0"]) == 1
    assert "out of order" in capsys.readouterr().out


def test_a_draft_that_nothing_is_accepted_of_is_pointed_out(pair, capsys):
    pair.draft.base_logits = lambda hidden: torch.full((len(hidden), 8), -20.0).index_fill(1, torch.tensor(7), 20.0)
    assert main([*COMMAND, "--samples", "0"]) == 0
    assert "no draft was accepted at all" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--max-new-tokens", "1"], "max_new_tokens must be at least 2"),
        (["--samples", "-1"], "samples must be 0 (no sampling) or more, got -1"),
        (["--temperature", "0"], "temperature must be positive, got 0.0"),
        (["--prompt", ""], "the prompt is empty"),
        (["--prompts", "nowhere.jsonl"], "nowhere.jsonl"),
    ],
)
def test_bad_options_are_named(pair, capsys, flags, message):
    assert main([*COMMAND, *flags]) == 2
    error = capsys.readouterr().err
    assert error.startswith("hf-dspark: ") and message in error and error.count("\n") == 1
