"""Logits processors on the draft's side: the same laws as on the target's, without leaving a trace of rejected positions."""

import copy
from types import FunctionType

import torch
from transformers import LogitsProcessor, LogitsProcessorList, UnbatchedClassifierFreeGuidanceLogitsProcessor

__all__ = ["draft_processors"]

# Stock processors that keep state between calls, or hold an object of the user's that may. Every other one of transformers' module
# is a function of (ids, scores).
_STATEFUL = ("SynthIDTextWatermarkLogitsProcessor", "DiaEOSDelayPatternLogitsProcessor", "PrefixConstrainedLogitsProcessor")


def draft_processors(processors: LogitsProcessorList) -> LogitsProcessorList:
    """The processors to call on drafted positions in one round; the target's own calls see committed text only, in order, once.

    A processor that may carry state is copied as it stands after the committed text, so that drafted positions can't spoil it.
    Guidance, which runs the target itself, and what can't be copied are left out: the draft then proposes from an unprocessed
    law, which costs acceptance and changes nothing in the output. A `prefix_allowed_tokens_fn` that is a plain function is
    called on drafted prefixes as it is: by its contract it depends on its arguments alone.
    """
    copies = (_copied(processor) for processor in processors)
    return LogitsProcessorList([processor for processor in copies if processor is not None])


def _copied(processor) -> LogitsProcessor | None:
    name, stock = type(processor).__name__, type(processor).__module__ == LogitsProcessor.__module__
    if isinstance(processor, UnbatchedClassifierFreeGuidanceLogitsProcessor):
        return None
    if stock and name not in _STATEFUL:
        return processor
    attributes = list(vars(processor).values()) if hasattr(processor, "__dict__") else []
    # Copying leaves a function as it is, and with it whatever its closure holds.
    if not stock and any(isinstance(value, FunctionType) and value.__closure__ for value in attributes):
        return None
    modules = {id(value): value for value in attributes if isinstance(value, torch.nn.Module)}
    try:
        copied = copy.deepcopy(processor, modules)
    except Exception:
        return None
    return None if copied is processor else copied
