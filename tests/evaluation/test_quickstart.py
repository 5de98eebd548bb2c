"""The demonstration: equal texts, marked tokens, one table, one file."""

import os

import pytest
import torch

from hf_dspark.evaluation.benchmarks import DRAFTED, OWN_LOOP, PLAIN
from hf_dspark.evaluation.pairs import load_pair
from hf_dspark.evaluation.quickstart import Demonstration, demonstrate, quickstart
from hf_dspark.generation.report import GenerationReport, RequestRecord, RoundRecord


@pytest.fixture(scope="module")
def pair(pair_folder):
    return load_pair(str(pair_folder / "draft"), device="cpu")


def test_three_ways_of_decoding_are_run_and_timed(pair):
    prompts = [torch.tensor([[1, 40, 50]]), torch.tensor([[1, 60]])]
    result = demonstrate(pair, prompts, max_new_tokens=6, num_runs=2)
    assert result.identical and [list(texts) for texts in result.texts] == [[PLAIN, OWN_LOOP, DRAFTED]] * 2
    assert [len(request.rounds) > 0 for request in result.report.requests] == [True, True]
    assert all(len(runs) == 4 for runs in result.seconds.values())
    assert result.new_tokens == sum(request.new_tokens for request in result.report.requests)


def test_without_a_number_of_runs_time_decides(pair, monkeypatch):
    prompts = [torch.tensor([[1, 40, 50]])]
    assert len(demonstrate(pair, prompts, max_new_tokens=3).seconds[PLAIN]) == 5
    monkeypatch.setattr("hf_dspark.evaluation.quickstart.TIMING_SECONDS", 0.0)
    assert len(demonstrate(pair, prompts, max_new_tokens=3).seconds[PLAIN]) == 1


def test_the_figures_by_hand():
    record = RequestRecord(2, 4, [RoundRecord(3, 4, 2)], target_seconds=3.0, draft_seconds=1.0, total_seconds=5.0)
    text = [1, 2, 3, 4, 5, 6]
    result = Demonstration(
        prompts=[torch.tensor([[1, 2]])],
        texts=[{PLAIN: text, OWN_LOOP: text, DRAFTED: text}],
        report=GenerationReport([record]),
        seconds={PLAIN: [4.0, 6.0, 9.0], OWN_LOOP: [3.0, 3.0, 3.0], DRAFTED: [2.0, 2.0, 3.0]},
    )
    assert result.summary() == {
        "identical": True,
        "tokens_per_round": 3.0,
        "speedup": 3.0,
        "speedup_over_own_plain": 1.5,
        "conditional_acceptance": [1.0, 1.0, 0.0],
        "draft_time_share": 0.2,
    }
    result.texts[0][DRAFTED] = [1, 2, 3, 4, 5, 7]
    assert not result.identical


def test_it_prints_the_texts_and_one_table_and_writes_one_file(pair, tmp_path, monkeypatch, capsys):
    home, output = tmp_path / "home", tmp_path / "output"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(home)
    figures = quickstart(pair, str(output), max_new_tokens=6, num_completions=2, num_runs=1)
    assert figures["identical"]
    printed = capsys.readouterr().out
    assert "identical token for token" in printed and "Bisection" in printed
    for name in (PLAIN, OWN_LOOP, DRAFTED):
        assert printed.count(f"\n{name} ") == 1
    assert os.listdir(output) == ["quickstart.png"] and os.listdir(home) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(max_new_tokens=1), "max_new_tokens must be at least 2, got 1"),
        (dict(num_runs=0), "runs must be at least 1, got 0"),
        (dict(num_completions=0), "completions must be at least 1, got 0"),
        (dict(output=__file__), "output must be a folder"),
    ],
)
def test_bad_options_are_named(pair, options, message):
    with pytest.raises(ValueError, match=message):
        quickstart(pair, **options)
