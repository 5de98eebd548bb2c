"""benchmarks/adapter.py in its smallest form, on a tiny pair and a small package."""

import itertools
import json
import math

import pytest
from benchmark_scripts import load_script
from evaluation.tiny_pair import save_pair


@pytest.fixture(scope="module")
def adapter():
    return load_script("adapter")


def test_the_script_runs_and_goes_on_from_what_is_there(adapter, tmp_path, capsys, monkeypatch):
    folder = save_pair(tmp_path)
    flags = ["--draft", str(folder / "draft"), "--target", str(folder / "target"), "--package", "email", "--held-out", "2", "--rank", "2"]
    flags += ["--fine-tuning-steps", "2", "--rows", "36", "--new-tokens", "8", "--steps", "1", "--whole", "1", "--output", str(tmp_path / "kept")]
    assert adapter.main([*flags, "--json", str(tmp_path / "figures.json")]) == 0
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert list(figures["pairs"]) == ["draft, its own target", "draft, fine-tuned target", "adapter, 1 steps", "whole draft, 1 steps"]
    assert all(summary["completions"] == 2 for pair in figures["pairs"].values() for summary in pair.values())
    assert set(figures["recovered"]) == {"adapter, 1 steps", "whole draft, 1 steps"}
    assert "recovered" in capsys.readouterr().out
    monkeypatch.setattr(adapter, "fine_tune", None)
    monkeypatch.setattr(adapter, "write_rows", None)
    assert adapter.main(flags) == 0


def test_text_cut_short_by_an_interruption_is_not_taken_for_whole(adapter, tmp_path, monkeypatch):
    save_pair(tmp_path)
    generate_many = adapter.generate_many
    monkeypatch.setattr(adapter, "generate_many", lambda *args, **options: itertools.islice(generate_many(*args, **options), 2))
    arguments = adapter.parser().parse_args(["--rows", "3", "--new-tokens", "4"])
    with pytest.raises(KeyboardInterrupt):
        adapter.write_rows(tmp_path / "target", ["def one(): return 1\n" * 40], tmp_path / "rows.jsonl", arguments)
    assert not (tmp_path / "rows.jsonl").exists()


def test_the_share_recovered_by_hand(adapter):
    def pair(greedy, sampled):
        return {"greedy": {"tokens_per_round": greedy}, "sampled": {"tokens_per_round": sampled}}

    figures = {"own": pair(3.0, 2.5), "lost": pair(2.0, 1.5), "adapter": pair(2.75, 2.0)}
    assert adapter.recovered(figures) == {"adapter": {"greedy": 0.75, "sampled": 0.5}}
    assert math.isnan(adapter.recovered(figures | {"lost": pair(3.0, 1.5)})["adapter"]["greedy"])


def test_options_that_cannot_work(adapter):
    with pytest.raises(ValueError, match="--package must name an installed package, got 'no_such_package'"):
        adapter.main(["--package", "no_such_package"])
    with pytest.raises(ValueError, match="--steps must be at least 1, got 0"):
        adapter.main(["--steps", "0"])
