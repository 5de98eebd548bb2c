"""Batches of token rows with the anchors of their blocks, and texts packed into rows.

Axis words: `batch` rows; `tokens` of a row; `anchors` blocks of a row. A packed row holds several documents, one after the other.
"""

import bisect
import hashlib
from dataclasses import dataclass, field

import torch
from datasets import Dataset, IterableDataset

from hf_dspark.distillation.blocks import pad_anchors, sample_anchors

__all__ = ["BlockCollator", "pack_rows"]


def _shared_zero() -> torch.Tensor:
    return torch.zeros((), dtype=torch.long).share_memory_()


@dataclass(slots=True)
class BlockCollator:
    """Pads rows on the right and draws their anchors.

    Returns `input_ids` long, `attention_mask` and `loss_mask` bool, each (batch, tokens), and `anchors` (batch, anchors) long, -1
    where a row has fewer. With `packing` also `position_ids` (batch, tokens) long, which start again at each document and at the
    padding, and of numbered rows `cached_rows` (batch,) long, the number `cached_row` of each.

    A row has `input_ids` (tokens,) and may bring its own `loss_mask` (tokens,); without one, all of its tokens are supervised. Its
    anchors are a function of `seed`, the epoch and its number `sample` (or, without one, of its ids) alone: the same on any worker,
    in any batch and after resuming. `lengths` are those of a packed row's documents.
    """

    num_anchors: int
    seed: int = 0
    pad_token_id: int = 0
    packing: bool = False
    # In shared memory: a worker process that outlives its epoch reads the next one's number here.
    epoch: torch.Tensor = field(default_factory=_shared_zero)

    def set_epoch(self, epoch: int) -> None:
        """The rows read from now on get the anchors of `epoch`, in worker processes too."""
        self.epoch.fill_(epoch)

    def __call__(self, rows: list[dict]) -> dict[str, torch.Tensor]:
        shape = len(rows), max(len(row["input_ids"]) for row in rows)
        batch = {
            "input_ids": torch.full(shape, self.pad_token_id),
            "attention_mask": torch.zeros(shape, dtype=torch.bool),
            "loss_mask": torch.zeros(shape, dtype=torch.bool),
        }
        if self.packing:
            batch["position_ids"] = torch.zeros(shape, dtype=torch.long)
        anchors = []
        for i, row in enumerate(rows):
            length = len(row["input_ids"])
            batch["input_ids"][i, :length] = torch.as_tensor(row["input_ids"])
            batch["attention_mask"][i, :length] = True
            loss_mask = torch.as_tensor(row["loss_mask"]).bool() if "loss_mask" in row else torch.ones(length, dtype=torch.bool)
            batch["loss_mask"][i, :length] = loss_mask
            positions = None
            if self.packing:
                positions = _document_positions(row.get("lengths", [length]))
                batch["position_ids"][i] = torch.cat([positions, torch.arange(shape[1] - length)])
            anchors.append(sample_anchors(loss_mask, self.num_anchors, self._generator(row), positions))
        if "cached_row" in rows[0]:
            batch["cached_rows"] = torch.tensor([row["cached_row"] for row in rows])
        return {**batch, "anchors": pad_anchors(anchors)}

    def _generator(self, row: dict) -> torch.Generator:
        sample = row["sample"] if "sample" in row else _digest(torch.as_tensor(row["input_ids"]).long().numpy().tobytes())
        return torch.Generator().manual_seed(_digest(f"{self.seed} {self.epoch.item()} {sample}".encode()))


def pack_rows(rows: Dataset | IterableDataset, max_length: int) -> Dataset | IterableDataset:
    """Puts texts together into rows of at most `max_length` tokens, the longest first, each where the least room remains.

    `rows` have `input_ids` and perhaps `loss_mask` and `sample`; other columns are dropped. The column `lengths` has the lengths of
    a row's texts, in order; its `sample` is the first text's. A longer text keeps a row of its own.

    Raises:
        ValueError: `rows` are no dataset.
    """
    if not isinstance(rows, Dataset | IterableDataset):
        raise ValueError(f"packing=True needs rows in a datasets.Dataset or IterableDataset, got a {type(rows).__name__}; see Dataset.from_list")

    def pack(batch: dict[str, list]) -> dict[str, list]:
        groups = _best_fit([len(ids) for ids in batch["input_ids"]], max_length)
        packed = {name: [[value for i in group for value in batch[name][i]] for group in groups] for name in joined}
        packed["lengths"] = [[len(batch["input_ids"][i]) for i in group] for group in groups]
        if "sample" in columns:
            packed["sample"] = [batch["sample"][group[0]] for group in groups]
        return packed

    columns = rows.column_names or list(next(iter(rows)))
    joined = [name for name in ("input_ids", "loss_mask") if name in columns]
    return rows.map(pack, batched=True, batch_size=1000, remove_columns=columns)


def _best_fit(lengths: list[int], max_length: int) -> list[list[int]]:
    """Indices of `lengths` in groups whose sums are at most `max_length`."""
    groups: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # (tokens left, group), increasing
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        place = bisect.bisect_left(rooms, (lengths[i], -1))
        if place < len(rooms):
            room, group = rooms.pop(place)
        else:
            room, group = max_length, len(groups)
            groups.append([])
        groups[group].append(i)
        bisect.insort(rooms, (room - lengths[i], group))
    return groups


def _document_positions(lengths: list[int]) -> torch.Tensor:
    return torch.cat([torch.arange(length) for length in lengths])


def _digest(content: bytes) -> int:
    """A seed below 2**63 that is the same on every machine."""
    return int.from_bytes(hashlib.sha256(content).digest()[:8], "little") % 2**63
