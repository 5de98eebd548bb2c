"""Training time, without evaluations and over resumed runs."""

import pytest
from oracle import tiny_draft, tiny_target
from test_trainer import make_trainer, rows
from transformers import TrainerState

from hf_dspark.distillation import clock as clock_module
from hf_dspark.distillation.clock import TrainingClock


@pytest.fixture
def now(monkeypatch):
    """The time in seconds, in a list of one."""
    value = [100.0]
    monkeypatch.setattr(clock_module.time, "monotonic", lambda: value[0])
    return value


def test_it_counts_training_and_stands_still_otherwise(now):
    clock = TrainingClock()
    now[0] += 5
    assert clock.seconds == 0
    clock.on_train_begin(None, TrainerState(), None)
    now[0] += 5
    with clock.paused():
        now[0] += 50
        assert clock.seconds == 5
    now[0] += 2
    clock.on_train_end(None, TrainerState(), None)
    with clock.paused():
        now[0] += 50
    now[0] += 50
    assert clock.seconds == 7


def test_a_resumed_run_goes_on_counting_and_a_new_one_starts_at_zero(now):
    clock = TrainingClock()
    clock.on_train_begin(None, TrainerState(), None)
    now[0] += 7
    saved = TrainerState(global_step=3, stateful_callbacks=[clock])
    resumed = TrainingClock()
    resumed.on_train_begin(None, saved, None)
    now[0] += 1
    assert resumed.seconds == 8
    # A state whose step is 0 is that of a new training with the same trainer.
    clock.on_train_begin(None, TrainerState(stateful_callbacks=[clock]), None)
    assert clock.seconds == 0


def test_evaluations_report_it_and_checkpoints_keep_it(tmp_path, monkeypatch):
    ticks = iter(range(10**6))
    monkeypatch.setattr(clock_module.time, "monotonic", lambda: float(next(ticks)))
    target = tiny_target()
    options = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1, "eval_dataset": rows(2)}

    def times(**more) -> list[float]:
        trainer = make_trainer(tmp_path, target, tiny_draft(target), eval_prompts=0, **options | more)
        trainer.train(resume_from_checkpoint=bool(more))
        return [entry["eval_train_seconds"] for entry in trainer.state.log_history if "eval_loss" in entry]

    first = times()
    assert 0 < first[0] < first[1]
    resumed = times(max_steps=4)
    assert resumed[:2] == first and first[1] < resumed[2] < resumed[3]
