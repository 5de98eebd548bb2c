"""How many bytes a token's features take, and how: plain, in 8 bits, or as coordinates in a subspace.

Axis words: `tokens`; `layers` the K chosen ones; `hidden` of the target; `vectors` that a token stores under one name; `rank` of the subspace.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from hf_dspark.distillation.features import TargetFeatures
from hf_dspark.distillation.subspace import Subspace

__all__ = ["FeatureCoding", "bytes_per_token", "stored_tensors"]

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8}
_SCALES = "_scales"


@dataclass(slots=True)
class FeatureCoding:
    """Encodes features to the tensors that are stored, and back.

    dtype: float32, bfloat16 or int8 (with one float32 scale for each vector). subspace: coordinates in it are stored in place of the
    chosen layers' states; the last hidden state, from which the teacher's logits come, is stored as it is.
    partition: makes (..., tokens) fp32 of last hidden states (..., tokens, hidden), which is stored too; None: nothing more is.
    """

    num_layers: int
    dtype: str
    subspace: Subspace | None = None
    partition: Callable[[torch.Tensor], torch.Tensor] | None = None

    def encode(self, features: TargetFeatures) -> dict[str, torch.Tensor]:
        """`hidden_states` (..., layers, hidden), or (..., 1, rank) in a subspace, `last_hidden` (..., 1, hidden), and `log_partition` (...)."""
        states = torch.stack([layer.to(features.last_hidden.device) for layer in features.hidden_states], dim=-2)  # (..., layers, hidden)
        if self.subspace is not None:
            self.subspace = self.subspace.to(states.device)
            states = self.subspace.encode(states.flatten(-2))[..., None, :]
        stored = {**self._stored("hidden_states", states), **self._stored("last_hidden", features.last_hidden[..., None, :])}
        if self.partition is not None:
            # Of the hidden state as it will be read: its rounding then moves no mass out of the vocabulary.
            stored["log_partition"] = self.partition(self._read(stored, "last_hidden")[..., 0, :].to(features.last_hidden.dtype))
        return stored

    def decode(self, tensors: dict[str, torch.Tensor], dtype: torch.dtype) -> TargetFeatures:
        """What `encode` made of features, as features of the type `dtype`; without `last_logits`."""
        states, last_hidden = self._read(tensors, "hidden_states"), self._read(tensors, "last_hidden")
        if self.subspace is not None:
            self.subspace = self.subspace.to(states.device)
            states = self.subspace.decode(states[..., 0, :]).unflatten(-1, (self.num_layers, -1))
        return TargetFeatures(list(states.to(dtype).unbind(dim=-2)), last_hidden[..., 0, :].to(dtype), None, tensors.get("log_partition"))

    def _stored(self, name: str, values: torch.Tensor) -> dict[str, torch.Tensor]:
        if self.dtype != "int8":
            return {name: values.to(_DTYPES[self.dtype])}
        values = values.float()
        scales = values.abs().amax(dim=-1) / 127  # (..., vectors)
        return {name: (values / scales.clamp(min=1e-30)[..., None]).round().to(torch.int8), name + _SCALES: scales}

    def _read(self, tensors: dict[str, torch.Tensor], name: str) -> torch.Tensor:
        if self.dtype != "int8":
            return tensors[name]
        return tensors[name].float() * tensors[name + _SCALES][..., None]


def stored_tensors(
    hidden_size: int, num_layers: int, dtype: str, rank: int | None = None, with_partition: bool = False
) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """(type, shape of one token) of each stored tensor, by name; `rank` of the subspace, None: none."""
    vectors = {"hidden_states": (num_layers, hidden_size) if rank is None else (1, rank), "last_hidden": (1, hidden_size)}
    stored = {name: (_DTYPES[dtype], shape) for name, shape in vectors.items()}
    if dtype == "int8":
        stored |= {name + _SCALES: (torch.float32, shape[:1]) for name, shape in vectors.items()}
    return stored | ({"log_partition": (torch.float32, ())} if with_partition else {})


def bytes_per_token(hidden_size: int, num_layers: int, dtype: str, rank: int | None = None, with_partition: bool = False) -> int:
    """Bytes that the features of one token take: `num_layers` chosen layers and the last hidden state, each of `hidden_size` numbers."""
    return sum(kind.itemsize * math.prod(shape) for kind, shape in stored_tensors(hidden_size, num_layers, dtype, rank, with_partition).values())
