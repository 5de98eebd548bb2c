"""benchmarks/features.py on a tiny target."""

import json

import pytest
from benchmark_scripts import load_script
from evaluation.tiny_pair import TEXTS, save_pair


@pytest.fixture(scope="module")
def features():
    return load_script("features")


def test_the_script_trains_from_every_mode_and_writes_its_figures(features, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    flags = ["--target", str(save_pair(tmp_path) / "target"), "--dataset", str(tmp_path / "texts.jsonl"), "--steps", "2", "--seeds", "3"]
    flags += ["--rows", "6", "--batch-size", "2", "--max-length", "32", "--held-out", "4", "--draft-layers", "1", "--anchors", "4", "--rank", "16"]
    flags += ["--folder", str(tmp_path / "features"), "--json", str(tmp_path / "figures.json")]
    assert features.main(flags) == 0
    modes = json.loads((tmp_path / "figures.json").read_text())["modes"]
    assert list(modes) == list(features.MODES)
    # 4 layers of a hidden size of 32, of which the draft reads some, and the last.
    num_vectors = modes["bfloat16"]["bytes_per_token"] // 64
    assert modes["bfloat16"]["bytes_per_token"] == 64 * num_vectors and modes["int8"]["bytes_per_token"] == 36 * num_vectors
    assert modes["half cached"]["bytes_per_token"] == 18 * num_vectors and modes["subspace"]["bytes_per_token"] == 16 + 4 + 32 + 4
    assert [modes[mode]["qwen3_4b_bytes_per_token"] for mode in features.MODES] == [0, 30_720, 15_384, 7_692, 1280 + 4 + 2560 + 4]
    for figures in modes.values():
        assert [run["seed"] for run in figures["runs"]] == [3] and all(1 <= run["tau"] <= 8 for run in figures["runs"])
    # The same rows, anchors and first weights: after two steps little differs between exact and nearly exact features.
    for mode in ("bfloat16", "int8", "half cached"):
        assert modes[mode]["runs"][0]["tau"] == pytest.approx(modes["online"]["runs"][0]["tau"], rel=0.02)
    output = capsys.readouterr().out
    assert "subspace of 16" in output and "of the reference's" in output and "50.1 %" in output
    half = len(list((tmp_path / "features" / "half_cached").glob("features-*")))
    assert half == 1 and (tmp_path / "features" / "subspace" / "subspace.safetensors").exists()


def test_a_mode_alone_has_no_difference_to_online(features):
    run = {"seed": 0, "tau": 2.0, "loss": 1.0, "seconds_per_step": 0.5, "opening_seconds": 0.0}
    other = {"bytes_per_token": 2304, "qwen3_4b_bytes_per_token": 30_720, "rank": None, "runs": [run]}
    [_, line] = features.render({"modes": {"bfloat16": other}}).splitlines()
    assert line.split() == ["bfloat16", "2,304", "30,720", "100.0", "%", "2.000", "0.50"]
    online = {**other, "runs": [{**run, "tau": 2.5}]}
    [_, _, line] = features.render({"modes": {"online": online, "bfloat16": other}}).splitlines()
    assert "-20.00 %" in line
