"""Anchors, block contents, and who may see whom: by hand, by a naive twin, by gradients, and against cached decoding."""

import pytest
import torch
from oracle import VOCAB, tiny_draft, tiny_target
from reference import naive_blocks
from safetensors.torch import load_file

from hf_dspark.distillation.blocks import (
    block_attention_mask,
    block_hidden_states,
    eligible_anchors,
    make_blocks,
    pad_anchors,
    sample_anchors,
)
from hf_dspark.distillation.features import target_features
from hf_dspark.modeling.context_cache import ContextCache

MASK_ID = VOCAB - 1


def pair(implementation: str = "sdpa", **options):
    target = tiny_target().requires_grad_(False)
    draft = tiny_draft(target, **options)
    draft.set_attn_implementation(implementation)
    if draft.markov_head is not None:
        torch.nn.init.normal_(draft.markov_head.markov_w2.weight)
    return target, draft.bind(target)


def draw(loss_mask: torch.Tensor, num_anchors: int, generator: torch.Generator | None = None) -> torch.Tensor:
    return pad_anchors([sample_anchors(row, num_anchors, generator) for row in loss_mask])


def test_isolated_supervised_tokens_give_no_anchors():
    assert eligible_anchors(torch.tensor([1, 0, 1, 0, 0, 1])).tolist() == []
    assert eligible_anchors(torch.tensor([1, 1, 0, 1, 1, 1])).tolist() == [0, 3, 4]
    assert eligible_anchors(torch.tensor([1])).tolist() == []
    assert draw(torch.tensor([[1, 0, 1], [0, 0, 0]]), 4).tolist() == [[-1], [-1]]


def test_anchors_are_drawn_in_order_without_repeats_and_repeatably():
    mask = torch.ones(50)
    mask[20] = 0
    draws = [sample_anchors(mask, 8, torch.Generator().manual_seed(seed)).tolist() for seed in range(100)]
    assert all(draw == sorted(set(draw)) and len(draw) == 8 for draw in draws)
    assert {anchor for draw in draws for anchor in draw} == set(range(49)) - {19, 20}
    assert draws[3] == sample_anchors(mask, 8, torch.Generator().manual_seed(3)).tolist()
    assert len({tuple(draw) for draw in draws}) == 100


def test_fewer_eligible_positions_than_anchors_give_them_all_padded():
    anchors = draw(torch.tensor([[1, 1, 1, 0], [0, 1, 1, 0]]), 5)
    assert anchors.tolist() == [[0, 1], [1, -1]]


def test_a_block_by_hand():
    blocks = make_blocks(torch.tensor([[10, 11, 12, 13, 14, 15]]), torch.tensor([[1, 1, 1, 1, 0, 1]]), torch.tensor([[1, 4, -1]]), 3, MASK_ID)
    assert blocks.block_ids[0].tolist()[:2] == [[11, MASK_ID, MASK_ID], [14, MASK_ID, MASK_ID]]
    assert blocks.positions[0, 0].tolist() == [1, 2, 3]
    assert blocks.previous_ids[0, 0].tolist() == [11, 12, 13]
    assert blocks.labels[0, 0].tolist() == [12, 13, 14]
    # Slot 2 predicts an unsupervised token; in the second block slot 1 lies outside the sequence; the third block is none.
    assert blocks.slot_mask[0].tolist() == [[True, True, False], [True, False, False], [False, False, False]]


def test_blocks_equal_the_naive_ones():
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        ids = torch.randint(VOCAB - 1, (2, 17), generator=generator)
        mask = torch.rand(2, 17, generator=generator) < 0.8
        anchors = draw(mask, 6, generator)
        blocks = make_blocks(ids, mask, anchors, 5, MASK_ID)
        for row in range(2):
            for column, anchor in enumerate(anchors[row].tolist()):
                counted = blocks.slot_mask[row, column].tolist()
                if anchor == -1:
                    assert not any(counted)
                    continue
                previous, labels, expected = naive_blocks(ids[row].tolist(), mask[row].tolist(), anchor, 5)
                assert counted == expected
                num = sum(expected)
                assert blocks.previous_ids[row, column, :num].tolist() == previous[:num]
                assert blocks.labels[row, column, :num].tolist() == labels[:num]


def test_slots_and_labels_equal_the_reference_values(deepspec_fixtures):
    values = load_file(deepspec_fixtures / "dspark_vanilla" / "expected.safetensors")
    blocks = make_blocks(values["train.input_ids"], values["train.loss_mask"], values["train.anchor_positions"], 7, 3)
    counted = values["train.eval_mask"].bool()
    assert torch.equal(blocks.slot_mask, counted)
    assert torch.equal(blocks.labels[counted], values["train.target_ids"][counted])


def test_mask_by_hand():
    anchors, starts = torch.tensor([[1, 3, -1]]), torch.tensor([[0, 0, 0]])
    mask = block_attention_mask(anchors, starts, num_tokens=4, block_size=2)[0, 0].int().tolist()
    assert mask == [
        [1, 0, 0, 0, 1, 1, 0, 0, 0, 0],
        [1, 0, 0, 0, 1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0, 1, 1, 0, 0],
        [1, 1, 1, 0, 0, 0, 1, 1, 0, 0],
        [0, 0, 0, 0, 0, 0, 0, 0, 1, 1],
        [0, 0, 0, 0, 0, 0, 0, 0, 1, 1],
    ]


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_no_block_sees_another_or_anything_from_its_anchor_on(implementation, monkeypatch):
    _, draft = pair(implementation)
    anchors = torch.tensor([[0, 2, 5, 6, 9]])
    ids = torch.randint(VOCAB - 1, (1, 12), generator=torch.Generator().manual_seed(0))
    blocks = make_blocks(ids, torch.ones(1, 12), anchors, 4, MASK_ID)
    layers = [torch.randn(1, 12, draft.config.hidden_size, requires_grad=True) for _ in draft.config.target_layer_ids]
    embedded = draft.tables.embed(blocks.block_ids.flatten(1)).detach().requires_grad_()
    monkeypatch.setattr(type(draft.tables), "embed", lambda self, ids: embedded)
    hidden = block_hidden_states(draft, layers, blocks)
    for i, anchor in enumerate(anchors[0].tolist()):
        for k in range(4):
            *by_layer, by_row = torch.autograd.grad(draft.base_logits(hidden[0, i, k]).square().sum(), [*layers, embedded], retain_graph=True)
            for gradient in by_layer:
                seen = gradient[0].abs().sum(-1) > 0
                assert seen.tolist() == [position < anchor for position in range(12)]
            rows = (by_row[0].abs().sum(-1) > 0).view(5, 4)
            assert rows.tolist() == [[j == i] * 4 for j in range(5)]


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_missing_anchors_are_finite_and_change_nothing(implementation):
    target, draft = pair(implementation)
    ids = torch.randint(VOCAB - 1, (1, 12), generator=torch.Generator().manual_seed(0))
    layers = target_features(target, ids, None, draft.config.target_layer_ids).hidden_states
    alone = make_blocks(ids, torch.ones(1, 12), torch.tensor([[3, 7]]), 4, MASK_ID)
    padded = make_blocks(ids, torch.ones(1, 12), torch.tensor([[3, 7, -1, -1]]), 4, MASK_ID)
    expected, hidden = block_hidden_states(draft, layers, alone), block_hidden_states(draft, layers, padded)
    assert torch.isfinite(hidden).all()
    torch.testing.assert_close(hidden[:, :2], expected, rtol=1e-5, atol=1e-5)
    hidden[padded.slot_mask].sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in draft.parameters() if p.grad is not None)


def test_padded_batch_gives_what_its_sequences_give_alone():
    target, draft = pair()
    generator = torch.Generator().manual_seed(1)
    long, short = torch.randint(VOCAB - 1, (1, 14), generator=generator), torch.randint(VOCAB - 1, (1, 9), generator=generator)
    ids = torch.cat([long, torch.nn.functional.pad(short, (0, 5))])
    attention = torch.ones(2, 14, dtype=torch.bool)
    attention[1, 9:] = False
    anchors = torch.tensor([[4, 9], [2, 6]])
    layers = target_features(target, ids, attention, draft.config.target_layer_ids).hidden_states
    together = block_hidden_states(draft, layers, make_blocks(ids, attention, anchors, 4, MASK_ID))
    alone = make_blocks(short, torch.ones(1, 9), anchors[1:], 4, MASK_ID)
    expected = block_hidden_states(draft, target_features(target, short, None, draft.config.target_layer_ids).hidden_states, alone)
    torch.testing.assert_close(together[1:], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_training_forward_and_cached_decoding_give_the_same_logits(implementation):
    target, draft = pair(implementation, markov_head_type="rnn")
    ids = torch.randint(VOCAB - 1, (1, 16), generator=torch.Generator().manual_seed(2))
    features = target_features(target, ids, None, draft.config.target_layer_ids)
    anchors = [1, 4, 9, 11]
    blocks = make_blocks(ids, torch.ones(1, 16), torch.tensor([anchors]), 4, MASK_ID)
    hidden = block_hidden_states(draft, features.hidden_states, blocks)
    bias = draft.markov_head.bias(draft.markov_head.block_features(blocks.previous_ids, hidden))
    trained = draft.base_logits(hidden) + bias

    cache, seen = ContextCache(draft.config.num_hidden_layers), 0
    for i, anchor in enumerate(anchors):
        # As in decoding: only the tokens since the last round are new, and the block is dropped afterwards.
        prefix = target_features(target, ids[:, :anchor], None, draft.config.target_layer_ids).hidden_states
        new = draft.context_features([layer[:, seen:] for layer in prefix])
        block = torch.full((1, 4), MASK_ID)
        block[0, 0] = ids[0, anchor]
        decoded = draft(block, new, torch.arange(seen, anchor + 4)[None], cache=cache)[0]
        cache.advance(anchor - seen)
        seen, state = anchor, None
        for k in range(4):
            feature, state = draft.markov_head.features(draft.markov_head.markov_w1(ids[0, anchor + k]), decoded[k], state)
            logits = draft.base_logits(decoded[k]) + draft.markov_head.bias(feature)
            torch.testing.assert_close(trained[0, i, k], logits, rtol=1e-4, atol=1e-4)


# Packing

LENGTHS = [6, 1, 9, 4]
POSITIONS = torch.cat([torch.arange(length) for length in LENGTHS])[None]


def test_blocks_and_anchors_end_with_their_document():
    positions = torch.tensor([[0, 1, 2, 0, 0, 1, 2]])
    assert eligible_anchors(torch.ones(7), positions[0]).tolist() == [0, 1, 4, 5]
    assert sample_anchors(torch.ones(7), 9, position_ids=positions[0]).tolist() == [0, 1, 4, 5]
    blocks = make_blocks(torch.arange(7)[None], torch.ones(1, 7), torch.tensor([[0, 1, 4, -1]]), 3, MASK_ID, positions)
    assert blocks.slot_mask[0].int().tolist() == [[1, 1, 0], [1, 0, 0], [1, 1, 0], [0, 0, 0]]
    assert blocks.document_starts.tolist() == [[0, 0, 4, 0]]
    context = block_attention_mask(torch.tensor([[1, 3, 6]]), torch.tensor([[0, 3, 4]]), num_tokens=7, block_size=1)[0, 0, :, :7]
    assert context.int().tolist() == [[1, 0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 1, 1, 0]]


@pytest.mark.parametrize("loss_share", [1.0, 0.7])
def test_packed_blocks_are_those_of_the_documents_alone(loss_share):
    generator = torch.Generator().manual_seed(0)
    for _ in range(10):
        ids = torch.randint(VOCAB - 1, (1, sum(LENGTHS)), generator=generator)
        mask = torch.rand(1, sum(LENGTHS), generator=generator) < loss_share
        anchors = pad_anchors([sample_anchors(mask[0], 30, generator, POSITIONS[0])])
        blocks = make_blocks(ids, mask, anchors, 5, MASK_ID, POSITIONS)
        found = []
        for start, length in zip([0, 6, 7, 16], LENGTHS):
            part = slice(start, start + length)
            alone = eligible_anchors(mask[0, part])
            found += (alone + start).tolist()
            for anchor in alone.tolist():
                column = anchors[0].tolist().index(anchor + start)
                previous, labels, counted = naive_blocks(ids[0, part].tolist(), mask[0, part].tolist(), anchor, 5)
                assert blocks.slot_mask[0, column].tolist() == counted
                assert blocks.previous_ids[0, column, : sum(counted)].tolist() == previous[: sum(counted)]
                assert blocks.labels[0, column, : sum(counted)].tolist() == labels[: sum(counted)]
        assert anchors[anchors >= 0].tolist() == found


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_no_packed_block_sees_another_document(implementation):
    _, draft = pair(implementation)
    anchors = torch.tensor([[3, 7, 9, 15, 18]])
    ids = torch.randint(VOCAB - 1, (1, 20), generator=torch.Generator().manual_seed(0))
    blocks = make_blocks(ids, torch.ones(1, 20), anchors, 4, MASK_ID, POSITIONS)
    layers = [torch.randn(1, 20, draft.config.hidden_size, requires_grad=True) for _ in draft.config.target_layer_ids]
    hidden = block_hidden_states(draft, layers, blocks)
    for i, (start, anchor) in enumerate(zip([0, 7, 7, 7, 16], anchors[0].tolist())):
        for by_layer in torch.autograd.grad(draft.base_logits(hidden[0, i]).square().sum(), layers, retain_graph=True):
            seen = by_layer[0].abs().sum(-1) > 0
            assert seen.tolist() == [start <= position < anchor for position in range(20)]


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_packed_documents_get_what_they_get_alone(implementation):
    target, draft = pair(implementation)
    target.set_attn_implementation(implementation)
    ids = torch.randint(VOCAB - 1, (1, 20), generator=torch.Generator().manual_seed(1))
    layer_ids = draft.config.target_layer_ids
    anchors = {0: [0, 4], 7: [7, 8, 12], 16: [17]}
    packed = make_blocks(ids, torch.ones(1, 20), torch.tensor([[0, 4, 7, 8, 12, 17]]), 4, MASK_ID, POSITIONS)
    together = block_hidden_states(draft, target_features(target, ids, None, layer_ids, POSITIONS).hidden_states, packed)
    column = 0
    for start, length in zip([0, 7, 16], [6, 9, 4]):
        part = ids[:, start : start + length]
        alone = make_blocks(part, torch.ones(1, length), torch.tensor([anchors[start]]) - start, 4, MASK_ID)
        expected = block_hidden_states(draft, target_features(target, part, None, layer_ids).hidden_states, alone)
        found = together[:, column : column + len(anchors[start])]
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        column += len(anchors[start])


def test_other_attention_implementations_are_refused():
    target, draft = pair()
    ids = torch.zeros(1, 6, dtype=torch.long)
    layers = target_features(target, ids, None, draft.config.target_layer_ids).hidden_states
    draft.config._attn_implementation = "flex_attention"
    with pytest.raises(ValueError, match="'sdpa' or 'eager', got 'flex_attention'"):
        block_hidden_states(draft, layers, make_blocks(ids, torch.ones(1, 6), torch.tensor([[1]]), 4, MASK_ID))
