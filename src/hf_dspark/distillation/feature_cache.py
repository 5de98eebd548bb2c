"""Target features of a training set in a folder of safetensors shards, read by row in every epoch."""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from hf_dspark.distillation.feature_coding import FeatureCoding
from hf_dspark.distillation.features import TargetFeatures

__all__ = ["FeatureCache", "NumberedRows", "Shard"]


class NumberedRows(torch.utils.data.Dataset):
    """`rows`, each with its number as `cached_row`, by which its features are found."""

    def __init__(self, rows: Sequence[dict]):
        if not hasattr(rows, "__len__") or not hasattr(rows, "__getitem__"):
            raise ValueError(f"features='cached' needs rows that are counted and can be read in any order, got a {type(rows).__name__}")
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict:
        return {**self.rows[index], "cached_row": index}


@dataclass(frozen=True, slots=True)
class Shard:
    """Rows from number `start` on in one file: the tokens of each, the hash of each, and the size of the file."""

    path: Path
    start: int
    lengths: list[int]
    hashes: list[int]
    num_bytes: int

    def is_whole(self, key: str) -> bool:
        """Whether the file is there, complete, was written for `key`, and begins with these rows."""
        try:
            with safe_open(self.path, framework="pt") as file:
                return (file.metadata() or {}).get("key") == key and file.get_tensor("row_hashes")[: len(self.hashes)].tolist() == self.hashes
        except (SafetensorError, OSError):  # torn, or absent
            return False


@dataclass(slots=True)
class FeatureCache:
    """Reads the features of the first `num_rows` rows of a training set; those of others are computed in the step."""

    shards: list[Shard]
    coding: FeatureCoding
    dtype: torch.dtype
    _starts: list[int] = field(init=False)
    _offsets: list[list[int]] = field(init=False)
    _is_checked: bool = field(init=False, default=False)

    def __post_init__(self):
        self._starts = [shard.start for shard in self.shards]
        self._offsets = [[0, *accumulate(shard.lengths)] for shard in self.shards]

    @property
    def num_rows(self) -> int:
        return self.shards[-1].start + len(self.shards[-1].lengths)

    def features(self, inputs: dict[str, torch.Tensor], compute: Callable[[dict], TargetFeatures]) -> TargetFeatures:
        """Features of the batch `inputs`, whose `cached_rows` (batch,) long number its rows; `compute` makes those that are not cached.

        Raises:
            ValueError: the first cached rows differ from what `compute` makes of them.
        """
        rows, (batch, num_tokens) = inputs["cached_rows"].tolist(), inputs["input_ids"].shape
        known = [i for i, row in enumerate(rows) if row < self.num_rows]
        if not known:
            return self._like_cached(compute(inputs))
        cached = self.read([rows[i] for i in known], num_tokens, inputs["input_ids"].device)
        if not self._is_checked:
            part = {name: value[known] for name, value in inputs.items()}
            self._check(cached, compute(part), part["attention_mask"])
            self._is_checked = True
        if len(known) == batch:
            return cached
        rest = [i for i in range(batch) if i not in set(known)]
        fresh = self._like_cached(compute({name: value[rest] for name, value in inputs.items()}))
        order = torch.tensor([*known, *rest]).argsort().to(cached.last_hidden.device)

        def merge(ours: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
            return torch.cat([ours, theirs.to(ours.device, ours.dtype)])[order]

        states = [merge(*pair) for pair in zip(cached.hidden_states, fresh.hidden_states)]
        partition = None if cached.log_partition is None else merge(cached.log_partition, fresh.log_partition)
        return TargetFeatures(states, merge(cached.last_hidden, fresh.last_hidden), None, partition)

    def read(self, rows: list[int], num_tokens: int, device: torch.device) -> TargetFeatures:
        """Features of the rows of these numbers, padded on the right to `num_tokens`, on `device`; without `last_logits`."""
        batch: dict[str, torch.Tensor] = {}
        for i, row in enumerate(rows):
            index = bisect_right(self._starts, row) - 1
            start, end = self._offsets[index][row - self._starts[index] :][:2]
            with safe_open(self.shards[index].path, framework="pt") as file:
                names = set(file.keys())
                for name in names - {"row_hashes"}:
                    values = file.get_slice(name)[start:end]
                    padded = batch.setdefault(name, values.new_zeros(len(rows), num_tokens, *values.shape[1:]))
                    padded[i, : end - start] = values
        return self.coding.decode({name: values.to(device) for name, values in batch.items()}, self.dtype)

    def _like_cached(self, fresh: TargetFeatures) -> TargetFeatures:
        """`fresh` features as they are, or in a subspace: the draft is to see nothing outside of it in any row."""
        if self.coding.subspace is not None:
            return self.coding.decode(self.coding.encode(fresh), self.dtype)
        return fresh if self.coding.partition is None else fresh._replace(log_partition=self.coding.partition(fresh.last_hidden))

    def _check(self, cached: TargetFeatures, fresh: TargetFeatures, attention_mask: torch.Tensor) -> None:
        """`cached` must be what coding makes of `fresh`, where `attention_mask` (batch, tokens) is set, but for rounding."""
        expected = self.coding.decode(self.coding.encode(fresh), self.dtype)  # (batch, tokens, hidden), each
        names = [*(f"chosen layer {i}" for i in range(len(cached.hidden_states))), "the last hidden state"]
        for name, ours, theirs in zip(names, *([*found.hidden_states, found.last_hidden] for found in (cached, expected))):
            ours, theirs = ours[attention_mask].float(), theirs.to(ours.device)[attention_mask].float()  # (tokens, hidden)
            difference = ((ours - theirs).norm(dim=-1) / theirs.norm(dim=-1).clamp(min=1e-12)).mean().item()
            if not difference <= (1e-3 if self.dtype.itemsize >= 4 else 0.1):
                raise ValueError(
                    f"features_dir={str(self.shards[0].path.parent)!r} is stale or damaged: of {name} the cached features of the first batch "
                    f"differ from the target's by {difference:.2g} (relative); delete the folder to write it anew"
                )
        if cached.log_partition is not None:
            self._check_partition(cached, attention_mask)

    def _check_partition(self, cached: TargetFeatures, attention_mask: torch.Tensor) -> None:
        """The log partition of `cached` must be that of its own last hidden state, which no rounding of features lies between."""
        with torch.autocast(cached.last_hidden.device.type, enabled=False):  # as it was written
            expected = self.coding.partition(cached.last_hidden)[attention_mask]
        difference = (cached.log_partition[attention_mask].to(expected.device) - expected).abs().mean().item()
        # Two computations round each logit, by eps / 2 of it at most (1e-3: TF32); those that count lie within log(vocabulary) < 16 of the sum.
        bound = max(1e-3, torch.finfo(self.dtype).eps) * (expected.abs().mean().item() + 16)
        if not difference <= bound:
            raise ValueError(
                f"features_dir={str(self.shards[0].path.parent)!r} is stale or damaged: of the log partition the cached values of the first batch "
                f"differ from its last hidden states' by {difference:.2g} nats, where rounding makes {bound:.2g} at most; delete the folder to write "
                "it anew"
            )
