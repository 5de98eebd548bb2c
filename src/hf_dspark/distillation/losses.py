"""The three loss terms of distillation and their weighted total (paper section 3.3, eq. 8 to 10).

Axis words: `rows` supervised block slots of all blocks; `block` positions of a block; `hidden`; `rank`; `vocab`.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional as F

from hf_dspark.distillation.blocks import Blocks
from hf_dspark.distillation.teacher import TeacherLaw, softmax_
from hf_dspark.modeling import DSparkDraftModel

__all__ = ["LossTerms", "LossWeights", "Normalisers", "decay_weights", "dspark_loss", "expected_tokens_per_round", "normalisers"]

# Values of one fp32 tensor over (rows, vocab) that may be alive at once.
_CHUNK_VALUES = 2**23


@dataclass(slots=True, frozen=True)
class LossWeights:
    """total = ce * CE + l1 * L1 + confidence * BCE; slot k of a block weighs exp(-k / decay_gamma), None: 1."""

    ce: float = 0.1
    l1: float = 0.9
    confidence: float = 1.0
    decay_gamma: float | None = 4.0


class Normalisers(NamedTuple):
    """What sums over the slots of a batch are divided by, scalars fp32; of several batches that make one step, add them up.

    ce: summed weights of the supervised slots whose label the draft can predict. slots: of all supervised slots. anchors: number of
    anchors with a supervised slot.
    """

    ce: torch.Tensor
    slots: torch.Tensor
    anchors: torch.Tensor


@dataclass(slots=True)
class LossTerms:
    """Scalars fp32: `total` carries the gradient; the others, its unweighted terms and `tokens_per_round`, are detached. None: no confidence head.

    Under normalisers of several batches, a batch's share of their means: the shares add up to the means.

    slot_acceptance, slot_confidence: (batch, anchors, block) fp32, detached, each slot's 1 - L1/2 and what the confidence head expects of
    it; 0 in slots that don't count.
    """

    total: torch.Tensor
    ce: torch.Tensor
    l1: torch.Tensor
    confidence: torch.Tensor | None
    tokens_per_round: torch.Tensor
    slot_acceptance: torch.Tensor
    slot_confidence: torch.Tensor | None


def decay_weights(block_size: int, gamma: float | None) -> torch.Tensor:
    """w_k = exp(-k / gamma), k from 0, or ones -> (block,) fp32."""
    return torch.ones(block_size) if gamma is None else torch.exp(-torch.arange(block_size) / gamma)


def normalisers(draft: DSparkDraftModel, blocks: Blocks, weights: LossWeights) -> Normalisers:
    """Those of a batch's `blocks`; they need no forward."""
    mask = blocks.slot_mask
    slot_weights = decay_weights(mask.shape[-1], weights.decay_gamma).to(mask.device).expand_as(mask)[mask]
    predictable = _draft_columns(draft, blocks.labels[mask]) >= 0
    return Normalisers((slot_weights * predictable).sum(), slot_weights.sum(), mask[..., 0].sum().float())


def dspark_loss(
    draft: DSparkDraftModel,
    hidden: torch.Tensor,
    last_hidden: torch.Tensor,
    blocks: Blocks,
    weights: LossWeights,
    chunk_values: int = _CHUNK_VALUES,
    totals: Normalisers | None = None,
    log_partition: torch.Tensor | None = None,
) -> LossTerms:
    """Weighted means over the supervised slots of a batch, or its share of those over several batches.

    Args:
        hidden: (batch, anchors, block, hidden), the draft's block hidden states after its final norm.
        last_hidden: (batch, tokens, hidden), the target's after its final norm; its logits at anchor + k teach slot k.
        chunk_values: rows are worked on in chunks of about this many logits.
        totals: the normalisers of all batches that make one step, over accumulation and processes; None: this batch's own.
        log_partition: (batch, tokens) fp32 of the target's logits at `last_hidden`, read under a reduced vocabulary; None: computed.

    Without a supervised slot the loss is 0. The law of a draft with a reduced vocabulary is 0 outside it: L1 is over the target's
    whole vocabulary, CE over the labels that the draft can predict.
    """
    mask = blocks.slot_mask
    totals = normalisers(draft, blocks, weights) if totals is None else totals
    rows = hidden[mask]  # (rows, hidden)
    previous_ids, labels = blocks.previous_ids[mask], blocks.labels[mask]
    batch_index = torch.arange(mask.shape[0], device=mask.device)[:, None, None].expand_as(mask)
    teacher = TeacherLaw(draft, last_hidden, batch_index[mask], blocks.positions[mask], log_partition)
    inputs = [rows] if draft.markov_head is None else [rows, draft.markov_head.block_features(blocks.previous_ids, hidden)[mask]]

    columns = _draft_columns(draft, labels)
    slot_weights = decay_weights(mask.shape[-1], weights.decay_gamma).to(hidden.device).expand_as(mask)[mask]
    # Without any weight there is nothing to divide, and the loss is 0.
    ce_weights, l1_weights = slot_weights * (columns >= 0) / totals.ce.clamp(min=1e-8), slot_weights / totals.slots.clamp(min=1e-8)
    num_rows = max(1, chunk_values // (draft.config.draft_vocab_size or draft.config.vocab_size))
    coefficients = torch.stack([weights.ce * ce_weights, weights.l1 * l1_weights])
    total, ce, l1 = _weighted_losses(draft, inputs, teacher, columns, coefficients, num_rows)
    confidence = slot_confidence = None
    acceptance = 1 - l1 / 2
    if draft.confidence_head is not None:
        embedding = draft.markov_head.markov_w1(previous_ids) if draft.confidence_head.with_markov else None
        logits = draft.confidence_head(rows, embedding).float()
        confidence = (l1_weights * F.binary_cross_entropy_with_logits(logits, acceptance.clamp(0, 1), reduction="none")).sum()
        total = total + weights.confidence * confidence
        slot_confidence = _in_slots(mask, logits.detach().sigmoid())
    slot_acceptance = _in_slots(mask, acceptance)
    return LossTerms(
        total=total,
        ce=(ce_weights * ce).sum(),
        l1=(l1_weights * l1).sum(),
        confidence=None if confidence is None else confidence.detach(),
        tokens_per_round=expected_tokens_per_round(slot_acceptance, mask, totals.anchors),
        slot_acceptance=slot_acceptance,
        slot_confidence=slot_confidence,
    )


def expected_tokens_per_round(acceptance: torch.Tensor, slot_mask: torch.Tensor, num_anchors: torch.Tensor | None = None) -> torch.Tensor:
    """tau = 1 + sum over k of a_1 ... a_k, from `acceptance` (batch, anchors, block), averaged over anchors with a supervised slot
    by `slot_mask` (batch, anchors, block); slots that don't count end their block -> scalar, 0 without such an anchor.

    `num_anchors`: scalar, divides the sum in place of the number of such anchors here.
    """
    survival = (acceptance * slot_mask).cumprod(dim=-1)
    counted = slot_mask[..., 0]
    num_anchors = counted.sum() if num_anchors is None else num_anchors
    return ((1 + survival.sum(dim=-1)) * counted).sum() / num_anchors.clamp(min=1)


def _weighted_losses(draft, inputs, teacher: TeacherLaw, columns, coefficients, num_rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(total, ce, l1): the scalar sum of coefficients * losses, which carries the gradient, and the losses (rows,), which don't.

    The gradient of a chunk of `num_rows` rows is taken at once, so that its logits are gone before the next ones are made and
    nothing, not even the teacher's logits, is computed again in the backward pass: a row's coefficients don't depend on the others.

    inputs: `hidden` (rows, hidden) and, with a Markov head, `features` (rows, rank). coefficients: (2, rows), of CE and of L1.
    """
    training = torch.is_grad_enabled()
    heads = [draft.markov_head.markov_w2] if draft.markov_head is not None else []
    heads += [draft.lm_head] if draft.config.draft_vocab_size is not None else []
    parameters = [parameter for head in heads for parameter in head.parameters() if parameter.requires_grad]
    gradients = [torch.zeros_like(value) for value in (*inputs, *parameters)]
    losses = torch.zeros_like(coefficients)
    # A row's share of a step is less than half precision resolves: gradients are taken of losses that weigh about 1.
    scale = coefficients.amax().clamp(min=1e-30) if len(columns) else coefficients.new_ones(())
    scaled = coefficients / scale
    for start in range(0, len(columns), num_rows):
        part = slice(start, start + num_rows)
        chunk = [value[part].detach().requires_grad_(training) for value in inputs]
        sums = [*(gradient[part] for gradient in gradients[: len(inputs)]), *gradients[len(inputs) :]]
        losses[:, part] = _chunk_losses(draft, chunk, parameters, teacher, part, columns[part], scaled[:, part] if training else None, sums)
    total = (coefficients * losses).sum()
    if training:
        # A term of value 0 whose gradient is the one at hand.
        carrier = scale * sum((value * gradient).sum(dtype=torch.float32) for value, gradient in zip((*inputs, *parameters), gradients))
        total = total + (carrier - carrier.detach())
    return total, *losses


def _chunk_losses(draft, inputs, parameters, teacher: TeacherLaw, part: slice, columns, coefficients, gradients) -> torch.Tensor:
    """(CE and L1 (2, rows) of a chunk); with `coefficients` (2, rows) its gradients are added to those of `inputs` and `parameters`.

    A function of its own, at whose end nothing over the vocabulary is left.
    """
    logits, edges = _draft_logits(draft, *inputs)
    with torch.no_grad():
        losses, gradient = _law_losses(logits, teacher.probabilities(part), columns, teacher.is_reduced, coefficients)
    del logits  # of the two tensors over the vocabulary, one is left
    if coefficients is not None:
        found = torch.autograd.grad(list(edges), [*inputs, *parameters], [gradient.to(dtype) for dtype in edges.values()])
        for gradient_sum, value in zip(gradients, found):
            gradient_sum.add_(value)
    return losses


def _draft_logits(draft: DSparkDraftModel, hidden: torch.Tensor, features: torch.Tensor | None = None) -> tuple[torch.Tensor, dict]:
    """(logits (rows, vocab) fp32 in memory of their own, where in the graph the terms that they sum come from, with each one's dtype)."""
    terms = [draft.base_logits(hidden)]
    if features is not None:
        terms.append(draft.markov_head.bias(features))
    edges = {get_gradient_edge(term): term.dtype for term in terms if term.requires_grad}
    if features is None:
        return terms[0].detach().to(torch.float32, copy=True), edges
    # The Markov head's product is nobody else's, and no gradient reads it: it may be written over.
    return terms[1].detach().float().add_(terms[0].detach()), edges


def _law_losses(
    logits: torch.Tensor, teacher: torch.Tensor, columns: torch.Tensor, is_reduced: bool, coefficients: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(CE and L1 (2, rows), the gradient (rows, vocab) of their sum weighted by `coefficients` (2, rows) for the draft's logits or None).

    `logits`, the draft's, and `teacher`, the target's probabilities of the same tokens, both (rows, vocab) fp32, are written over: nothing
    else of this size is alive. `is_reduced`: what the teacher's lack to 1 is outside of the draft's vocabulary. With p = softmax(logits),
    d CE = p - [label], d L1 = p * (s - p . s), s = sign(p - p_target).
    """
    labels = columns.clamp(min=0)[:, None]
    label_logits = logits.gather(-1, labels)
    ce = (softmax_(logits) - label_logits)[:, 0]
    difference = teacher.to(logits.device)
    # Not below 0, where rounding makes them more than 1.
    outside = (1 - difference.sum(dim=-1)).clamp(min=0) if is_reduced else 0.0
    torch.sub(logits, difference, out=difference)
    losses = torch.stack([ce, torch.linalg.vector_norm(difference, ord=1, dim=-1) + outside])
    if coefficients is None:
        return losses, None
    ce_weights, l1_weights = coefficients[..., None]
    signs = difference.sign_()
    mean_sign = torch.bmm(logits[:, None], signs[..., None])[:, 0]  # (rows, 1)
    gradient = signs.sub_(mean_sign).mul_(l1_weights).add_(ce_weights).mul_(logits)
    return losses, gradient.scatter_add_(-1, labels, -ce_weights)


def _in_slots(mask: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """`values` (rows,) at the slots where `mask` (batch, anchors, block) is True, else 0."""
    return torch.zeros_like(mask, dtype=torch.float32).masked_scatter(mask, values)


def _draft_columns(draft: DSparkDraftModel, labels: torch.Tensor) -> torch.Tensor:
    """Labels (rows,) as columns of the draft's logits; -1: outside its vocabulary."""
    size = draft.config.draft_vocab_size
    if size is None:
        return labels
    columns = labels.new_full((draft.config.vocab_size,), -1)
    draft_ids = torch.arange(size, device=labels.device)
    columns[draft.target_ids(draft_ids)] = draft_ids
    return columns[labels]
