"""The target's law at the slots of blocks, over what the draft can predict: what a draft is taught.

Axis words: `rows` slots; `hidden` of the target; `vocab` of the draft, the target's own or a part of it.
"""

from collections.abc import Callable

import torch
from torch.nn.functional import linear

from hf_dspark.modeling import DSparkDraftModel

__all__ = ["TeacherLaw", "log_partition", "softmax_"]

# Logits that are alive at once: few enough for a processor's cache, where most of the time of a sum over them would go to memory.
_CHUNK_LOGITS = 2**21
_CHUNK_ROWS = 2**10


class TeacherLaw:
    """softmax of the target's logits at tokens that may stand in several blocks.

    For a draft with a reduced vocabulary only its own columns of the target's head are multiplied. The sum over the whole vocabulary that
    divides them is worked out once a token, or known already.

    Args:
        last_hidden: (batch, tokens, hidden), the target's after its final norm.
        sequences, tokens: (rows,) long, where in `last_hidden` each slot's teacher stands.
        partition: (batch, tokens) fp32 as of `log_partition`; None: worked out where it is needed.
    """

    def __init__(
        self,
        draft: DSparkDraftModel,
        last_hidden: torch.Tensor,
        sequences: torch.Tensor,
        tokens: torch.Tensor,
        partition: torch.Tensor | None = None,
    ):
        self.hidden = last_hidden[sequences, tokens]  # (rows, hidden)
        self.is_reduced = draft.config.draft_vocab_size is not None
        if not self.is_reduced:
            self._logits = draft.tables.logits
            return
        self._logits = _column_logits(draft, draft.target_ids(torch.arange(draft.config.draft_vocab_size, device=draft.d2t.device)))
        if partition is None:
            used, places = (sequences * last_hidden.shape[1] + tokens).unique(return_inverse=True)
            self._partition = log_partition(draft, last_hidden.flatten(0, 1)[used])[places]
        else:
            self._partition = partition[sequences, tokens]

    def probabilities(self, part: slice) -> torch.Tensor:
        """Those of the rows `part`: (rows, vocab) fp32, in memory of their own; they sum up to less than 1 over a reduced vocabulary."""
        logits = self._logits(self.hidden[part]).float()
        if not self.is_reduced:
            softmax_(logits)
            return logits
        return logits.sub_(self._partition[part].to(logits.device)[:, None]).exp_()


@torch.no_grad()
def log_partition(draft: DSparkDraftModel, last_hidden: torch.Tensor, chunk_logits: int = _CHUNK_LOGITS) -> torch.Tensor:
    """Logarithm of the sum of exp(logit) over the target's whole vocabulary: `last_hidden` (tokens..., hidden) -> (tokens...) fp32.

    `chunk_logits`: about so many logits are alive at once.
    """
    head, sums = draft.tables.plain_head, []
    for rows in last_hidden.flatten(0, -2).split(_CHUNK_ROWS if head is not None else max(1, chunk_logits // draft.config.vocab_size)):
        if head is None:
            sums.append(_exponentials_(draft.tables.target_logits(rows).float())[1][:, 0])
            continue
        columns, parts = max(1, chunk_logits // max(1, len(rows))), []
        for start in range(0, head.weight.shape[0], columns):
            logits = _column_logits(draft, slice(start, start + columns))(rows)
            parts.append(_exponentials_(logits.float())[1][:, 0])
        sums.append(torch.stack(parts).logsumexp(dim=0))
    return torch.cat(sums).view(last_hidden.shape[:-1])


def _column_logits(draft: DSparkDraftModel, ids: torch.Tensor | slice) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function from `hidden` (rows, hidden) to the target's logits (rows, ids) of the tokens `ids` (ids,) long.

    Only their rows of its head are multiplied, where that is an ordinary linear layer; a head of another kind is called.
    """
    head = draft.tables.plain_head
    if head is None:
        num_rows = max(1, _CHUNK_LOGITS // draft.config.vocab_size)
        return lambda hidden: torch.cat([draft.tables.target_logits(part)[:, ids] for part in hidden.split(num_rows)])
    weight, bias = head.weight[ids], None if head.bias is None else head.bias[ids]
    return lambda hidden: draft.tables.transformed(linear(hidden.to(weight), weight, bias))


def softmax_(logits: torch.Tensor) -> torch.Tensor:
    """Turns `logits` (rows, vocab) into their softmax, in place; returns the logarithm of the norm, (rows, 1)."""
    norm, log_norm = _exponentials_(logits)
    logits.div_(norm)
    return log_norm


def _exponentials_(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Turns `logits` (rows, vocab) into exp(logit - largest), in place; returns their sum and the logarithm of the sum of exp(logit), (rows, 1)."""
    largest = logits.amax(dim=-1, keepdim=True)
    norm = logits.sub_(largest).exp_().sum(dim=-1, keepdim=True)
    return norm, largest + norm.log()
