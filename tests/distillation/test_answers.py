"""Verdicts on answers, counted by hand."""

import pytest

from hf_dspark.distillation.answers import judge_answer

LOOP = [1, 2, 3, 4] * 8  # 25 8-grams, 4 of them distinct: 84 % repeated
VARIED = list(range(32))


@pytest.mark.parametrize(
    ("ids", "facts", "verdict"),
    [
        (VARIED, {}, "whole"),
        (VARIED, {"is_ended": False}, "cut"),
        (LOOP, {}, "looping"),
        (LOOP, {"is_ended": False}, "looping"),
        (LOOP, {"looping_share": 0.84}, "looping"),
        (LOOP, {"looping_share": 0.85}, "whole"),
        (VARIED + VARIED[:10], {}, "whole"),  # 3 of 35 repeated
        ([7] * 8, {}, "whole"),  # one 8-gram
        ([2], {"is_blank": True}, "empty"),
        (LOOP, {"is_blank": True}, "empty"),
    ],
    ids=["whole", "cut", "looping", "looping and cut", "at the threshold", "below it", "a little repeated", "short", "empty", "blanks"],
)
def test_verdicts(ids, facts, verdict):
    assert judge_answer(ids, **{"is_blank": False, "is_ended": True, **facts}) == verdict
