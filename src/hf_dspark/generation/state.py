"""What a draft knows of one target cache: its own keys and values, and target features it has not turned into them yet."""

import copy
import weakref
from bisect import bisect_left
from dataclasses import dataclass, field

import torch

from hf_dspark.modeling import DSparkDraftModel
from hf_dspark.modeling.context_cache import ContextCache

__all__ = ["DraftState", "draft_state", "forget_draft_state"]

# The state travels with the target's cache object, so that the next turn of a conversation finds it.
_ATTRIBUTE = "dspark_draft_state"


@dataclass(slots=True)
class _Pending:
    """Outputs of the chosen target layers, each (1, tokens, hidden), with the cache slots and true positions of the tokens."""

    hidden_states: list[torch.Tensor]
    slots: list[int]
    positions: list[int]


@dataclass
class DraftState:
    """Context of the draft over one target cache. A slot is an index into that cache; padded slots have no row here."""

    draft: weakref.ref
    cache: ContextCache
    slots: list[int] = field(default_factory=list)
    pending: list[_Pending] = field(default_factory=list)
    token_ids: torch.Tensor | None = None

    def __deepcopy__(self, memo) -> "DraftState":
        return DraftState(self.draft, *(copy.deepcopy(value, memo) for value in (self.cache, self.slots, self.pending, self.token_ids)))

    def __reduce__(self):
        # A cache written to disk is read without it; the draft then works on what the next call processes.
        return type(None), ()

    @property
    def num_tokens(self) -> int:
        """Tokens the draft has features of."""
        return len(self.slots) + sum(len(chunk.slots) for chunk in self.pending)

    def append(self, hidden_states: list[torch.Tensor], slots: list[int], positions: list[int]) -> None:
        """Notes the features of newly processed tokens; their keys and values are computed at the next draft."""
        if slots:
            self.pending.append(_Pending(hidden_states, slots, positions))

    def pending_layers(self) -> list[torch.Tensor]:
        """Outputs of the chosen layers, each (1, new, hidden), for the tokens noted since the last `settle`; empty where there are none."""
        return [torch.cat(layer, dim=1) if len(layer) > 1 else layer[0] for layer in zip(*(chunk.hidden_states for chunk in self.pending))]

    def pending_positions(self) -> list[int]:
        """True positions of those tokens."""
        return [position for chunk in self.pending for position in chunk.positions]

    def settle(self) -> None:
        """The tokens noted since the last call count as context: their keys and values are the next rows of the cache."""
        slots = [slot for chunk in self.pending for slot in chunk.slots]
        self.pending = []
        self.slots += slots
        self.cache.advance(len(slots))

    def truncate(self, slot: int) -> None:
        """Forgets everything from cache slot `slot` on (the cache was cropped, or holds other tokens there now)."""
        self.cache.truncate(bisect_left(self.slots, slot))
        del self.slots[self.cache.length :]
        kept = []
        for chunk in self.pending:
            if count := bisect_left(chunk.slots, slot):
                kept.append(_Pending([layer[:, :count] for layer in chunk.hidden_states], chunk.slots[:count], chunk.positions[:count]))
        self.pending = kept


def draft_state(draft: DSparkDraftModel, cache, past_length: int, input_ids: torch.Tensor) -> DraftState:
    """The state that travels with `cache`, cut to what still holds of its first `past_length` slots, or a new one.

    `input_ids` (1, tokens) is the whole text where it has at least `past_length` tokens, else only its new part.
    """
    state = cache.__dict__.get(_ATTRIBUTE)
    if state is None or state.draft() is not draft or past_length == 0:
        state = DraftState(weakref.ref(draft), ContextCache(draft.config.num_hidden_layers))
        setattr(cache, _ATTRIBUTE, state)
        return state
    valid = past_length
    if state.token_ids is not None and input_ids.shape[1] >= past_length:
        known = min(past_length, state.token_ids.shape[1])
        differing = (state.token_ids[:, :known].to(input_ids.device) != input_ids[:, :known]).nonzero()
        if len(differing):
            valid = differing[0, 1].item()
    state.truncate(valid)
    return state


def forget_draft_state(cache) -> None:
    """Drops what a failed draft may have left half-written."""
    cache.__dict__.pop(_ATTRIBUTE, None)
