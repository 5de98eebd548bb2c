"""A training whose loss or weights stop being finite ends with an error, and its draft is not written."""

import math

import torch
from torch import nn
from torch.distributed.tensor import DTensor

__all__ = ["check_finite", "diverged", "num_non_finite_weights"]


def check_finite(values: dict[str, float], step: int, learning_rate: float) -> None:
    """Raises ValueError where one of the logged `values` isn't finite; `step` and `learning_rate` are those of the training."""
    if wrong := [f"{name} is {value}" for name, value in values.items() if not math.isfinite(value)]:
        raise diverged(", ".join(wrong), step, learning_rate)


def diverged(what: str, step: int, learning_rate: float) -> ValueError:
    """The error of a training in which `what` was found after `step` steps."""
    return ValueError(
        f"diverged at step {step}: {what}; lower learning_rate ({learning_rate:g}) or lengthen warmup_steps; the checkpoints before it stay, but the "
        "newest of them may already have been on its way there"
    )


@torch.no_grad()
def num_non_finite_weights(draft: nn.Module) -> torch.Tensor:
    """() fp32, how many weights of `draft` are nan or infinite, of those that this process holds."""
    shares = [parameter.to_local() if isinstance(parameter, DTensor) else parameter for parameter in draft.parameters()]
    return torch.stack([(~torch.isfinite(share)).sum() for share in shares]).sum().float()
