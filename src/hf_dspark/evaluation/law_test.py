"""A test of draws against the laws they were drawn from, where every draw has a law of its own.

Given what came before, a draw x follows a known law p. For any way of sorting outcomes into categories, counts minus their
expectation are then a martingale, whose covariance is the sum of diag(p) - p p^T over the draws: a chi-square test over all of
them, whatever the number of outcomes.
"""

from dataclasses import dataclass

import torch

__all__ = ["LawTest", "chi_square_tail", "law_test"]

MAX_CATEGORIES = 48
# Categories, and directions among them, with less than this many expected events say nothing that a chi-square law describes.
LEAST_EXPECTED = 10.0


@dataclass(slots=True)
class LawTest:
    """p-value, degrees of freedom, and of the category that deviates most its key, its count and its expected count."""

    p_value: float
    degrees: int
    worst_key: int = -1
    worst_count: int = 0
    worst_expected: float = 0.0


def law_test(keys: torch.Tensor, probs: torch.Tensor, drawn_slots: torch.Tensor) -> LawTest:
    """Counts of drawn keys against their expectation.

    Args:
        keys: (rows, slots) long, the category of each told-apart outcome of each draw, chosen without knowledge of the draw.
        probs: (rows, slots) fp64, their probabilities; what is missing to 1 is the rest, a category of its own.
        drawn_slots: (rows,) long, the slot that was drawn; `slots`: the rest.

    The `MAX_CATEGORIES` keys of the largest expectation are told apart, if at least `LEAST_EXPECTED`; the others are the rest.
    """
    if len(keys) == 0:
        return LawTest(1.0, 0)
    unique, inverse = keys.unique(return_inverse=True)
    expected = torch.zeros(len(unique), dtype=torch.float64).index_add_(0, inverse.flatten(), probs.flatten())
    order = expected.argsort(descending=True)[:MAX_CATEGORIES]
    chosen = order[expected[order] >= LEAST_EXPECTED]
    rest = len(chosen)
    category_of = torch.full((len(unique),), rest)
    category_of[chosen] = torch.arange(rest)
    categories = category_of[inverse]  # (rows, slots)
    law = torch.zeros(len(keys), rest + 1, dtype=torch.float64).scatter_add_(1, categories, probs)
    law[:, rest] += 1.0 - probs.sum(dim=1)
    drawn = torch.cat([categories, torch.full((len(keys), 1), rest)], dim=1).gather(1, drawn_slots[:, None])[:, 0]
    counts, means = torch.bincount(drawn, minlength=rest + 1).double(), law.sum(dim=0)
    excess, covariance = counts - means, torch.diag(means) - law.T @ law
    variances, directions = torch.linalg.eigh(covariance)
    open_ = variances >= LEAST_EXPECTED
    degrees = int(open_.sum())
    if degrees == 0:
        return LawTest(1.0, 0)
    statistic = ((directions.T @ excess)[open_] ** 2 / variances[open_]).sum().item()
    worst = int((excess.abs() / covariance.diagonal().clamp(min=LEAST_EXPECTED).sqrt())[:rest].argmax())
    return LawTest(chi_square_tail(statistic, degrees), degrees, int(unique[chosen[worst]]), int(counts[worst]), means[worst].item())


def chi_square_tail(statistic: float, degrees: int) -> float:
    """Probability that a chi-square variable with `degrees` of freedom exceeds `statistic`."""
    halves = torch.tensor([degrees / 2, statistic / 2], dtype=torch.float64)
    return torch.special.gammaincc(halves[0], halves[1]).item()
