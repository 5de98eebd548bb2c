"""Muon beside AdamW: which parameters it gets, that it does what both alone would do, and that its state survives a file."""

import pytest
import torch
from transformers import get_polynomial_decay_schedule_with_warmup

from hf_dspark.distillation.muon import MuonAndOther, is_muon_matrix


def parameters(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(size, generator=generator)) for size in ((6, 4), (4, 6), (5,), (7, 3))]


def both(params, lr=0.01):
    matrices, others = params[:2], params[2:]
    return MuonAndOther(matrices, lr, 0.0, torch.optim.AdamW(others, lr=lr, weight_decay=0.0))


def train(params, optimizer, steps, start=0):
    for step in range(start, start + steps):
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(100 + step)
        sum((parameter * torch.randn(parameter.shape, generator=generator)).sum() for parameter in params).backward()
        optimizer.step()


def test_it_is_muon_over_matrices_and_adamw_over_the_rest():
    ours, apart = parameters(), parameters()
    train(ours, both(ours), 4)
    muon = torch.optim.Muon(apart[:2], lr=0.01, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
    train(apart, torch.optim.AdamW(apart[2:], lr=0.01, weight_decay=0.0), 4)
    train(apart, muon, 4)
    for mine, theirs in zip(ours, apart):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)


def test_a_step_of_muon_has_orthogonal_directions():
    # The polar factor of the gradient: singular values near 1 (Newton-Schulz leaves them within 0.7 to 1.2), times 0.2 sqrt(rows) lr.
    params = parameters()
    before = params[0].detach().clone()
    train(params, both(params, lr=1.0), 1)
    step = torch.linalg.svdvals(before - params[0].detach()) / (0.2 * max(params[0].shape) ** 0.5)
    assert step.min() > 0.6 and step.max() < 1.25


def test_state_saved_and_read_goes_on_as_if_nothing_had_been(tmp_path):
    whole, stopped = parameters(), parameters()
    train(whole, both(whole), 6)
    first = both(stopped)
    train(stopped, first, 3)
    torch.save(first.state_dict(), tmp_path / "optimizer.pt")
    second = both(stopped)
    second.load_state_dict(torch.load(tmp_path / "optimizer.pt"))
    train(stopped, second, 3, start=3)
    for mine, theirs in zip(stopped, whole):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)


def test_a_scheduler_reaches_both_parts():
    params = parameters()
    optimizer = both(params)
    optimizer.load_state_dict(optimizer.state_dict())
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    before = [parameter.detach().clone() for parameter in params]
    train(params, optimizer, 1)
    assert all(torch.equal(old, new) for old, new in zip(before, params))


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("fc.weight", (4, 8), True),
        ("layers.0.self_attn.q_proj.weight", (4, 4), True),
        ("layers.0.self_attn.q_norm.weight", (4,), False),
        ("markov_head.markov_w1.weight", (9, 2), False),
        ("lm_head.weight", (9, 4), False),
    ],
)
def test_tables_heads_and_vectors_are_not_muons(name, shape, expected):
    assert is_muon_matrix(name, torch.nn.Parameter(torch.zeros(shape))) is expected


def test_schedules_find_the_learning_rate():
    optimizer = both(parameters(), lr=0.01)
    schedule = get_polynomial_decay_schedule_with_warmup(optimizer, num_warmup_steps=0, num_training_steps=2, lr_end=0.0)
    train(parameters(), optimizer, 1)
    schedule.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.005, 0.005]
