"""Batches of token rows."""

from dataclasses import dataclass

import torch

__all__ = ["BlockCollator"]


@dataclass(slots=True)
class BlockCollator:
    """Pads rows on the right: `input_ids` long, `attention_mask` and `loss_mask` bool, each (batch, tokens).

    A row may bring its own `loss_mask` (tokens,); without one, all of its tokens are supervised.
    """

    pad_token_id: int = 0

    def __call__(self, rows: list[dict]) -> dict[str, torch.Tensor]:
        num_tokens = max(len(row["input_ids"]) for row in rows)
        input_ids = torch.full((len(rows), num_tokens), self.pad_token_id)
        attention_mask = torch.zeros(len(rows), num_tokens, dtype=torch.bool)
        loss_mask = torch.zeros_like(attention_mask)
        for i, row in enumerate(rows):
            length = len(row["input_ids"])
            input_ids[i, :length] = torch.as_tensor(row["input_ids"])
            attention_mask[i, :length] = True
            loss_mask[i, :length] = torch.as_tensor(row["loss_mask"]).bool() if "loss_mask" in row else True
        return {"input_ids": input_ids, "attention_mask": attention_mask, "loss_mask": loss_mask}
