"""Many requests in one forward of the target: their rows follow one another in a batch of one, and attention runs per request against
its own keys and values, through transformers' attention interface. No model's code is copied or changed.

Axis words: `rows` of all requests, in order; `kv_heads`, `heads` (kv_heads * groups); `length` of one request's keys.
"""

import sys
import threading
import weakref
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, cached_property
from inspect import signature

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import ModelOutput

from hf_dspark.generation.key_values import KeyValuePool, KeyValues
from hf_dspark.generation.varlen import SlotRows, varlen_attention, varlen_works

__all__ = ["Segment", "packed_forward", "packing_failure"]

# What the attention implementation is called in a target's config while a packed forward runs.
_NAME = "hf_dspark_packed"

# Arguments of an attention call that say nothing about its result here: positions and lengths follow from the segments.
_WITHOUT_EFFECT = (
    "position_ids", "cache_position", "use_cache", "output_attentions", "output_hidden_states", "output_router_logits", "return_dict", "is_causal",
    "position_embeddings",
)  # fmt: skip


@dataclass(slots=True)
class Segment:
    """One request's part of a packed forward: its place, the ids to process, a row each, and of how many rows the logits are kept."""

    place: KeyValues
    ids: list[int]
    num_kept: int


def _positions(segments: list[Segment]) -> list[int]:
    """The position of every row, which is its index among its request's keys."""
    return [position for s in segments for position in range(s.place.length, s.place.length + len(s.ids))]


class _Group:
    """The segments of one pool in one packed forward, and where their rows and keys are."""

    def __init__(self, pool: KeyValuePool, segments: list[Segment], rows: list[slice], num_rows: int, device: torch.device):
        self.pool = pool
        places = [(segment.place.slot, segment.place.length, own) for segment, own in zip(segments, rows)]
        self._places, self._num_rows, self._device = places, num_rows, device
        self.fresh = [own for _, length, own in places if length == 0]
        going = sorted((place for place in places if place[1] > 0), key=lambda place: place[0])
        self.longest = max(length + own.stop - own.start for _, length, own in places)
        # Where every row's keys and values are written.
        all_rows = [row for own in rows for row in range(own.start, own.stop)]
        self.rows = None if len(all_rows) == num_rows else torch.tensor(all_rows, device=device)  # None: all rows of the forward
        self.row_slots = torch.tensor([slot for slot, _, own in places for _ in range(own.start, own.stop)], device=device)
        self.row_positions = torch.tensor(_positions(segments), device=device)
        self._where: tuple[int, torch.Tensor] | None = None
        self.num_going = len(going)
        if not going:
            return
        slots, lengths, own_rows = zip(*going)
        self.slots = slice(0, len(slots)) if slots == tuple(range(len(slots))) else torch.tensor(slots, device=device)
        widths = [own.stop - own.start for own in own_rows]
        self.width, self.even = max(widths), min(widths) == max(widths)
        self.reach = max(length + width for length, width in zip(lengths, widths))
        steps = torch.arange(self.width)[None]
        starts, last = torch.tensor([own.start for own in own_rows])[:, None], torch.tensor(widths)[:, None] - 1
        # A narrower request repeats its last row, which is left out again.
        self.query_rows = (starts + steps.minimum(last)).to(device)  # (requests, width)
        # The rows of the forward as they are: nothing to gather.
        self.in_order = self.even and self.query_rows.numel() == num_rows and list(own_rows) == sorted(own_rows, key=lambda own: own.start)
        self.real = (steps <= last).to(device)
        self.positions = (torch.tensor(lengths)[:, None] + steps.minimum(last)).to(device)
        self.same_length = self.width == 1 and min(lengths) == max(lengths)
        self.masks: dict[int | None, torch.Tensor | None] = {}

    @cached_property
    def slot_rows(self) -> SlotRows:
        """The rows in the order of the slots, for the variable-length kernel alone."""
        return SlotRows(self._places, len(self.pool.held), self._num_rows, self._device)

    def write(self, layer_idx: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes the group's rows of a forward's (kv_heads, rows, head_dim); returns the pool's whole keys and values of the layer."""
        held = self.pool.buffers(layer_idx, keys, values, self.longest)
        capacity = held[0].shape[1]
        if self._where is None or self._where[0] != capacity:
            self._where = capacity, self.row_slots * capacity + self.row_positions
        for buffer, rows in zip(held, (keys, values)):
            rows = rows.transpose(0, 1)  # (rows, kv_heads, head_dim)
            buffer.flatten(0, 1).index_copy_(0, self._where[1], rows if self.rows is None else rows[self.rows])
        return held

    def mask(self, window: int | None, groups: int, dtype: torch.dtype) -> torch.Tensor | None:
        """(requests, 1, groups * width, reach), 0 where a row may look, else -inf; None: everything is seen."""
        window = None if window is not None and window >= self.reach else window
        if window not in self.masks:
            if self.same_length and window is None:
                self.masks[window] = None
            else:
                keys, queries = torch.arange(self.reach, device=self.positions.device), self.positions[..., None]
                seen = keys <= queries
                if window is not None:
                    seen &= keys > queries - window
                mask = torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, -torch.inf)
                self.masks[window] = mask[:, None] if self.width == 1 else mask.repeat(1, groups, 1)[:, None]
        return self.masks[window]


class _Step:
    """One packed forward: its segments by pool, and the sliding window that each layer was given."""

    def __init__(self, segments: list[Segment], device: torch.device):
        self.rows: list[slice] = []
        start = 0
        for segment in segments:
            self.rows.append(slice(start, start + len(segment.ids)))
            start += len(segment.ids)
        self.groups = []
        for pool in {id(segment.place.pool): segment.place.pool for segment in segments}.values():
            own = [i for i, segment in enumerate(segments) if segment.place.pool is pool]
            self.groups.append(_Group(pool, [segments[i] for i in own], [self.rows[i] for i in own], start, device))
        self.windows: dict[int, int | None] = {}


_step: ContextVar[_Step | None] = ContextVar("hf_dspark_packed_step", default=None)
_locks: "weakref.WeakKeyDictionary[PreTrainedModel, threading.RLock]" = weakref.WeakKeyDictionary()
_verdicts: "weakref.WeakKeyDictionary[PreTrainedModel, tuple]" = weakref.WeakKeyDictionary()
_guard = threading.Lock()
# id of a living config -> its implementation before the switch, for other threads' forwards; kept, since they may ask after the switch back.
_usual_names: dict[int, str] = {}


class _PassedOn(Cache):
    """Stands for the target's cache in a packed forward: attention is given the new rows' keys and values as they are."""

    def __init__(self):
        super().__init__(layers=[DynamicLayer()])

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        """The new rows alone; attention stores them."""
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Nothing: positions are passed."""
        return 0


def packed_forward(
    target: PreTrainedModel, segments: list[Segment], hidden_layers: list[int], windows: dict[int, int | None] | None = None
) -> list[ModelOutput]:
    """One forward over the rows of all segments, whose width is their sum.

    Returns, for each segment, `logits` (1, num_kept, vocab) of its last rows and `hidden_states`, where `hidden_layers` names an
    index, (1, rows, hidden). The keys and values of all its rows count as context from now on. `windows`, where given, is filled
    with the sliding window that each layer passed to its attention.
    """
    device = target.device
    step = _Step(segments, device)
    ids = torch.tensor([token for segment in segments for token in segment.ids], device=device)
    positions = torch.tensor([_positions(segments)], device=device)
    arguments = {"input_ids": ids[None], "position_ids": positions, "cache": _PassedOn(), "use_cache": True}
    if hidden_layers:
        arguments["output_hidden_states"] = hidden_layers
    kept = [rows.stop - segment.num_kept + k for segment, rows in zip(segments, step.rows) for k in range(segment.num_kept)]
    keeps_all, selects = len(kept) == len(ids), _selects_logits(type(target))
    if selects:
        arguments["logits_to_keep"] = 0 if keeps_all else torch.tensor(kept, device=device)
    with _packed_attention(target, step):
        outputs = target(**arguments, return_dict=True)
    if windows is not None:
        windows.update(step.windows)
    logits = outputs.logits if selects or keeps_all else outputs.logits[:, kept]
    results = []
    for segment, rows, own_logits in zip(segments, step.rows, logits.split([segment.num_kept for segment in segments], dim=1)):
        segment.place.length += len(segment.ids)
        hidden = [None if layer is None else layer[:, rows] for layer in outputs.hidden_states] if hidden_layers else None
        results.append(ModelOutput(logits=own_logits, hidden_states=hidden))
    return results


def packing_failure(target: PreTrainedModel) -> str | None:
    """Why `target` can't decode many requests in one forward, None: it can. Found out once a target, by comparing one packed forward
    of two short texts with separate ones, prepared as generate() prepares them."""
    key = (target.config._attn_implementation, target.dtype, str(target.device), target.training, *_own_preparation(target))
    with _lock(target):
        if target not in _verdicts or _verdicts[target][0] != key:
            _verdicts[target] = (key, _compare(target))
        return _verdicts[target][1]


@torch.no_grad()
def _compare(target: PreTrainedModel) -> str | None:
    name, config = type(target).__name__, target.config.get_text_config()
    if "position_ids" not in signature(target.forward).parameters:
        return f"{name} takes no position_ids"
    device, most = target.device, min(config.vocab_size, 1000)
    texts = [[(7 + 13 * i * step) % most for i in range(count)] for count, step in ((8, 1), (4, 3))]
    pool, firsts = KeyValuePool(), (5, 3)
    places = [pool.add() for _ in texts]
    try:
        packed_forward(target, [Segment(place, text[:first], 1) for place, text, first in zip(places, texts, firsts)], [])
        rest = [Segment(place, text[first:], len(text) - first) for place, text, first in zip(places, texts, firsts)]
        windows: dict[int, int | None] = {}
        together = packed_forward(target, rest, [], windows)
        apart = [_usual_logits(target, torch.tensor([text], device=device), first) for text, first in zip(texts, firsts)]
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    tolerance = 1e-3 if target.dtype.itemsize >= 4 else 5e-2
    for expected, outputs in zip(apart, together):
        difference, scale = (outputs.logits[0].float() - expected).abs().max().item(), max(1.0, expected.abs().max().item())
        if not difference <= tolerance * scale:
            return f"the logits of {name} differ by {difference:.3g} (largest {scale:.3g}) between a packed forward and separate ones"
    return _unseen_window(config, windows)


def _usual_logits(target: PreTrainedModel, ids: torch.Tensor, first: int) -> torch.Tensor:
    """(tokens - first, vocab) fp32 logits after `ids` (1, tokens) from `first` on, in two forwards that go the way of generate()."""
    positions = torch.arange(first, device=ids.device)[None]
    arguments = dict(attention_mask=None, position_ids=positions, cache=DynamicCache(config=target.config), use_cache=True)
    outputs = target(**target.prepare_inputs_for_generation(ids[:, :first], is_first_iteration=True, **arguments), return_dict=True)
    num_rest = ids.shape[1] - first
    arguments = target._update_model_kwargs_for_generation(outputs, arguments, num_new_tokens=num_rest)
    outputs = target(**target.prepare_inputs_for_generation(ids, next_sequence_length=num_rest, **arguments), return_dict=True)
    return outputs.logits[0, -num_rest:].float()


def _own_preparation(target: PreTrainedModel) -> tuple:
    """What tells one replacement of this target's `prepare_inputs_for_generation` from another, without keeping it alive."""
    method = vars(target).get("prepare_inputs_for_generation")
    if method is None:
        return ()
    owner = getattr(method, "__self__", None)
    function = weakref.ref(getattr(method, "__func__", method))
    return (function,) if owner is None else (function, weakref.ref(owner), repr(getattr(owner, "active_adapter", None)))


def _unseen_window(config, windows: dict[int, int | None]) -> str | None:
    """Short texts don't show a lost sliding window, so each layer that has one must have passed it on."""
    layer_types = getattr(config, "layer_types", None)
    if layer_types is None:
        window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
        expected = {layer: window for layer in windows}
    else:
        if unknown := set(layer_types) - {"full_attention", "sliding_attention"}:
            return f"layers of type {sorted(unknown)} are not known"
        expected = {layer: config.sliding_window if layer_types[layer] == "sliding_attention" else None for layer in windows}
    for layer, window in windows.items():
        if window != expected[layer]:
            return f"layer {layer} passes the sliding window {window} to its attention, its config says {expected[layer]}"
    return None


@cache
def _selects_logits(target_class: type[PreTrainedModel]) -> bool:
    return "logits_to_keep" in signature(target_class.forward).parameters


def _lock(target: PreTrainedModel) -> threading.RLock:
    with _guard:
        return _locks.setdefault(target, threading.RLock())


@contextmanager
def _packed_attention(target: PreTrainedModel, step: _Step):
    """Switches the target's attention, sub-configs included, for one forward; other threads wait, or see the usual one (see `_attend`)."""
    with _lock(target):
        configs = _all_configs(target.config)
        before = [config._attn_implementation_internal for config in configs]
        token = _step.set(step)
        try:
            for config, implementation in zip(configs, before):
                _note_usual_name(config, implementation)
            for config in configs:
                config._attn_implementation_internal = _NAME
            yield
        finally:
            for config, implementation in zip(configs, before):
                config._attn_implementation_internal = implementation
            _step.reset(token)


def _note_usual_name(config, implementation: str) -> None:
    if implementation == _NAME:
        return
    if id(config) not in _usual_names:
        weakref.finalize(config, _usual_names.pop, id(config), None)
    _usual_names[id(config)] = implementation


def _all_configs(config) -> list:
    found = [config]
    for name in config.sub_configs:
        if (sub := getattr(config, name, None)) is not None:
            found += _all_configs(sub)
    return found


def _attend(module, query, key, value, attention_mask, scaling=None, dropout=0.0, sliding_window=None, **kwargs):
    """transformers' attention interface: query (1, heads, rows, head_dim), key and value (1, kv_heads, rows, head_dim) of the new rows."""
    step = _step.get()
    if step is None:
        return _usual_attention(module)(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, sliding_window=sliding_window, **kwargs
        )
    given = {name: argument for name, argument in kwargs.items() if argument is not None and name not in _WITHOUT_EFFECT}
    given |= {"dropout": dropout} if dropout else {}
    if given or attention_mask is not None:
        raise ValueError(f"the attention of {type(module).__name__} needs {sorted(given) or ['a mask of its own']}, which a packed step does not do")
    if not getattr(module, "is_causal", True) or kwargs.get("is_causal") is False:
        raise ValueError(f"the attention of {type(module).__name__} is not causal")
    step.windows[module.layer_idx] = sliding_window
    query_rows, output = query[0].transpose(0, 1), None
    for group in step.groups:
        keys, values = group.write(module.layer_idx, key[0], value[0])
        attended = None
        if by_kernel := varlen_works(query_rows, keys, values):
            rows = slice(None) if group.slot_rows.rows is None else group.slot_rows.rows
            attended = varlen_attention(group.slot_rows, query_rows[rows], keys, values, scaling, sliding_window)
        elif group.num_going:
            attended = _attend_going(group, query[0], keys, values, scaling, sliding_window)  # (requests, width, heads, head_dim)
            if group.in_order:
                return attended.flatten(0, 1)[None], None
        if output is None:
            output = query.new_empty(*query_rows.shape[:2], value.shape[3])  # (rows, heads, head_dim)
        if by_kernel:
            output[rows] = attended
            continue
        for rows in group.fresh:
            output[rows] = _attend_fresh(query[:, :, rows], key[:, :, rows], value[:, :, rows], scaling, sliding_window)
        if attended is not None:
            output[group.query_rows[group.real]] = attended[group.real]
    return output[None], None


def _attend_fresh(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None, window: int | None) -> torch.Tensor:
    """A text's first rows, which see one another alone: (1, heads or kv_heads, rows, head_dim) -> (rows, heads, head_dim)."""
    groups, num_rows = query.shape[1] // key.shape[1], query.shape[2]
    key, value = (rows.repeat_interleave(groups, dim=1) if groups > 1 else rows for rows in (key, value))
    mask = None
    if window is not None and num_rows > window:
        places = torch.arange(num_rows, device=query.device)
        mask = (places <= places[:, None]) & (places > places[:, None] - window)
    return scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=mask is None, scale=scaling)[0].transpose(0, 1)


def _attend_going(group: _Group, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float | None, window: int | None):
    """All other requests of a pool at once: query (heads, rows, head_dim) -> (requests, width, heads, head_dim)."""
    heads, kv_heads = query.shape[0], keys.shape[2]
    groups, (num_requests, width) = heads // kv_heads, group.query_rows.shape
    # The query heads that share keys become rows, so that keys and values are not repeated.
    own = query if group.in_order else query[:, group.query_rows.flatten()]
    if width == 1:
        own = own.transpose(0, 1).reshape(num_requests, kv_heads, groups, -1)
    else:
        own = own.reshape(kv_heads, groups, num_requests, width, -1).permute(2, 0, 1, 3, 4).reshape(num_requests, kv_heads, groups * width, -1)
    keys, values = (buffer[group.slots, : group.reach].transpose(1, 2) for buffer in (keys, values))
    mask = group.mask(window, groups, query.dtype)
    output = scaled_dot_product_attention(own, keys, values, attn_mask=mask, scale=scaling)
    if width > 1:
        output = output.view(num_requests, kv_heads, groups, width, -1).permute(0, 3, 1, 2, 4)
    return output.reshape(num_requests, width, heads, -1)


def _no_mask(*args, config=None, **kwargs) -> torch.Tensor | None:
    """Masks follow from the segments; a forward of another thread gets the usual one."""
    if _step.get() is not None:
        return None
    usual = ALL_MASK_ATTENTION_FUNCTIONS.get(_usual_names.get(id(config)))
    return usual(*args, config=config, **kwargs) if usual is not None else None


def _usual_attention(module):
    """What another thread's ordinary forward, while the implementation is switched, would have called."""
    name = _usual_names.get(id(getattr(module, "config", None)), "sdpa")
    return ALL_ATTENTION_FUNCTIONS.get_interface(name, getattr(sys.modules[type(module).__module__], "eager_attention_forward", None))


AttentionInterface.register(_NAME, _attend)
AttentionMaskInterface.register(_NAME, _no_mask)
