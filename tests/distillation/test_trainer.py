"""What is trained, what is logged, what is refused; and that a draft trained on a text predicts it in generate()."""

import copy

import pytest
import torch
from oracle import VOCAB, tiny_draft, tiny_target
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import Trainer, TrainerCallback

from hf_dspark import DSparkDraftModel, record_generation
from hf_dspark.distillation.arguments import DistillationArguments
from hf_dspark.distillation.blocks import block_hidden_states, make_blocks
from hf_dspark.distillation.features import target_features
from hf_dspark.distillation.losses import dspark_loss
from hf_dspark.distillation.trainer import DSparkTrainer


class KeepGradients(TrainerCallback):
    """Appends the gradients of every step, by name."""

    def __init__(self, steps: list):
        self.steps = steps

    def on_pre_optimizer_step(self, args, state, control, model, **kwargs):
        self.steps.append({name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None})


def rows(count: int = 8, num_tokens: int = 16, **columns) -> list[dict]:
    generator = torch.Generator().manual_seed(0)
    return [{"input_ids": torch.randint(VOCAB - 1, (num_tokens - i % 3,), generator=generator), **columns} for i in range(count)]


def make_trainer(tmp_path, target=None, draft=None, dataset=None, eval_dataset=None, **options) -> DSparkTrainer:
    target = target or tiny_target()
    draft = draft or tiny_draft(target)
    values = {"max_steps": 2, "per_device_train_batch_size": 4, "logging_steps": 1, "learning_rate": 1e-3, "warmup_steps": 0, "num_anchors": 4}
    values |= {"target": "tiny", "output_dir": str(tmp_path), "use_cpu": True, "save_strategy": "no", "disable_tqdm": True}
    values |= {"eval_prompts": 0}
    args = DistillationArguments(**{**values, **options})
    return DSparkTrainer(draft, target, args, train_dataset=rows() if dataset is None else dataset, eval_dataset=eval_dataset)


def weights(draft) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in draft.named_parameters()}


@pytest.mark.parametrize("muon", [False, True])
def test_the_draft_is_trained_and_nothing_of_the_target(tmp_path, muon):
    target, before = tiny_target(), None
    draft = tiny_draft(target)
    before, target_before = weights(draft), weights(target)
    trainer = make_trainer(tmp_path, target, draft, muon=muon)
    trainer.train()
    held = {id(parameter) for group in trainer.optimizer.param_groups for parameter in group["params"]}
    assert held == {id(parameter) for parameter in draft.parameters()}
    assert all(not torch.equal(parameter, before[name]) for name, parameter in draft.named_parameters())
    assert all(torch.equal(parameter, target_before[name]) for name, parameter in target.named_parameters())
    assert all(parameter.grad is None and not parameter.requires_grad for parameter in target.parameters()) and not target.training


def test_a_target_inside_the_trained_module_is_refused(tmp_path):
    trainer = make_trainer(tmp_path)
    trainer.target.requires_grad_(True)
    trainer.model.add_module("target", trainer.target)
    with pytest.raises(ValueError, match=r"the optimizer holds parameters of the target: \['model.embed_tokens.weight'"):
        trainer.create_optimizer()


@pytest.mark.parametrize("wrap", [lambda draft: draft, lambda draft: adapted(draft)], ids=["whole draft", "adapter"])
def test_an_optimizer_with_more_or_less_than_the_draft_is_refused(tmp_path, monkeypatch, wrap):
    create = Trainer.create_optimizer

    def lacking(self, model=None):
        optimizer = create(self, model)
        optimizer.param_groups[0]["params"].pop()
        return optimizer

    def with_another(self, model=None):
        optimizer = create(self, model)
        optimizer.param_groups[0]["params"].append(torch.nn.Parameter(torch.zeros(1)))
        return optimizer

    for fault, message in ((lacking, "the optimizer lacks 1 trainable parameters of the draft"), (with_another, "the optimizer holds")):
        monkeypatch.setattr(Trainer, "create_optimizer", fault)
        with pytest.raises(ValueError, match=message):
            make_trainer(tmp_path, draft=wrap(tiny_draft(tiny_target()))).train()


def test_faults_of_the_first_batch_stop_the_training(tmp_path, monkeypatch):
    trainer = make_trainer(tmp_path)
    trainer.target.lm_head.requires_grad_(True)
    with pytest.raises(ValueError, match="the target must be frozen"):
        trainer.train()

    def off_by_one(target, input_ids, attention_mask, layer_ids, position_ids=None):
        return target_features(target, input_ids, attention_mask, [layer - 1 for layer in layer_ids], position_ids)

    monkeypatch.setattr("hf_dspark.distillation.trainer.target_features", off_by_one)
    with pytest.raises(ValueError, match=r"output of its layer 0 .of target_layer_ids .0, 2.. is the output of layer -1"):
        make_trainer(tmp_path).train()


def test_terms_are_logged_as_their_means(tmp_path):
    target = tiny_target()
    trainer = make_trainer(tmp_path, target, tiny_draft(target), max_steps=4, logging_steps=2)
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(logs) == 2
    for entry in logs:
        assert entry["loss"] == pytest.approx(0.1 * entry["ce"] + 0.9 * entry["l1"] + entry["confidence"], abs=1e-3)
        assert 1 <= entry["tau"] <= 5 and 0 <= entry["l1"] <= 2
    without = make_trainer(tmp_path, target, tiny_draft(target, enable_confidence_head=False), max_steps=1)
    without.train()
    assert "confidence" not in without.state.log_history[0] and "tau" in without.state.log_history[0]


def test_evaluation_reports_loss_and_tau_and_repeats_itself(tmp_path):
    trainer = make_trainer(tmp_path, eval_dataset=rows(6))
    metrics = trainer.evaluate()
    assert metrics["eval_loss"] == pytest.approx(0.1 * metrics["eval_ce"] + 0.9 * metrics["eval_l1"] + metrics["eval_confidence"], abs=1e-4)
    assert 1 <= metrics["eval_tau"] <= 5
    again = trainer.evaluate()
    assert all(metrics[name] == again[name] for name in ("eval_loss", "eval_tau", "eval_ce"))
    assert trainer.predict(rows(2)).predictions is None


def test_given_anchors_and_the_loss_are_those_of_the_parts(tmp_path):
    trainer = make_trainer(tmp_path, dataset=rows(2))
    batch = trainer.data_collator(rows(2))
    batch["anchors"] = torch.tensor([[0, 3, 9], [2, 5, -1]])
    draft, ids = trainer.model, batch["input_ids"]
    features = target_features(trainer.target, ids, batch["attention_mask"], draft.config.target_layer_ids)
    blocks = make_blocks(ids, batch["loss_mask"], batch["anchors"], draft.config.block_size, draft.config.mask_token_id)
    expected = dspark_loss(draft, block_hidden_states(draft, features.hidden_states, blocks), features.last_hidden, blocks, trainer.args.loss_weights)
    assert trainer.compute_loss(draft, batch).item() == expected.total.item()


def test_a_run_repeats_itself_and_the_seed_matters(tmp_path):
    target = tiny_target()
    draft = tiny_draft(target)
    runs = []
    for seed in (0, 0, 1):
        trained = copy.deepcopy(draft)
        make_trainer(tmp_path, target, trained, seed=seed).train()
        runs.append(weights(trained))
    assert all(torch.equal(runs[0][name], runs[1][name]) for name in runs[0])
    assert not all(torch.equal(runs[0][name], runs[2][name]) for name in runs[0])


def test_checkpoints_hold_a_slim_draft_that_loads(tmp_path):
    trainer = make_trainer(tmp_path, max_steps=1, save_strategy="steps", save_steps=1)
    trainer.train()
    saved = load_file(tmp_path / "checkpoint-1" / "model.safetensors")
    assert saved.keys() == trainer.model.state_dict().keys()
    loaded = DSparkDraftModel.from_pretrained(tmp_path / "checkpoint-1")
    assert all(torch.equal(parameter, dict(loaded.named_parameters())[name]) for name, parameter in trainer.model.named_parameters())
    assert loaded.config.use_cache


def with_masks(dataset: list[dict], empty: set[int]) -> list[dict]:
    """The rows numbered `empty` have no two supervised neighbours."""
    alternating = torch.tensor([True, False] * 8)
    return [{**row, "loss_mask": alternating[: len(row["input_ids"])] | (i not in empty)} for i, row in enumerate(dataset)]


def test_masks_without_an_anchor_are_refused_in_the_first_step(tmp_path):
    with pytest.raises(ValueError, match=r"the first step, of 4 rows a process, has no anchor: no two neighbouring tokens are supervised"):
        make_trainer(tmp_path, dataset=with_masks(rows(), set(range(8)))).train()
    trainer = make_trainer(tmp_path, eval_dataset=with_masks(rows(), set(range(8))))
    with pytest.raises(ValueError, match="the rows to evaluate have no anchor"):
        trainer.evaluate()


def test_rows_without_an_anchor_are_skipped_and_counted(tmp_path):
    target = tiny_target()
    draft = tiny_draft(target)
    options = {"max_steps": 1, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 4, "max_grad_norm": 0.0, "num_anchors": 16}
    gradients, logs = [], []
    for dataset, sampling in ((with_masks(rows(4), {0, 2}), "sequential"), ([rows(4)[1], rows(4)[3]], "sequential")):
        trained = copy.deepcopy(draft)
        trainer = make_trainer(tmp_path, target, trained, dataset=dataset, train_sampling_strategy=sampling, **options)
        trainer.add_callback(KeepGradients(gradients))
        trainer.train()
        logs.append(trainer.state.log_history[0])
    assert logs[0]["empty_samples"] == 2 and "empty_samples" not in logs[1]
    assert logs[0]["loss"] == pytest.approx(logs[1]["loss"], rel=1e-5)
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name], rtol=1e-5, atol=1e-6)


def test_a_target_with_unknown_logits_is_refused(tmp_path):
    target = tiny_target()
    forward = target.forward

    def scaled(*args, logits_to_keep=0, **kwargs):
        outputs = forward(*args, logits_to_keep=logits_to_keep, **kwargs)
        outputs.logits = outputs.logits * 3
        return outputs

    target.forward = scaled
    with pytest.raises(ValueError, match="computes its logits in a way this library does not know"):
        make_trainer(tmp_path, target).train()


def test_a_draft_with_another_output_head_is_refused(tmp_path):
    target = tiny_target()
    draft = tiny_draft(target)
    draft.stored_tables = {"lm_head.weight": torch.randn(VOCAB, 32)}
    with pytest.raises(ValueError, match=r"an output head .lm_head.weight. that differs from the target's"):
        make_trainer(tmp_path, target, draft)


def test_a_draft_of_another_target_is_refused(tmp_path):
    with pytest.raises(ValueError, match="num_target_layers is 4, the target has 6"):
        make_trainer(tmp_path, tiny_target(num_hidden_layers=6), tiny_draft(tiny_target()))


@pytest.mark.parametrize("rank", [0, 4])
@pytest.mark.parametrize("confidence", [False, True])
@pytest.mark.parametrize("with_markov", [False, True])
def test_every_combination_of_heads_trains_or_is_refused_by_its_config(tmp_path, rank, confidence, with_markov):
    target = tiny_target()
    options = {"markov_rank": rank, "enable_confidence_head": confidence, "confidence_head_with_markov": with_markov}
    if rank == 0 and confidence and with_markov:
        with pytest.raises(ValueError, match="confidence_head_with_markov"):
            tiny_draft(target, **options)
        return
    draft = tiny_draft(target, **options)
    before = weights(draft)
    make_trainer(tmp_path, target, draft, max_steps=2).train()
    assert all(not torch.equal(parameter, before[name]) for name, parameter in draft.named_parameters())


@pytest.mark.parametrize("options", [{"bf16": True}, {"activation_checkpointing": True}], ids=str)
def test_mixed_precision_and_checkpointing_train_fp32_weights(tmp_path, options):
    target = tiny_target().to(torch.bfloat16) if "bf16" in options else tiny_target()
    draft = tiny_draft(target)
    before = weights(draft)
    make_trainer(tmp_path, target, draft, **options).train()
    assert not torch.is_autocast_enabled("cpu")
    assert all(parameter.dtype == torch.float32 for parameter in draft.parameters())
    assert all(torch.isfinite(parameter).all() and not torch.equal(parameter, before[name]) for name, parameter in draft.named_parameters())


def adapted(draft):
    return get_peft_model(draft, LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))


def test_an_adapter_trains_alone(tmp_path):
    target = tiny_target()
    draft = adapted(tiny_draft(target))
    before = weights(draft)
    trainer = make_trainer(tmp_path, target, draft, max_steps=3)
    trainer.train()
    held = {id(parameter) for group in trainer.optimizer.param_groups for parameter in group["params"]}
    assert held == {id(parameter) for name, parameter in draft.named_parameters() if "lora_" in name}
    changed = {name for name, parameter in draft.named_parameters() if not torch.equal(parameter, before[name])}
    assert changed and all("lora_" in name for name in changed)


def test_a_draft_trained_on_a_text_predicts_it_in_generate(tmp_path):
    target = tiny_target(seed=3)
    prompt = torch.tensor([[7, 3, 11, 5]])
    plain = target.generate(prompt, max_new_tokens=40, do_sample=False)
    draft = tiny_draft(target, initializer_range=0.05)

    def tokens_per_round() -> float:
        with record_generation() as report:
            assert torch.equal(target.generate(prompt, assistant_model=draft, max_new_tokens=40, do_sample=False), plain)
        return report.tokens_per_round

    before = tokens_per_round()
    trainer = make_trainer(
        tmp_path, target, draft, dataset=[{"input_ids": plain[0]}], max_steps=60, per_device_train_batch_size=1, learning_rate=1e-2, num_anchors=64
    )
    trainer.train()
    draft.eval()
    # Block 4: five tokens a round at best; the last round is cut by the budget.
    assert before < 1.8
    assert tokens_per_round() > 3.9


# Divergence


ABSURD = {"learning_rate": 1e30, "max_steps": 6, "lr_scheduler_type": "constant", "save_strategy": "steps", "logging_steps": 100, "save_steps": 100}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"logging_steps": 1}, r"diverged at step 2: loss is nan, ce is nan.*; lower learning_rate .1e\+30.*the checkpoints before it stay"),
        ({"logging_steps": 1, "logging_nan_inf_filter": True}, r"diverged at step 2: ce is nan"),
        ({"logging_steps": 3}, r"diverged at step 3: loss is nan"),
        ({"eval_strategy": "steps", "eval_steps": 1, "eval_prompts": 1}, r"diverged at step 1: ce is nan"),
        ({"save_steps": 1}, r"diverged at step 2: \d+ of the draft's weights are nan or infinite"),
    ],
    ids=["at a log", "at a log that leaves out nan", "at a log of several steps", "at an evaluation", "at a checkpoint"],
)
def test_a_training_that_diverges_ends_with_an_error_and_writes_nothing_of_it(tmp_path, options, message):
    trainer = make_trainer(tmp_path, eval_dataset=rows(2), **{**ABSURD, **options})
    with pytest.raises(ValueError, match=message):
        trainer.train()
    kept = sorted(folder.name for folder in tmp_path.glob("checkpoint-*"))
    assert kept == (["checkpoint-1"] if "save_steps" in options else [])
    assert all(torch.isfinite(tensor).all() for name in kept for tensor in load_file(tmp_path / name / "model.safetensors").values())


def test_weights_are_checked_when_asked(tmp_path):
    trainer = make_trainer(tmp_path)
    trainer.check_weights()
    trainer.model.fc.weight.data[0, :3] = float("inf")
    with pytest.raises(ValueError, match="diverged at step 0: 3 of the draft's weights are nan or infinite"):
        trainer.check_weights()


# The number of steps


def test_rows_that_fill_no_batch_are_named(tmp_path):
    trainer = make_trainer(tmp_path, dataset=rows(3), dataloader_drop_last=True)
    with pytest.raises(ValueError, match=r"no step was trained: .*per_device_train_batch_size=4, dataloader_drop_last=True"):
        trainer.train()


@pytest.mark.parametrize("options", [{"max_steps": 3}, {"max_steps": -1, "num_train_epochs": 1.5}], ids=str)
def test_a_finished_run_that_is_resumed_trains_nothing_more(tmp_path, options):
    target = tiny_target()
    draft = tiny_draft(target)
    options = {**options, "save_strategy": "steps", "save_steps": 2, "lr_scheduler_type": "constant"}  # two steps an epoch
    finished, resumed = copy.deepcopy(draft), copy.deepcopy(draft)
    make_trainer(tmp_path, target, finished, **options).train()
    trainer = make_trainer(tmp_path, target, resumed, **options)
    trainer.training_step = None
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 3
    assert all(torch.equal(parameter, weights(finished)[name]) for name, parameter in resumed.named_parameters())
