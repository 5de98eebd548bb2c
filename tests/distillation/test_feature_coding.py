"""Bytes and precision of stored features."""

import pytest
import torch

from hf_dspark.distillation.feature_coding import FeatureCoding, bytes_per_token, stored_tensors
from hf_dspark.distillation.features import TargetFeatures
from hf_dspark.distillation.subspace import find_subspace

HIDDEN, LAYERS = 24, 3


def features(shape=(2, 7), hidden: int = HIDDEN, dtype=torch.float32) -> TargetFeatures:
    generator = torch.Generator().manual_seed(0)
    # Layers of very different sizes, as targets have.
    states = [scale * torch.randn(*shape, hidden, generator=generator) for scale in (0.1, 1.0, 300.0)]
    return TargetFeatures([layer.to(dtype) for layer in states], torch.randn(*shape, hidden, generator=generator).to(dtype), None)


def decoded(coding: FeatureCoding, dtype=torch.float32) -> list[torch.Tensor]:
    found = coding.decode(coding.encode(features()), dtype)
    assert found.last_logits is None and {part.dtype for part in [*found.hidden_states, found.last_hidden]} == {dtype}
    return [*found.hidden_states, found.last_hidden]


# Qwen3-4B: hidden 2560, K = 5. The reference stores 6 vectors in bf16 (the paper's 38 TB).
@pytest.mark.parametrize(
    "dtype, rank, expected",
    [
        ("bfloat16", None, 30_720),  # 6 * 2560 * 2
        ("float32", None, 61_440),  # 6 * 2560 * 4
        ("int8", None, 15_384),  # 6 * (2560 + 4)
        ("int8", 2560, 5_128),  # 2 * (2560 + 4): a sixth
        ("bfloat16", 2560, 10_240),  # 2 * 2560 * 2
        ("int8", 1280, 3_848),  # 1280 + 4 + 2560 + 4
    ],
)
def test_bytes_of_a_token_of_qwen3_4b(dtype, rank, expected):
    assert bytes_per_token(2560, 5, dtype, rank) == expected
    assert bytes_per_token(2560, 5, dtype, rank, with_partition=True) == expected + 4


def partition(last_hidden: torch.Tensor) -> torch.Tensor:
    return last_hidden.float().logsumexp(dim=-1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("rank", [None, 5])
@pytest.mark.parametrize("partition", [None, partition], ids=["", "partition"])
def test_what_is_stored_is_what_was_counted(dtype, rank, partition):
    subspace = None if rank is None else find_subspace(torch.cat(features((2, 40)).hidden_states, dim=-1).flatten(0, 1), rank)
    encoded, shape = FeatureCoding(LAYERS, dtype, subspace, partition).encode(features()), (HIDDEN, LAYERS, dtype, rank, partition is not None)
    assert {name: (values.dtype, tuple(values.shape[2:])) for name, values in encoded.items()} == stored_tensors(*shape)
    assert sum(values.nbytes for values in encoded.values()) == 14 * bytes_per_token(*shape)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_the_log_partition_is_that_of_the_last_hidden_state_as_it_will_be_read(dtype):
    coding = FeatureCoding(LAYERS, dtype, None, partition)
    found = coding.decode(coding.encode(features()), torch.float32)
    assert found.log_partition.dtype == torch.float32 and torch.equal(found.log_partition, partition(found.last_hidden))
    assert torch.equal(found.log_partition, partition(features().last_hidden)) == (dtype == "float32")
    assert coding.decode(FeatureCoding(LAYERS, dtype).encode(features()), torch.float32).log_partition is None


def test_float32_is_exact_and_bfloat16_rounds_once():
    expected = [*features().hidden_states, features().last_hidden]
    assert all(map(torch.equal, decoded(FeatureCoding(LAYERS, "float32")), expected))
    assert all(map(torch.equal, decoded(FeatureCoding(LAYERS, "bfloat16")), [part.bfloat16().float() for part in expected]))


def test_8_bits_are_wrong_by_half_a_step_of_each_vector_at_most():
    for found, expected in zip(decoded(FeatureCoding(LAYERS, "int8")), [*features().hidden_states, features().last_hidden]):
        step = expected.abs().amax(dim=-1, keepdim=True) / 127
        assert ((found - expected).abs() <= 0.5001 * step).all()


def test_a_zero_vector_stays_zero_in_8_bits():
    zeros = torch.zeros(1, 2, HIDDEN)
    coding = FeatureCoding(1, "int8")
    assert torch.equal(coding.decode(coding.encode(TargetFeatures([zeros], zeros, None)), torch.float32).hidden_states[0], zeros)


@pytest.mark.parametrize("dtype, tolerance", [("float32", 1e-4), ("int8", 0.03)])
def test_features_that_lie_in_a_subspace_come_back_from_it(dtype, tolerance):
    generator = torch.Generator().manual_seed(1)
    states = torch.randn(60, 4, generator=generator) @ torch.randn(4, LAYERS * HIDDEN, generator=generator)
    layers = [layer[None] for layer in states.unflatten(-1, (LAYERS, HIDDEN)).unbind(dim=1)]
    coding = FeatureCoding(LAYERS, dtype, find_subspace(states, 4))
    found = coding.decode(coding.encode(TargetFeatures(layers, layers[0], None)), torch.float32)
    for ours, theirs in zip(found.hidden_states, layers):
        assert ours.shape == theirs.shape and (ours - theirs).norm() <= tolerance * theirs.norm()
