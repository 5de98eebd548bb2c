"""The two ways to run the target: one request on the target's ordinary cache; packed, many requests in one flattened forward."""

import math

import torch
from transformers import DynamicCache, GenerationConfig, PreTrainedModel
from transformers.utils import ModelOutput

from hf_dspark.generation.context_limits import positions_in_use
from hf_dspark.generation.key_values import KeyValueStore
from hf_dspark.generation.packing import Segment, packed_forward

__all__ = ["CachedSequence", "PackedSequence", "advance", "forward_all", "prefill", "rollback", "verify"]


class CachedSequence:
    """One request on the target's ordinary cache, which lives in `model_kwargs`."""

    def __init__(self, target: PreTrainedModel, generation_config: GenerationConfig, model_kwargs: dict):
        self.target, self.generation_config, self.model_kwargs = target, generation_config, model_kwargs
        self.attention_mask = model_kwargs.get("attention_mask")
        self.recorded_past: list[tuple[object, bool]] = []
        self.num_positions = 0  # of the text, its last token included, from the first forward on
        self.has_verified = False

    @property
    def cache(self):
        """The target's cache."""
        return self.model_kwargs["cache"]

    def start(self, input_ids: torch.Tensor, overrides: dict) -> ModelOutput:
        """The first forward over `input_ids` (1, tokens).

        Raises:
            ValueError: the target keeps no cache, or one that can't be rolled back.
        """
        outputs = prefill(self.target, input_ids, self.generation_config, self.model_kwargs, overrides)
        cache = outputs.get("cache")
        if cache is None:
            raise ValueError(f"decoding with a DSpark draft needs a cache, which {type(self.target).__name__} does not return")
        if not cache.is_croppable:
            raise ValueError(
                f"{type(self.target).__name__} keeps a state that can't be rolled back after a rejected draft (a recurrent layer, or a static cache "
                "past its sliding window); generate without assistant_model"
            )
        # Sliding layers keep what a rollback needs from now on; the prefill needs none of it.
        self.recorded_past = [(layer, layer.record_past) for layer in cache.layers if hasattr(layer, "record_past")]
        cache.activate_past_recording()
        self.num_positions = positions_in_use(self.model_kwargs, int(cache.get_seq_length()))
        return outputs

    def verify(self, input_ids: torch.Tensor, draft_ids: list[int], overrides: dict) -> ModelOutput:
        """One forward over the anchor (last of `input_ids` (1, tokens)) and the drafted ids.

        Raises:
            ValueError: the target adds slots of its own to the cache, at the first forward with drafts.
        """
        checked = bool(draft_ids) and not self.has_verified
        num_slots = int(self.cache.get_seq_length()) if checked else 0
        outputs = verify(self.target, input_ids, draft_ids, self.model_kwargs, overrides)
        if checked:
            self.has_verified = True
            num_new = int(outputs.cache.get_seq_length()) - num_slots
            if num_new != 1 + len(draft_ids):
                raise ValueError(
                    f"{type(self.target).__name__} adds {num_new} tokens to its cache in a forward of {1 + len(draft_ids)}, so a draft that is "
                    "rejected can't be taken back; generate without assistant_model"
                )
        return outputs

    def advance(self, tokens: list[int], outputs: ModelOutput) -> None:
        """Model arguments after `tokens` have been committed."""
        before = self.cache
        self.model_kwargs = advance(self.target, self.model_kwargs, len(tokens), outputs)
        if self.cache is not before:  # computed anew, see `verify`
            self.recorded_past += [(layer, False) for layer in self.cache.layers if hasattr(layer, "record_past")]
        self.num_positions += len(tokens)

    def rollback(self, num_tokens: int) -> None:
        """Takes the last `num_tokens` of the last forward back."""
        rollback(self.cache, num_tokens)

    def release(self) -> None:
        """Stops the cache's layers from keeping what only a rollback needs."""
        for layer, recorded in self.recorded_past:
            layer.record_past = recorded


class PackedSequence:
    """One request among many in a packed forward: its own keys and values, without padding."""

    def __init__(self, target: PreTrainedModel, input_ids: torch.Tensor, attention_mask: torch.Tensor | None, store: KeyValueStore, max_length: int):
        self.target = target
        real = input_ids[0] if attention_mask is None else input_ids[0][attention_mask[0].bool()]
        self.prompt_ids = real.to(target.device)
        self.attention_mask = None  # padded slots have no keys
        self.cache = store.add(max_length)
        self.last_id = int(real[-1])
        self.num_positions = len(real)  # of the text, its last token included
        self.has_bad_keys = False

    def segment(self, draft_ids: list[int]) -> Segment:
        """The rows of the next forward: the prompt at first, then the anchor and the drafted ids."""
        if self.cache.length == 0:
            return Segment(self.cache, self.prompt_ids.tolist(), num_kept=1)
        return Segment(self.cache, [self.last_id, *draft_ids], num_kept=1 + len(draft_ids))

    def advance(self, tokens: list[int], outputs: ModelOutput) -> None:
        """`tokens` have been committed; positions follow from the length of the cache."""
        self.last_id = tokens[-1]
        self.num_positions += len(tokens)
        # Keys that are not finite spoil all later rows, so the last one shows them.
        self.has_bad_keys = not math.isfinite(outputs.logits[0, -1, 0])

    def rollback(self, num_tokens: int) -> None:
        """Takes the last `num_tokens` of the last forward back."""
        self.cache.rollback(num_tokens, clear=self.has_bad_keys)

    def release(self) -> None:
        """Frees keys and values."""
        self.cache.release()


def forward_all(requests: list, proposals: list) -> list[ModelOutput | Exception]:
    """The next forward of every request: outputs with logits (1, 1 + drafts, vocab) and the hidden states of its rows, or what it raised.

    Packed requests go through the target as one row; when that fails, each goes alone, so that only the one at fault fails.
    """
    packed = [i for i, request in enumerate(requests) if isinstance(request.sequence, PackedSequence)]
    results: list[ModelOutput | Exception | None] = [None] * len(requests)
    if packed:
        segments = [requests[i].sequence.segment(proposals[i].ids) for i in packed]
        hidden_layers = sorted({index for i in packed for index in requests[i].overrides.get("output_hidden_states", ())})
        target = requests[packed[0]].target
        for i, outputs in zip(packed, _forward_packed(target, segments, hidden_layers)):
            results[i] = outputs
    for i, request in enumerate(requests):
        if results[i] is None:
            try:
                if request.started:
                    results[i] = request.sequence.verify(request.input_ids, proposals[i].ids, request.overrides)
                else:
                    results[i] = request.sequence.start(request.input_ids, request.overrides)
            except Exception as error:
                results[i] = error
    return results


def _forward_packed(target: PreTrainedModel, segments: list[Segment], hidden_layers: list[int]) -> list[ModelOutput | Exception]:
    try:
        return packed_forward(target, segments, hidden_layers)
    except Exception as error:
        if len(segments) == 1:
            return [error]
        return [_forward_packed(target, [segment], hidden_layers)[0] for segment in segments]


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
    anew = inputs.get("cache") is None
    if anew:  # where its rope changes, a target drops its cache and computes the whole text once more
        inputs["cache"] = DynamicCache(config=target.config)
        inputs["cache"].activate_past_recording()
    outputs = target(**{**inputs, **overrides}, return_dict=True)
    if anew and outputs.get("hidden_states") is not None:
        outputs.hidden_states = tuple(layer if layer is None else layer[:, -num_rows:] for layer in outputs.hidden_states)
    return outputs


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
