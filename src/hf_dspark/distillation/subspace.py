"""The chosen layers' states as coordinates in a subspace, and a draft that reads that subspace alone.

Axis words: `tokens`; `layers` the K chosen ones; `hidden` of the target; `rank` dimensions of the subspace.
"""

import math
from dataclasses import dataclass

import torch
from transformers import TrainerCallback

from hf_dspark.modeling import DSparkDraftModel

__all__ = ["FoldSubspace", "Subspace", "find_subspace"]


@dataclass(frozen=True, slots=True)
class Subspace:
    """The principal directions of concatenated states, through the origin.

    directions: (layers * hidden, rank) float32, orthonormal columns. deviations: (rank,) float32, root mean squares of the coordinates;
    each is stored divided by its own, so that all of them share the 8 bits of a token evenly.
    """

    directions: torch.Tensor
    deviations: torch.Tensor

    def to(self, device: torch.device) -> "Subspace":
        return Subspace(self.directions.to(device), self.deviations.to(device))

    def encode(self, states: torch.Tensor) -> torch.Tensor:
        """`states` (..., layers * hidden) -> coordinates (..., rank) float32."""
        return states.float() @ self.directions / self.deviations

    def decode(self, coordinates: torch.Tensor) -> torch.Tensor:
        """`coordinates` (..., rank) -> states (..., layers * hidden) float32, the closest ones in the subspace."""
        return (coordinates.float() * self.deviations) @ self.directions.T


@torch.no_grad()
def find_subspace(states: torch.Tensor, rank: int) -> Subspace:
    """The first `rank` principal directions of `states` (tokens, layers * hidden); the global random state is left as it is.

    Raises:
        ValueError: `rank` is larger than a dimension of `states`.
    """
    if rank > min(states.shape):
        raise ValueError(
            f"features_rank={rank} is more than {states.shape[0]} sampled tokens of {states.shape[1]} numbers (layers times hidden size) can "
            "span; lower it, or bring more text"
        )
    with torch.random.fork_rng(devices=[states.device] if states.is_cuda else []):
        torch.manual_seed(0)  # the randomised method starts from random directions
        _, singular_values, directions = torch.svd_lowrank(states.float(), q=rank, niter=4)
    deviations = singular_values / math.sqrt(len(states))
    return Subspace(directions.contiguous(), deviations.clamp(min=1e-6 * deviations[0].item() + 1e-30))


class FoldSubspace(TrainerCallback):
    """Keeps `draft.fc` blind to what training never shows it: the part of the target's states outside of the subspace.

    In training fc reads W P P^T x, and W P P^T in place of W gives the same there. The draft that is evaluated or saved reads x itself, whose other
    directions would meet weights as they were drawn, so W is replaced before.

    Raises:
        ValueError: fc is frozen, as below an adapter.
    """

    def __init__(self, draft: DSparkDraftModel, subspace: Subspace):
        self.weight, self.directions = draft.fc.weight, subspace.directions
        if not self.weight.requires_grad:
            raise ValueError(f"features_rank={subspace.directions.shape[1]} needs fc.weight to be trained, but it is frozen; train the whole draft")

    def on_step_end(self, args, state, control, **kwargs):
        if control.should_evaluate or control.should_save or control.should_training_stop:
            self.fold()

    def on_train_end(self, args, state, control, **kwargs):
        self.fold()

    @torch.no_grad()
    def fold(self) -> None:
        """Projects the rows of fc's weight (hidden, layers * hidden) into the subspace."""
        directions = self.directions.to(self.weight.device, self.weight.dtype)
        self.weight.copy_(self.weight @ directions @ directions.T)
