"""Keys and values of the draft over the tokens that the target has processed."""

import torch

__all__ = ["ContextCache", "PackedContext"]

# Rows of the block, and the keys and values (1, kv_heads, length, head_dim) that they attend to.
Segment = tuple[slice, torch.Tensor, torch.Tensor]


class ContextCache:
    """Per-layer keys and values (1, kv_heads, length, head_dim) in buffers that grow by doubling.

    A round writes its block behind the context and drops it by not advancing `length`: rollback copies nothing.
    """

    def __init__(self, num_layers: int):
        self.length = 0
        self._keys: list[torch.Tensor | None] = [None] * num_layers
        self._values: list[torch.Tensor | None] = [None] * num_layers

    def write(self, layer_idx: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes (1, kv_heads, rows, head_dim) behind the context; returns views over context and new rows."""
        end = self.length + keys.shape[2]
        self._keys[layer_idx] = self._grown(self._keys[layer_idx], keys, end)
        self._values[layer_idx] = self._grown(self._values[layer_idx], values, end)
        self._keys[layer_idx][:, :, self.length : end] = keys
        self._values[layer_idx][:, :, self.length : end] = values
        return self._keys[layer_idx][:, :, :end], self._values[layer_idx][:, :, :end]

    def segments(self, layer_idx: int, keys: torch.Tensor, values: torch.Tensor) -> list[Segment]:
        """`write`, and all rows of the block attend to what it returns."""
        return [(slice(None), *self.write(layer_idx, keys, values))]

    def advance(self, rows: int) -> None:
        """Keeps the first `rows` of the rows written last as context."""
        self.length += rows

    def truncate(self, length: int) -> None:
        """Forgets the context from row `length` on."""
        self.length = min(self.length, length)

    def _grown(self, buffer: torch.Tensor | None, rows: torch.Tensor, end: int) -> torch.Tensor:
        if buffer is not None and end <= buffer.shape[2] and _writable(buffer, rows):
            return buffer
        capacity = end + 64 if buffer is None else 2 * end
        grown = rows.new_zeros(*rows.shape[:2], capacity, rows.shape[3])
        if buffer is not None:
            grown[:, :, : self.length] = buffer[:, :, : self.length]
        return grown


class PackedContext:
    """Several requests in one row: first the new context of each, then the block of each, which attends to its own context alone."""

    def __init__(self, caches: list[ContextCache], num_new: list[int], block_size: int):
        self.caches, self.block_size = caches, block_size
        self.sizes = [*num_new, *[block_size] * len(caches)]

    def segments(self, layer_idx: int, keys: torch.Tensor, values: torch.Tensor) -> list[Segment]:
        """Writes (1, kv_heads, rows, head_dim) behind the context of the request that each row belongs to."""
        if len(self.caches) == 1:
            return self.caches[0].segments(layer_idx, keys, values)
        count, segments = len(self.caches), []
        keys, values = keys.split(self.sizes, dim=2), values.split(self.sizes, dim=2)
        for i, cache in enumerate(self.caches):
            own_keys, own_values = (torch.cat([rows[i], rows[count + i]], dim=2) for rows in (keys, values))
            rows = slice(i * self.block_size, (i + 1) * self.block_size)
            segments.append((rows, *cache.write(layer_idx, own_keys, own_values)))
        return segments


def _writable(buffer: torch.Tensor, rows: torch.Tensor) -> bool:
    """Whether `rows` can be written into `buffer` as it is; a later turn may come in another dtype, place or autograd mode."""
    fits_mode = torch.is_inference_mode_enabled() or not buffer.is_inference()
    return fits_mode and buffer.dtype == rows.dtype and buffer.device == rows.device
