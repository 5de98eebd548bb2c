"""Attention of many requests at once by PyTorch's variable-length kernel, where a GPU has it: no padding, no mask.

Axis words as in packing.py and key_values.py: `rows` of a packed forward, `slots` and `capacity` of a pool of keys and values.
"""

from functools import cache, cached_property

import torch
from torch.nn.functional import scaled_dot_product_attention

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # older than PyTorch 2.10
    varlen_attn = None

__all__ = ["SlotRows", "varlen_attention", "varlen_works"]

_DTYPES = (torch.float16, torch.bfloat16)
# bf16 rounds to 2^-8 of a value; what a wrong offset, scale or window changes is of the size of the values.
_TOLERANCE = 3e-2


class SlotRows:
    """The rows that each slot of a pool has in a packed forward, in the order of the slots; a slot without any takes part with none.

    `places`: (slot, tokens held before, rows of the forward) of each request. `num_rows`: of the whole forward.
    """

    def __init__(self, places: list[tuple[int, int, slice]], num_slots: int, num_rows: int, device: torch.device):
        self.places, self.num_slots, self.num_rows, self.device = sorted(places, key=lambda place: place[0]), num_slots, num_rows, device
        self.most_rows = max(own.stop - own.start for _, _, own in places)
        self.longest = max(length + own.stop - own.start for _, length, own in places)

    @cached_property
    def rows(self) -> torch.Tensor | None:
        """Rows of the forward (own rows,) long; None: all of them, as they are."""
        rows = [row for _, _, own in self.places for row in range(own.start, own.stop)]
        return None if rows == list(range(self.num_rows)) else torch.tensor(rows, device=self.device)

    @cached_property
    def row_ends(self) -> torch.Tensor:
        """(slots + 1,) int32: where each slot's rows begin and end."""
        counts = [0] * (self.num_slots + 1)
        for slot, _, own in self.places:
            counts[slot + 1] = own.stop - own.start
        return torch.tensor(counts).cumsum(0).to(self.device, torch.int32)

    @cached_property
    def key_counts(self) -> torch.Tensor:
        """(slots,) int32: keys of each slot that count, the new rows' own included."""
        counts = [1] * self.num_slots  # of a slot without rows, nobody reads it
        for slot, length, own in self.places:
            counts[slot] = length + own.stop - own.start
        return torch.tensor(counts, dtype=torch.int32).to(self.device)


def varlen_attention(
    slot_rows: SlotRows, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float | None, window: int | None
) -> torch.Tensor:
    """Causal attention of every slot's rows over its own keys: query (own rows, heads, head_dim), keys and values
    (slots, capacity, kv_heads, head_dim) -> (own rows, heads, head_dim). `window`: keys a row sees, itself included; None: all."""
    num_slots, capacity = slot_rows.num_slots, keys.shape[1]
    starts = torch.arange(num_slots + 1, device=keys.device, dtype=torch.int32) * capacity
    return varlen_attn(
        query,
        keys[:num_slots].flatten(0, 1),
        values[:num_slots].flatten(0, 1),
        slot_rows.row_ends,
        starts,
        slot_rows.most_rows,
        slot_rows.longest,
        scale=scaling,
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=query.shape[1] != keys.shape[2],
        seqused_k=slot_rows.key_counts,
    )


def varlen_works(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> bool:
    """Whether the kernel runs and is right for heads like those of query (rows, heads, head_dim), keys and values
    (slots, capacity, kv_heads, head_dim). Found out once for each such shape, by comparing it with ordinary attention."""
    if varlen_attn is None or query.device.type != "cuda" or query.dtype not in _DTYPES or keys.shape[-1] != values.shape[-1]:
        return False
    return _is_right(query.device, query.dtype, query.shape[1], keys.shape[-2], query.shape[2])


@cache
@torch.no_grad()
def _is_right(device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int) -> bool:
    """Compares two requests with ordinary attention, with and without a window; one begins, one goes on, a slot between them rests."""
    places, capacity, random = [(0, 0, slice(0, 3)), (2, 9, slice(3, 5))], 16, torch.Generator().manual_seed(0)
    query, keys, values = (
        torch.randn(shape, generator=random).to(device, dtype)
        for shape in ((5, heads, head_dim), (3, capacity, kv_heads, head_dim), (3, capacity, kv_heads, head_dim))
    )
    try:
        for window in (None, 4):
            together = varlen_attention(SlotRows(places, 3, 5, device), query, keys, values, None, window)
            for slot, length, own in places:
                count = own.stop - own.start
                at, seen = torch.arange(length, length + count, device=device)[:, None], torch.arange(length + count, device=device)
                mask = (seen <= at) & (seen > at - (window or length + count))
                own_query, own_keys, own_values = (
                    rows.transpose(0, 1).float() for rows in (query[own], keys[slot, : length + count], values[slot, : length + count])
                )
                alone = scaled_dot_product_attention(own_query[None], own_keys[None], own_values[None], attn_mask=mask, enable_gqa=True)[0]
                if not (together[own].float() - alone.transpose(0, 1)).abs().max() <= _TOLERANCE:
                    return False
    except Exception:  # no such kernel for this GPU or these heads, or an older PyTorch's, without seqused_k
        return False
    return True
