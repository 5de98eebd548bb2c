"""Rows over a large vocabulary, read in as few passes as an exact answer needs: largest, best and drawn tokens.

On a CPU torch's argmax, topk and multinomial over 262,144 values take longer than the forward of a small model's row. Each is split in
two here: over the largest (or the sums) of blocks of columns, then inside the blocks that matter. Axis words: `rows`, `vocab`.
"""

import torch
from torch.nn import functional as F
from transformers import LogitsProcessorList, MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from hf_dspark.generation.acceptance import choose

__all__ = ["LARGE_VOCABULARY", "best_tokens", "draw", "largest_token"]

LARGE_VOCABULARY = 16_384
# Columns of a group, and of a block, whose maximum is found before the values themselves are looked at.
_GROUP, _BLOCK = 32, 512
# Best tokens that a nucleus without top-k is looked for in, one size after the other.
_NUCLEUS_SIZES = (128, 1024)
# generate()'s order of the processors that keep some tokens; temperature comes before them.
_ORDER = (TopKLogitsWarper, TopPLogitsWarper, MinPLogitsWarper)
# Probability mass within which two orders of summation may part.
_MASS_ERROR = 1e-5


def largest_token(row: torch.Tensor) -> int:
    """`row.argmax()` of (vocab,), the first of equal ones."""
    if row.shape[-1] <= LARGE_VOCABULARY or row.device.type != "cpu":
        return row.argmax().item()
    blocks = _blocks(row[None])[0]
    block = blocks.amax(dim=-1).argmax().item()
    return block * blocks.shape[-1] + blocks[block].argmax().item()


def best_tokens(rows: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`rows.topk(count)` of (rows, vocab): values, largest first, and ids, each (rows, count). Which of equal values come last is open."""
    num_groups = rows.shape[-1] // _GROUP
    if rows.device.type != "cpu" or rows.shape[-1] % _GROUP or num_groups < 4 * count:
        return rows.topk(count, dim=-1)
    groups = rows.reshape(rows.shape[0], _GROUP, num_groups)  # a group is a column of it: vectorised maxima
    # Outside the `count` groups with the largest values there is nothing larger than `count` values inside them.
    chosen = groups.amax(dim=1).topk(count, dim=-1).indices  # (rows, count)
    inside = groups.gather(2, chosen[:, None].expand(-1, _GROUP, -1)).flatten(1)
    values, places = inside.topk(count, dim=-1)
    return values, places // count * num_groups + chosen.gather(1, places % count)


def draw(row: torch.Tensor, processors: LogitsProcessorList, generator: torch.Generator | None = None) -> int | None:
    """A token from the law of `row` (vocab,) after `processors`, or None where only the whole way, in fp32 over all columns, is exact.

    Known are temperature alone (drawn block first), and temperature, top-k, top-p and min-p in the order of generate() (drawn among
    the best tokens). Where those may not be all that is kept, where a mass is too close to its bound, and where top-p keeps some of
    several equal logits, which ones being an accident of a sort over the whole row, it is the whole way's turn.
    """
    if row.shape[-1] <= LARGE_VOCABULARY:
        return None
    processors = list(processors)
    temperature = processors.pop(0).temperature if processors and type(processors[0]) is TemperatureLogitsWarper else 1.0
    if not processors:
        return _draw_from_blocks(row, temperature, generator)
    places = [_ORDER.index(type(processor)) if type(processor) in _ORDER else -1 for processor in processors]
    if -1 in places or places != sorted(set(places)) or any(processor.filter_value != -float("inf") for processor in processors):
        return None
    first, *others = processors
    if type(first) is TopKLogitsWarper:
        kept = _of_top_k(row, temperature, first.top_k)
    elif type(first) is TopPLogitsWarper and first.min_tokens_to_keep == 1:
        kept = _of_top_p(row, temperature, first.top_p)
    else:
        return None
    if kept is None:
        return None
    values = row[kept].float() / temperature
    scores = values[None]
    for processor in others:
        if _too_close(processor, scores[0]):
            return None
        scores = processor(kept[None], scores)
    removed = torch.isneginf(scores[0])
    if removed.any() and values[removed].max() == values[~removed].min():
        return None
    return kept[choose(torch.softmax(scores, dim=-1), generator).item()].item()


def _of_top_k(row: torch.Tensor, temperature: float, top_k: int) -> torch.Tensor | None:
    """Ids of all tokens as good as the `top_k`-th or better, of which there can be more; None where they can't be told."""
    if 2 * top_k > _NUCLEUS_SIZES[-1]:
        return None
    values, ids = (best[0] for best in best_tokens(row[None], 2 * top_k))
    values = values.float() / temperature  # which may make neighbours equal
    count = int((values >= values[top_k - 1]).sum())
    return ids[:count] if count < len(values) else None


def _of_top_p(row: torch.Tensor, temperature: float, top_p: float) -> torch.Tensor | None:
    """Ids of the nucleus: a token is in it while those before it have less mass than `top_p`; None where it can't be told."""
    normaliser = torch.logsumexp(row.float() / temperature, dim=-1)
    for size in _NUCLEUS_SIZES:
        values, ids = (best[0] for best in best_tokens(row[None], size))
        values = values.float() / temperature
        mass = (values - normaliser).exp_().double().cumsum(0)
        count = 1 + int((mass < top_p).sum())
        if count < len(values):
            split = values[count] == values[count - 1]
            return None if split or (mass - top_p).abs().min() < _MASS_ERROR else ids[:count]
    return None


def _too_close(processor, scores: torch.Tensor) -> bool:
    """Whether rounding could decide what top-p or min-p keeps of `scores` (kept,)."""
    if type(processor) is TopPLogitsWarper:
        mass = torch.softmax(scores, dim=-1).sort(descending=True).values.double().cumsum(0)
        return bool((mass - processor.top_p).abs().min() < _MASS_ERROR)
    if type(processor) is MinPLogitsWarper:
        return bool(((scores - scores.max()).exp() - processor.min_p).abs().min() < _MASS_ERROR)
    return False


def _draw_from_blocks(row: torch.Tensor, temperature: float, generator: torch.Generator | None) -> int:
    """A block of columns by its weight, then a column in it by its own."""
    scores = row.float() / temperature
    weights = _blocks((scores - scores.max()).exp_()[None], fill=0.0)[0]
    block = choose(weights.sum(dim=-1)[None], generator).item()
    return block * weights.shape[-1] + choose(weights[block][None], generator).item()


def _blocks(rows: torch.Tensor, fill: float = -torch.inf) -> torch.Tensor:
    """(rows, vocab) -> (rows, blocks, _BLOCK), filled up with `fill`, which nothing chooses."""
    missing = -rows.shape[-1] % _BLOCK
    rows = F.pad(rows, (0, missing), value=fill) if missing else rows
    return rows.reshape(rows.shape[0], -1, _BLOCK)
