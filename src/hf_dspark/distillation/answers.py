"""What a target's answer is good for: whole, cut at the length limit, looping, or empty."""

from hf_dspark.evaluation.acceptance import LOOPING_SHARE, REPEATED_NGRAM
from hf_dspark.evaluation.benchmarks import repeated_ngram_share

__all__ = ["CUT", "EMPTY", "LOOPING", "LOOPING_SHARE", "WHOLE", "judge_answer"]

WHOLE, CUT, LOOPING, EMPTY = "whole", "cut", "looping", "empty"


def judge_answer(ids: list[int], *, is_blank: bool, is_ended: bool, looping_share: float = LOOPING_SHARE) -> str:
    """One word for the answer of the tokens `ids`, the end token among them or not.

    Args:
        is_blank: there is no text in it.
        is_ended: the target ended it itself; False: it went on to the length limit.
        looping_share: from this share of 8-grams that had occurred before the answer is a loop, cut or not.
    """
    if is_blank:
        return EMPTY
    if repeated_ngram_share(ids, REPEATED_NGRAM) >= looping_share:
        return LOOPING
    return WHOLE if is_ended else CUT
