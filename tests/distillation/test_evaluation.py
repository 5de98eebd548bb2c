"""What an evaluation reports of decoding and of each slot, that it leaves training alone, and that checkpoints can be chosen by it."""

import copy
import os
import socket

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from datasets import Dataset
from oracle import ScriptedDraft, right_for, spy, tiny_draft, tiny_target
from test_trainer import adapted, make_trainer, rows, weights
from transformers import TrainerCallback

from hf_dspark import record_generation
from hf_dspark.distillation.evaluation import accepted_length, eval_prompts, random_state_kept, slot_metrics, slot_sums
from hf_dspark.distillation.trainer import DSparkTrainer

DECODING = {"eval_prompts": 3, "eval_prompt_tokens": 5, "eval_new_tokens": 9}


# Slots


def test_slots_by_hand():
    mask = torch.tensor([[[True, True], [True, False], [False, False]]])
    acceptance = torch.tensor([[[0.5, 0.25], [0.75, 0.0], [0.0, 0.0]]])
    confidence = torch.tensor([[[0.55, 0.05], [0.95, 0.0], [0.0, 0.0]]])
    metrics = slot_metrics(slot_sums(mask, acceptance, confidence), has_confidence=True)
    expected = {
        "acceptance_1": 1.25 / 2,
        "acceptance_2": 0.25,
        "survival_1": 1.25 / 2,
        "survival_2": 0.125 / 2,
        "confidence_bias": (1.55 - 1.5) / 3,
        # Bins 5, 0 and 9 hold one slot each.
        "confidence_calibration_error": (0.05 + 0.2 + 0.2) / 3,
    }
    assert metrics == pytest.approx(expected, abs=1e-6)
    assert all(type(value) is float for value in metrics.values())


def test_sums_of_batches_add_up_and_a_sure_head_has_a_bin():
    generator = torch.Generator().manual_seed(0)
    mask, acceptance = torch.rand(4, 3, 5, generator=generator) > 0.3, torch.rand(4, 3, 5, generator=generator)
    confidence = torch.ones(4, 3, 5)
    whole = slot_sums(mask, acceptance, confidence)
    torch.testing.assert_close(whole, slot_sums(mask[:1], acceptance[:1], confidence[:1]) + slot_sums(mask[1:], acceptance[1:], confidence[1:]))
    metrics = slot_metrics(whole, has_confidence=True)
    assert metrics["confidence_bias"] == pytest.approx(metrics["confidence_calibration_error"]) and metrics["confidence_bias"] > 0.2
    without = slot_metrics(slot_sums(mask, acceptance, None), has_confidence=False)
    assert without.keys() == {f"{name}_{k}" for name in ("acceptance", "survival") for k in range(1, 6)}


def test_a_draft_of_nan_has_sums_all_the_same():
    mask = torch.tensor([[[True, False]]])
    for value in (float("nan"), float("inf"), float("-inf"), -1.0):
        sums = slot_sums(mask, torch.full((1, 1, 2), 0.5), torch.full((1, 1, 2), value))
        assert sums.shape == (4 * 2 + 10,) and sums[:2].tolist() == [1, 0]


def test_an_evaluation_reports_slots_that_agree_with_tau_and_with_the_loss(tmp_path):
    trainer = make_trainer(tmp_path, eval_dataset=rows(5), eval_prompts=0)
    metrics = trainer.evaluate()
    assert metrics["eval_tau"] == pytest.approx(1 + sum(metrics[f"eval_survival_{k}"] for k in range(1, 5)), abs=1e-5)
    assert metrics["eval_acceptance_1"] == pytest.approx(metrics["eval_survival_1"])
    assert "eval_tokens_per_round" not in metrics and abs(metrics["eval_confidence_bias"]) <= metrics["eval_confidence_calibration_error"] + 1e-6
    # Without decay the L1 term is the plain mean over slots, as acceptance and confidence are.
    trainer.args.decay_gamma = None
    batch = trainer.eval_collator(rows(5))
    terms, blocks = trainer._losses(trainer.model, batch, None), trainer._blocks(trainer.model, batch)
    counted = blocks.slot_mask.sum((0, 1))
    mean = sum(metrics[f"eval_acceptance_{k + 1}"] * counted[k] for k in range(4)) / counted.sum()
    assert mean.item() == pytest.approx(1 - terms.l1.item() / 2, abs=1e-5)
    assert metrics["eval_confidence_bias"] == pytest.approx((terms.slot_confidence.sum() / counted.sum() - mean).item(), abs=1e-5)
    assert (terms.slot_acceptance[~blocks.slot_mask] == 0).all() and not terms.slot_confidence.requires_grad


# Prompts


def arguments(tmp_path, **options):
    return make_trainer(tmp_path, **{**DECODING, **options}).args


def test_a_text_gives_its_first_tokens_and_a_conversation_all_before_its_answer(tmp_path):
    args = arguments(tmp_path)
    text = {"input_ids": list(range(20))}
    chat = {"input_ids": list(range(20)), "loss_mask": [False] * 8 + [True] * 12}
    masked = {"input_ids": list(range(20)), "loss_mask": [True] * 20}
    assert eval_prompts([text, chat, masked], args, None) == [list(range(5)), list(range(8)), list(range(5))]
    # Spread over the rows, and no more than asked for.
    many = [{"input_ids": [i] * 6} for i in range(9)]
    assert [prompt[0] for prompt in eval_prompts(Dataset.from_list(many), args, None)] == [0, 3, 6]


def test_prompts_without_room_are_left_out_and_streams_are_refused(tmp_path):
    args = arguments(tmp_path)
    chats = [{"input_ids": [1] * 30, "loss_mask": [False] * length + [True] * 4} for length in (6, 20)]
    assert [len(prompt) for prompt in eval_prompts(chats, args, 15)] == [6]
    with pytest.raises(ValueError, match=r"eval_new_tokens=9 leave no room for a prompt in the target's context of 14 tokens .the shortest has 6"):
        eval_prompts(chats, args, 14)
    with pytest.raises(ValueError, match="chosen from a IterableDataset; evaluate on a Dataset, or set eval_prompts=0"):
        eval_prompts(Dataset.from_list(chats).to_iterable_dataset(), args, None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"eval_prompts": -1}, "eval_prompts must be at least 0, got -1"),
        ({"eval_prompt_tokens": 0}, "eval_prompt_tokens must be at least 1, got 0"),
        ({"eval_new_tokens": 1}, "eval_new_tokens must be at least 2, got 1"),
        ({"eval_temperature": 0.0}, "eval_temperature must be positive or None, got 0.0"),
        ({"eval_prompts": 0, "metric_for_best_model": "tokens_per_round"}, "metric_for_best_model='tokens_per_round' needs eval_prompts above 0"),
        ({"metric_for_best_model": "eval_sampled_tokens_per_round"}, "needs an eval_temperature"),
        ({"eval_prompts": 0, "metric_for_best_model": "repeated_8gram_share"}, "needs eval_prompts above 0"),
        ({"metric_for_best_model": "accuracy"}, "metric_for_best_model='accuracy' is not what an evaluation reports: loss, ce, .*tokens_per_round"),
        ({"metric_for_best_model": "eval_acceptance_8"}, "metric_for_best_model='eval_acceptance_8' .*k from 1 to block_size=7"),
        ({"metric_for_best_model": "survival_0"}, "metric_for_best_model='survival_0' is not"),
        ({"metric_for_best_model": "confidence", "enable_confidence_head": False}, "needs enable_confidence_head: true"),
    ],
    ids=str,
)
def test_options_out_of_range_are_named(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        arguments(tmp_path, **options)
    assert arguments(tmp_path, metric_for_best_model="eval_tokens_per_round").greater_is_better


def test_every_metric_that_drafts_can_be_ranked_by_is_reported_and_has_its_direction(tmp_path):
    better = {"loss": False, "ce": False, "l1": False, "confidence": False, "confidence_calibration_error": False, "tau": True}
    better |= {"tokens_per_round": True, "repeated_8gram_share": False, "sampled_tokens_per_round": True, "sampled_repeated_8gram_share": False}
    better |= {"acceptance_1": True, "survival_4": True}
    metrics = make_trainer(tmp_path, eval_dataset=rows(2), **DECODING, eval_temperature=1.0).evaluate()
    for name, is_greater in better.items():
        assert f"eval_{name}" in metrics
        for metric in (name, f"eval_{name}"):
            assert arguments(tmp_path, metric_for_best_model=metric, eval_temperature=1.0).greater_is_better is is_greater
    assert arguments(tmp_path, metric_for_best_model="ce", greater_is_better=True).greater_is_better
    assert arguments(tmp_path, metric_for_best_model="acceptance_12", init_draft="of a larger block").greater_is_better


# Decoding


def test_the_accepted_length_of_a_scripted_draft_is_known(tmp_path):
    target = tiny_target()
    draft = tiny_draft(target, ScriptedDraft)
    dataset = rows(1, num_tokens=5)
    text = target.generate(dataset[0]["input_ids"][None], max_new_tokens=41, do_sample=False)[0].tolist()
    for num_right in (0, 2, 4):
        draft.script = right_for(text, num_right)
        trainer = make_trainer(tmp_path, target, draft, eval_dataset=dataset, **{**DECODING, "eval_new_tokens": 31})
        draft.train()
        # The first token needs no draft; 30 more are 10 rounds of 3, or 6 of 5.
        assert accepted_length(draft, target, dataset, trainer.args, trainer.accelerator)["tokens_per_round"] == num_right + 1
        assert draft.training


def test_an_evaluation_decodes_with_generate_and_counts_repetition(tmp_path):
    target = tiny_target()
    trainer = make_trainer(tmp_path, target, tiny_draft(target), eval_dataset=rows(4), **{**DECODING, "eval_new_tokens": 30}, eval_temperature=0.7)
    metrics = trainer.evaluate()
    with record_generation() as report:
        for prompt in eval_prompts(rows(4), trainer.args, None):
            target.generate(torch.tensor([prompt]), assistant_model=trainer.model, max_new_tokens=30, do_sample=False)
    assert metrics["eval_tokens_per_round"] == pytest.approx(report.tokens_per_round)
    assert metrics["eval_repeated_8gram_share"] == metrics["eval_sampled_repeated_8gram_share"] == 0.0
    assert 1 <= metrics["eval_sampled_tokens_per_round"] <= 5
    again = trainer.evaluate()
    assert again["eval_sampled_tokens_per_round"] == metrics["eval_sampled_tokens_per_round"]
    for parameter in target.parameters():  # a target that always says the same
        parameter.data.zero_()
    looping = trainer.evaluate()
    # 23 eight-grams, one distinct.
    assert looping["eval_repeated_8gram_share"] == pytest.approx(22 / 23)


def test_an_adapter_over_a_draft_is_decoded_with(tmp_path):
    target = tiny_target()
    draft = adapted(tiny_draft(target))
    for name, parameter in draft.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(0))
    trainer = make_trainer(tmp_path, target, draft, eval_dataset=rows(3), **{**DECODING, "eval_new_tokens": 60})
    with_adapter = trainer.evaluate()
    merged = make_trainer(tmp_path, target, draft.merge_and_unload(), eval_dataset=rows(3), **{**DECODING, "eval_new_tokens": 60}).evaluate()
    for name in ("eval_tokens_per_round", "eval_tau"):
        assert with_adapter[name] == pytest.approx(merged[name], abs=1e-5)


def test_knobs_of_the_draft_and_its_failures_are_not_hidden(tmp_path):
    target = tiny_target()
    draft = tiny_draft(target)
    trainer = make_trainer(tmp_path, target, draft, eval_dataset=rows(2), **DECODING)
    expected = trainer.evaluate()["eval_tokens_per_round"]
    draft.generation_config.num_assistant_tokens = 1
    assert trainer.evaluate()["eval_tokens_per_round"] == expected and draft.generation_config.num_assistant_tokens == 1
    draft.base_logits = lambda hidden: 1 / 0
    with pytest.raises(ZeroDivisionError):
        accepted_length(draft, target, rows(2), trainer.args, trainer.accelerator)


def test_random_numbers_go_on_where_they_were():
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    with random_state_kept():
        torch.rand(5)
    assert torch.equal(torch.rand(2), expected)


def test_training_is_the_same_with_and_without_evaluations(tmp_path):
    target = tiny_target()
    draft = tiny_draft(target, attention_dropout=0.0)
    options = {"max_steps": 6, "per_device_train_batch_size": 2}
    runs = []
    for evaluating in ({}, {"eval_strategy": "steps", "eval_steps": 1, **DECODING, "eval_temperature": 1.0}):
        trained = copy.deepcopy(draft)
        trainer = make_trainer(tmp_path, target, trained, eval_dataset=rows(4), **options, **evaluating)
        trainer.train()  # a second epoch is begun, whose order is drawn anew
        runs.append(([entry["loss"] for entry in trainer.state.log_history if "loss" in entry], weights(trained), torch.rand(1)))
    assert runs[0][0] == runs[1][0] and len(runs[0][0]) == 6
    assert all(torch.equal(runs[0][1][name], runs[1][1][name]) for name in runs[0][1]) and torch.equal(runs[0][2], runs[1][2])


def test_every_logged_value_is_a_plain_number(tmp_path):
    logged = []

    class Reporter(TrainerCallback):
        def on_log(self, args, state, control, logs, **kwargs):
            logged.append(dict(logs))

    options = {"eval_strategy": "steps", "eval_steps": 1, **DECODING, "eval_temperature": 1.0}
    trainer = make_trainer(tmp_path, eval_dataset=rows(3), **options)
    trainer.add_callback(Reporter())
    trainer.train()
    evaluations = [logs for logs in logged if "eval_loss" in logs]
    assert len(evaluations) == 2 and {"eval_tokens_per_round", "eval_sampled_tokens_per_round", "eval_train_seconds"} <= evaluations[0].keys()
    assert all(type(value) in (int, float) for logs in logged for value in logs.values())


# Processes


def evaluate_in_process(rank: int, port: int, folder: str) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    metrics = decoding_trainer(folder, ddp_backend="gloo").evaluate()
    torch.save(metrics, f"{folder}/found{rank}.pt")
    torch.distributed.destroy_process_group()


def decoding_trainer(folder, **options) -> DSparkTrainer:
    target = tiny_target()
    return make_trainer(folder, target, tiny_draft(target), eval_dataset=rows(5), **DECODING, eval_temperature=1.0, **options)


def test_two_processes_share_the_prompts(tmp_path):
    expected = decoding_trainer(tmp_path).evaluate()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torch.multiprocessing.start_processes(evaluate_in_process, (port, str(tmp_path)), nprocs=2, start_method="fork")
    names = [name for name in expected if any(part in name for part in ("round", "8gram", "acceptance", "survival", "confidence"))]
    assert len(names) == 4 + 8 + 3
    for rank in range(2):
        found = torch.load(tmp_path / f"found{rank}.pt")
        assert {name: found[name] for name in names} == pytest.approx({name: expected[name] for name in names}, abs=1e-5)


# The best checkpoint


@pytest.mark.parametrize("best", [1, 2, 3])
def test_the_best_checkpoint_by_accepted_length_is_the_final_draft(tmp_path, monkeypatch, best):
    target = tiny_target()
    draft = tiny_draft(target)
    by_step = {}

    def scripted(draft, target, rows, args, accelerator):
        step = len(by_step) + 1
        by_step[step] = weights(draft)
        return {"tokens_per_round": 3.0 - abs(best - step)}

    monkeypatch.setattr("hf_dspark.distillation.trainer.accepted_length", scripted)
    options = {"max_steps": 3, "eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1, "save_total_limit": 1}
    options |= {"eval_prompts": 1}
    options |= {"load_best_model_at_end": True, "metric_for_best_model": "eval_tokens_per_round"}
    trainer = make_trainer(tmp_path, target, draft, eval_dataset=rows(2), **options)
    assert trainer.args.greater_is_better
    reads = []
    spy(monkeypatch, type(draft), "from_pretrained", lambda folder, **_: reads.append(str(folder)))
    trainer.train()
    assert reads == [str(tmp_path / f"checkpoint-{best}")]
    assert trainer.model is draft and draft.tables.target is target and len(by_step) == 3
    assert all(torch.equal(parameter, by_step[best][name]) for name, parameter in draft.named_parameters())
    assert best == 3 or not torch.equal(by_step[3]["fc.weight"], by_step[best]["fc.weight"])


def test_the_best_adapter_by_accepted_length_is_the_final_one(tmp_path, monkeypatch):
    target = tiny_target()
    draft = adapted(tiny_draft(target))
    by_step = []

    def scripted(draft, *_):
        by_step.append(weights(draft))
        return {"tokens_per_round": float(len(by_step) == 1)}

    monkeypatch.setattr("hf_dspark.distillation.trainer.accepted_length", scripted)
    options = {"max_steps": 2, "eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1, "eval_prompts": 1}
    options |= {"load_best_model_at_end": True, "metric_for_best_model": "tokens_per_round"}
    make_trainer(tmp_path, target, draft, eval_dataset=rows(2), **options).train()
    assert all(torch.equal(parameter, by_step[0][name]) for name, parameter in draft.named_parameters())
    assert any(not torch.equal(by_step[0][name], by_step[1][name]) for name in by_step[0])
