"""Keys and values of many requests, stored once: grown in blocks, freed when a request ends.

Axis words: `slots` places of a pool; `capacity` tokens that each has room for; `kv_heads`.
"""

import torch

__all__ = ["KeyValuePool", "KeyValueStore", "KeyValues"]

# Tokens by which keys and values grow at least.
_BLOCK = 64


class KeyValues:
    """One request's place in a pool of keys and values. Rolling back lowers `length` and copies nothing."""

    def __init__(self, pool: "KeyValuePool", slot: int):
        self.pool, self.slot, self.length = pool, slot, 0

    def get_seq_length(self) -> int:
        """Tokens held, as transformers' caches call it."""
        return self.length

    def rollback(self, num_tokens: int, clear: bool = False) -> None:
        """Drops the last `num_tokens`; `clear`: their values as well, which are not finite and would be read with weight 0."""
        self.length -= num_tokens
        if clear:
            for keys_and_values in self.pool.layers.values():
                for buffer in keys_and_values:
                    buffer[self.slot, self.length :] = 0

    def release(self) -> None:
        """Gives the place back; may be called again."""
        if self.pool is not None:
            self.pool.remove(self)
            self.pool = None


class KeyValuePool:
    """Keys and values of requests of about the same length, per layer (slots, capacity, kv_heads, head_dim).

    Capacity grows in blocks with the longest request, slots with their number; the slots in use are always the first ones.
    """

    def __init__(self):
        self.held: list[KeyValues] = []
        self.layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def add(self) -> KeyValues:
        """A place for one more request."""
        self.held.append(KeyValues(self, len(self.held)))
        return self.held[-1]

    def remove(self, place: KeyValues) -> None:
        """Frees a place, which the last one moves into, and leaves nothing of the one who had it: see `_grown`."""
        last = self.held.pop()
        for keys_and_values in self.layers.values():
            for buffer in keys_and_values:
                if last is not place:
                    buffer[place.slot] = buffer[last.slot]
                buffer[last.slot] = 0
        if last is not place:
            last.slot = place.slot
            self.held[last.slot] = last
        if not self.held:
            self.layers.clear()
        for layer_idx, (keys, values) in self.layers.items():
            if len(keys) > 2 * len(self.held):
                self.layers[layer_idx] = keys[: len(self.held)].clone(), values[: len(self.held)].clone()

    def buffers(self, layer_idx: int, keys: torch.Tensor, values: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A layer's keys and values with room for `length` tokens in every place, made for rows like (kv_heads, rows, head_dim)."""
        held = self.layers.get(layer_idx, (None, None))
        if held[0] is None or len(held[0]) < len(self.held) or held[0].shape[1] < length:
            held = self.layers[layer_idx] = tuple(self._grown(buffer, rows, length) for buffer, rows in zip(held, (keys, values)))
        return held

    def _grown(self, buffer: torch.Tensor | None, rows: torch.Tensor, length: int) -> torch.Tensor:
        slots, capacity = len(self.held), -(-(length + 1) // _BLOCK) * _BLOCK
        if buffer is not None:
            slots = len(buffer) if len(buffer) >= slots else max(slots, len(buffer) * 3 // 2)
            capacity = buffer.shape[1] if buffer.shape[1] >= length else max(capacity, buffer.shape[1] * 5 // 4)
        # Zeros: places beyond a request's length are read, with weight 0, and must not hold what a 0 does not cancel.
        grown = rows.new_zeros(slots, capacity, rows.shape[0], rows.shape[2])
        if buffer is not None:
            grown[: len(buffer), : buffer.shape[1]] = buffer
        return grown


class KeyValueStore:
    """The pools of one call: a request is pooled with those whose texts may grow about as long, so that padding costs at most half."""

    def __init__(self):
        self.pools: dict[int, KeyValuePool] = {}

    def add(self, max_length: int) -> KeyValues:
        """A place for a request that grows to `max_length` tokens at most."""
        return self.pools.setdefault(max(_BLOCK, max_length).bit_length(), KeyValuePool()).add()
