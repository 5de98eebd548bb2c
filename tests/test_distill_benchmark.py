"""benchmarks/distill.py on a tiny target."""

import json
from pathlib import Path

import pytest
import torch
from benchmark_scripts import load_script
from evaluation.tiny_pair import TEXTS, save_pair
from transformers import TrainerState


@pytest.fixture(scope="module")
def benchmark():
    return load_script("distill")


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    """A recipe of a tiny draft on a text file; its own saving, evaluating and uploading must not happen."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    save_pair(tmp_path)
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    options = {"target": str(tmp_path / "target"), "dataset": str(tmp_path / "texts.jsonl"), "output_dir": str(tmp_path / "run"), "num_held_out": 4}
    options |= {"max_length": 32, "block_size": 4, "num_draft_layers": 1, "markov_rank": 8, "num_anchors": 8, "num_key_value_heads": 1}
    options |= {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "use_cpu": True, "push_to_hub": True, "save_strategy": "steps"}
    options |= {"eval_strategy": "steps", "eval_steps": 1, "save_steps": 1, "load_best_model_at_end": True, "max_steps": 100}
    (tmp_path / "recipe.yaml").write_text("".join(f"{name}: {json.dumps(value)}\n" for name, value in options.items()))
    return tmp_path / "recipe.yaml"


def test_the_script_measures_steps_and_writes_its_figures(benchmark, recipe, tmp_path, capsys):
    flags = ["--recipe", str(recipe), "--steps", "3", "--warmup", "1", "--num_anchors", "5"]
    assert benchmark.main([*flags, "--json", str(tmp_path / "out.json")]) == 0
    figures = json.loads((tmp_path / "out.json").read_text())
    # Two batches of two rows, five anchors each, which every text has room for.
    assert figures["steps"] == 3 and figures["anchors_per_step"] == 20
    assert list(figures["share"]) == ["target", "draft", "loss", "backward", "optimizer", "rest"]
    assert sum(figures["share"].values()) == pytest.approx(1) and all(share > 0 for share in figures["share"].values())
    assert figures["anchors_per_second"] == pytest.approx(20 / figures["seconds_per_step"])
    assert figures["peak_bytes"] is None or figures["peak_bytes"] > 2**24
    assert not (tmp_path / "run").exists()
    out = capsys.readouterr().out
    assert "anchors/s, 20.0 anchors a step" in out and "optimizer" in out


def test_a_recipe_of_an_adapter_is_measured_as_one(benchmark, recipe, tmp_path, monkeypatch):
    trainer, drafts = benchmark.DSparkTrainer, []
    monkeypatch.setattr(benchmark, "DSparkTrainer", lambda draft, *args, **options: drafts.append(draft) or trainer(draft, *args, **options))
    flags = ["--init_draft", str(tmp_path / "draft"), "--lora_rank", "2", "--num_anchors", "5"]
    assert benchmark.main(["--recipe", str(recipe), "--steps", "1", "--warmup", "1", *flags]) == 0
    assert [type(draft).__name__ for draft in drafts] == ["PeftModel"]


def test_only_the_parts_of_measured_steps_count(benchmark, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(benchmark.time, "perf_counter", lambda: now[0])
    watch = benchmark.Stopwatch(warmup=1, device=torch.device("cpu"))

    def work(seconds: float) -> None:
        now[0] += seconds

    run = watch.timed("draft", work)
    for step in range(3):
        state = TrainerState(global_step=step)
        watch.on_step_begin(None, state, None)
        run(2.0)
        work(1.0)
        watch.on_step_end(None, state, None)
        work(100.0 if step == 2 else 0.0)
    assert watch.seconds["draft"] == 4.0 and watch.total == 6.0


def test_the_default_is_the_bundled_target_without_the_text_it_wrote(benchmark, tmp_path):
    args = benchmark.recipe_options(benchmark.parser().parse_args([]), ["--num_anchors", "3"], str(tmp_path))
    assert args.target.endswith("target") and Path(args.target).is_dir() and args.extra_rows is None
    assert args.dataset == "stdlib" and args.num_anchors == 3 and args.max_steps == 12 and args.eval_prompts == 0


def test_impossible_numbers_of_steps_are_named(benchmark):
    with pytest.raises(ValueError, match="--steps and --warmup must be at least 1, got 0 and 2"):
        benchmark.main(["--steps", "0"])
