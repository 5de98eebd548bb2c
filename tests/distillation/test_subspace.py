"""Principal directions of a target's states, and drafts trained in them alone."""

import pytest
import torch
from oracle import tiny_draft, tiny_target
from peft import LoraConfig, get_peft_model
from test_feature_cache import cached, make_trainer, text_rows
from test_trainer_steps import as_dataset

from hf_dspark import DSparkDraftModel
from hf_dspark.distillation.subspace import FoldSubspace, find_subspace


def states(num_tokens: int = 80, width: int = 72) -> torch.Tensor:
    """Correlated states with a mean that is not 0: (tokens, layers * hidden)."""
    generator = torch.Generator().manual_seed(0)
    mixing = torch.randn(width, width, generator=generator) / torch.arange(1, width + 1)[:, None]
    return torch.randn(num_tokens, width, generator=generator) @ mixing + 0.3


def test_a_subspace_is_the_best_of_its_rank():
    subspace = find_subspace(states(), 10)
    torch.testing.assert_close(subspace.directions.T @ subspace.directions, torch.eye(10), rtol=0, atol=1e-5)
    best = torch.linalg.svdvals(states())
    kept = subspace.decode(subspace.encode(states())).square().sum()
    assert (kept / best[:10].square().sum()).item() == pytest.approx(1, abs=0.01)
    # Coordinates are divided by their own size, so that no direction uses up the 8 bits.
    torch.testing.assert_close(subspace.encode(states()).square().mean(dim=0), torch.ones(10), rtol=0.05, atol=0)


def test_finding_a_subspace_leaves_the_random_state_alone_and_gives_the_same_twice():
    before = torch.get_rng_state()
    first, second = find_subspace(states(), 3), find_subspace(states(), 3)
    assert torch.equal(torch.get_rng_state(), before) and torch.equal(first.directions, second.directions)


def test_a_rank_that_the_sample_cannot_span_is_refused():
    with pytest.raises(ValueError, match="features_rank=6 is more than 5 sampled tokens of 72 numbers"):
        find_subspace(torch.zeros(5, 72), 6)


def test_a_folded_draft_reads_the_subspace_alone():
    draft = tiny_draft(tiny_target())
    full = states(40, 64)
    subspace = find_subspace(full, 6)
    projected = subspace.decode(subspace.encode(full))
    expected = draft.context_features(list(projected[None].split(32, dim=-1)))
    apart = draft.context_features(list(full[None].split(32, dim=-1)))
    assert (apart - expected).abs().max() > 0.01
    FoldSubspace(draft, subspace).fold()
    for given in (full, projected):
        torch.testing.assert_close(draft.context_features(list(given[None].split(32, dim=-1))), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("when", ["evaluation", "checkpoint", "end"])
def test_what_is_evaluated_or_saved_is_folded(tmp_path, when):
    strategies = {"save_strategy": "steps", "save_steps": 2, "max_steps": 3} if when == "checkpoint" else {"max_steps": 2}
    trainer = make_trainer(tmp_path, **cached(tmp_path, features_rank=8, **strategies))
    directions = trainer.feature_cache.coding.subspace.directions

    def outside(weight: torch.Tensor) -> float:
        return (weight - weight @ directions @ directions.T).norm().item() / weight.norm().item()

    assert outside(trainer.model.fc.weight) > 0.1
    if when == "evaluation":
        trainer.eval_dataset, trainer.args.eval_strategy, trainer.args.eval_steps, found = as_dataset(text_rows(4)), "steps", 1, []
        trainer.model.fc.register_forward_pre_hook(lambda module, args: found.append(outside(module.weight)) if not trainer.model.training else None)
        trainer.train()
        assert found and max(found) < 1e-5
        return
    trainer.train()
    weight = trainer.model.fc.weight if when == "end" else DSparkDraftModel.from_pretrained(tmp_path / "run" / "checkpoint-2").fc.weight
    assert outside(weight) < 1e-5


def test_an_adapter_has_no_fc_to_fold():
    draft = get_peft_model(tiny_draft(tiny_target()), LoraConfig(r=2, target_modules=["q_proj", "fc"]))
    with pytest.raises(ValueError, match=r"features_rank=3 needs fc.weight to be trained, but it is frozen"):
        FoldSubspace(draft, find_subspace(states(40, 64), 3))
