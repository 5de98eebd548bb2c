"""What one step sees and weighs: anchors by epoch, normalisers over accumulated batches and processes, packed rows, resumed runs."""

import copy
import os
import socket

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from datasets import Dataset
from oracle import VOCAB, spy, tiny_draft, tiny_target
from test_trainer import KeepGradients, make_trainer, rows, weights
from transformers import Trainer

from hf_dspark.distillation.collator import BlockCollator
from hf_dspark.distillation.trainer import DSparkTrainer


def uneven_rows(count: int = 8) -> list[dict]:
    """Rows of 8 to 22 tokens of which the last 2 to 16 are supervised."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for i in range(count):
        ids = torch.randint(VOCAB - 1, (8 + 2 * i,), generator=generator)
        found.append({"input_ids": ids, "loss_mask": torch.arange(len(ids)) >= 6, "sample": i})
    return found


def as_dataset(rows: list[dict]) -> Dataset:
    return Dataset.from_list([{name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in row.items()} for row in rows])


# Epochs


def drawn_by_epoch(trainer, monkeypatch) -> list[dict[tuple, list]]:
    """Of each epoch's batches as they are trained on: anchors by ids."""
    epochs: list[dict[tuple, list]] = []

    def note(self, model, inputs, num_items_in_batch=None):
        epoch = int(self.state.epoch or 0)
        epochs.extend({} for _ in range(epoch + 1 - len(epochs)))
        for ids, anchors in zip(inputs["input_ids"].tolist(), inputs["anchors"].tolist()):
            epochs[epoch][tuple(ids)] = anchors

    with monkeypatch.context() as patch:
        spy(patch, Trainer, "training_step", note)
        trainer.train(resume_from_checkpoint=trainer.args.resume_from_checkpoint)
    return epochs


WORKERS = [
    {"dataloader_num_workers": 0},
    {"dataloader_num_workers": 2},
    {"dataloader_num_workers": 2, "dataloader_persistent_workers": True},
]


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("workers", WORKERS, ids=["no worker", "workers", "persistent workers"])
def test_anchors_are_those_of_seed_epoch_and_sample_wherever_rows_are_collated(tmp_path, monkeypatch, workers):
    dataset = [{**row, "sample": i} for i, row in enumerate(rows(3))]
    options = {"max_steps": 9, "per_device_train_batch_size": 1, "save_strategy": "steps", "save_steps": 4, "seed": 5, **workers}
    expected = []
    for epoch in range(3):
        collator = BlockCollator(num_anchors=4, seed=5)
        collator.set_epoch(epoch)
        expected.append({tuple(row["input_ids"].tolist()): collator([row])["anchors"][0].tolist() for row in dataset})
    assert expected[0] != expected[1] != expected[2]
    trainer = make_trainer(tmp_path, dataset=dataset, eval_dataset=rows(2), eval_strategy="steps", eval_steps=2, **options)
    assert drawn_by_epoch(trainer, monkeypatch) == expected
    # A checkpoint in the middle of the second epoch: its rest and the third have the same anchors as before.
    options["resume_from_checkpoint"] = str(tmp_path / "checkpoint-4")
    resumed = drawn_by_epoch(make_trainer(tmp_path, dataset=dataset, **options), monkeypatch)
    assert resumed[0] == {} and resumed[2] == expected[2]
    assert len(resumed[1]) == 2 and resumed[1].items() <= expected[1].items()


def test_an_evaluation_has_the_same_anchors_whenever_it_comes_and_whatever_the_seed(tmp_path, monkeypatch):
    seen = []
    spy(monkeypatch, DSparkTrainer, "prediction_step", lambda self, model, inputs, *args, **kwargs: seen.append(inputs["anchors"].tolist()))
    target = tiny_target()
    for seed in (0, 1):
        options = {"max_steps": 4, "eval_strategy": "steps", "eval_steps": 2, "eval_on_start": True, "seed": seed}
        trainer = make_trainer(tmp_path, target, tiny_draft(target), eval_dataset=rows(3), **options)
        trainer.train()
        trainer.predict(rows(3))
    assert len(seen) == 8 and all(anchors == seen[0] for anchors in seen)
    assert isinstance(trainer.data_collator, BlockCollator) and trainer.data_collator is not trainer.eval_collator


# Normalisers


def step(tmp_path, target, draft, trainer_class=DSparkTrainer, **options) -> tuple[dict[str, torch.Tensor], dict]:
    """(gradients, log) of the first step, without clipping."""
    gradients: list[dict[str, torch.Tensor]] = []
    values = {"max_steps": 1, "max_grad_norm": 0.0, "num_anchors": 6, "dataset": uneven_rows()}
    trainer = make_trainer(tmp_path, target, copy.deepcopy(draft), **{**values, **options})
    trainer.__class__ = trainer_class
    trainer.add_callback(KeepGradients(gradients))
    trainer.train()
    # The names of a wrapped model begin with "module.".
    return {name.removeprefix("module."): gradient for name, gradient in gradients[0].items()}, trainer.state.log_history[0]


class MeanOfBatches(DSparkTrainer):
    """The fault: each batch is a mean of its own, and the step their mean."""

    loss_is_scaled_for_ga = False

    def get_batch_samples(self, *args):
        return super().get_batch_samples(*args)[0], None


def largest_gap(gradients: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    assert gradients.keys() == expected.keys()
    return max((gradients[name] - expected[name]).abs().max().item() for name in expected)


@pytest.mark.parametrize("options", [{}, {"draft_vocab_size": 40}], ids=["whole vocabulary", "reduced vocabulary"])
def test_accumulated_batches_are_one_big_batch(tmp_path, options):
    target = tiny_target()
    draft = tiny_draft(target, **options)
    if options:
        draft.d2t.copy_(torch.arange(40) // 2)
    expected, expected_log = step(tmp_path, target, draft, per_device_train_batch_size=8)
    assert max(gradient.abs().max() for gradient in expected.values()) > 0.01
    for size in (1, 2, 4):
        gradients, log = step(tmp_path, target, draft, per_device_train_batch_size=size, gradient_accumulation_steps=8 // size)
        assert largest_gap(gradients, expected) < 1e-5
        for name in ("loss", "ce", "l1", "confidence", "tau"):
            assert log[name] == pytest.approx(expected_log[name], abs=1e-5), name
    faulty, _ = step(tmp_path, target, draft, MeanOfBatches, per_device_train_batch_size=1, gradient_accumulation_steps=8)
    assert largest_gap(faulty, expected) > 1e-3


def test_the_last_step_of_an_epoch_has_fewer_batches_and_is_still_one_mean(tmp_path):
    target = tiny_target()
    draft = tiny_draft(target)
    logs = []
    for size in (1, 4):
        gradients: list[dict[str, torch.Tensor]] = []
        options = {"max_steps": 2, "per_device_train_batch_size": size, "gradient_accumulation_steps": 4 // size, "learning_rate": 0.0}
        trainer = make_trainer(tmp_path, target, copy.deepcopy(draft), dataset=uneven_rows(6), max_grad_norm=0.0, **options)
        trainer.add_callback(KeepGradients(gradients))
        trainer.train()
        logs.append(([entry["loss"] for entry in trainer.state.log_history if "loss" in entry], gradients))
    assert logs[0][0] == pytest.approx(logs[1][0], abs=1e-5) and len(logs[0][0]) == 2
    assert all(largest_gap(one, other) < 1e-5 for one, other in zip(logs[0][1], logs[1][1], strict=True))


def test_logs_over_several_steps_are_the_means_of_the_steps(tmp_path):
    target = tiny_target()
    draft = tiny_draft(target)
    options = {"max_steps": 4, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 2, "dataset": uneven_rows()}
    logs = []
    for every in (1, 4):
        trainer = make_trainer(tmp_path, target, copy.deepcopy(draft), logging_steps=every, **options)
        trainer.train()
        logs.append([entry for entry in trainer.state.log_history if "loss" in entry])
    for name in ("loss", "ce", "l1", "confidence", "tau"):
        assert sum(entry[name] for entry in logs[0]) / 4 == pytest.approx(logs[1][0][name], rel=1e-4)


@pytest.mark.parametrize("options", [{}, {"draft_vocab_size": 40}], ids=["whole vocabulary", "reduced vocabulary"])
def test_an_evaluation_is_one_mean_however_it_is_batched(tmp_path, options):
    target = tiny_target()
    draft = tiny_draft(target, **options)
    trainer = make_trainer(tmp_path, target, draft, eval_dataset=uneven_rows(7))
    results = []
    for size in (1, 3, 7):
        trainer.args.per_device_eval_batch_size = size
        results.append(trainer.evaluate())
    for name in ("eval_loss", "eval_ce", "eval_l1", "eval_confidence", "eval_tau"):
        assert [result[name] for result in results] == pytest.approx([results[0][name]] * 3, abs=1e-5)
    batch = trainer.eval_collator(uneven_rows(7))
    terms = trainer._losses(draft, batch, None)
    found = [results[0][f"eval_{name}"] for name in ("ce", "l1", "confidence", "tau")]
    assert found == pytest.approx([terms.ce.item(), terms.l1.item(), terms.confidence.item(), terms.tokens_per_round.item()], abs=1e-5)
    expected = 0.1 * results[0]["eval_ce"] + 0.9 * results[0]["eval_l1"] + results[0]["eval_confidence"]
    assert results[0]["eval_loss"] == pytest.approx(expected, abs=1e-5)


# Processes


def train_in_process(rank: int, port: int, folder: str) -> None:
    """One of two processes: a right step, a faulty one, one on a stream, and an evaluation; rank 0 writes what it found."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    target = tiny_target()
    draft = tiny_draft(target)
    options = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "ddp_backend": "gloo"}
    found = {
        "step": step(folder, target, draft, **options),
        "faulty": step(folder, target, draft, MeanOfBatches, **options),
        "stream": step(folder, target, draft, dataset=as_dataset(uneven_rows()).to_iterable_dataset(), **options),
    }
    trainer = make_trainer(folder, target, copy.deepcopy(draft), eval_dataset=uneven_rows(5), per_device_eval_batch_size=2, **options)
    assert trainer.accelerator.num_processes == 2
    found["evaluation"] = trainer.evaluate()
    if rank == 0:
        torch.save(found, f"{folder}/found.pt")
    torch.distributed.destroy_process_group()


def test_two_processes_are_one_big_batch(tmp_path):
    target = tiny_target()
    draft = tiny_draft(target)
    expected, expected_log = step(tmp_path, target, draft, per_device_train_batch_size=8)
    evaluation = make_trainer(tmp_path, target, copy.deepcopy(draft), eval_dataset=uneven_rows(5)).evaluate()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torch.multiprocessing.start_processes(train_in_process, (port, str(tmp_path)), nprocs=2, start_method="fork")
    found = torch.load(tmp_path / "found.pt")
    for case in ("step", "stream"):
        gradients, log = found[case]
        assert largest_gap(gradients, expected) < 1e-5, case
        for name in ("loss", "ce", "l1", "confidence", "tau"):
            assert log[name] == pytest.approx(expected_log[name], abs=1e-5), (case, name)
    assert largest_gap(found["faulty"][0], expected) > 1e-3
    # Five rows in batches of two: accelerate repeats some in the last batches, which must not count twice.
    for name in ("eval_loss", "eval_ce", "eval_l1", "eval_confidence", "eval_tau"):
        assert found["evaluation"][name] == pytest.approx(evaluation[name], abs=1e-5), name


# Packing


def test_a_packed_step_has_the_gradients_of_the_texts_apart(tmp_path):
    target = tiny_target()
    draft = tiny_draft(target)
    options = {"dataset": as_dataset(uneven_rows()), "num_anchors": 64, "per_device_train_batch_size": 8, "max_length": 50}
    expected, expected_log = step(tmp_path, target, draft, **options)
    gradients, log = step(tmp_path, target, draft, packing=True, **options)
    assert largest_gap(gradients, expected) < 1e-4
    for name in ("loss", "ce", "l1", "confidence", "tau"):
        assert log[name] == pytest.approx(expected_log[name], abs=1e-4), name


def test_packed_rows_of_a_target_that_mixes_them_are_refused(tmp_path):
    target = tiny_target()
    forward = target.forward

    def mixing(*args, logits_to_keep=0, position_ids=None, **kwargs):
        return forward(*args, logits_to_keep=logits_to_keep, **kwargs)

    target.forward = mixing
    with pytest.raises(ValueError, match=r"packing=True: Qwen3ForCausalLM .* does not keep packed texts apart"):
        make_trainer(tmp_path, target, dataset=as_dataset(rows()), packing=True, max_length=40).train()


# Resuming


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("workers", WORKERS[::2], ids=["no worker", "persistent workers"])
@pytest.mark.parametrize("broken_at", [2, 3], ids=["between epochs", "within an epoch"])
def test_a_resumed_run_equals_an_unbroken_one(tmp_path, broken_at, workers):
    target = tiny_target()
    draft = tiny_draft(target)
    whole, broken, resumed = copy.deepcopy(draft), copy.deepcopy(draft), copy.deepcopy(draft)
    options = {"max_steps": 5, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "lr_scheduler_type": "constant", **workers}
    options |= {"save_strategy": "steps", "save_steps": broken_at, "dataset": uneven_rows()}
    unbroken = make_trainer(tmp_path / "whole", target, whole, **options)
    unbroken.train()
    make_trainer(tmp_path / "broken", target, broken, **{**options, "max_steps": broken_at}).train()
    trainer = make_trainer(tmp_path / "broken", target, resumed, **options)
    trainer.train(resume_from_checkpoint=True)
    expected = weights(whole)
    assert all(torch.equal(parameter, expected[name]) for name, parameter in resumed.named_parameters())
    for name in ("loss", "ce", "tau"):
        losses = [[entry[name] for entry in run.state.log_history if name in entry] for run in (unbroken, trainer)]
        assert losses[0] == losses[1] and len(losses[0]) == 5
