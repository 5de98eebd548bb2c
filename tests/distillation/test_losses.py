"""The loss terms against the reference implementation's values, a naive twin with its gradients, and hand computation."""

import dataclasses
import json
import math

import pytest
import torch
from oracle import VOCAB, tiny_draft, tiny_target
from reference import naive_loss
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from hf_dspark.distillation.blocks import Blocks, block_hidden_states, eligible_anchors, make_blocks, pad_anchors
from hf_dspark.distillation.features import target_features
from hf_dspark.distillation.losses import LossWeights, Normalisers, _law_losses, decay_weights, dspark_loss, expected_tokens_per_round, normalisers
from hf_dspark.distillation.teacher import TeacherLaw
from hf_dspark.modeling import DSparkDraftModel

DRAFTS = {
    "vanilla": {},
    "gated": {"markov_head_type": "gated"},
    "rnn": {"markov_head_type": "rnn"},
    "confidence without Markov features": {"confidence_head_with_markov": False},
    "no confidence head": {"enable_confidence_head": False},
    "rank 0": {"markov_rank": 0, "confidence_head_with_markov": False},
    "rank 0, no confidence head": {"markov_rank": 0, "enable_confidence_head": False},
    "reduced vocabulary": {"draft_vocab_size": 20},
    "reduced vocabulary, rnn": {"draft_vocab_size": 20, "markov_head_type": "rnn"},
}


def training_batch(**options):
    """A random pair and two sequences of 14 tokens with gaps in their masks, one block missing."""
    target = tiny_target().requires_grad_(False)
    draft = tiny_draft(target, **options).bind(target)
    generator = torch.Generator().manual_seed(0)
    if draft.markov_head is not None:
        torch.nn.init.normal_(draft.markov_head.markov_w2.weight, generator=generator)
    if draft.config.draft_vocab_size is not None:
        kept = torch.randperm(VOCAB, generator=generator)[: draft.config.draft_vocab_size].sort().values
        draft.d2t.copy_(kept - torch.arange(len(kept)))
    ids = torch.randint(VOCAB - 1, (2, 14), generator=generator)
    mask = torch.ones(2, 14)
    mask[0, 6] = mask[1, 11] = 0
    blocks = make_blocks(ids, mask, torch.tensor([[0, 3, 9], [2, 12, -1]]), draft.config.block_size, draft.config.mask_token_id)
    return target, draft, blocks, target_features(target, ids, None, draft.config.target_layer_ids)


@pytest.mark.parametrize("chunk_values", [2**24, 2**12])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["dspark_vanilla", "dflash"])
def test_terms_equal_the_reference_values(deepspec_fixtures, name, implementation, chunk_values):
    folder = deepspec_fixtures / name
    values, expected = load_file(folder / "expected.safetensors"), json.loads((folder / "expected.json").read_text())
    target = AutoModelForCausalLM.from_pretrained(deepspec_fixtures / "target_qwen3", dtype=torch.float32)
    draft = DSparkDraftModel.from_pretrained(folder, dtype=torch.float32, attn_implementation=implementation).bind(target)
    features = target_features(target, values["train.input_ids"], None, draft.config.target_layer_ids)
    torch.testing.assert_close(torch.cat(features.hidden_states, dim=-1), values["train.context_features"], rtol=0, atol=1e-5)
    torch.testing.assert_close(features.last_hidden, values["train.target_last_hidden"], rtol=0, atol=1e-5)
    blocks = make_blocks(values["train.input_ids"], values["train.loss_mask"], values["train.anchor_positions"], 7, draft.config.mask_token_id)
    hidden = block_hidden_states(draft, features.hidden_states, blocks)
    for gamma in (4.0, None):
        terms = dspark_loss(draft, hidden, features.last_hidden, blocks, LossWeights(decay_gamma=gamma), chunk_values)
        found = {"ce": terms.ce, "l1": terms.l1, "confidence": terms.confidence, "total_0.1_0.9_1.0": terms.total}
        keys = [key for key in expected["loss"] if key.endswith(f"@gamma={gamma}")]
        assert len(keys) == (4 if name == "dspark_vanilla" else 2)
        for key in keys:
            assert found[key.split("@")[0]].item() == pytest.approx(expected["loss"][key], abs=1e-5)
    per_anchor = torch.tensor(expected["expected_tokens_per_round_per_anchor"])
    assert terms.tokens_per_round.item() == pytest.approx(per_anchor.mean().item(), abs=1e-5)
    found = [
        expected_tokens_per_round(values["train.accept_rate"][i : i + 1, j : j + 1], blocks.slot_mask[i : i + 1, j : j + 1])
        for i in range(3)
        for j in range(6)
    ]
    torch.testing.assert_close(torch.stack(found).view(3, 6), per_anchor, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["dspark_vanilla", "dflash"])
def test_slots_equal_the_reference_values(deepspec_fixtures, name):
    values = load_file(deepspec_fixtures / name / "expected.safetensors")
    target = AutoModelForCausalLM.from_pretrained(deepspec_fixtures / "target_qwen3", dtype=torch.float32)
    draft = DSparkDraftModel.from_pretrained(deepspec_fixtures / name, dtype=torch.float32).bind(target)
    features = target_features(target, values["train.input_ids"], None, draft.config.target_layer_ids)
    blocks = make_blocks(values["train.input_ids"], values["train.loss_mask"], values["train.anchor_positions"], 7, draft.config.mask_token_id)
    hidden, counted = block_hidden_states(draft, features.hidden_states, blocks), values["train.eval_mask"].bool()
    logits = draft.base_logits(hidden)
    if draft.markov_head is not None:
        logits = logits + draft.markov_head.bias(draft.markov_head.block_features(blocks.previous_ids, hidden))
        confidence = draft.confidence_head(hidden, draft.markov_head.markov_w1(blocks.previous_ids))
        torch.testing.assert_close(confidence[counted], values["train.confidence_logits"][counted], rtol=0, atol=1e-5)
    torch.testing.assert_close(logits[counted], values["train.draft_logits"][counted], rtol=0, atol=1e-5)
    teacher = torch.stack([features.last_hidden[b, position] for b, positions in enumerate(blocks.positions) for position in positions[counted[b]]])
    torch.testing.assert_close(target.lm_head(teacher), values["train.target_logits"][counted], rtol=0, atol=1e-5)
    terms = dspark_loss(draft, hidden, features.last_hidden, blocks, LossWeights())
    torch.testing.assert_close(terms.slot_acceptance[counted], values["train.accept_rate"][counted], rtol=0, atol=1e-5)


@pytest.mark.parametrize("chunk_values", [2**24, 3 * VOCAB])
@pytest.mark.parametrize("weights", [LossWeights(), LossWeights(ce=0.5, l1=0.3, confidence=2.0, decay_gamma=None)])
@pytest.mark.parametrize("options", DRAFTS.values(), ids=DRAFTS.keys())
def test_terms_and_gradients_equal_the_naive_twin(options, weights, chunk_values):
    target, draft, blocks, features = training_batch(**options)
    gradients = []
    for naive in (False, True):
        draft.zero_grad()
        hidden = block_hidden_states(draft, features.hidden_states, blocks)
        if naive:
            expected = naive_loss(draft, target, hidden, features.last_hidden, blocks, weights)
            expected["total"].backward()
        else:
            terms = dspark_loss(draft, hidden, features.last_hidden, blocks, weights, chunk_values)
            terms.total.backward()
        gradients.append({name: parameter.grad.clone() for name, parameter in draft.named_parameters()})
    for name in ("total", "ce", "l1", "confidence"):
        if name in expected:
            torch.testing.assert_close(getattr(terms, name), expected[name], rtol=1e-5, atol=1e-5)
        else:
            assert name == "confidence" and terms.confidence is None
    scale = max(gradient.abs().max() for gradient in gradients[1].values())
    for name, gradient in gradients[1].items():
        torch.testing.assert_close(gradients[0][name], gradient, rtol=1e-4, atol=1e-5 * max(1.0, scale.item()), msg=lambda m, n=name: f"{n}: {m}")


def test_no_tensor_over_all_rows_and_the_vocabulary_is_made():
    _, draft, blocks, features = training_batch()
    hidden = block_hidden_states(draft, features.hidden_states, blocks)
    num_rows = blocks.slot_mask.sum().item()
    widest = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            output = function(*args, **(kwargs or {}))
            if isinstance(output, torch.Tensor) and output.dim() == 2 and output.shape[1] == VOCAB:
                widest.append(output.shape[0])
            return output

    with Watch():
        dspark_loss(draft, hidden, features.last_hidden, blocks, LossWeights(), chunk_values=3 * VOCAB).total.backward()
    # Transposed weights of the heads, (hidden 32 or rank 4, vocab), pass by too.
    assert num_rows == 15 and set(widest) == {3, 4, 32}


def test_without_a_supervised_slot_loss_and_gradients_are_zero():
    _, draft, blocks, features = training_batch()
    blocks.slot_mask = torch.zeros_like(blocks.slot_mask)
    terms = dspark_loss(draft, block_hidden_states(draft, features.hidden_states, blocks), features.last_hidden, blocks, LossWeights())
    terms.total.backward()
    assert terms.total.item() == 0 and terms.tokens_per_round.item() == 0
    assert all(parameter.grad is None or not parameter.grad.any() for parameter in draft.parameters())


def part_of(blocks: Blocks, rows: slice) -> Blocks:
    return Blocks(**{field.name: getattr(blocks, field.name)[rows] for field in dataclasses.fields(blocks)})


def gradients_of(draft) -> dict[str, torch.Tensor]:
    found = {name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone() for name, parameter in draft.named_parameters()}
    draft.zero_grad()
    return found


@pytest.mark.parametrize("options", DRAFTS.values(), ids=DRAFTS.keys())
def test_shares_of_a_batch_cut_in_two_add_up_to_the_whole(options):
    _, draft, blocks, features = training_batch(**options)
    hidden = block_hidden_states(draft, features.hidden_states, blocks)
    expected = dspark_loss(draft, hidden, features.last_hidden, blocks, LossWeights())
    expected.total.backward(retain_graph=True)
    expected_gradients = gradients_of(draft)
    rows = [slice(0, 1), slice(1, 2)]
    counts = [normalisers(draft, part_of(blocks, row), LossWeights()) for row in rows]
    totals = Normalisers(*(first + second for first, second in zip(*counts)))
    assert counts[0].slots != counts[1].slots
    shares = [dspark_loss(draft, hidden[row], features.last_hidden[row], part_of(blocks, row), LossWeights(), totals=totals) for row in rows]
    (shares[0].total + shares[1].total).backward()
    for name in ("total", "ce", "l1", "confidence", "tokens_per_round"):
        if getattr(expected, name) is not None:
            torch.testing.assert_close(sum(getattr(share, name) for share in shares), getattr(expected, name), rtol=1e-5, atol=1e-6)
    for name, gradient in gradients_of(draft).items():
        torch.testing.assert_close(gradient, expected_gradients[name], rtol=1e-5, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_keeps_the_gradients_of_a_step_of_many_slots(dtype):
    """A slot of millions weighs less than the smallest number of float16; the loss is scaled up afterwards alone, as by a GradScaler."""
    _, draft, blocks, features = training_batch()
    totals = Normalisers(*(2e6 * value for value in normalisers(draft, blocks, LossWeights())))
    gradients = []
    for enabled in (False, True):
        hidden = block_hidden_states(draft, features.hidden_states, blocks)
        with torch.autocast("cpu", dtype, enabled=enabled):
            terms = dspark_loss(draft, hidden, features.last_hidden, blocks, LossWeights(), totals=totals)
        (2**16 * terms.total).backward()
        gradients.append(gradients_of(draft))
    for name, gradient in gradients[0].items():
        assert (gradients[1][name] - gradient).norm() <= 0.05 * gradient.norm(), name


def test_normalisers_by_hand():
    _, draft, blocks, _ = training_batch(draft_vocab_size=20)
    blocks.slot_mask = torch.zeros(2, 3, 4, dtype=torch.bool)
    blocks.slot_mask[0, 0, :3] = blocks.slot_mask[1, 1, :1] = True
    kept = draft.target_ids(torch.arange(20))
    outside = next(i for i in range(VOCAB) if i not in kept)
    blocks.labels[0, 0, :3] = torch.tensor([kept[0], outside, kept[19]])
    blocks.labels[1, 1, 0] = outside
    found = normalisers(draft, blocks, LossWeights(decay_gamma=2.0))
    assert found.ce.item() == pytest.approx(1 + math.exp(-1.0))
    assert found.slots.item() == pytest.approx(2 + math.exp(-0.5) + math.exp(-1.0))
    assert found.anchors.item() == 2


@pytest.mark.parametrize("options", [{}, {"markov_head_type": "rnn"}, {"draft_vocab_size": 20}], ids=["vanilla", "rnn", "reduced vocabulary"])
def test_packed_documents_give_the_losses_and_gradients_of_a_batch_of_them(options):
    target, draft, _, _ = training_batch(**options)
    generator = torch.Generator().manual_seed(3)
    lengths = [6, 11, 5]
    starts = torch.tensor([0, 6, 17])
    ids, mask = torch.randint(VOCAB - 1, (1, 22), generator=generator), torch.rand(1, 22, generator=generator) < 0.8
    mask[0, :3] = mask[0, 8:12] = True
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    anchors = [eligible_anchors(mask[0, start : start + length]) for start, length in zip(starts, lengths)]
    config = draft.config
    packed = make_blocks(
        ids, mask, torch.cat([part + start for part, start in zip(anchors, starts)])[None], config.block_size, config.mask_token_id, positions
    )
    apart_ids, apart_mask = (
        torch.nn.utils.rnn.pad_sequence([row[0, start : start + length] for start, length in zip(starts, lengths)], batch_first=True)
        for row in (ids, mask)
    )
    apart = make_blocks(apart_ids, apart_mask, pad_anchors(anchors), config.block_size, config.mask_token_id)
    attention = torch.arange(11) < torch.tensor(lengths)[:, None]
    results = []
    for blocks, features in (
        (packed, target_features(target, ids, None, config.target_layer_ids, positions)),
        (apart, target_features(target, apart_ids, attention, config.target_layer_ids)),
    ):
        terms = dspark_loss(draft, block_hidden_states(draft, features.hidden_states, blocks), features.last_hidden, blocks, LossWeights())
        terms.total.backward()
        results.append((terms, gradients_of(draft)))
    (terms, gradients), (expected, expected_gradients) = results
    assert packed.slot_mask.sum() == apart.slot_mask.sum() > 10
    for name in ("total", "ce", "l1", "confidence", "tokens_per_round"):
        torch.testing.assert_close(getattr(terms, name), getattr(expected, name), rtol=1e-5, atol=1e-5)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected_gradients[name], rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def test_the_confidence_target_and_the_teacher_pass_no_gradient():
    target, draft, blocks, features = training_batch()
    last_hidden = features.last_hidden.clone().requires_grad_()
    hidden = block_hidden_states(draft, features.hidden_states, blocks)
    terms = dspark_loss(draft, hidden, last_hidden, blocks, LossWeights(ce=0.0, l1=0.0, confidence=1.0))
    terms.total.backward()
    assert last_hidden.grad is None
    # The Markov head's W2 reaches the confidence term only through its target.
    assert not draft.markov_head.markov_w2.weight.grad.any()
    assert draft.confidence_head.proj.weight.grad.any()
    assert all(parameter.grad is None for parameter in target.parameters())


def test_reduced_vocabulary_counts_the_mass_it_can_not_reach():
    target, draft, _, _ = training_batch(draft_vocab_size=2, markov_rank=0, enable_confidence_head=False)
    draft.d2t.copy_(torch.tensor([5, 8]))  # the target's tokens 5 and 9
    with torch.no_grad():
        draft.lm_head.weight.zero_()
        target.lm_head.weight.zero_()
    with torch.no_grad():
        hidden = torch.randn(1, 1, 32)
        teacher = TeacherLaw(draft, hidden, torch.tensor([0]), torch.tensor([0])).probabilities(slice(0, 1))
        (ce, l1), _ = _law_losses(draft.base_logits(hidden[0]), teacher, torch.tensor([1]), is_reduced=True)
    assert ce.item() == pytest.approx(math.log(2))
    # Draft 1/2 on two tokens, target 1/64 on each of 64.
    assert l1.item() == pytest.approx(2 * (1 / 2 - 1 / 64) + 62 / 64)


def test_weights_and_tokens_per_round_by_hand():
    torch.testing.assert_close(decay_weights(3, 2.0), torch.tensor([1.0, math.exp(-0.5), math.exp(-1.0)]))
    assert decay_weights(3, None).tolist() == [1, 1, 1]
    acceptance = torch.tensor([[[0.5, 0.5, 1.0], [1.0, 0.8, 0.9], [0.9, 0.9, 0.9]]])
    mask = torch.tensor([[[True, True, True], [True, False, False], [False, False, False]]])
    # 1 + 1/2 + 1/4 + 1/4 = 2 and 1 + 1 = 2; the third block has no slot that counts.
    assert expected_tokens_per_round(acceptance, mask).item() == pytest.approx(2.0)
