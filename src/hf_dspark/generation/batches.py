"""A batch of generate() as one request a row, and the rows' outputs as what generate() returns for a batch."""

import copy
import logging

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.utils import GenerateDecoderOnlyOutput

from hf_dspark.generation.candidates import DSparkCandidateGenerator
from hf_dspark.generation.decoding import Request, length_limit
from hf_dspark.generation.key_values import KeyValueStore
from hf_dspark.generation.packing import packing_failure
from hf_dspark.generation.processors import row_criteria, row_processors
from hf_dspark.generation.steps import CachedSequence, PackedSequence
from hf_dspark.modeling import DSparkDraftModel

__all__ = ["joined_output", "row_requests", "unpacked_reason", "warn_unpacked"]

logger = logging.getLogger(__name__)

# Model arguments that a packed step has its own of, or that only say what it does anyway.
_PACKED_ARGUMENTS = {"attention_mask", "position_ids", "cache", "use_cache", "logits_to_keep"}
_warned: set[tuple[str, str]] = set()


def row_requests(
    target: PreTrainedModel,
    draft: DSparkDraftModel | None,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    model_kwargs: dict,
    streamer=None,
) -> list[Request]:
    """One request for each row of `input_ids` (batch, tokens), with what generate() has prepared for the batch.

    One row uses the target's ordinary cache. Several are packed where the target can, and otherwise decoded a round of each in turn.

    Raises:
        ValueError: a row is padded on the right, or empty; a batch that continues a cache.
    """
    num_rows = input_ids.shape[0]
    if num_rows == 1:
        sequence = CachedSequence(target, generation_config, model_kwargs)
        generator = None if draft is None else DSparkCandidateGenerator(draft, target, generation_config, logits_processor)
        return [Request(target, input_ids, generation_config, logits_processor, stopping_criteria, sequence, generator, streamer)]
    _refuse_batch(input_ids, model_kwargs)
    reason = unpacked_reason(target, generation_config, model_kwargs)
    if reason is not None:
        warn_unpacked(target, reason)
    requests, store = [], KeyValueStore()
    for row in range(num_rows):
        own_ids, own_kwargs = input_ids[row : row + 1], _row_kwargs(model_kwargs, row, num_rows)
        if reason is None:
            sequence = PackedSequence(target, own_ids, own_kwargs.get("attention_mask"), store, length_limit(generation_config, stopping_criteria))
        else:
            sequence = CachedSequence(target, generation_config, own_kwargs)
        processors, criteria = row_processors(logits_processor, row, num_rows), row_criteria(stopping_criteria)
        generator = None if draft is None else DSparkCandidateGenerator(draft, target, generation_config, processors)
        requests.append(Request(target, own_ids, generation_config, processors, criteria, sequence, generator))
    return requests


def joined_output(requests: list[Request]) -> torch.Tensor | GenerateDecoderOnlyOutput:
    """What generate() returns: ids (batch, tokens), shorter rows filled up with the pad token, or the dictionary of it.

    Scores and logits of a step are (batch, vocab), zeros for rows that have ended; the cache of a batch is None.
    """
    if len(requests) == 1:
        return requests[0].output()
    config, rows = requests[0].generation_config, [request.input_ids for request in requests]
    longest = max(row.shape[1] for row in rows)
    # Rows differ in length only where something ends a text early, which generate() demands a pad token for.
    pad = 0 if config._pad_token_tensor is None else int(config._pad_token_tensor)
    sequences = torch.cat([torch.nn.functional.pad(row, (0, longest - row.shape[1]), value=pad) for row in rows])
    if not config.return_dict_in_generate:
        return sequences
    scores, logits = (_joined_steps([getattr(request, name) for request in requests]) for name in ("scores", "logits"))
    return GenerateDecoderOnlyOutput(sequences=sequences, scores=scores, logits=logits, cache=None)


def warn_unpacked(target: PreTrainedModel, reason: str) -> None:
    """Says once why a target's requests are not decoded in one forward."""
    key = type(target).__name__, reason
    if key not in _warned:
        _warned.add(key)
        logger.warning("the rows of a batch are decoded in turn instead of in one forward, which is slower: %s", reason)


def _joined_steps(rows: list[tuple | None]) -> tuple[torch.Tensor, ...] | None:
    if rows[0] is None:
        return None
    ended = torch.zeros_like(rows[0][0])
    return tuple(torch.cat([row[k] if k < len(row) else ended for row in rows]) for k in range(max(map(len, rows))))


def _refuse_batch(input_ids: torch.Tensor, model_kwargs: dict) -> None:
    if (held := int(model_kwargs["cache"].get_seq_length())) > 0:
        raise ValueError(
            f"a batch of {input_ids.shape[0]} rows can't continue a cache (it holds {held} tokens) with a DSpark draft; continue each row by itself, "
            "or pass the whole texts"
        )
    mask = model_kwargs.get("attention_mask")
    if mask is None or mask.dim() != 2:
        return
    for row, real in enumerate(mask.bool().tolist()):
        if not any(real):
            raise ValueError(f"row {row} of the batch is empty: its attention_mask has no 1")
        if not real[-1]:
            raise ValueError(f"row {row} of the batch is padded on the right; a text is continued from its last token: use padding_side='left'")


def unpacked_reason(target: PreTrainedModel, generation_config: GenerationConfig, model_kwargs: dict) -> str | None:
    """Why requests with these arguments of generate() can not be packed, None: they can."""
    given = {name for name, value in model_kwargs.items() if value is not None} - _PACKED_ARGUMENTS
    if given:
        return f"generate() was given {sorted(given)}"
    mask = model_kwargs.get("attention_mask")
    if mask is not None and mask.dim() != 2:
        return f"the attention_mask has {mask.dim()} dimensions"
    positions = model_kwargs.get("position_ids")
    expected = None if positions is None else _usual_positions(mask, positions)
    if positions is not None and not torch.equal(positions, expected.to(positions)):
        return "generate() was given position_ids of its own"
    if generation_config.cache_implementation not in (None, "dynamic"):
        return f"cache_implementation={generation_config.cache_implementation!r}"
    return packing_failure(target)


def _usual_positions(mask: torch.Tensor | None, positions: torch.Tensor) -> torch.Tensor:
    if mask is None:
        return torch.arange(positions.shape[-1]).expand(positions.shape)
    usual = mask.long().cumsum(-1) - 1
    # Nothing reads the positions of padded tokens.
    return torch.where(mask.bool().to(positions.device), usual.to(positions), positions)


def _row_kwargs(model_kwargs: dict, row: int, num_rows: int) -> dict:
    """The arguments of one row; the cache, which is empty, is its own."""
    own = {}
    for name, value in model_kwargs.items():
        if name == "cache":
            value = copy.deepcopy(value)
        elif isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape[0] == num_rows:
            value = value[row : row + 1]
        own[name] = value
    return own
