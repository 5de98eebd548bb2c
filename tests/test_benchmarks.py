"""benchmarks/decode.py on a tiny pair."""

import contextlib
import io
import json
import subprocess
from pathlib import Path

import pytest
import torch
from benchmark_scripts import FOLDER, load_script
from evaluation.tiny_pair import save_pair

from hf_dspark.evaluation.benchmarks import DRAFTED, OWN_LOOP, PLAIN, PROMPT_LOOKUP
from hf_dspark.generation.report import GenerationReport, RequestRecord, RoundRecord

SCRIPT = FOLDER / "decode.py"


@pytest.fixture(scope="module")
def decode():
    return load_script("decode")


def test_the_script_runs_and_writes_its_figures(decode, tmp_path, capsys):
    folder = save_pair(tmp_path)
    flags = ["--draft", str(folder / "draft"), "--device", "cpu", "--prompts", "def add1(", "return a", "--max-new-tokens", "10", "--runs", "2"]
    assert decode.main([*flags, "--json", str(tmp_path / "figures.json")]) == 0
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert list(figures["ways"]) == [PLAIN, OWN_LOOP, DRAFTED, PROMPT_LOOKUP]
    for way in figures["ways"].values():
        assert way["identical"] and way["tokens_per_round"] >= 1 and 0 < way["distinct_bigram_share"] <= 1
    assert figures["ways"][PLAIN]["tokens_per_round"] == figures["ways"][OWN_LOOP]["tokens_per_round"] == 1.0
    assert set(figures["round"]) == {"rounds", "target_milliseconds", "draft_milliseconds", "rest_milliseconds"}
    assert "a round with the draft: " in capsys.readouterr().out


def test_memory_is_measured_for_each_way_by_itself(decode, tmp_path, monkeypatch):
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("reads /proc")
    folder = save_pair(tmp_path)
    pair, commands = decode.load_pair(str(folder / "draft"), device="cpu"), []

    def run_here(command, **_):
        commands.append(command)
        with contextlib.redirect_stdout(io.StringIO()) as output:
            return subprocess.CompletedProcess(command, decode.main(command[2:]), output.getvalue())

    monkeypatch.setattr(decode.subprocess, "run", run_here)
    memory = decode.memory_above_plain(pair, ["--prompts", "def add1(", "--max-new-tokens", "4", "--device", "cpu"])
    assert [command[-1] for command in commands] == [PLAIN, DRAFTED] and all(command[1] == str(SCRIPT) for command in commands)
    assert memory["draft_weights_bytes"] == sum(4 * parameter.numel() for parameter in pair.draft.parameters())
    assert memory["plain_bytes"] > 2**24 and memory["draft_bytes"] > 2**24
    assert decode.render_memory(memory).startswith("peak memory: ")


def test_forwards_are_counted_inside_the_block_alone(decode):
    layer = torch.nn.Linear(2, 2)
    with decode.counted_forwards(layer) as calls:
        layer(torch.zeros(1, 2))
        layer(torch.zeros(1, 2))
    layer(torch.zeros(1, 2))
    assert calls.count == 2


def test_a_round_is_split_without_the_prefill(decode):
    record = RequestRecord(
        3, 5, [RoundRecord(2, 4, 1)] * 2, time_to_first_token_seconds=1.0, target_seconds=3.0, draft_seconds=0.5, total_seconds=3.6
    )
    split = decode.split_of_a_round(GenerationReport([record]))
    assert split == pytest.approx({"rounds": 2, "target_milliseconds": 1000.0, "draft_milliseconds": 250.0, "rest_milliseconds": 50.0})
    assert decode.split_of_a_round(GenerationReport([RequestRecord(3)])) == {}


def test_a_bad_file_is_named(decode):
    with pytest.raises(OSError, match=r"nowhere\.jsonl"):
        decode.texts_of(decode.parser().parse_args(["--prompt-file", "nowhere.jsonl"]))
