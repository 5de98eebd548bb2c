"""What a target's positions allow: no drafted row beyond its context, and no forward across a border at which its rope changes."""

from dataclasses import dataclass

import torch
from transformers import PreTrainedConfig

__all__ = ["ContextLimits", "positions_in_use"]


@dataclass(frozen=True, slots=True)
class ContextLimits:
    """Positions of one target.

    context: positions it was made for; a table of learned ones ends there. None: no bound. borders: lengths up to which a "longrope"
    uses its short factors; one forward uses one set for all its rows. is_dynamic: beyond `context`, the rope is another one for each length.
    """

    context: int | None
    borders: tuple[int, ...]
    is_dynamic: bool

    @classmethod
    def of(cls, config: PreTrainedConfig) -> "ContextLimits":
        """Read from a target's config, of its text part where it has several."""
        config = config.get_text_config()
        context = getattr(config, "max_position_embeddings", None)
        context = context if isinstance(context, int) and context > 0 else None
        ropes = _ropes(config)
        borders = {rope.get("original_max_position_embeddings") or context for rope in ropes if _kind(rope) == "longrope"}
        return cls(context, tuple(sorted(borders - {None})), any("dynamic" in _kind(rope) for rope in ropes))

    def num_drafts(self, num_positions: int, wanted: int) -> int:
        """At most `wanted` drafts after a text of `num_positions` tokens, the last of which is the anchor of the next forward."""
        ends = [border for border in self.borders if border >= num_positions]
        # Beyond the context every text is decoded plainly, which also keeps the lengths that a dynamic rope sees those of plain decoding.
        ends += [] if self.context is None else [self.context]
        return max(0, min([wanted, *(end - num_positions for end in ends)]))

    def unpacked_reason(self, max_length: int) -> str | None:
        """Why texts of up to `max_length` tokens can't share a forward, which has one rope for all rows; None: they can.

        Raises:
            ValueError: they can't take turns either, since a dynamic rope keeps the length of the longest text.
        """
        if self.is_dynamic and max_length > (self.context or 0):
            raise ValueError(
                f"the texts may grow to {max_length} tokens, where a rope of rope_type 'dynamic' depends on the others beyond {self.context}; lower "
                "max_new_tokens, or generate one text at a time"
            )
        if self.borders and max_length > self.borders[0]:
            return f"its rope (rope_type 'longrope') is another one in a forward with a text of more than {self.borders[0]} tokens"
        return None

    def explained(self, error: Exception, num_positions: int, target_name: str) -> Exception:
        """`error` of a forward up to `num_positions` tokens; where a table of positions has ended, one that says so."""
        if self.context is None or num_positions <= self.context or not isinstance(error, IndexError):
            return error
        explained = ValueError(
            f"the text has {num_positions} tokens, the context of {target_name} holds {self.context}; shorten the prompt or lower max_new_tokens"
        )
        explained.__cause__ = error
        return explained


def positions_in_use(model_kwargs: dict, num_slots: int) -> int:
    """Positions taken by a text of `num_slots` slots of a cache: padded ones take none, and generate()'s position_ids may start anywhere."""
    positions, mask = model_kwargs.get("position_ids"), model_kwargs.get("attention_mask")
    if positions is not None:
        return int(positions[..., -1].max()) + 1
    if isinstance(mask, torch.Tensor) and mask.dim() == 2:
        return int(mask[0].bool().sum())
    return num_slots


def _ropes(config: PreTrainedConfig) -> list[dict]:
    """The rope of all layers, or one for each type of layer."""
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if "rope_type" in parameters or "type" in parameters:
        return [parameters]
    return [own for own in parameters.values() if isinstance(own, dict)]


def _kind(rope: dict) -> str:
    return rope.get("rope_type") or rope.get("type") or "default"
