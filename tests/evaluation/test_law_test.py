"""The chi-square test of draws that have a law each."""

import pytest
import torch

from hf_dspark.evaluation.law_test import chi_square_tail, law_test


def draws(laws: torch.Tensor, seed: int = 0) -> torch.Tensor:
    return torch.multinomial(laws, 1, generator=torch.Generator().manual_seed(seed))[:, 0]


@pytest.mark.parametrize(("statistic", "degrees", "tail"), [(3.841, 1, 0.05), (18.307, 10, 0.05), (29.588, 10, 0.001)])
def test_chi_square_tail_is_the_tables(statistic, degrees, tail):
    assert chi_square_tail(statistic, degrees) == pytest.approx(tail, rel=1e-3)


def test_one_law_for_all_draws_is_pearsons_test():
    # 120 throws of a die: Pearson's statistic is (16 + 16 + 0 + 0 + 100 + 100) / 20 = 11.6 with 5 degrees of freedom.
    counts = [24, 16, 20, 20, 30, 10]
    drawn = torch.repeat_interleave(torch.arange(6), torch.tensor(counts))
    result = law_test(torch.arange(6).expand(120, 6), torch.full((120, 6), 1 / 6, dtype=torch.float64), drawn)
    assert result.degrees == 5 and result.p_value == pytest.approx(chi_square_tail(11.6, 5), rel=1e-9)
    assert (result.worst_key, result.worst_count) in ((4, 30), (5, 10)) and result.worst_expected == pytest.approx(20)


def test_p_values_of_right_laws_are_uniform():
    generator = torch.Generator().manual_seed(0)
    p_values = []
    for seed in range(300):
        laws = torch.softmax(2 * torch.randn(200, 5, generator=generator, dtype=torch.float64), dim=-1)
        p_values.append(law_test(torch.arange(5).expand(200, 5), laws, draws(laws, seed)).p_value)
    shares = [sum(p < level for p in p_values) / len(p_values) for level in (0.05, 0.25, 0.5, 0.75)]
    # Three standard errors of a share of 300.
    assert shares == pytest.approx([0.05, 0.25, 0.5, 0.75], abs=0.09) and shares[0] < 0.09


def test_a_wrong_law_is_found_and_its_category_named():
    laws = torch.tensor([[0.5, 0.3, 0.2]], dtype=torch.float64).expand(400, 3)
    shifted = torch.tensor([[0.35, 0.3, 0.35]], dtype=torch.float64).expand(400, 3)
    result = law_test(torch.tensor([7, 8, 9]).expand(400, 3), laws, draws(shifted))
    assert result.p_value < 1e-8 and result.worst_key == 9 and result.worst_count > 120 and result.worst_expected == pytest.approx(80)


def test_the_rest_is_a_category_and_rare_ones_are_pooled():
    # Slots hold 0.9 of the law; key 2 expects 4 events, too few to stand alone.
    probs = torch.tensor([[0.6, 0.28, 0.02]], dtype=torch.float64).expand(200, 3)
    drawn = torch.tensor([0] * 120 + [1] * 56 + [2] * 4 + [3] * 20)
    result = law_test(torch.arange(3).expand(200, 3), probs, drawn)
    assert result.degrees == 2 and result.p_value == pytest.approx(1.0)
    wrong = law_test(torch.arange(3).expand(200, 3), probs, torch.tensor([0] * 100 + [1] * 36 + [3] * 64))
    assert wrong.p_value < 1e-8


def test_certain_laws_leave_nothing_to_test():
    probs = torch.tensor([[1.0, 0.0]], dtype=torch.float64).expand(100, 2)
    assert law_test(torch.arange(2).expand(100, 2), probs, torch.zeros(100, dtype=torch.long)).degrees == 0
    nothing = torch.zeros(0, 2)
    assert law_test(nothing.long(), nothing.double(), torch.zeros(0, dtype=torch.long)).p_value == 1.0
