"""Training blocks: anchors drawn from a sequence, the tokens of their blocks, and who may see whom (paper section 3.3).

Axis words: `batch`; `tokens` of a sequence; `anchors` blocks of a sequence; `block` the B positions of one; `rows` = anchors * block.
A sequence may hold several documents, packed one after the other: nothing crosses from one into another.
"""

from dataclasses import dataclass

import torch

from hf_dspark.modeling import DSparkDraftModel

__all__ = ["Blocks", "block_attention_mask", "block_hidden_states", "eligible_anchors", "make_blocks", "pad_anchors", "sample_anchors"]

NO_ANCHOR = -1


@dataclass(slots=True)
class Blocks:
    """The blocks of a batch of sequences, slot k of a block at anchor + k and predicting the token behind it.

    anchors: (batch, anchors) long, indices of tokens; -1 where a sequence has fewer. block_ids: (batch, anchors, block) long, the
    anchor's token and mask tokens. previous_ids: (batch, anchors, block) long, the true token at each slot, which teacher-forces the
    Markov head. labels: (batch, anchors, block) long, the true token behind each slot. slot_mask: (batch, anchors, block) bool, slots
    that count. positions: (batch, anchors, block) long, indices of the slots' tokens. document_positions: (batch, tokens) long, each
    token's place in its document, from 0.
    """

    anchors: torch.Tensor
    block_ids: torch.Tensor
    previous_ids: torch.Tensor
    labels: torch.Tensor
    slot_mask: torch.Tensor
    positions: torch.Tensor
    document_positions: torch.Tensor

    @property
    def document_starts(self) -> torch.Tensor:
        """Index of the first token of each anchor's document: (batch, anchors) long."""
        anchors = self.anchors.clamp(min=0)
        return anchors - self.document_positions.gather(1, anchors)


def eligible_anchors(loss_mask: torch.Tensor, position_ids: torch.Tensor | None = None) -> torch.Tensor:
    """Positions whose own token and next token are supervised: `loss_mask` (tokens,) -> (eligible,) long, increasing.

    Where `position_ids` (tokens,) start again at 0, another document begins, whose first token is nobody's next one.
    """
    supervised = loss_mask.bool()
    eligible = supervised[:-1] & supervised[1:]
    if position_ids is not None:
        eligible = eligible & (position_ids[1:] > 0)
    return eligible.nonzero()[:, 0]


def sample_anchors(
    loss_mask: torch.Tensor, num_anchors: int, generator: torch.Generator | None = None, position_ids: torch.Tensor | None = None
) -> torch.Tensor:
    """Draws anchors without replacement: `loss_mask` (tokens,) -> (anchors,) long, increasing; all eligible ones where they are fewer.

    `position_ids` (tokens,) of a row of several documents; None: one.
    """
    eligible = eligible_anchors(loss_mask, position_ids)
    order = torch.randperm(len(eligible), generator=generator)[:num_anchors]
    return eligible[order.to(eligible.device)].sort().values


def pad_anchors(drawn: list[torch.Tensor]) -> torch.Tensor:
    """Anchors of each sequence, each (anchors,) long, -> (batch, anchors), padded with -1; at least one column."""
    anchors = torch.full((len(drawn), max(1, *map(len, drawn))), NO_ANCHOR)
    for row, positions in zip(anchors, drawn):
        row[: len(positions)] = positions
    return anchors


def make_blocks(
    input_ids: torch.Tensor,
    loss_mask: torch.Tensor,
    anchors: torch.Tensor,
    block_size: int,
    mask_token_id: int,
    position_ids: torch.Tensor | None = None,
) -> Blocks:
    """Cuts the blocks out of `input_ids` (batch, tokens) long at `anchors` (batch, anchors) long, -1: none.

    A slot counts while its label is inside the anchor's document and supervised by `loss_mask` (batch, tokens) without a gap since
    the anchor. `position_ids` (batch, tokens) start again at 0 with each document of a row; None: a row is one document.
    """
    batch, num_tokens = input_ids.shape
    if position_ids is None:
        position_ids = torch.arange(num_tokens, device=input_ids.device).expand(batch, -1)
    positions = anchors.clamp(min=0)[..., None] + torch.arange(block_size, device=anchors.device)  # (batch, anchors, block)
    inside = positions.clamp(max=num_tokens - 1)
    next_inside = (positions + 1).clamp(max=num_tokens - 1)

    def gather(values: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return values.gather(1, index.view(batch, -1)).view_as(index)

    # The first token of a document is no label: there the run of supervised slots ends.
    labelled = gather(loss_mask.bool() & (position_ids > 0), next_inside)
    supervised = labelled & (positions + 1 < num_tokens) & (anchors != NO_ANCHOR)[..., None]
    previous_ids = gather(input_ids, inside)
    block_ids = torch.full_like(previous_ids, mask_token_id)
    block_ids[..., 0] = previous_ids[..., 0]
    return Blocks(
        anchors=anchors,
        block_ids=block_ids,
        previous_ids=previous_ids,
        labels=gather(input_ids, next_inside),
        slot_mask=supervised.long().cumprod(dim=-1).bool(),
        positions=positions,
        document_positions=position_ids,
    )


def block_attention_mask(anchors: torch.Tensor, starts: torch.Tensor, num_tokens: int, block_size: int) -> torch.Tensor:
    """Who sees whom: `anchors` and `starts` (batch, anchors) -> (batch, 1, rows, num_tokens + rows) bool, True: the row sees the key.

    A row sees the context from the start of its anchor's document to strictly before its anchor and, in both directions, its own
    block. The block of a missing anchor (-1) sees itself alone, so that its softmax stays finite.
    """
    batch, num_anchors = anchors.shape
    rows = num_anchors * block_size
    index = torch.arange(num_tokens, device=anchors.device)
    context = (index < anchors[..., None]) & (index >= starts[..., None])  # (batch, anchors, tokens)
    block_of = torch.arange(num_anchors, device=anchors.device).repeat_interleave(block_size)
    own_block = block_of[:, None] == block_of  # (rows, rows)
    return torch.cat([context.repeat_interleave(block_size, dim=1), own_block.expand(batch, rows, rows)], dim=-1)[:, None]


def block_hidden_states(draft: DSparkDraftModel, hidden_states: list[torch.Tensor], blocks: Blocks) -> torch.Tensor:
    """The parallel stage over all blocks of all sequences at once.

    Args:
        hidden_states: outputs of the chosen target layers, each (batch, tokens, hidden).

    Returns:
        h (batch, anchors, block, hidden) after the draft's final norm.

    Raises:
        ValueError: the draft's attention implementation takes no mask of this form.
    """
    batch, num_anchors, block_size = blocks.block_ids.shape
    features = draft.context_features(hidden_states)  # (batch, tokens, hidden)
    starts = blocks.document_starts  # (batch, anchors)
    mask = block_attention_mask(blocks.anchors, starts, features.shape[1], block_size)
    implementation = draft.config._attn_implementation
    if implementation == "eager":
        mask = torch.zeros(mask.shape, dtype=features.dtype, device=mask.device).masked_fill_(~mask, torch.finfo(features.dtype).min)
    elif implementation != "sdpa":
        raise ValueError(
            f"a draft is trained with attn_implementation 'sdpa' or 'eager', got {implementation!r}; call draft.set_attn_implementation('sdpa')"
        )
    block_positions = blocks.positions - starts[..., None]
    # Neither a call nor the instance's own forward, which accelerate wraps: this may run inside one.
    hidden = type(draft).forward(
        draft,
        block_ids=blocks.block_ids.flatten(1),
        context_features=features,
        position_ids=torch.cat([blocks.document_positions, block_positions.flatten(1)], dim=1),
        attention_mask=mask,
    )
    return hidden.view(batch, num_anchors, block_size, -1)
