"""The three loss terms of distillation and their weighted total (paper section 3.3, eq. 8 to 10).

Axis words: `rows` supervised block slots of all blocks; `block` positions of a block; `hidden`; `rank`; `vocab`.
"""

from dataclasses import dataclass

import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from hf_dspark.distillation.blocks import Blocks
from hf_dspark.modeling import DSparkDraftModel

__all__ = ["LossTerms", "LossWeights", "decay_weights", "dspark_loss", "expected_tokens_per_round", "slot_losses"]

# Values of one fp32 tensor over (rows, vocab) that may be alive at once.
_CHUNK_VALUES = 2**24


@dataclass(slots=True, frozen=True)
class LossWeights:
    """total = ce * CE + l1 * L1 + confidence * BCE; slot k of a block weighs exp(-k / decay_gamma), None: 1."""

    ce: float = 0.1
    l1: float = 0.9
    confidence: float = 1.0
    decay_gamma: float | None = 4.0


@dataclass(slots=True)
class LossTerms:
    """Scalars fp32: `total` carries the gradient; the others, its unweighted terms and `tokens_per_round`, are detached. None: no confidence head."""

    total: torch.Tensor
    ce: torch.Tensor
    l1: torch.Tensor
    confidence: torch.Tensor | None
    tokens_per_round: torch.Tensor


def decay_weights(block_size: int, gamma: float | None) -> torch.Tensor:
    """w_k = exp(-k / gamma), k from 0, or ones -> (block,) fp32."""
    return torch.ones(block_size) if gamma is None else torch.exp(-torch.arange(block_size) / gamma)


def dspark_loss(
    draft: DSparkDraftModel,
    hidden: torch.Tensor,
    last_hidden: torch.Tensor,
    blocks: Blocks,
    weights: LossWeights,
    chunk_values: int = _CHUNK_VALUES,
) -> LossTerms:
    """Weighted means over the supervised slots of a batch.

    Args:
        hidden: (batch, anchors, block, hidden), the draft's block hidden states after its final norm.
        last_hidden: (batch, tokens, hidden), the target's after its final norm; its logits at anchor + k teach slot k.
        chunk_values: rows are worked on in chunks of about this many logits and recomputed in the backward pass.

    A batch without a supervised slot has loss 0. The law of a draft with a reduced vocabulary is 0 outside it: L1 is over the
    target's whole vocabulary, CE over the labels that the draft can predict.
    """
    mask = blocks.slot_mask
    rows = hidden[mask]  # (rows, hidden)
    previous_ids, labels = blocks.previous_ids[mask], blocks.labels[mask]
    batch_index = torch.arange(mask.shape[0], device=mask.device)[:, None, None].expand_as(mask)
    teacher = last_hidden[batch_index[mask], blocks.positions[mask]]
    features = None if draft.markov_head is None else draft.markov_head.block_features(blocks.previous_ids, hidden)[mask]
    slot_weights = decay_weights(mask.shape[-1], weights.decay_gamma).to(hidden.device).expand_as(mask)[mask]

    columns = _draft_columns(draft, labels)
    ce, l1 = _chunked_slot_losses(draft, rows, features, teacher, columns, chunk_values)
    mean_ce, mean_l1 = _weighted_mean(ce, slot_weights * (columns >= 0)), _weighted_mean(l1, slot_weights)
    total, confidence = weights.ce * mean_ce + weights.l1 * mean_l1, None
    acceptance = 1 - l1.detach() / 2
    if draft.confidence_head is not None:
        embedding = draft.markov_head.markov_w1(previous_ids) if draft.confidence_head.with_markov else None
        logits = draft.confidence_head(rows, embedding).float()
        confidence = _weighted_mean(F.binary_cross_entropy_with_logits(logits, acceptance.clamp(0, 1), reduction="none"), slot_weights)
        total = total + weights.confidence * confidence
    return LossTerms(
        total=total,
        ce=mean_ce.detach(),
        l1=mean_l1.detach(),
        confidence=None if confidence is None else confidence.detach(),
        tokens_per_round=expected_tokens_per_round(torch.zeros_like(mask, dtype=torch.float32).masked_scatter(mask, acceptance), mask),
    )


def slot_losses(
    draft: DSparkDraftModel, hidden: torch.Tensor, features: torch.Tensor | None, teacher: torch.Tensor, columns: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """CE = -log p_draft(label) and L1 = ||p_draft - p_target||_1 (not halved), each (rows,) fp32.

    Args:
        hidden: (rows, hidden), the draft's. features: (rows, rank), what the Markov head's W2 multiplies; None: rank 0.
        teacher: (rows, hidden), the target's. columns: (rows,) long, labels in the draft's vocabulary, negative: outside it.
    """
    logits = draft.base_logits(hidden)
    if features is not None:
        logits = logits + draft.markov_head.bias(features)
    with torch.no_grad():
        target_law = draft.tables.logits(teacher).to(hidden.device).float().softmax(dim=-1)
    log_law = logits.float().log_softmax(dim=-1)
    ce = -log_law.gather(-1, columns.clamp(min=0)[:, None])[:, 0]
    if draft.config.draft_vocab_size is None:
        return ce, (log_law.exp() - target_law).abs().sum(dim=-1)
    reachable = target_law[:, draft.target_ids(torch.arange(draft.config.draft_vocab_size, device=hidden.device))]
    return ce, (log_law.exp() - reachable).abs().sum(dim=-1) + (1 - reachable.sum(dim=-1))


def expected_tokens_per_round(acceptance: torch.Tensor, slot_mask: torch.Tensor) -> torch.Tensor:
    """tau = 1 + sum over k of a_1 ... a_k, from `acceptance` (batch, anchors, block), averaged over anchors with a supervised slot
    by `slot_mask` (batch, anchors, block); slots that don't count end their block -> scalar, 0 without such an anchor."""
    survival = (acceptance * slot_mask).cumprod(dim=-1)
    counted = slot_mask[..., 0]
    return ((1 + survival.sum(dim=-1)) * counted).sum() / counted.sum().clamp(min=1)


def _chunked_slot_losses(draft, hidden, features, teacher, columns, chunk_values: int) -> tuple[torch.Tensor, torch.Tensor]:
    num_rows = max(1, chunk_values // draft.config.vocab_size)
    if len(hidden) <= num_rows:
        return slot_losses(draft, hidden, features, teacher, columns)
    terms = [
        checkpoint(
            slot_losses, draft, hidden[i : i + num_rows], None if features is None else features[i : i + num_rows], teacher[i : i + num_rows],
            columns[i : i + num_rows], use_reentrant=False, preserve_rng_state=False,
        )
        for i in range(0, len(hidden), num_rows)
    ]  # fmt: skip
    ce, l1 = zip(*terms)
    return torch.cat(ce), torch.cat(l1)


def _draft_columns(draft: DSparkDraftModel, labels: torch.Tensor) -> torch.Tensor:
    """Labels (rows,) as columns of the draft's logits; -1: outside its vocabulary."""
    size = draft.config.draft_vocab_size
    if size is None:
        return labels
    columns = labels.new_full((draft.config.vocab_size,), -1)
    draft_ids = torch.arange(size, device=labels.device)
    columns[draft.target_ids(draft_ids)] = draft_ids
    return columns[labels]


def _weighted_mean(values: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    # Without any weight the mean is 0, and so is its gradient.
    return (values * weights).sum() / weights.sum().clamp(min=1e-8)
