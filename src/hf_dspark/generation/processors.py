"""Logits processors on the draft's side: the same laws as on the target's, without leaving a trace of rejected positions; and those of
a batch as each row's own."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType

import torch
from transformers import (
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    LogitsProcessor,
    LogitsProcessorList,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteria,
    StoppingCriteriaList,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)

__all__ = ["draft_processors", "row_criteria", "row_processors"]

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


def row_processors(processors: LogitsProcessorList, row: int, num_rows: int) -> LogitsProcessorList:
    """The processors made for a batch, as row `row` of it has them alone: (1, n) ids, its own state, its own batch_id."""
    return LogitsProcessorList([_of_row(processor, row, num_rows) for processor in processors])


def row_criteria(criteria: StoppingCriteriaList) -> StoppingCriteriaList:
    """The criteria of a batch for one row: transformers' own keep nothing of a text and are shared, others are copied."""
    return StoppingCriteriaList([criterion if _is_stock(criterion, StoppingCriteria) else _copied(criterion) or criterion for criterion in criteria])


def _of_row(processor, row: int, num_rows: int):
    kind = type(processor)
    if kind is PrefixConstrainedLogitsProcessor:
        return PrefixConstrainedLogitsProcessor(_AllowedInRow(processor._prefix_allowed_tokens_fn, row), num_beams=1)
    if kind is EncoderRepetitionPenaltyLogitsProcessor:
        own = copy.copy(processor)
        own.encoder_input_ids = _own_part(processor.encoder_input_ids, row, num_rows)
        return own
    if kind is RepetitionPenaltyLogitsProcessor and isinstance(processor.prompt_ignore_length, torch.Tensor):
        own = copy.copy(processor)
        own.prompt_ignore_length = _own_part(processor.prompt_ignore_length, row, num_rows)
        return own
    if kind is EncoderNoRepeatNGramLogitsProcessor:
        own = copy.copy(processor)
        own.batch_size, own.generated_ngrams = 1, _own_part(processor.generated_ngrams, row, num_rows)
        return own
    if kind is UnbatchedClassifierFreeGuidanceLogitsProcessor:
        own = copy.copy(processor)
        own.unconditional_context = dict(processor.unconditional_context)
        for name in ("input_ids", "attention_mask"):
            if (value := own.unconditional_context[name]) is not None:
                own.unconditional_context[name] = _own_part(value, row, num_rows)
        return own
    if _is_stock(processor, LogitsProcessor) and kind.__name__ not in _STATEFUL:
        return processor
    # What can't be copied is shared by the rows, and gets one row at a time.
    return _copied(processor) or processor


@dataclass
class _AllowedInRow:
    """A prefix_allowed_tokens_fn with its batch_id; no closure, so that a copy has its own state."""

    allowed: Callable[[int, torch.Tensor], list[int]]
    row: int

    def __call__(self, _: int, ids: torch.Tensor) -> list[int]:
        return self.allowed(self.row, ids)


def _own_part(values, row: int, num_rows: int):
    # One entry a prompt, of which each makes several rows with num_return_sequences.
    index = row * len(values) // num_rows
    return values[index : index + 1]


def _is_stock(value, base: type) -> bool:
    return type(value).__module__ == base.__module__
