"""The teacher's law against softmax over all logits, for heads that are read in parts and heads that must be called."""

import math

import pytest
import torch
from oracle import VOCAB, tiny_draft, tiny_target

from hf_dspark.distillation import teacher as teacher_module
from hf_dspark.distillation.teacher import TeacherLaw, log_partition, softmax_

KEPT = torch.tensor([0, 3, 4, 17, 40, 63])  # increasing ids of the target


class CalledHead(torch.nn.Linear):
    """Stands for a head whose weight is not what it multiplies, such as a quantised one."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden) - 1.5 * self.weight[:, 0]


def hooked(target) -> None:
    target.lm_head.register_forward_hook(lambda module, inputs, output: 2 * output)


def with_bias(target) -> None:
    target.lm_head.bias = torch.nn.Parameter(torch.randn(VOCAB, generator=torch.Generator().manual_seed(1)))


def called(target) -> None:
    head = CalledHead(32, VOCAB, bias=False)
    head.weight = target.lm_head.weight
    target.lm_head = head


def capped(target) -> None:
    target.config.final_logit_softcapping = 2.0


HEADS = {"plain": lambda target: None, "bias": with_bias, "soft cap": capped, "hook": hooked, "called": called}


def pair(change=HEADS["plain"], reduced: bool = True):
    target = tiny_target().requires_grad_(False)
    change(target)
    draft = tiny_draft(target, **({"draft_vocab_size": len(KEPT)} if reduced else {})).bind(target)
    if reduced:
        draft.d2t.copy_(KEPT - torch.arange(len(KEPT)))
    return target, draft, torch.randn(2, 7, 32, generator=torch.Generator().manual_seed(0))


def all_logits(target, hidden: torch.Tensor) -> torch.Tensor:
    """Through the target's own head as a whole, and its soft cap."""
    logits, cap = target.lm_head(hidden), target.config.to_dict().get("final_logit_softcapping")
    return logits if cap is None else cap * torch.tanh(logits / cap)


@pytest.mark.parametrize("chunk_logits", [1, 5 * VOCAB, 10**6], ids=["one by one", "in parts", "at once"])
@pytest.mark.parametrize("head", HEADS)
def test_the_partition_is_of_all_logits_however_they_are_cut(head, chunk_logits):
    target, draft, hidden = pair(HEADS[head])
    expected = all_logits(target, hidden).logsumexp(dim=-1)
    torch.testing.assert_close(log_partition(draft, hidden, chunk_logits), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("rows_at_once", [1, 4])
def test_the_partition_takes_more_tokens_than_a_chunk_and_none(monkeypatch, rows_at_once):
    target, draft, hidden = pair()
    monkeypatch.setattr(teacher_module, "_CHUNK_ROWS", rows_at_once)
    torch.testing.assert_close(log_partition(draft, hidden), all_logits(target, hidden).logsumexp(dim=-1), rtol=0, atol=1e-5)
    assert log_partition(draft, hidden[:, :0]).shape == (2, 0)


@pytest.mark.parametrize("reduced", [True, False], ids=["reduced", "whole"])
@pytest.mark.parametrize("head", HEADS)
def test_probabilities_are_those_of_the_whole_softmax(head, reduced):
    target, draft, hidden = pair(HEADS[head], reduced)
    sequences, tokens = torch.tensor([0, 1, 1, 0]), torch.tensor([6, 2, 2, 0])
    expected = all_logits(target, hidden[sequences, tokens]).softmax(dim=-1)
    expected = expected[:, KEPT] if reduced else expected
    law = TeacherLaw(draft, hidden, sequences, tokens)
    found = torch.cat([law.probabilities(slice(0, 3)), law.probabilities(slice(3, 4))])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def test_a_partition_at_hand_is_used_and_one_that_is_missing_is_worked_out_once_a_token(monkeypatch):
    _target, draft, hidden = pair()  # a draft keeps no target alive
    sequences, tokens = torch.tensor([0, 1, 1, 1, 1]), torch.tensor([6, 2, 2, 3, 2])
    asked = []
    monkeypatch.setattr(teacher_module, "log_partition", lambda draft, rows: asked.append(rows) or log_partition(draft, rows))
    expected = TeacherLaw(draft, hidden, sequences, tokens).probabilities(slice(None))
    assert [rows.shape for rows in asked] == [(3, 32)]
    law = TeacherLaw(draft, hidden, sequences, tokens, log_partition(draft, hidden) + 1)
    torch.testing.assert_close(law.probabilities(slice(None)), expected / torch.e)
    assert len(asked) == 1


def test_probabilities_may_be_written_over():
    _target, draft, hidden = pair()
    law = TeacherLaw(draft, hidden, torch.tensor([0]), torch.tensor([0]))
    expected = law.probabilities(slice(None)).clone()
    law.probabilities(slice(None)).zero_()
    torch.testing.assert_close(law.probabilities(slice(None)), expected)


def test_softmax_in_place_by_hand():
    logits = torch.tensor([[0.0, 0.0], [1000.0, 0.0]])
    log_norm = softmax_(logits)
    torch.testing.assert_close(logits, torch.tensor([[0.5, 0.5], [1.0, 0.0]]))
    torch.testing.assert_close(log_norm, torch.tensor([[math.log(2)], [1000.0]]))
