"""Logits processors on the draft's side: the same laws as on the target's, without leaving a trace of rejected positions."""

import copy

import torch
from transformers import LogitsProcessor, LogitsProcessorList, UnbatchedClassifierFreeGuidanceLogitsProcessor

__all__ = ["draft_processors"]

# These stock processors keep state between calls. Every other one of transformers' module is a function of (ids, scores).
_STATEFUL = ("SynthIDTextWatermarkLogitsProcessor", "DiaEOSDelayPatternLogitsProcessor")


def draft_processors(processors: LogitsProcessorList) -> LogitsProcessorList:
    """The processors to call on drafted positions in one round; the target's own calls see committed text only, in order, once.

    A processor that may carry state is copied as it stands after the committed text, so that drafted positions can't spoil it.
    Guidance, which runs the target itself, and what can't be copied are left out: the draft then proposes from an unprocessed
    law, which costs acceptance and changes nothing in the output.
    """
    chosen = []
    for processor in processors:
        if type(processor).__module__ == LogitsProcessor.__module__ and type(processor).__name__ not in _STATEFUL:
            if not isinstance(processor, UnbatchedClassifierFreeGuidanceLogitsProcessor):
                chosen.append(processor)
            continue
        modules = (
            {id(value): value for value in vars(processor).values() if isinstance(value, torch.nn.Module)} if hasattr(processor, "__dict__") else {}
        )
        try:
            chosen.append(copy.deepcopy(processor, modules))
        except Exception:
            continue
    return LogitsProcessorList(chosen)
