"""What counts as a training that has diverged, and how it is told."""

import pytest
import torch
from torch import nn

from hf_dspark.distillation.divergence import check_finite, diverged, num_non_finite_weights


@pytest.mark.parametrize("wrong", ["nan", "inf", "-inf"])
def test_the_terms_that_are_no_numbers_are_named_with_the_step_and_the_rate(wrong):
    check_finite({"loss": 1e30, "ce": 0.0}, 7, 0.1)
    with pytest.raises(
        ValueError, match=f"diverged at step 7: loss is {wrong}, l1 is {wrong}; lower learning_rate .0.1. .*checkpoints before it stay"
    ):
        check_finite({"loss": float(wrong), "ce": 1.0, "l1": float(wrong)}, 7, 0.1)
    assert "diverged at step 2: three weights; lower learning_rate (1e+06)" in str(diverged("three weights", 2, 1e6))


def test_weights_are_counted():
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    assert num_non_finite_weights(model).item() == 0
    with torch.no_grad():
        model[0].weight[0, :2], model[1].bias[1] = torch.tensor([float("nan"), float("inf")]), float("-inf")
    assert num_non_finite_weights(model).item() == 3
