"""Checks of the first batch of a training: faults that would train a useless draft without a sound."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_dspark.distillation.features import TargetFeatures, target_features
from hf_dspark.modeling import DSparkDraftModel

__all__ = ["check_first_batch", "check_optimizer"]

logger = logging.getLogger(__name__)


def check_first_batch(draft: DSparkDraftModel, target: PreTrainedModel, inputs: dict[str, torch.Tensor], features: TargetFeatures) -> None:
    """`features` of the batch `inputs` must be the target's: its own logits, the layers named, the documents of a row kept apart.

    Raises:
        ValueError: they are not, or the target is not frozen.
    """
    check_frozen(target)
    draft.tables.check_head(features.last_hidden[:, -1], features.last_logits)
    index, layer_ids = 0, draft.config.target_layer_ids
    if "position_ids" in inputs:
        num_documents = ((inputs["position_ids"] == 0) & inputs["attention_mask"]).sum(dim=1)
        index = int(num_documents.argmax())
    row = slice(index, index + 1)
    inputs = {name: value[row] for name, value in inputs.items()}
    hidden_states = [layer[row] for layer in features.hidden_states]
    check_layers(target, inputs, hidden_states, layer_ids)
    if "position_ids" in inputs:
        check_packing(target, inputs, [*hidden_states, features.last_hidden[row]], layer_ids)


def check_frozen(target: PreTrainedModel) -> None:
    """Raises ValueError where the target, whose tables the draft borrows, would change or drop anything."""
    if trainable := [name for name, parameter in target.named_parameters() if parameter.requires_grad]:
        raise ValueError(f"the target must be frozen, but {len(trainable)} of its parameters require a gradient, such as {trainable[0]}")
    if target.training:
        raise ValueError(f"{type(target).__name__} is in training mode, where its features may be random; call target.eval()")


def check_layers(target: PreTrainedModel, inputs: dict[str, torch.Tensor], hidden_states: list[torch.Tensor], layer_ids: list[int]) -> None:
    """`hidden_states`, each (1, tokens, hidden), must come from the layers `layer_ids`: they are compared with what the layers themselves
    put out over `inputs`, one row. A target whose layers can't be found is let through with a warning.

    Raises:
        ValueError: another layer's output is closer.
    """
    nearby = sorted({near for layer in layer_ids for near in (layer - 1, layer, layer + 1) if near >= -1})
    with layer_outputs(target, nearby) as outputs:
        again = target_features(target, inputs["input_ids"], inputs["attention_mask"], layer_ids, inputs.get("position_ids"))
    if not outputs:
        logger.warning("%s has no list of layers to compare its hidden states with; target_layer_ids are taken on trust", type(target).__name__)
        return
    last_layer = target.config.get_text_config().num_hidden_layers - 1
    if last_layer in nearby:
        outputs[last_layer] = again.last_hidden
    for layer, hidden in zip(layer_ids, hidden_states):
        differences = {near: _difference(hidden, output) for near, output in outputs.items()}
        if not differences[layer] <= min(differences.values()) + 1e-6:
            closest = min(differences, key=differences.get)
            raise ValueError(
                f"what {type(target).__name__} returns as the output of its layer {layer} (of target_layer_ids {layer_ids}) is the output "
                f"of layer {closest}: it differs from layer {layer}'s by {differences[layer]:.2g}, from layer {closest}'s by "
                f"{differences[closest]:.2g}; the draft would learn from other layers than its config names"
            )


def check_packing(target: PreTrainedModel, inputs: dict[str, torch.Tensor], hidden_states: list[torch.Tensor], layer_ids: list[int]) -> None:
    """`hidden_states` of one packed row, each (1, tokens, hidden), the last one the target's last, must be those of its documents alone.

    Raises:
        ValueError: they differ by more than rounding.
    """
    num_tokens = int(inputs["attention_mask"].sum())
    starts = (inputs["position_ids"][0, :num_tokens] == 0).nonzero()[:, 0].tolist()
    for start, end in zip(starts, [*starts[1:], num_tokens]):
        alone = target_features(target, inputs["input_ids"][:, start:end], None, layer_ids)
        for packed, expected in zip(hidden_states, [*alone.hidden_states, alone.last_hidden]):
            difference = _difference(packed[:, start:end], expected)
            if not difference <= (1e-3 if target.dtype.itemsize >= 4 else 0.1):
                raise ValueError(
                    f"packing=True: {type(target).__name__} ({target.config._attn_implementation} attention) does not keep packed texts "
                    f"apart: the hidden states of a text in a packed row differ from those it has alone by {difference:.2g} (relative); "
                    "set packing=False"
                )


def check_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module, target: PreTrainedModel) -> None:
    """Raises ValueError unless `optimizer` holds the trainable parameters of `model`, the draft, each once, and nothing else."""
    held = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    distinct = set(held)
    if foreign := [name for name, parameter in target.named_parameters() if id(parameter) in distinct]:
        raise ValueError(f"the optimizer holds parameters of the target: {foreign[:3]}; give the trainer the draft alone as its model")
    wanted = {id(parameter): name for name, parameter in model.named_parameters() if parameter.requires_grad}
    if missing := [name for key, name in wanted.items() if key not in distinct]:
        raise ValueError(f"the optimizer lacks {len(missing)} trainable parameters of the draft, such as {missing[0]}, which would never change")
    if len(held) != len(wanted):
        raise ValueError(f"the optimizer holds {len(held)} parameters, the draft has {len(wanted)} trainable ones; each belongs in one group, once")


@contextmanager
def layer_outputs(target: PreTrainedModel, layer_ids: list[int]) -> Iterator[dict[int, torch.Tensor]]:
    """Collects the outputs (batch, tokens, hidden) of the decoder layers `layer_ids` of the next forward, by layer; -1: what enters layer 0.

    Found by structure: the first list of modules with a place for each layer; nothing is collected where there is none. The last
    layer's output, which transformers returns after the final norm, is left out.
    """
    num_layers = target.config.get_text_config().num_hidden_layers
    lists = [module for module in target.get_decoder().modules() if isinstance(module, nn.ModuleList) and len(module) == num_layers]
    layers = dict(enumerate(lists[0])) if lists else {}
    outputs: dict[int, torch.Tensor] = {}

    def keep(layer: int, value) -> None:
        outputs[layer] = value[0] if isinstance(value, tuple) else value

    def keep_input(module, args, kwargs) -> None:
        keep(-1, args[0] if args else kwargs["hidden_states"])

    hooks = [layers[0].register_forward_pre_hook(keep_input, with_kwargs=True)] if layers and -1 in layer_ids else []
    hooks += [
        layers[layer].register_forward_hook(lambda module, args, output, layer=layer: keep(layer, output))
        for layer in layer_ids
        if layer in layers and layer < num_layers - 1
    ]
    try:
        yield outputs
    finally:
        for hook in hooks:
            hook.remove()


def _difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Mean over tokens of the relative distance of two hidden states (1, tokens, hidden): one huge channel or token decides nothing alone."""
    ours, theirs = ours.float(), theirs.to(ours.device).float()
    return ((ours - theirs).norm(dim=-1) / theirs.norm(dim=-1).clamp(min=1e-12)).mean().item()
