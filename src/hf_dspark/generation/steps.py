"""How a step runs the target: its ordinary forward with its ordinary cache, for one request."""

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.utils import ModelOutput

__all__ = ["advance", "prefill", "rollback", "verify"]


def prefill(
    target: PreTrainedModel, input_ids: torch.Tensor, generation_config: GenerationConfig, model_kwargs: dict, overrides: dict
) -> ModelOutput:
    """The first forward, over everything the cache does not hold: `input_ids` (1, tokens) -> outputs with logits (1, ..., vocab)."""
    return target._prefill(input_ids, generation_config, {**model_kwargs, **overrides})


def verify(target: PreTrainedModel, input_ids: torch.Tensor, draft_ids: list[int], model_kwargs: dict, overrides: dict) -> ModelOutput:
    """One forward over the anchor (last of `input_ids` (1, tokens)) and the drafted ids -> outputs with logits (1, 1 + drafts, vocab)."""
    num_rows = 1 + len(draft_ids)
    if draft_ids:
        input_ids = torch.cat([input_ids, input_ids.new_tensor([draft_ids])], dim=1)
        model_kwargs = advance(target, dict(model_kwargs), len(draft_ids))
    inputs = target.prepare_inputs_for_generation(input_ids, next_sequence_length=num_rows, **model_kwargs)
    if "logits_to_keep" in inputs:
        inputs["logits_to_keep"] = num_rows
    return target(**{**inputs, **overrides}, return_dict=True)


def advance(target: PreTrainedModel, model_kwargs: dict, num_new_tokens: int, outputs: ModelOutput | None = None) -> dict:
    """Model arguments (mask, positions, ...) after `num_new_tokens` more tokens, exactly as plain decoding would grow them."""
    # Token types are continued from the last ones, which only single steps do as plain decoding does.
    steps = [1] * num_new_tokens if model_kwargs.get("token_type_ids") is not None else [num_new_tokens]
    for step in steps if num_new_tokens else ():
        model_kwargs = target._update_model_kwargs_for_generation(outputs or ModelOutput(), model_kwargs, num_new_tokens=step)
    return model_kwargs


def rollback(cache, num_tokens: int) -> None:
    """Removes the last `num_tokens` from the target's cache. Zero is no no-op: a sliding layer trims what it kept for a rollback."""
    cache.crop(-num_tokens)
