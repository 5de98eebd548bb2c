"""benchmarks/load.py on a tiny pair."""

import json
import runpy
import sys

import pytest
import torch
from benchmark_scripts import FOLDER, load_script
from evaluation.tiny_pair import save_pair
from oracle import tiny_target

from hf_dspark.evaluation.benchmarks import CONTINUOUS, OWN_LOOP, PLAIN
from hf_dspark.generation.report import GenerationReport, RequestRecord, RoundRecord

SCRIPT = FOLDER / "load.py"
DRAFTED = {length: f"our loop, {length}-token drafts" for length in (1, 3, 4)}
QUICK = ["--device", "cpu", "--runs", "1", "--concurrency", "3", "--max-new-tokens", "8"]


@pytest.fixture(scope="module")
def load():
    return load_script("load")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture
def without_continuous(load, monkeypatch):
    """Starting and stopping its manager takes a second a call."""

    def refuse(*args):
        raise RuntimeError("no pages")

    monkeypatch.setattr(load, "decode_continuously", refuse)


def run(load, folder, tmp_path, *flags) -> tuple[int, dict]:
    """The script's return value and figures on the pair in `folder`."""
    code = load.main(["--draft", str(folder / "draft"), *QUICK, *flags, "--json", str(tmp_path / "load.json")])
    return code, json.loads((tmp_path / "load.json").read_text())


def test_all_ways_are_measured_and_write_the_same(load, folder, tmp_path, capsys):
    code, figures = run(load, folder, tmp_path, "--ignore-eos", "--output", str(tmp_path / "new"))
    (entry,) = figures["loads"]
    ways, output = entry["ways"], capsys.readouterr().out
    assert code == 0 and entry["concurrency"] == 3 and entry["skipped"] == {} and not entry["mixed_budgets"]
    assert list(ways) == [PLAIN, CONTINUOUS, OWN_LOOP, *DRAFTED.values()]
    for name, way in ways.items():
        assert way["identical"] and way["identical_texts"] == 3 and way["new_tokens"] == [24]
        assert way["tokens_per_second"] == pytest.approx(24 / way["seconds"][0])
        assert way["tokens_per_second_per_user"] == pytest.approx(way["tokens_per_second"] / 3)
        assert way["speedup"] == pytest.approx(ways[PLAIN]["seconds"][0] / way["seconds"][0])
        assert f"  3  {name} " in output
    assert [ways[name]["rows_per_token"] for name in (PLAIN, CONTINUOUS, OWN_LOOP)] == [1.0] * 3
    assert all(ways[name]["rejected_share"] is None for name in (PLAIN, CONTINUOUS, OWN_LOOP))
    for length, name in DRAFTED.items():
        assert 1.0 <= ways[name]["rows_per_token"] <= 1 + length and 0 <= ways[name]["rejected_share"] <= 1
    assert (tmp_path / "new" / "load.png").stat().st_size > 0
    assert figures["dtype"] == "float32" and figures["ignore_eos"] and len(figures["prompt_tokens"]) == 3  # of the four default prompts


def test_mixed_budgets_make_generate_compute_rows_that_nobody_asked_for(load, folder, tmp_path, without_continuous):
    flags = ["--ignore-eos", "--mixed-budgets", "--draft-lengths", "1", "1"]
    code, figures = run(load, folder, tmp_path, *flags)
    (entry,) = figures["loads"]
    # Budgets 2, 5 and 8: 15 tokens, 12 of them after the prompts' own. generate() computes 7 further rows of each request.
    assert code == 0 and entry["mixed_budgets"]
    assert list(entry["ways"]) == [PLAIN, OWN_LOOP, DRAFTED[1]] and all(way["new_tokens"] == [15] for way in entry["ways"].values())
    assert entry["ways"][PLAIN]["rows_per_token"] == 21 / 12 and entry["ways"][OWN_LOOP]["rows_per_token"] == 1.0
    assert all(way["identical"] for way in entry["ways"].values())


def test_continuous_batching_that_does_not_run_is_skipped_with_the_reason(load, folder, tmp_path, capsys, without_continuous):
    code, figures = run(load, folder, tmp_path, "--draft-lengths", "1")
    assert code == 0 and figures["loads"][0]["skipped"] == {CONTINUOUS: "RuntimeError: no pages"}
    assert f"{CONTINUOUS} was skipped: RuntimeError: no pages" in capsys.readouterr().out


def test_sampled_texts_are_not_compared(load, folder, tmp_path, without_continuous):
    flags = ["--do-sample", "--temperature", "0.7", "--top-k", "5", "--top-p", "0.9", "--draft-lengths", "3"]
    code, figures = run(load, folder, tmp_path, *flags)
    (entry,) = figures["loads"]
    assert code == 0 and entry["options"] == {"do_sample": True, "temperature": 0.7, "top_k": 5, "top_p": 0.9}
    assert {way["identical"] for way in entry["ways"].values()} == {None}
    assert entry["setting"] == "sampled at temperature 0.7, top-k 5, top-p 0.9, equal budgets"


def test_plain_only_needs_no_draft(load, folder, tmp_path, capsys):
    flags = ["--target", str(folder / "target"), "--plain-only", "--max-new-tokens", "4", "--concurrency", "2", "1", "2", "--ignore-eos"]
    code = load.main([*QUICK, *flags, "--json", str(tmp_path / "load.json"), "--output", str(tmp_path)])
    figures = json.loads((tmp_path / "load.json").read_text())
    kinds = ["greedy", "top-k 64", "top-p 0.9", "the whole law"]
    settings = [f"{kind}, {budgets} budgets" for budgets in ("equal", "mixed") for kind in kinds]
    assert [(entry["setting"], entry["concurrency"]) for entry in figures["loads"]] == [(name, count) for name in settings for count in (1, 2)]
    assert code == 0 and figures["draft"] is None and (tmp_path / "load.png").exists()
    for entry in figures["loads"]:
        assert list(entry["ways"]) == [PLAIN, OWN_LOOP]
        # A budget of 1 and one of 4, or twice 4.
        expected = {(1, False): 4, (1, True): 4, (2, False): 8, (2, True): 5}[entry["concurrency"], entry["mixed_budgets"]]
        assert [way["new_tokens"] for way in entry["ways"].values()] == [[expected]] * 2
        assert [way["identical"] for way in entry["ways"].values()] == ([None, None] if entry["options"]["do_sample"] else [True, True])
    options = [entry["options"] for entry in figures["loads"][::2]]
    sampled = {"do_sample": True, "temperature": 1.0}
    assert options[:4] == [{"do_sample": False}, *({**sampled, "top_k": k, "top_p": p} for k, p in ((64, 1.0), (0, 0.9), (0, 1.0)))]
    assert options[4:] == options[:4] and capsys.readouterr().out.count("requests, way") == 8


def test_a_text_of_our_loop_that_differs_is_a_negative_finding(load, folder, tmp_path, monkeypatch, without_continuous):
    decode_queue = load.decode_queue

    def wrong(target, draft, requests, num_drafts=None):
        texts, seconds = decode_queue(target, draft, requests, num_drafts)
        return [[*texts[0][:-1], 279], *texts[1:]] if draft is not None else texts, seconds

    monkeypatch.setattr(load, "decode_queue", wrong)
    code, figures = run(load, folder, tmp_path, "--ignore-eos", "--draft-lengths", "1")
    ways = figures["loads"][0]["ways"]
    assert code == 1 and not ways[DRAFTED[1]]["identical"] and ways[DRAFTED[1]]["identical_texts"] == 2 and ways[OWN_LOOP]["identical"]


def test_an_error_of_our_loop_is_no_reason_to_skip_it(load, folder, tmp_path, monkeypatch, without_continuous):
    def failing(*args, **kwargs):
        raise RuntimeError("packed wrongly")

    monkeypatch.setattr(load, "decode_queue", failing)
    with pytest.raises(RuntimeError, match="packed wrongly"):
        run(load, folder, tmp_path)


def test_what_was_complete_at_an_interruption_is_kept(load, folder, tmp_path, monkeypatch, capsys, without_continuous):
    measure = load.measure

    def interrupted(pair, requests, *rest):
        if len(requests.prompts) == 2:
            raise KeyboardInterrupt
        return measure(pair, requests, *rest)

    monkeypatch.setattr(load, "measure", interrupted)
    code, figures = run(load, folder, tmp_path, "--concurrency", "1", "2", "--draft-lengths", "1")
    assert code == 0 and [entry["concurrency"] for entry in figures["loads"]] == [1]
    assert "interrupted" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("count", "mixed", "expected"),
    [(1, True, [64]), (2, False, [64, 64]), (2, True, [16, 64]), (4, True, [16, 32, 48, 64])],
)
def test_budgets_by_hand(load, count, mixed, expected):
    assert load.budgets_of(count, 64, mixed) == expected
    assert min(load.budgets_of(3, 1, True)) == 1


def test_rows_are_counted_inside_the_block_alone(load):
    target, ids = tiny_target(), torch.ones(2, 5, dtype=torch.long)
    with load.counted_rows(target) as rows:
        target(ids)
        target(input_ids=ids[:1])
    target(ids)
    assert rows.count == 15


def test_shares_of_an_observation_by_hand(load):
    report = GenerationReport([RequestRecord(3, 5, [RoundRecord(2, 3, 1), RoundRecord(3, 3, 2)])])
    observed = load.Observation([[1, 2, 3, 4, 5, 6]], 8, report)
    assert observed.rows_per_token == 8 / 5 and observed.rejected_share == pytest.approx(1 / 2)
    first_only = load.Observation([[1], [2]], 0, GenerationReport())
    assert first_only.rows_per_token != first_only.rows_per_token and first_only.rejected_share != first_only.rejected_share


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--concurrency", "4", "0"], "--concurrency must be at least 1, got 0"),
        (["--max-new-tokens", "0"], "--max-new-tokens must be at least 1, got 0"),
        (["--runs", "-1"], "--runs must be at least 1, got -1"),
        (["--threads", "0"], "--threads must be at least 1, got 0"),
        (["--temperature", "0.5"], "--temperature 0.5 has no effect on greedy decoding; add --do-sample"),
        (["--plain-only", "--top-k", "5"], "--top-k 5 has no effect on what --plain-only samples"),
        (["--do-sample", "--temperature", "0"], "--temperature must be positive, got 0"),
        (["--do-sample", "--temperature", "nan"], "--temperature must be positive, got nan"),
        (["--do-sample", "--top-k", "-1"], "--top-k must be at least 0, got -1"),
        (["--do-sample", "--top-p", "1.5"], r"--top-p must lie in \(0, 1\], got 1.5"),
        (["--plain-only", "--do-sample"], "--do-sample does not go with --plain-only"),
        (["--plain-only", "--mixed-budgets"], "--mixed-budgets does not go with --plain-only"),
        (["--plain-only", "--draft-lengths", "1"], "--draft-lengths does not go with --plain-only"),
        (["--json", "no/such/folder/load.json"], "--json must be a file in a folder that exists, got 'no/such/folder/load.json'"),
        (["--json", "."], r"--json must be a file in a folder that exists, got '\.'"),
        (["--output", __file__], "--output must be a folder, but .* is a file"),
        (["--device", "abacus"], "the device 'abacus' can't be used here"),
        (["--draft-lengths", "1", "5"], "--draft-lengths must lie between 1 and the draft's block size 4, got 5"),
        (["--draft-lengths", "0"], "--draft-lengths must lie between 1 and the draft's block size 4, got 0"),
        (["--max-new-tokens", "1020"], "prompt 1 has .* tokens, which with --max-new-tokens 1020 is more than the context of .*, 1024"),
        (["--prompts", "nowhere.jsonl"], r"nowhere\.jsonl"),
    ],
)
def test_bad_input_is_refused_before_anything_is_measured(load, folder, monkeypatch, flags, words):
    monkeypatch.setattr(load, "measure_all", None)
    with pytest.raises((ValueError, OSError), match=words):
        load.main(["--draft", str(folder / "draft"), "--device", "cpu", *flags])


def test_a_target_alone_on_no_device_is_refused(load, folder):
    with pytest.raises(ValueError, match="the device 'abacus' can't be used here"):
        load.main(["--target", str(folder / "target"), "--plain-only", "--device", "abacus"])


def test_the_script_says_bad_input_in_a_sentence(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--runs", "0"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert ended.value.code == 2 and capsys.readouterr().err == "load.py: --runs must be at least 1, got 0\n"
