"""The Markov heads and the confidence head against equations 4 to 7, written out over plain numbers."""

import math

import pytest
import torch

from hf_dspark import DSparkConfig
from hf_dspark.modeling.heads import ConfidenceHead, MarkovHead

VOCAB, HIDDEN, RANK, BLOCK = 7, 4, 3, 5


def make_config(head_type="vanilla", **options):
    values = dict(
        vocab_size=VOCAB, hidden_size=HIDDEN, markov_rank=RANK, block_size=BLOCK, mask_token_id=0, eos_token_id=None, markov_head_type=head_type
    )
    return DSparkConfig(**{**values, **options})


def make(head_class, config, seed=0):
    """A head whose every parameter is random, the output projection too."""
    torch.manual_seed(seed)
    head = head_class(config).double()
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter)
    return head


def matrix_times(matrix, vector):
    return [sum(weight * value for weight, value in zip(row, vector)) for row in matrix]


def sigmoid(values):
    return [1 / (1 + math.exp(-value)) for value in values]


def naive_biases(head, head_type, previous_ids, hidden):
    """B_k of one block: a list of BLOCK lists of VOCAB numbers. `previous_ids` BLOCK ids, `hidden` BLOCK vectors h_k."""
    w1, w2 = head.markov_w1.weight.tolist(), head.markov_w2.weight.tolist()
    state, biases = [0.0] * RANK, []
    for token, h in zip(previous_ids, hidden):
        e = w1[token]
        if head_type == "vanilla":
            features = e
        elif head_type == "gated":
            gate = [a + b for a, b in zip(matrix_times(head.gate_proj.weight.tolist(), h + e), head.gate_proj.bias.tolist())]
            features = [g * value for g, value in zip(sigmoid(gate), e)]
        else:
            z = [a + b for a, b in zip(matrix_times(head.joint_proj.weight.tolist(), state + e + h), head.joint_proj.bias.tolist())]
            gate, candidate, output = sigmoid(z[:RANK]), z[RANK : 2 * RANK], z[2 * RANK :]
            state = [g * s + (1 - g) * math.tanh(c) for g, s, c in zip(gate, state, candidate)]
            features = [math.tanh(value) for value in output]
        biases.append(matrix_times(w2, features))
    return biases


@pytest.fixture
def block():
    """(previous ids (rows, BLOCK), hidden (rows, BLOCK, HIDDEN)) of 3 blocks."""
    generator = torch.Generator().manual_seed(5)
    return torch.randint(VOCAB, (3, BLOCK), generator=generator), torch.randn(3, BLOCK, HIDDEN, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("head_type", ["vanilla", "gated", "rnn"])
def test_whole_blocks_equal_the_equations(head_type, block):
    previous_ids, hidden = block
    head = make(MarkovHead, make_config(head_type))
    biases = head.bias(head.block_features(previous_ids, hidden))
    expected = [naive_biases(head, head_type, ids, rows) for ids, rows in zip(previous_ids.tolist(), hidden.tolist())]
    torch.testing.assert_close(biases, torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("head_type", ["vanilla", "gated", "rnn"])
def test_step_by_step_equals_the_equations(head_type, block):
    previous_ids, hidden = block[0][0], block[1][0]
    head, state = make(MarkovHead, make_config(head_type)), None
    for k, expected in enumerate(naive_biases(head, head_type, previous_ids.tolist(), hidden.tolist())):
        features, state = head.features(head.markov_w1(previous_ids[k]), hidden[k], state)
        torch.testing.assert_close(head.bias(features), torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("head_type", ["vanilla", "gated", "rnn"])
def test_gradients_of_blocks_and_steps_are_equal(head_type, block):
    previous_ids, hidden = block
    head = make(MarkovHead, make_config(head_type))

    def gradients(biases):
        return torch.autograd.grad((biases * torch.arange(1.0, VOCAB + 1)).sum(), list(head.parameters()))

    steps = []
    for ids, rows in zip(previous_ids, hidden):
        state = None
        for k in range(BLOCK):
            features, state = head.features(head.markov_w1(ids[k]), rows[k], state)
            steps.append(head.bias(features))
    torch.testing.assert_close(gradients(head.bias(head.block_features(previous_ids, hidden))), gradients(torch.stack(steps)))


def test_only_the_rnn_head_remembers(block):
    previous_ids, hidden = block
    changed = previous_ids.clone()
    changed[:, 0] = (changed[:, 0] + 1) % VOCAB
    for head_type, remembers in (("vanilla", False), ("gated", False), ("rnn", True)):
        head = make(MarkovHead, make_config(head_type))
        before, after = head.block_features(previous_ids, hidden), head.block_features(changed, hidden)
        assert not torch.equal(before[:, 0], after[:, 0])
        assert torch.equal(before[:, 1:], after[:, 1:]) is not remembers


@pytest.mark.parametrize("columns", [[0], [6, 2, 2], list(range(VOCAB))])
def test_bias_of_some_columns(columns):
    head = make(MarkovHead, make_config())
    features = torch.randn(RANK, dtype=torch.float64)
    torch.testing.assert_close(head.bias(features, torch.tensor(columns)), head.bias(features)[columns])


def test_reduced_vocabulary_reads_target_ids_and_writes_draft_ids():
    head = make(MarkovHead, make_config(draft_vocab_size=4))
    assert head.markov_w1.weight.shape == (VOCAB, RANK)
    assert head.markov_w2.weight.shape == (4, RANK)
    assert head.bias(head.markov_w1(torch.tensor(6))).shape == (4,)


@pytest.mark.parametrize(
    ("head_type", "shapes"),
    [
        ("vanilla", {}),
        ("gated", {"gate_proj.weight": (RANK, HIDDEN + RANK), "gate_proj.bias": (RANK,)}),
        ("rnn", {"joint_proj.weight": (3 * RANK, 2 * RANK + HIDDEN), "joint_proj.bias": (3 * RANK,)}),
    ],
)
def test_names_and_shapes_are_those_of_the_reference_checkpoints(head_type, shapes):
    found = {name: tuple(value.shape) for name, value in MarkovHead(make_config(head_type)).state_dict().items()}
    assert found == {"markov_w1.weight": (VOCAB, RANK), "markov_w2.weight": (VOCAB, RANK), **shapes}


@pytest.mark.parametrize("with_markov", [True, False])
def test_confidence_is_linear_in_hidden_then_embedding(with_markov):
    head = make(ConfidenceHead, make_config(confidence_head_with_markov=with_markov))
    hidden, embedding = torch.randn(2, BLOCK, HIDDEN, dtype=torch.float64), torch.randn(2, BLOCK, RANK, dtype=torch.float64)
    weight, bias = head.proj.weight[0].tolist(), head.proj.bias.item()
    assert len(weight) == HIDDEN + (RANK if with_markov else 0)
    logits = head(hidden, embedding if with_markov else None)
    assert logits.shape == (2, BLOCK)
    for row in range(2):
        for k in range(BLOCK):
            inputs = hidden[row, k].tolist() + (embedding[row, k].tolist() if with_markov else [])
            assert logits[row, k].item() == pytest.approx(bias + sum(w * value for w, value in zip(weight, inputs)))


def test_confidence_without_markov_features_ignores_the_embedding():
    head = make(ConfidenceHead, make_config(confidence_head_with_markov=False))
    hidden = torch.randn(3, HIDDEN, dtype=torch.float64)
    assert torch.equal(head(hidden, None), head(hidden, torch.full((3, RANK), math.nan, dtype=torch.float64)))
