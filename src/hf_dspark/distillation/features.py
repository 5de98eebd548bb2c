"""What a frozen target tells its draft about a text: the outputs of the chosen layers, and the hidden state its logits come from."""

import hashlib
import inspect
import json
from typing import NamedTuple

import torch
from peft import PeftModel
from transformers import PreTrainedModel

__all__ = ["TargetFeatures", "config_fingerprint", "target_features", "weights_fingerprint"]

# Options of a config that change nothing of what a forward computes from given weights.
_NEUTRAL = ("_name_or_path", "transformers_version", "dtype", "use_cache", "architectures", "output_hidden_states", "output_attentions")
# Elements of each tensor that its fingerprint reads.
_NUM_SAMPLED = 64


class TargetFeatures(NamedTuple):
    """One target forward.

    hidden_states: outputs of the chosen layers, each (batch, tokens, hidden). last_hidden: (batch, tokens, hidden), after the
    target's final norm. last_logits: (batch, vocab), the target's own logits at the last position; None: not of a forward just run.
    log_partition: (batch, tokens) fp32, see `log_partition` in teacher.py; None: not worked out.
    """

    hidden_states: list[torch.Tensor]
    last_hidden: torch.Tensor
    last_logits: torch.Tensor | None
    log_partition: torch.Tensor | None = None


@torch.no_grad()
def target_features(
    target: PreTrainedModel,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None,
    layer_ids: list[int],
    position_ids: torch.Tensor | None = None,
) -> TargetFeatures:
    """Runs `target` over `input_ids` (batch, tokens) long, right-padded where `attention_mask` (batch, tokens) is 0.

    `layer_ids` are 0-based target layers, -1 the embedding's output. `position_ids` (batch, tokens) long of packed rows start again
    at 0 with each document and with the padding; transformers then keeps the documents apart by itself, in each layer's own way
    (sliding windows, flash attention), and `attention_mask` is not used. The full logits (batch, tokens, vocab) are not computed
    where the target's forward takes `logits_to_keep`.

    Raises:
        ValueError: the target returns no hidden states of a layer asked for, or packed rows for a target without `position_ids`.
    """
    last_index = target.config.get_text_config().num_hidden_layers
    indices = [layer + 1 for layer in layer_ids]  # hidden_states[0] is the embedding's output
    # PEFT's own forward names none of these and hands them on.
    parameters = inspect.signature((target.get_base_model() if isinstance(target, PeftModel) else target).forward).parameters
    options = {}
    if position_ids is not None:
        if "position_ids" not in parameters:
            raise ValueError(f"packing=True: {type(target).__name__} takes no position_ids, which tell packed texts apart; set packing=False")
        attention_mask, options["position_ids"] = None, position_ids
    if "logits_to_keep" in parameters:
        # The number 1 slices a view whose product with the head, on a CPU, first copies the head once for each sequence.
        options["logits_to_keep"] = torch.tensor([input_ids.shape[1] - 1], device=input_ids.device)
    outputs = target(
        input_ids=input_ids, attention_mask=attention_mask, output_hidden_states=[*indices, last_index], use_cache=False, return_dict=True, **options
    )
    states = outputs.hidden_states
    if states is None or any(states[index] is None for index in [*indices, last_index]):
        raise ValueError(
            f"{type(target).__name__} returned no hidden states of its layers {layer_ids} and of its last; a draft can't be trained for it"
        )
    return TargetFeatures([states[index] for index in indices], states[last_index], outputs.logits[:, -1])


def config_fingerprint(target: PreTrainedModel) -> str:
    """16 hex digits of the sha256 of the target's config (without names, types and versions)."""
    essential = json.dumps(_essential(target.config.to_diff_dict()), sort_keys=True, default=str)
    return hashlib.sha256(essential.encode()).hexdigest()[:16]


@torch.no_grad()
def weights_fingerprint(target: PreTrainedModel, rounded: bool = False) -> str:
    """16 hex digits of a sha256 over names, shapes, types and 64 evenly spaced elements of every tensor of the target, an adapter's
    included: fast, and different for a fine-tuned target. Tensors that are elsewhere (offloaded to disk) count by name and shape.

    Args:
        rounded: numbers count as bfloat16, so that it is the same for the target loaded as float32, as bfloat16 or as it was stored.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(target.state_dict().items()):
        if not isinstance(tensor, torch.Tensor):
            continue
        is_rounded = rounded and tensor.is_floating_point()
        digest.update(f"{name} {tuple(tensor.shape)} {torch.bfloat16 if is_rounded else tensor.dtype}".encode())
        if tensor.is_meta or not tensor.numel():
            continue
        flat = tensor.flatten()
        sampled = flat[torch.arange(min(_NUM_SAMPLED, len(flat)), device=flat.device) * len(flat) // min(_NUM_SAMPLED, len(flat))]
        sampled = sampled.bfloat16() if is_rounded else sampled
        digest.update(sampled.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    if isinstance(target, PeftModel):
        digest.update(str(target.active_adapters).encode())
    return digest.hexdigest()[:16]


def _essential(config: dict) -> dict:
    kept = {key: value for key, value in config.items() if key not in _NEUTRAL}
    return {key: _essential(value) if isinstance(value, dict) else value for key, value in kept.items()}
