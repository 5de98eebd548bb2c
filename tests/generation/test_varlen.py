"""Attention by a variable-length kernel, with a naive one in place of the GPU's: the same packed forwards, and kernels that are not trusted."""

import pytest
import test_packing
import torch

from hf_dspark.generation import packing, varlen


def naive_kernel(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1), enable_gqa=False, seqused_k=None, block_table=None
):
    """What PyTorch's documentation says varlen_attn computes, a row and a head at a time: causal where window_size ends in 0, the last row
    sees the last key that is used."""
    assert enable_gqa or query.shape[1] == key.shape[1]
    assert cu_seq_q.dtype == cu_seq_k.dtype == seqused_k.dtype == torch.int32 and window_size[1] == 0 and block_table is None
    output, groups = torch.zeros(*query.shape[:2], value.shape[2], dtype=query.dtype), query.shape[1] // key.shape[1]
    scale = query.shape[2] ** -0.5 if scale is None else scale
    for sequence, num_keys in enumerate(seqused_k.tolist()):
        first, end = cu_seq_q[sequence : sequence + 2].tolist()
        start, stop = cu_seq_k[sequence : sequence + 2].tolist()
        assert end - first <= max_q and (num_keys <= max_k or end == first) and num_keys <= stop - start
        for row in range(first, end):
            last = num_keys - (end - row)
            begin = 0 if window_size[0] < 0 else max(0, last - window_size[0])
            seen = slice(start + begin, start + last + 1)
            for head in range(query.shape[1]):
                weights = (key[seen, head // groups].float() @ query[row, head].float() * scale).softmax(0)
                output[row, head] = (weights @ value[seen, head // groups].float()).to(output.dtype)
    return output


@pytest.fixture
def kernel_calls(monkeypatch):
    """Packed steps use the naive kernel; the list gets an entry a call."""
    calls = []

    def counted(*args, **kwargs):
        calls.append(kwargs["window_size"])
        return naive_kernel(*args, **kwargs)

    monkeypatch.setattr(varlen, "varlen_attn", counted)
    monkeypatch.setattr(packing, "varlen_works", lambda *heads: True)
    return calls


@pytest.mark.parametrize("kind", ["qwen3", "llama-tied", "gemma3", "mistral-sliding", "gpt2"])
def test_packed_steps_equal_separate_forwards(kind, kernel_calls):
    test_packing.test_packed_equals_separate(kind)
    windows = {window for window, _ in kernel_calls}
    # The sliding windows of these targets are 6 tokens, the row's own included.
    assert windows == {"gemma3": {-1, 5}, "mistral-sliding": {5}}.get(kind, {-1})


def test_slots_without_rows_and_rows_in_another_order(kernel_calls):
    """Slots 2 and 0 have rows, 1 rests; every value is its slot's number, so a row gets the number of the slot it belongs to."""
    places = [(2, 3, slice(0, 2)), (0, 0, slice(2, 5))]
    slot_rows = varlen.SlotRows(places, 3, 5, torch.device("cpu"))
    assert slot_rows.rows.tolist() == [2, 3, 4, 0, 1]
    assert slot_rows.row_ends.tolist() == [0, 3, 3, 5] and slot_rows.key_counts.tolist() == [3, 1, 5]
    keys, values = torch.zeros(3, 8, 1, 4), torch.arange(3.0)[:, None, None, None].expand(3, 8, 1, 4)
    attended = varlen.varlen_attention(slot_rows, torch.zeros(5, 2, 4), keys, values, None, None)
    assert attended[:, 0, 0].tolist() == [0, 0, 0, 2, 2]
    assert varlen.SlotRows([(0, 4, slice(0, 2)), (1, 0, slice(2, 3))], 2, 3, torch.device("cpu")).rows is None


def without_window(*args, window_size, **kwargs):
    return naive_kernel(*args, window_size=(-1, 0), **kwargs)


def window_of_one_more(*args, window_size, **kwargs):
    return naive_kernel(*args, window_size=(window_size[0] + (window_size[0] >= 0), 0), **kwargs)


def one_key_short(*args, seqused_k, **kwargs):
    return naive_kernel(*args, seqused_k=(seqused_k - 1).clamp(min=3), **kwargs)


def of_the_first_slots(query, key, value, cu_seq_q, cu_seq_k, *args, **kwargs):
    return naive_kernel(query, key, value, cu_seq_q, torch.cat([cu_seq_k[:2], cu_seq_k[1:-1]]), *args, **kwargs)


def not_finite(*args, **kwargs):
    return naive_kernel(*args, **kwargs) * torch.nan


def without_kernel(*args, **kwargs):
    raise RuntimeError("no kernel image is available for execution on the device")


def of_an_older_pytorch(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False):
    raise AssertionError("called without the lengths of the keys")


FAULTS = [without_window, window_of_one_more, one_key_short, of_the_first_slots, not_finite, without_kernel, of_an_older_pytorch]


@pytest.mark.parametrize("kernel", FAULTS)
def test_a_kernel_that_is_not_right_is_not_used(kernel, monkeypatch):
    heads = (torch.device("cpu"), torch.bfloat16, 4, 2, 8)
    varlen._is_right.cache_clear()
    monkeypatch.setattr(varlen, "varlen_attn", naive_kernel)
    assert varlen._is_right(*heads)
    varlen._is_right.cache_clear()
    monkeypatch.setattr(varlen, "varlen_attn", kernel)
    assert not varlen._is_right(*heads)
    varlen._is_right.cache_clear()


def test_only_where_the_kernel_is(monkeypatch):
    """On a CPU, in fp32, for keys and values of different widths, and with a PyTorch without it, it isn't asked."""
    monkeypatch.setattr(varlen, "_is_right", lambda *heads: True)
    monkeypatch.setattr(varlen, "varlen_attn", naive_kernel)

    class OnGPU:
        def __init__(self, dtype, *shape):
            self.device, self.dtype, self.shape = torch.device("cuda", 0), dtype, shape

    query, keys = OnGPU(torch.bfloat16, 5, 4, 8), OnGPU(torch.bfloat16, 3, 16, 2, 8)
    assert varlen.varlen_works(query, keys, keys)
    assert not varlen.varlen_works(torch.zeros(5, 4, 8, dtype=torch.bfloat16), keys, keys)
    assert not varlen.varlen_works(OnGPU(torch.float32, 5, 4, 8), keys, keys)
    assert not varlen.varlen_works(query, keys, OnGPU(torch.bfloat16, 3, 16, 2, 4))
    monkeypatch.setattr(varlen, "varlen_attn", None)
    assert not varlen.varlen_works(query, keys, keys)
