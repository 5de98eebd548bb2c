"""benchmarks/loss_memory.py at a tiny vocabulary."""

import contextlib
import io
import json
import subprocess
from pathlib import Path

import pytest
import torch
from benchmark_scripts import load_script

SMALL = ["--vocab-size", "50", "--block-size", "3", "--hidden-size", "8", "--rank", "4", "--compared", "5", "--many", "9", "--threads", "1"]


@pytest.fixture(scope="module")
def loss_memory():
    return load_script("loss_memory")


def test_both_losses_have_the_same_gradients(loss_memory):
    arguments = loss_memory.parser().parse_args(SMALL)
    found = [loss_memory.gradients(case, *loss_memory.make_batch(5, arguments)) for case in (loss_memory.OURS, loss_memory.NAIVE)]
    for ours, naive in zip(*found, strict=True):
        assert naive.abs().max() > 1e-4
        torch.testing.assert_close(ours, naive, rtol=1e-5, atol=1e-6)


def test_each_case_is_measured_in_its_own_process(loss_memory, tmp_path, monkeypatch, capsys):
    peaks, commands = iter([1000 * 2**20, 250 * 2**20, 300 * 2**20]), []

    def run_apart(command, **_):
        commands.append(command)
        return subprocess.CompletedProcess(command, 0, f"a line\n{next(peaks)}\n", "")

    monkeypatch.setattr(loss_memory.subprocess, "run", run_apart)
    assert loss_memory.main([*SMALL, "--json", str(tmp_path / "out.json")]) == 0
    assert [command[-4:] for command in commands] == [
        ["--case", case, "--anchors", anchors] for case, anchors in (("naive", "5"), ("ours", "5"), ("ours", "9"))
    ]
    figures = json.loads((tmp_path / "out.json").read_text())
    assert figures["share_of_naive"] == 0.25 and [case["peak_bytes"] >> 20 for case in figures["cases"]] == [1000, 250, 300]
    assert "ours is 25.0% of the naive loss at 5 anchors" in capsys.readouterr().out


def test_a_case_prints_its_peak(loss_memory):
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("reads /proc")
    with contextlib.redirect_stdout(io.StringIO()) as output:
        assert loss_memory.main([*SMALL, "--vocab-size", "20000", "--case", "naive", "--anchors", "64"]) == 0
    # The laws alone, 64 * 3 * 20,000 fp32 values, are 15 MB each.
    assert int(output.getvalue()) > 30e6


def test_a_failing_case_is_named(loss_memory, monkeypatch):
    monkeypatch.setattr(loss_memory.subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 1, "", "no memory"))
    with pytest.raises(RuntimeError, match="measuring naive at 5 anchors failed: no memory"):
        loss_memory.main(SMALL)
