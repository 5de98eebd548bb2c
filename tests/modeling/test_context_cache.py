"""The draft's keys and values against plain concatenation."""

import pytest
import torch

from hf_dspark.modeling.context_cache import ContextCache

HEADS, DIM = 2, 3


def rows(count, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1, HEADS, count, DIM, generator=generator), torch.randn(1, HEADS, count, DIM, generator=generator)


def test_rounds_equal_concatenation():
    """Each round brings `new` context rows and a block of 4 that is dropped; 300 rounds grow the buffers several times."""
    cache, context = ContextCache(num_layers=2), {0: [], 1: []}
    for step in range(300):
        new = (5, 1, 0, 3, 2)[step % 5]
        for layer in (0, 1):
            keys, values = rows(new + 4, seed=2 * step + layer)
            seen_keys, seen_values = cache.write(layer, keys, values)
            expected = [torch.cat([*(chunk[part] for chunk in context[layer]), (keys, values)[part]], dim=2) for part in (0, 1)]
            assert torch.equal(seen_keys, expected[0]) and torch.equal(seen_values, expected[1])
            context[layer].append((keys[:, :, :new], values[:, :, :new]))
        cache.advance(new)
        assert cache.length == sum(chunk[0].shape[2] for chunk in context[0])


def test_rows_that_are_not_advanced_over_are_overwritten():
    cache = ContextCache(1)
    cache.write(0, *rows(4, seed=0))
    keys, values = rows(2, seed=1)
    seen_keys, seen_values = cache.write(0, keys, values)
    assert torch.equal(seen_keys, keys) and torch.equal(seen_values, values)


def test_truncating_forgets_the_end_and_never_lengthens():
    cache, (keys, values) = ContextCache(1), rows(6, seed=0)
    cache.write(0, keys, values)
    cache.advance(6)
    cache.truncate(9)
    assert cache.length == 6
    cache.truncate(2)
    more_keys, more_values = rows(3, seed=1)
    seen_keys, seen_values = cache.write(0, more_keys, more_values)
    assert torch.equal(seen_keys, torch.cat([keys[:, :, :2], more_keys], dim=2))
    assert torch.equal(seen_values, torch.cat([values[:, :, :2], more_values], dim=2))


def test_what_is_returned_shares_the_buffer_so_that_a_round_copies_no_context():
    cache = ContextCache(1)
    first, _ = cache.write(0, *rows(4, seed=0))
    cache.advance(4)
    second, _ = cache.write(0, *rows(4, seed=1))
    assert first.data_ptr() == second.data_ptr()


def test_growth_is_geometric():
    """A context of n tokens is copied O(log n) times."""
    cache, buffers = ContextCache(1), set()
    for step in range(2000):
        cache.write(0, *rows(5, seed=step))
        cache.advance(1)
        buffers.add(cache._keys[0].shape[2])
    assert len(buffers) <= 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dtype_is_kept_and_grown_memory_is_written(dtype, poisoned_memory):
    cache = ContextCache(1)
    keys, values = (tensor.to(dtype) for tensor in rows(3, seed=0))
    seen_keys, seen_values = cache.write(0, keys, values)
    assert seen_keys.dtype == seen_values.dtype == dtype
    assert torch.isfinite(cache._keys[0]).all() and torch.isfinite(cache._values[0]).all()


def test_a_later_turn_may_come_in_another_dtype_or_autograd_mode():
    cache = ContextCache(num_layers=1)
    keys, values = rows(5, seed=0)
    with torch.inference_mode():
        cache.write(0, keys, values)
    cache.advance(3)
    more = rows(2, seed=1)
    seen, _ = cache.write(0, *more)
    assert torch.equal(seen, torch.cat([keys[:, :, :3], more[0]], dim=2))
    seen, _ = cache.write(0, more[0].bfloat16(), more[1].bfloat16())
    assert seen.dtype == torch.bfloat16 and torch.equal(seen, torch.cat([keys[:, :, :3], more[0]], dim=2).bfloat16())
