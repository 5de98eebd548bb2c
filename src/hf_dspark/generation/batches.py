"""A batch of generate() as one request a row, and the rows' outputs as what generate() returns for a batch."""

import copy
import logging

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.utils import GenerateDecoderOnlyOutput

from hf_dspark.generation.candidates import DSparkCandidateGenerator
from hf_dspark.generation.context_limits import ContextLimits
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
# Model arguments with a row for each text and a column for each of its tokens, or of those that a cache holds and it.
_ROW_ARGUMENTS = ("attention_mask", "position_ids", "token_type_ids", "mm_token_type_ids", "inputs_embeds")
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
        ValueError: an argument with other rows or another length than the texts; a row that is padded on the right, or empty; a batch
            that continues a cache, or keeps it in another memory.
    """
    num_rows = input_ids.shape[0]
    _refuse_other_shapes(input_ids, model_kwargs)
    if num_rows == 1:
        sequence = CachedSequence(target, generation_config, model_kwargs)
        generator = None if draft is None else DSparkCandidateGenerator(draft, target, generation_config, logits_processor)
        return [Request(target, input_ids, generation_config, logits_processor, stopping_criteria, sequence, generator, streamer)]
    _refuse_batch(input_ids, model_kwargs)
    max_length = length_limit(generation_config, stopping_criteria)
    reason = unpacked_reason(target, generation_config, model_kwargs, max_length)
    if reason is not None:
        warn_unpacked(target, reason)
    requests, store = [], KeyValueStore()
    for row in range(num_rows):
        own_ids, own_kwargs = input_ids[row : row + 1], _row_kwargs(model_kwargs, row, num_rows)
        if reason is None:
            sequence = PackedSequence(target, own_ids, own_kwargs.get("attention_mask"), store, max_length)
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


def _refuse_other_shapes(input_ids: torch.Tensor, model_kwargs: dict) -> None:
    """Raises ValueError for an argument whose rows or columns are not those of the texts."""
    embeds, cache = model_kwargs.get("inputs_embeds"), model_kwargs.get("cache")
    name, text = ("input_ids", input_ids) if embeds is None else ("inputs_embeds", embeds)
    lengths = {input_ids.shape[1], text.shape[1]}
    if cache is not None:
        lengths |= {int(cache.get_seq_length()) + length for length in lengths}
    for own in _ROW_ARGUMENTS:
        value = model_kwargs.get(own)
        if not isinstance(value, torch.Tensor) or (own == "attention_mask" and value.dim() != 2):
            continue
        # Positions of several axes come first, and may be those of all rows.
        num_rows, length = value.shape[:2] if own == "inputs_embeds" else value.shape[-2:] if value.dim() > 1 else (1, value.shape[-1])
        if length not in lengths or (num_rows != text.shape[0] and not (own == "position_ids" and num_rows == 1)):
            # generate() drops a mask of ones alone, and makes positions of it.
            own = "attention_mask or position_ids" if own == "position_ids" else own
            raise ValueError(f"{own} has the shape {tuple(value.shape)}, which does not fit {name} of shape {tuple(text.shape)}")


def _refuse_batch(input_ids: torch.Tensor, model_kwargs: dict) -> None:
    if getattr(model_kwargs["cache"], "offloading", False):
        raise ValueError(
            f"a batch of {input_ids.shape[0]} rows can't share an offloaded cache (cache_implementation='offloaded') with a DSpark draft, which "
            "needs one a row; use hf_dspark.generate_many, or leave it unset"
        )
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


def unpacked_reason(target: PreTrainedModel, generation_config: GenerationConfig, model_kwargs: dict, max_length: int) -> str | None:
    """Why requests with these arguments of generate(), of up to `max_length` tokens, can not be packed, None: they can.

    Raises:
        ValueError: nor decoded in turn (a dynamic rope, see `ContextLimits`).
    """
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
    return ContextLimits.of(target.config).unpacked_reason(max_length) or packing_failure(target)


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
        elif name == "position_ids" and value is not None and value.dim() == 3:  # (axes, batch, tokens)
            value = value if value.shape[1] == 1 else value[:, row : row + 1]
        elif isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape[0] == num_rows:
            value = value[row : row + 1]
        own[name] = value
    return own
