"""A Trainer whose model is the draft; the target stands beside it and is only asked."""

import torch
from transformers import PreTrainedModel, Trainer

from hf_dspark.distillation.arguments import DistillationArguments
from hf_dspark.distillation.blocks import Blocks, block_hidden_states, make_blocks, sample_batch_anchors
from hf_dspark.distillation.collator import BlockCollator
from hf_dspark.distillation.features import TargetFeatures, target_features
from hf_dspark.distillation.losses import LossTerms, dspark_loss
from hf_dspark.modeling import DSparkDraftModel

__all__ = ["DSparkTrainer"]


class TermAverages:
    """Running means of the logged terms: ce, l1, confidence (nan without the head) and tau."""

    names = ("ce", "l1", "confidence", "tau")

    def __init__(self):
        self.sums: torch.Tensor | None = None
        self.count = 0

    def add(self, terms: LossTerms) -> None:
        confidence = torch.full_like(terms.ce, torch.nan) if terms.confidence is None else terms.confidence
        values = torch.stack([terms.ce, terms.l1, confidence, terms.tokens_per_round])
        self.sums = values if self.sums is None else self.sums + values
        self.count += 1

    def take(self, accelerator) -> dict[str, float]:
        """The means over all processes since the last call; empty without a step."""
        if self.sums is None:
            return {}
        means = accelerator.reduce(self.sums / self.count, reduction="mean").tolist()
        self.sums, self.count = None, 0
        return {name: mean for name, mean in zip(self.names, means) if mean == mean}


class DSparkTrainer(Trainer):
    """Distils `target` into `model`, a [`DSparkDraftModel`] (bare or PEFT-wrapped), on rows of `input_ids` (and `loss_mask`).

    The target's features are computed online. It is frozen and set to eval mode, moved to the draft's device unless it is spread
    over several, and neither saved nor optimised. Logs ce, l1, confidence and tau (estimated tokens a round) beside the loss.

    Raises:
        ValueError: the draft does not fit the target; in the first batch, no anchor, or a target whose logits are computed in an
            unknown way.
    """

    # The loss is a mean over the slots of one batch; the Trainer divides it by the accumulation steps.
    loss_is_scaled_for_ga = False

    def __init__(self, model: DSparkDraftModel, target: PreTrainedModel, args: DistillationArguments, **kwargs):
        pad_token_id = model.config.pad_token_id or 0
        super().__init__(model=model, args=args, data_collator=kwargs.pop("data_collator", None) or BlockCollator(pad_token_id), **kwargs)
        self.target = target.requires_grad_(False).eval()
        if not hasattr(target, "hf_device_map"):
            self.target.to(args.device)
        model.bind(target)
        if model.tables.own_head is not None:
            raise ValueError(
                "this draft came with an output head (lm_head.weight) that differs from the target's, and would be taught by its own head; "
                "train it for the target it was made for, or save it without its tables first"
            )
        self._train_terms, self._eval_terms = TermAverages(), TermAverages()
        self._first_batch_checked = False

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """One batch: target features, anchors (drawn, or given as `inputs["anchors"]` (batch, anchors)), draft, losses."""
        draft = self.accelerator.unwrap_model(model)
        config, input_ids = draft.config, inputs["input_ids"]
        features = target_features(self.target, input_ids, inputs["attention_mask"], config.target_layer_ids)
        anchors = inputs["anchors"] if "anchors" in inputs else self._draw_anchors(input_ids, inputs["loss_mask"], model.training)
        blocks = make_blocks(input_ids, inputs["loss_mask"], anchors, config.block_size, config.mask_token_id)
        if not self._first_batch_checked:
            self._check_first_batch(draft, features, blocks)
        hidden = block_hidden_states(draft, features.hidden_states, blocks, model)
        terms = dspark_loss(draft, hidden, features.last_hidden, blocks, self.args.loss_weights)
        (self._train_terms if model.training else self._eval_terms).add(terms)
        return (terms.total, {"loss": terms.total.detach()}) if return_outputs else terms.total

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        """The loss alone: no logits are gathered."""
        with torch.no_grad(), self.compute_loss_context_manager():
            loss = self.compute_loss(model, self._prepare_inputs(inputs))
        return loss.detach(), None, None

    def evaluation_loop(self, *args, metric_key_prefix="eval", **kwargs):
        """transformers' loop, with the mean of each term (`eval_tau`, ...) among its metrics."""
        self._eval_terms = TermAverages()
        output = super().evaluation_loop(*args, metric_key_prefix=metric_key_prefix, **kwargs)
        output.metrics.update({f"{metric_key_prefix}_{name}": value for name, value in self._eval_terms.take(self.accelerator).items()})
        return output

    def log(self, logs, start_time=None):
        """Adds the mean of each term since the last training log."""
        if "loss" in logs:
            logs.update(self._train_terms.take(self.accelerator))
        super().log(logs, start_time)

    def create_optimizer(self, model=None):
        """transformers' optimizer, checked to hold the draft's trainable parameters and nothing of the target."""
        optimizer = super().create_optimizer(model)
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        if foreign := [name for name, parameter in self.target.named_parameters() if id(parameter) in held]:
            raise ValueError(f"the optimizer holds parameters of the target: {foreign[:3]}; give the trainer the draft alone as its model")
        return optimizer

    def _draw_anchors(self, input_ids: torch.Tensor, loss_mask: torch.Tensor, training: bool) -> torch.Tensor:
        # The seed is a function of step and batch: the same after resuming, on other workers, and at every evaluation.
        step = self.state.global_step + 1 if training else 0
        seed = (self.args.seed * 1_000_003 + step) * 1_000_003 + input_ids.sum().item()
        generator = torch.Generator().manual_seed(seed % 2**63)
        return sample_batch_anchors(loss_mask.cpu(), self.args.num_anchors, generator).to(input_ids.device)

    def _check_first_batch(self, draft: DSparkDraftModel, features: TargetFeatures, blocks: Blocks) -> None:
        draft.tables.check_head(features.last_hidden[:, -1], features.last_logits)
        if not blocks.slot_mask.any():
            raise ValueError(
                f"the first batch, of shape {tuple(features.last_hidden.shape[:2])}, has no anchor: no two neighbouring tokens are supervised "
                "by its loss_mask; check how the masks were made"
            )
        self._first_batch_checked = True
