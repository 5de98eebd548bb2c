"""A Trainer whose model is the draft; the target stands beside it and is only asked."""

import copy
from functools import partial
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel, Trainer, TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from hf_dspark.distillation.arguments import DistillationArguments
from hf_dspark.distillation.blocks import Blocks, block_hidden_states, make_blocks
from hf_dspark.distillation.clock import TrainingClock
from hf_dspark.distillation.collator import BlockCollator, pack_rows
from hf_dspark.distillation.divergence import check_finite, diverged, num_non_finite_weights
from hf_dspark.distillation.evaluation import accepted_length, random_state_kept, slot_metrics, slot_sums
from hf_dspark.distillation.feature_cache import NumberedRows
from hf_dspark.distillation.feature_writing import open_feature_cache
from hf_dspark.distillation.features import TargetFeatures, target_features
from hf_dspark.distillation.first_batch import check_first_batch, check_optimizer
from hf_dspark.distillation.losses import LossTerms, Normalisers, dspark_loss, normalisers
from hf_dspark.distillation.muon import MuonAndOther, is_muon_matrix
from hf_dspark.distillation.resumption import check_same_draft, checkpoint_to_resume, forget_whole
from hf_dspark.distillation.subspace import FoldSubspace
from hf_dspark.distillation.teacher import log_partition
from hf_dspark.hub import DraftCard, upload_draft, write_draft_card
from hf_dspark.modeling import DSparkDraftModel

__all__ = ["DSparkTrainer"]


class EpochCallback(TrainerCallback):
    """Tells a collator the epoch, which transformers tells its samplers and datasets alone."""

    def __init__(self, collator: BlockCollator):
        self.collator = collator
        self.next_epoch = 0

    def on_train_begin(self, args, state, control, **kwargs):
        self.next_epoch = int(state.epoch or 0)  # of a checkpoint: whole epochs and the share of the one begun

    def on_epoch_begin(self, args, state, control, **kwargs):
        self.collator.set_epoch(self.next_epoch)
        self.next_epoch += 1


class DSparkTrainer(Trainer):
    """Distils `target` into `model`, a [`DSparkDraftModel`] (bare or PEFT-wrapped), on rows of `input_ids` (and `loss_mask`, `sample`).

    The target's features are computed online or, with `args.features` "cached", read from a folder that is filled first; evaluations
    compute theirs online. `chat_template`, by which the rows were rendered, is one of the things that a cache is checked for. The target
    is frozen and set to eval mode, moved to the draft's device unless it is spread over several, and neither saved nor optimised. Logs
    ce, l1, confidence and tau (estimated tokens a round) beside the loss: means over the slots of a whole step (all accumulated batches
    of all processes), or of a whole evaluation.

    Raises:
        ValueError: the draft does not fit the target; in the first batch, no anchor, or features that are not the target's own (see
            first_batch.py); an optimizer that does not hold just the draft; a loss or, when a checkpoint is due, a weight that isn't finite.
    """

    # The loss is a batch's share of the mean over the step: nothing is left to divide.
    loss_is_scaled_for_ga = True

    def __init__(self, model: DSparkDraftModel, target: PreTrainedModel, args: DistillationArguments, chat_template: str | None = None, **kwargs):
        options = {"num_anchors": args.num_anchors, "pad_token_id": model.config.pad_token_id or 0}
        collator = BlockCollator(seed=args.seed, packing=args.packing, **options)
        # Its seed and epoch never change: evaluations of all runs see the same anchors.
        self.eval_collator = BlockCollator(**options)
        if args.packing and kwargs.get("train_dataset") is not None:
            kwargs["train_dataset"] = pack_rows(kwargs["train_dataset"], args.max_length)
        if args.accelerator_config.dispatch_batches is None:
            # One process can't read a stream for all of them: batches differ in width.
            args.accelerator_config.dispatch_batches = False
        super().__init__(model=model, args=args, data_collator=collator, **kwargs)
        self.clock = TrainingClock()
        self.add_callback(EpochCallback(collator))
        self.add_callback(self.clock)
        self.target = target.requires_grad_(False).eval()
        if not hasattr(target, "hf_device_map"):
            self.target.to(args.device)
        model.bind(target)
        if model.tables.own_head is not None:
            raise ValueError(
                "this draft came with an output head (lm_head.weight) that differs from the target's, and would be taught by its own head; "
                "train it for the target it was made for, or save it without its tables first"
            )
        self._term_names = ["ce", "l1", "tau", *(["confidence"] if model.config.enable_confidence_head else [])]
        self._first_step_checked, self._first_batch_checked = False, False
        self.feature_cache = None
        if args.features == "cached" and self.train_dataset is not None:
            self._open_feature_cache(chat_template)
        self._reset_sums()

    def train(self, resume_from_checkpoint=None, **kwargs):
        """transformers', which goes on from a whole checkpoint of the same draft alone (see resumption.py); from the last one there is
        nothing to go on with, and the draft is that checkpoint's.

        Raises:
            ValueError: there is no checkpoint to resume from, or it is torn or of another draft; the rows fill no batch.
        """
        checkpoint = checkpoint_to_resume(resume_from_checkpoint, self.args.output_dir)
        if checkpoint is not None:
            check_same_draft(checkpoint, self.accelerator.unwrap_model(self.model))
        result = super().train(checkpoint, **kwargs)
        if self.state.global_step == 0:
            raise ValueError(
                "no step was trained: the rows of a process fill no batch "
                f"(per_device_train_batch_size={self.args.per_device_train_batch_size}, dataloader_drop_last={self.args.dataloader_drop_last})"
            )
        return result

    def _run_epoch(self, *args, **kwargs):
        if self.state.global_step < self.state.max_steps:
            return super()._run_epoch(*args, **kwargs)
        # Of a finished run that is resumed, where transformers would train one more step.
        self.control.should_training_stop = True

    def get_eval_dataloader(self, eval_dataset=None):
        """transformers', whose rows get the same anchors at every evaluation."""
        return self._with_eval_collator(super().get_eval_dataloader, eval_dataset)

    def get_test_dataloader(self, test_dataset):
        """transformers', whose rows get the same anchors each time."""
        return self._with_eval_collator(super().get_test_dataloader, test_dataset)

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        """The batches of one step, and the normalisers of the losses over all of them and all processes."""
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        if not batches:
            return batches, None
        draft = self.accelerator.unwrap_model(self.model)
        sums = [torch.stack(normalisers(draft, self._blocks(draft, batch), self.args.loss_weights)) for batch in batches]
        empty = [(batch["anchors"] < 0).all(dim=1).sum() for batch in batches]
        counts = self.accelerator.reduce(torch.stack([*sum(sums), sum(empty)]), reduction="sum")
        totals = Normalisers(*counts[:3])
        if not self._first_step_checked and not totals.anchors > 0:
            raise ValueError(
                f"the first step, of {sum(len(batch['anchors']) for batch in batches)} rows a process, has no anchor: no two neighbouring tokens "
                "are supervised by its loss_mask; check how the masks were made"
            )
        self._first_step_checked = True
        self._num_steps += 1
        self._num_empty += counts[3]
        return batches, totals

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """One batch: target features, blocks at `inputs["anchors"]` (batch, anchors), draft, losses.

        `num_items_in_batch`: the normalisers of the step, from `get_batch_samples`; None: this batch is a step of its own.
        """
        terms = self._losses(model, inputs, num_items_in_batch)
        if num_items_in_batch is not None:
            self._train_sums += self._stacked(terms)
        # Gradients of several processes are averaged, the shares of one mean must be added.
        loss = terms.total if num_items_in_batch is None else terms.total * self.accelerator.num_processes
        return (loss, {"loss": loss.detach()}) if return_outputs else loss

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        """Adds a batch's sums to those of the evaluation; no logits are gathered."""
        inputs = self._prepare_inputs(inputs)
        inputs["anchors"] = self._without_repeated_rows(inputs["anchors"])
        draft = self.accelerator.unwrap_model(model)
        ones = Normalisers(*torch.ones(3, device=self.args.device))
        with torch.no_grad(), self.compute_loss_context_manager():
            terms = self._losses(model, inputs, ones)
        blocks = self._blocks(draft, inputs)
        totals = normalisers(draft, blocks, self.args.loss_weights)
        self._eval_sums += torch.cat([self._stacked(terms), torch.stack(totals)])
        self._slot_sums = self._slot_sums + slot_sums(blocks.slot_mask, terms.slot_acceptance, terms.slot_confidence)
        return terms.total.detach() / totals.slots.clamp(min=1e-8), None, None

    def evaluation_loop(self, dataloader, *args, metric_key_prefix="eval", **kwargs):
        """transformers' loop, with the loss and its terms (`eval_loss`, `eval_tau`, ...) as means over all slots, however batched; the
        accepted length of decoding, acceptance by slot and confidence bias (see evaluation.py); and `eval_train_seconds`, the time of
        training so far.

        Raises:
            ValueError: the rows have no anchor, or a mean isn't finite.
        """
        with self.clock.paused(), random_state_kept():
            self._eval_sums = torch.zeros(len(self._term_names) + 3, device=self.args.device)
            self._slot_sums = torch.zeros((), device=self.args.device)
            output = super().evaluation_loop(dataloader, *args, metric_key_prefix=metric_key_prefix, **kwargs)
            metrics = self._eval_means()
            if self.args.eval_prompts:
                metrics |= accepted_length(self.whole_draft(), self.target, dataloader.dataset, self.args, self.accelerator)
            metrics["train_seconds"] = self.clock.seconds
        output.metrics.update({f"{metric_key_prefix}_{name}": value for name, value in metrics.items()})
        return output

    def _eval_means(self) -> dict[str, float]:
        """Means over all slots of an evaluation, of all processes."""
        num_terms, weights = len(self._term_names), self.args.loss_weights
        sums = self.accelerator.reduce(self._eval_sums, reduction="sum")
        totals = Normalisers(*sums[num_terms:])
        if not totals.anchors > 0:
            raise ValueError("the rows to evaluate have no anchor: no two neighbouring tokens are supervised by their loss_mask")
        divisors = {"ce": totals.ce, "l1": totals.slots, "tau": totals.anchors, "confidence": totals.slots}
        means = {name: (value / divisors[name].clamp(min=1e-8)).item() for name, value in zip(self._term_names, sums)}
        means["loss"] = weights.ce * means["ce"] + weights.l1 * means["l1"] + weights.confidence * means.get("confidence", 0.0)
        check_finite(means, self.state.global_step, self.args.learning_rate)
        return means | slot_metrics(self.accelerator.reduce(self._slot_sums, reduction="sum"), "confidence" in means)

    def log(self, logs, start_time=None):
        """Adds the mean of each term over the steps since the last training log, and how many rows had no anchor, if any.

        Raises:
            ValueError: one of the means isn't finite.
        """
        if "loss" in logs and self._num_steps > 0:
            means = self.accelerator.reduce(self._train_sums, reduction="sum") / self._num_steps
            logs.update(zip(self._term_names, means.tolist()))
            check_finite({name: logs[name] for name in ("loss", *self._term_names)}, self.state.global_step, self.args.learning_rate)
            if self._num_empty > 0:
                logs["empty_samples"] = int(self._num_empty)
            self._reset_sums()
        super().log(logs, start_time)

    def whole_draft(self) -> DSparkDraftModel:
        """The draft with all its weights, on its device: itself, or where FSDP spreads them a copy on each process. All must call it."""
        draft = self.accelerator.unwrap_model(self.model)
        if not self.is_fsdp_enabled:
            return draft
        with self.args.device:
            whole = DSparkDraftModel(copy.deepcopy(draft.config))
        whole.load_state_dict({name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for name, tensor in draft.state_dict().items()})
        return whole.bind(self.target)

    def check_weights(self) -> None:
        """Raises ValueError where a weight of the draft isn't finite. All processes must call it."""
        num_wrong = int(self.accelerator.reduce(num_non_finite_weights(self.model), reduction="sum"))
        if num_wrong:
            raise diverged(f"{num_wrong} of the draft's weights are nan or infinite", self.state.global_step, self.args.learning_rate)

    def create_optimizer(self, model=None):
        """transformers' optimizer, or with `args.muon` Muon and that, checked to hold the draft's trainable parameters and nothing else."""
        is_given = self.optimizer is not None
        optimizer = super().create_optimizer(model)
        if self.args.muon and not is_given:
            optimizer = self.optimizer = self._with_muon(optimizer, self.model if model is None else model)
        if isinstance(optimizer, torch.optim.Optimizer):  # DeepSpeed may make its own later
            check_optimizer(optimizer, self.model if model is None else model, self.target)
        return optimizer

    def _with_muon(self, other: torch.optim.Optimizer, model) -> MuonAndOther:
        """Muon over the matrices of `model`, which `other` gives up, and `other` over what it is left with."""
        matrices = [parameter for name, parameter in model.named_parameters() if parameter.requires_grad and is_muon_matrix(name, parameter)]
        taken = {id(parameter) for parameter in matrices}
        for group in other.param_groups:
            group["params"] = [parameter for parameter in group["params"] if id(parameter) not in taken]
        return MuonAndOther(matrices, self.args.learning_rate, self.args.weight_decay, other)

    def _losses(self, model, inputs: dict[str, torch.Tensor], totals: Normalisers | None) -> LossTerms:
        draft = self.accelerator.unwrap_model(model)
        is_cached = self.feature_cache is not None and "cached_rows" in inputs
        features = self.feature_cache.features(inputs, self._target_features) if is_cached else self._target_features(inputs)
        if not self._first_batch_checked:
            check_first_batch(draft, self.target, inputs, self._target_features(inputs) if is_cached else features)
            self._first_batch_checked = True
        blocks = self._blocks(draft, inputs)

        def losses(draft: DSparkDraftModel) -> LossTerms:
            hidden = block_hidden_states(draft, features.hidden_states, blocks)
            options = {"totals": totals, "log_partition": features.log_partition}
            return dspark_loss(draft, hidden, features.last_hidden, blocks, self.args.loss_weights, **options)

        return model(within=losses)

    def _target_features(self, inputs: dict[str, torch.Tensor]) -> TargetFeatures:
        layer_ids = self.model.config.target_layer_ids
        return target_features(self.target, inputs["input_ids"], inputs["attention_mask"], layer_ids, inputs.get("position_ids"))

    def _open_feature_cache(self, chat_template: str | None) -> None:
        def compute(rows: list[dict]) -> TargetFeatures:
            with self.compute_loss_context_manager():
                return self._target_features(self._prepare_inputs(self.data_collator(rows)))

        rows, layer_ids = self.train_dataset, self.model.config.target_layer_ids
        self.train_dataset = NumberedRows(rows)
        is_reduced = self.model.config.draft_vocab_size is not None
        partition = partial(log_partition, self.accelerator.unwrap_model(self.model)) if is_reduced else None
        self.feature_cache = open_feature_cache(rows, self.args, self.target, layer_ids, compute, chat_template, partition)
        if self.feature_cache.coding.subspace is not None:
            self.add_callback(FoldSubspace(self.model, self.feature_cache.coding.subspace))

    def _blocks(self, draft: DSparkDraftModel, inputs: dict[str, torch.Tensor]) -> Blocks:
        size, mask_id = draft.config.block_size, draft.config.mask_token_id
        return make_blocks(inputs["input_ids"], inputs["loss_mask"], inputs["anchors"], size, mask_id, inputs.get("position_ids"))

    def _with_eval_collator(self, make_dataloader, dataset):
        collator = self.data_collator
        self.data_collator = self.eval_collator
        try:
            return make_dataloader(dataset)
        finally:
            self.data_collator = collator

    def _without_repeated_rows(self, anchors: torch.Tensor) -> torch.Tensor:
        """`anchors` (batch, anchors), -1 in the rows with which accelerate fills up the last batches of several processes."""
        state = self.accelerator.gradient_state
        if self.accelerator.num_processes == 1 or not state.end_of_dataloader or state.remainder <= 0:
            return anchors
        rows = torch.arange(len(anchors), device=anchors.device) + self.accelerator.process_index * len(anchors)
        return anchors.masked_fill((rows >= state.remainder)[:, None], -1)

    def _reset_sums(self) -> None:
        device = self.args.device
        self._train_sums = torch.zeros(len(self._term_names), device=device)
        self._num_empty, self._num_steps = torch.zeros((), device=device), 0

    def _stacked(self, terms: LossTerms) -> torch.Tensor:
        values = {"ce": terms.ce, "l1": terms.l1, "tau": terms.tokens_per_round, "confidence": terms.confidence}
        return torch.stack([values[name] for name in self._term_names])

    def _save_checkpoint(self, model, trial):
        self.check_weights()
        if self.args.should_save:
            forget_whole(Path(self._get_output_dir(trial)) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}")
        super()._save_checkpoint(model, trial)

    def _save_rng_state(self, output_dir):
        super()._save_rng_state(output_dir)
        # What marks the checkpoint as whole comes after the files of all processes.
        self.accelerator.wait_for_everyone()

    def _load_optimizer_and_scheduler(self, checkpoint):
        try:
            super()._load_optimizer_and_scheduler(checkpoint)
        except ValueError as error:
            given = f"muon={self.args.muon}, optim={self.args.optim.value}"
            raise ValueError(f"{checkpoint} holds the state of another optimizer than {given}; go on as the run was begun ({error})") from error

    def _load_best_model(self):
        if self.is_fsdp_enabled or self.is_deepspeed_enabled or not isinstance(self.model, DSparkDraftModel):
            return super()._load_best_model()
        # Checked as any checkpoint is, and copied into the draft at hand, which stays bound to its target.
        best = DSparkDraftModel.from_pretrained(self.state.best_model_checkpoint, dtype=torch.float32)
        self.model.load_state_dict(best.state_dict())

    def create_model_card(self, **kwargs):
        """Writes this library's card to `output_dir`, where transformers would write its own."""
        if self.is_world_process_zero():
            card = DraftCard(arguments=self.args.to_dict(), report={"steps": self.state.global_step}, repo_id=self.hub_model_id)
            write_draft_card(self.accelerator.unwrap_model(self.model), self.args.output_dir, card)

    def push_to_hub(self, commit_message="End of training", blocking=True, token=None, revision=None, private=None, **kwargs):
        """Uploads the draft's own files of `output_dir` (weights, configs, training arguments, card) and nothing else that lies there."""
        self.save_model(_internal_call=True)
        if not self.is_world_process_zero():
            return None
        self.create_model_card()
        return upload_draft(
            self.args.output_dir,
            self.hub_model_id or self.args.hub_model_id or Path(self.args.output_dir).absolute().name,
            private=self.args.hub_private_repo if private is None else private,
            token=token or self.args.hub_token,
            revision=revision or self.args.hub_revision,
            commit_message=commit_message,
            run_as_future=not blocking,
        )
