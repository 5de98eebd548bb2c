"""The evaluations of a training as data, table and plot; and what `distill` leaves of them."""

import json

import pytest
from matplotlib.image import imread
from test_distill import arguments, folder  # noqa: F401 (a fixture)

from hf_dspark import DSparkDraftModel
from hf_dspark.distillation.distill import distill
from hf_dspark.distillation.summary import evaluations, plot_history, summary_table

LOG = [
    {"loss": 3.0, "step": 10},
    {"eval_loss": 2.0, "eval_tau": 1.5, "eval_tokens_per_round": 1.25, "eval_train_seconds": 90.0, "eval_runtime": 1.0, "epoch": 0.1, "step": 10},
    {"eval_loss": 1.0, "eval_tau": 2.5, "eval_confidence_bias": -0.04, "eval_train_seconds": 240.0, "epoch": 0.3, "step": 30},
    {"train_loss": 1.0, "step": 30},
    {"eval_loss": 9.0, "eval_tau": 9.0, "eval_train_seconds": 300.0, "step": 30},
]
HISTORY = [
    {"step": 10, "minutes": 1.5, "loss": 2.0, "tau": 1.5, "tokens_per_round": 1.25},
    {"step": 30, "minutes": 4.0, "loss": 1.0, "tau": 2.5, "confidence_bias": -0.04},
]


def test_evaluations_are_the_first_of_each_step():
    assert evaluations(LOG) == HISTORY
    assert evaluations(LOG[:1]) == []


def test_the_table_has_the_columns_there_are():
    assert summary_table(HISTORY).splitlines() == [
        "step  minutes   loss  tau by laws  tokens a round  confidence bias",
        "10        1.5  2.000         1.50            1.25                -",
        "30        4.0  1.000         2.50               -           -0.040",
    ]


def test_the_plot_needs_two_points(tmp_path):
    assert plot_history(tmp_path / "tau.png", HISTORY[:1]) is None and not list(tmp_path.iterdir())
    assert imread(plot_history(tmp_path / "tau.png", HISTORY)).shape[:2] == (600, 1050)


EVALUATING = {"eval_strategy": "steps", "eval_steps": 1, "eval_prompts": 2, "eval_prompt_tokens": 4, "eval_new_tokens": 6, "eval_temperature": 1.0}


def test_distill_ends_with_a_table_a_plot_and_the_history(folder, capsys):  # noqa: F811
    output = distill(arguments(folder, **EVALUATING))
    report = json.loads((output / "distillation.json").read_text())
    assert [entry["step"] for entry in report["history"]] == [1, 2, 3]
    last = report["history"][-1]
    assert {"minutes", "loss", "tau", "tokens_per_round", "sampled_tokens_per_round", "acceptance_4", "survival_4", "confidence_bias"} <= last.keys()
    for name in ("tau", "tokens_per_round", "sampled_tokens_per_round", "confidence_bias"):
        assert report[f"eval_{name}"] == pytest.approx(last[name])
    assert summary_table(report["history"]) in capsys.readouterr().out
    assert imread(output / "tau_by_time.png").shape[:2] == (600, 1050)


def test_a_resumed_training_has_the_evaluations_before_and_after(folder):  # noqa: F811
    options = {**EVALUATING, "save_strategy": "steps", "save_steps": 2}
    first = json.loads((distill(arguments(folder, **options, max_steps=2)) / "distillation.json").read_text())["history"]
    output = distill(arguments(folder, **options, max_steps=4, resume_from_checkpoint=str(folder / "draft" / "checkpoint-2")))
    history = json.loads((output / "distillation.json").read_text())["history"]
    assert [entry["step"] for entry in history] == [1, 2, 3, 4] and history[:2] == first[:2]
    minutes = [entry["minutes"] for entry in history]
    assert minutes == sorted(minutes) and minutes[0] > 0


def test_the_best_checkpoint_is_what_is_written(folder, monkeypatch):  # noqa: F811
    calls = []

    def scripted(*_):
        calls.append(None)
        return {"tokens_per_round": 3.0 if len(calls) == 2 else 2.0}

    monkeypatch.setattr("hf_dspark.distillation.trainer.accepted_length", scripted)
    best = {"load_best_model_at_end": True, "metric_for_best_model": "tokens_per_round", "save_strategy": "steps", "save_steps": 1}
    output = distill(arguments(folder, **EVALUATING, **best, save_dtype="float32"))
    written, kept = DSparkDraftModel.from_pretrained(output), DSparkDraftModel.from_pretrained(output / "checkpoint-2")
    assert all(parameter.equal(dict(kept.named_parameters())[name]) for name, parameter in written.named_parameters())
    report = json.loads((output / "distillation.json").read_text())
    # The last evaluation is of the draft that is written, not of the last step's.
    assert [entry["tokens_per_round"] for entry in report["history"]] == [2.0, 3.0, 2.0] and len(calls) == 4
    assert report["eval_tau"] == pytest.approx(report["history"][1]["tau"], rel=1e-6)
