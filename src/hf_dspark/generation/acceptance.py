"""Verification of drafted tokens, one position at a time: the law of the output is the target's (paper section 2; Leviathan et al., 2023)."""

import torch

__all__ = ["accept_or_replace", "choose"]


def choose(weights: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
    """Draws an index from each row of `weights` (rows, n), non-negative, -> (rows,) long. Every random number of decoding is drawn here.

    `generator`: the request's own source of random numbers, None: the global one (`set_seed`).
    """
    return torch.multinomial(weights, num_samples=1, generator=generator).squeeze(1)


def accept_or_replace(scores: torch.Tensor, draft_id: int | None, draft_law: torch.Tensor | None, generator: torch.Generator | None = None) -> int:
    """The token at one position: `draft_id` itself when it is accepted, otherwise the token that replaces it.

    Args:
        scores: the target's processed scores at this position, (1, vocab); log probabilities up to a constant.
        draft_id: the drafted token; None: there is none at this position, the target chooses alone.
        draft_law: the law (vocab,) fp32 that `draft_id` was drawn from; None: it was chosen by argmax (the one-hot law).
        generator: see `choose`.

    With a law q the drafted token x is accepted with probability min(1, p(x) / q(x)); a rejected position is drawn from the
    normalised positive part of p - q, or from p where rounding leaves nothing of it. Under the one-hot law that is the same as
    drawing from p and comparing.
    """
    target_law = torch.softmax(scores.float(), dim=-1)  # (1, vocab)
    if draft_id is None or draft_law is None:
        return choose(target_law, generator).item()
    draft_law = draft_law.to(target_law.device)
    ratio = (target_law[0, draft_id] / draft_law[draft_id]).clamp(max=1.0)
    if choose(torch.stack([1.0 - ratio, ratio])[None], generator).item():
        return draft_id
    residual = (target_law - draft_law).clamp_(min=0.0)
    return choose(residual if residual.sum() > 0 else target_law, generator).item()
