"""`hf-dspark verify` passes a right pair and finds planted faults; every fault is in code that the pair really runs."""

import json

import pytest
import torch
from evaluation.tiny_pair import letter_pair

from hf_dspark.cli import main
from hf_dspark.evaluation.lossless import Text, _places_inside_blocks, first_difference, unit_in_last_place
from hf_dspark.generation import candidates, steps
from hf_dspark.generation.candidates import DSparkCandidateGenerator, Proposal
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
    propose = DSparkCandidateGenerator.propose

    def faulty(self, input_ids, max_tokens):
        if self.samples_chain:
            return propose(self, input_ids, max_tokens)
        self.samples_chain = True
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(candidates, "choose", lambda weights: weights.argmax(dim=-1))
            proposal = propose(self, input_ids, max_tokens)
        self.samples_chain = False
        return proposal

    monkeypatch.setattr(DSparkCandidateGenerator, "propose", faulty)


def law_without_temperature(monkeypatch):
    propose = DSparkCandidateGenerator.propose

    def faulty(self, input_ids, max_tokens):
        proposal = propose(self, input_ids, max_tokens)
        if proposal.law is not None:
            proposal.law = torch.softmax(TEMPERATURE * proposal.law.log(), dim=-1)
        return proposal

    monkeypatch.setattr(DSparkCandidateGenerator, "propose", faulty)


def crop_one_too_few(monkeypatch):
    monkeypatch.setattr(steps, "rollback", lambda cache, num_tokens: cache.crop(-max(0, num_tokens - 1)))


def crop_one_too_many(monkeypatch):
    monkeypatch.setattr(steps, "rollback", lambda cache, num_tokens: cache.crop(-(num_tokens + 1) if num_tokens else 0))


def overrun_of_a_stop_token(monkeypatch):
    stops = Request._stops
    monkeypatch.setattr(Request, "_stops", lambda self, tokens: stops(self, tokens) if len(tokens) in (1, self.budget) else False)


def overrun_of_the_budget(monkeypatch):
    monkeypatch.setattr(Request, "budget", property(lambda self: self.generation_config.max_length - self.input_ids.shape[1] + 1))


def scheduler_that_looks_back(monkeypatch):
    draft_round = DSparkCandidateGenerator._draft_round

    def faulty(self, input_ids, max_tokens):
        proposal = draft_round(self, input_ids, max_tokens)
        unlikely = [k for k, token in enumerate(proposal.ids) if proposal.law is not None and proposal.law[k][token] < 0.3]
        keep = unlikely[0] if unlikely else len(proposal.ids)
        return Proposal(proposal.ids[:keep], None if proposal.law is None else proposal.law[:keep], (proposal.confidence or [])[:keep])

    monkeypatch.setattr(DSparkCandidateGenerator, "_draft_round", faulty)


def test_a_right_pair_passes(pair, capsys, tmp_path):
    assert main([*COMMAND, "--samples", "100", "--json", str(tmp_path / "verdict.json")]) == 0
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
        (softmax_law_for_argmax, 100, "sampling, argmax"),
        (law_without_temperature, 100, "sampling, chain"),
        (crop_one_too_few, 0, "greedy"),
        (crop_one_too_many, 0, "greedy"),
        (overrun_of_a_stop_token, 0, "endings"),
        (overrun_of_the_budget, 0, "greedy"),
        (scheduler_that_looks_back, 100, "sampling, chain"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_a_planted_fault_is_found(pair, monkeypatch, capsys, tmp_path, plant, samples, failing):
    plant(monkeypatch)
    assert main([*COMMAND, "--samples", str(samples), "--json", str(tmp_path / "verdict.json")]) == 1
    verdict = json.loads((tmp_path / "verdict.json").read_text())
    print([(c["name"], c["passed"], c.get("p_value")) for c in verdict["checks"]])
    assert not verdict["lossless"] and failing in [check["name"] for check in verdict["checks"] if not check["passed"]]
    assert "\nNOT lossless: " in capsys.readouterr().out
