"""The knobs of one generate() call, read from `draft.generation_config` and checked."""

from dataclasses import dataclass
from difflib import get_close_matches

from transformers import GenerationConfig

from hf_dspark.modeling import DSparkDraftModel

__all__ = ["DraftOptions", "draft_options"]

_OWN_NAMES = ("conditional_confidence_threshold", "draft_sampling", "raise_on_draft_failure")


@dataclass(slots=True, frozen=True)
class DraftOptions:
    """Checked knobs: drafts a round, thresholds in [0, 1] (0: no cut), "chain" or "argmax", whether a failing draft raises."""

    num_assistant_tokens: int
    survival_threshold: float
    conditional_threshold: float
    draft_sampling: str
    raise_on_draft_failure: bool


def draft_options(draft: DSparkDraftModel) -> DraftOptions:
    """The options of `draft`, with None replaced by the default that fits its heads.

    Raises:
        ValueError: an unknown or impossible option in `draft.generation_config`; the message names it and its value.
    """
    knobs = draft.generation_config
    if not isinstance(knobs, GenerationConfig):
        raise ValueError(f"draft.generation_config must be a GenerationConfig, got {knobs!r}; change its options instead of replacing it")
    _refuse_misspelt(knobs)
    block_size = draft.config.block_size
    num_tokens = block_size if knobs.num_assistant_tokens is None else knobs.num_assistant_tokens
    if isinstance(num_tokens, bool) or not isinstance(num_tokens, int) or not 1 <= num_tokens <= block_size:
        raise ValueError(
            f"draft.generation_config.num_assistant_tokens must lie between 1 and the draft's block_size {block_size} (None: the whole block), "
            f"got {num_tokens!r}"
        )
    if (schedule := knobs.num_assistant_tokens_schedule) not in (None, "constant"):
        raise ValueError(f"draft.generation_config.num_assistant_tokens_schedule must be 'constant' or None, a draft has no other; got {schedule!r}")
    thresholds = []
    for name in ("assistant_confidence_threshold", "conditional_confidence_threshold"):
        value = getattr(knobs, name, None)
        value = 0.0 if value is None else value  # transformers' unset value is no cut
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 <= value <= 1.0:
            raise ValueError(f"draft.generation_config.{name} is a probability and must lie in [0, 1], got {value!r}")
        if value > 0 and draft.confidence_head is None:
            raise ValueError(f"draft.generation_config.{name}={value} needs a confidence head, but this draft was trained without one")
        thresholds.append(float(value))
    sampling = getattr(knobs, "draft_sampling", None)
    if sampling not in (None, "chain", "argmax"):
        raise ValueError(f"draft.generation_config.draft_sampling must be 'chain', 'argmax' or None, got {sampling!r}")
    raising = getattr(knobs, "raise_on_draft_failure", False)
    if not isinstance(raising, bool):
        raise ValueError(f"draft.generation_config.raise_on_draft_failure must be True or False, got {raising!r}")
    # Independent draws at every position are hardly ever accepted together; without a Markov head the most likely tokens are.
    default_sampling = "chain" if draft.config.markov_rank > 0 else "argmax"
    return DraftOptions(num_tokens, *thresholds, sampling or default_sampling, raising)


def _refuse_misspelt(knobs: GenerationConfig) -> None:
    known = set(vars(GenerationConfig())) | set(_OWN_NAMES)
    for name in vars(knobs):
        if not name.startswith("_") and name not in known:
            close = get_close_matches(name, known, n=1)
            raise ValueError(
                f"draft.generation_config has an unknown option {name!r} (value {getattr(knobs, name)!r})"
                + (f"; did you mean {close[0]!r}?" if close else "")
            )
