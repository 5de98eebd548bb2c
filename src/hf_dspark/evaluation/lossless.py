"""Is a pair lossless here? Its own prompts decoded with and without the draft, compared: `hf-dspark verify`."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel

from hf_dspark.evaluation.output import progress
from hf_dspark.evaluation.sampling_law import SamplingCheck, check_sampling, stop_tokens
from hf_dspark.generation.report import GenerationReport, RequestRecord, record_generation
from hf_dspark.modeling import DSparkDraftModel

__all__ = ["NEAR_TIE_UNITS", "Check", "verify"]

# In half precision a row of a block and a single row round differently; texts may part where the gap is at most this many
# units in the last place of the largest logit.
NEAR_TIE_UNITS = 4
# Relative difference of logits that two fp32 kernels stay far below, and a wrong cache does not.
LOGITS_TOLERANCE = 1e-3


@dataclass(slots=True)
class Check:
    """One check: its name, whether it passed, the finding in words, and figures for JSON."""

    name: str
    passed: bool
    words: str
    figures: dict = field(default_factory=dict)


@dataclass(slots=True)
class Text:
    """A greedy text: new ids, and where they were kept the scores and logits of each, (1, vocab) fp32, and the cache's length."""

    ids: list[int]
    scores: tuple[torch.Tensor, ...] = ()
    logits: tuple[torch.Tensor, ...] = ()
    cache_length: int = 0


def verify(
    target: PreTrainedModel,
    draft: DSparkDraftModel,
    prompts: list[torch.Tensor],
    max_new_tokens: int = 64,
    num_samples: int = 200,
    temperature: float = 0.7,
    seed: int = 0,
    show: Callable[[int], str] = str,
) -> Iterator[Check]:
    """Yields the finding of each check as it is made; the pair is lossless on `prompts`, each (1, tokens), when all have passed.

    Greedy texts must be plain decoding's, token for token; in half precision the first difference may be a near tie. Texts that
    end inside a block must end there. Sampled texts must follow the target's own processed law. `show` turns a token into text.

    Raises:
        ValueError: an option outside its range.
    """
    if max_new_tokens < 2:
        raise ValueError(f"max_new_tokens must be at least 2 (the first token is written without the draft), got {max_new_tokens}")
    if num_samples < 0:
        raise ValueError(f"samples must be 0 (no sampling) or more, got {num_samples}")
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    plain = [_write(target, prompt, max_new_tokens) for prompt in progress(prompts, "plain")]
    with record_generation() as report:
        drafted = [_write(target, prompt, max_new_tokens, draft, watched=False) for prompt in progress(prompts, "greedy")]
    yield _check_failures(report)
    yield _check_greedy(target, plain, drafted, report, show)
    yield _check_logits(target, draft, prompts, plain, max_new_tokens)
    yield _check_endings(target, draft, prompts, drafted, report, max_new_tokens, show)
    if num_samples:
        for check in check_sampling(target, draft, prompts, max_new_tokens, num_samples, temperature, seed, show):
            yield _from_sampling(check)


def _from_sampling(check: SamplingCheck) -> Check:
    figures = {"p_value": check.p_value, "alarm_below": check.alarm_below, "texts": check.num_texts, "tokens": check.num_tokens}
    return Check(f"sampling, {check.name}", check.passed, check.words, figures)


def _write(target: PreTrainedModel, prompt: torch.Tensor, max_new_tokens: int, draft=None, watched: bool = True, stop_id: int | None = None) -> Text:
    """A greedy text after `prompt` (1, tokens); `watched`: with scores and logits; `stop_id`: one more token that ends it."""
    options = dict(max_new_tokens=max_new_tokens, do_sample=False)
    if draft is not None:
        options["assistant_model"] = draft
    if stop_id is not None:
        options["eos_token_id"] = sorted({stop_id, *stop_tokens(target)})
    if not watched:
        return Text(target.generate(input_ids=prompt, **options)[0, prompt.shape[1] :].tolist())
    output = target.generate(input_ids=prompt, return_dict_in_generate=True, output_scores=True, output_logits=True, **options)
    return Text(output.sequences[0, prompt.shape[1] :].tolist(), output.scores, output.logits, int(output.cache.get_seq_length()))


@dataclass(slots=True)
class Difference:
    """Where two texts part: index of the first token that differs, both tokens (None: ended), and how near a tie it was there."""

    index: int
    plain_id: int | None
    drafted_id: int | None
    gap: float
    unit: float
    excused: bool

    def words(self, show: Callable[[int], str]) -> str:
        tokens = ["the end" if token is None else f"{show(token)!r} ({token})" for token in (self.plain_id, self.drafted_id)]
        where = f"new token {self.index + 1}: {tokens[0]} in plain decoding, {tokens[1]} with the draft"
        if math.isnan(self.gap):
            return where
        return f"{where}; there their logits are {self.gap:.3g} apart, {self.gap / self.unit:.1f} units in the last place" + (
            f" (a near tie is at most {NEAR_TIE_UNITS})" if not self.excused else ""
        )


def first_difference(plain: Text, drafted_ids: list[int], dtype: torch.dtype) -> Difference | None:
    """The first difference of `drafted_ids` from the watched text `plain`, excused in half precision where it is a near tie."""
    for index in range(max(len(plain.ids), len(drafted_ids))):
        ours = plain.ids[index] if index < len(plain.ids) else None
        theirs = drafted_ids[index] if index < len(drafted_ids) else None
        if ours == theirs:
            continue
        if ours is None or theirs is None:
            return Difference(index, ours, theirs, math.nan, math.nan, excused=False)
        scores, logits = plain.scores[index][0].float(), plain.logits[index][0].float()
        gap = (scores[ours] - scores[theirs]).item()
        unit = unit_in_last_place(logits[logits.isfinite()].abs().max().item(), dtype)
        return Difference(index, ours, theirs, gap, unit, excused=dtype.itemsize < 4 and gap <= NEAR_TIE_UNITS * unit)
    return None


def unit_in_last_place(magnitude: float, dtype: torch.dtype) -> float:
    """Distance of neighbouring numbers of `dtype` at `magnitude`."""
    return torch.finfo(dtype).eps * 2.0 ** math.floor(math.log2(magnitude)) if magnitude > 0 else torch.finfo(dtype).tiny


def _check_failures(report: GenerationReport) -> Check:
    """A draft that fails costs no token, but then nothing of it is checked."""
    causes = [request.draft_failure for request in report.requests if request.draft_failure]
    if causes:
        return Check("draft", False, f"the draft failed on {len(causes)} of {len(report.requests)} prompts ({causes[0]}); nothing was checked there")
    return Check("draft", True, f"the draft ran on {len(report.requests)} of {len(report.requests)} prompts")


def _check_greedy(target, plain: list[Text], drafted: list[Text], report: GenerationReport, show) -> Check:
    differences = [first_difference(ours, theirs.ids, target.dtype) for ours, theirs in zip(plain, drafted)]
    wrong = [(number, found) for number, found in enumerate(differences, 1) if found is not None and not found.excused]
    excused = [found for found in differences if found is not None and found.excused]
    figures = {
        "prompts": len(plain),
        "tokens": sum(len(text.ids) for text in drafted),
        "rounds": len(report.rounds),
        "tokens_per_round": report.tokens_per_round,
        "near_ties": len(excused),
        "identical_prompts": differences.count(None),
    }
    if wrong:
        number, found = wrong[0]
        return Check("greedy", False, f"{len(wrong)} of {len(plain)} texts differ, the first at prompt {number}, {found.words(show)}", figures)
    words = f"{differences.count(None)} of {len(plain)} texts identical"
    words += f" ({figures['tokens']} tokens, {figures['rounds']} rounds of {report.tokens_per_round:.2f} tokens)"
    if excused:
        words += f"; the others part at a near tie of {str(target.dtype).removeprefix('torch.')}, e.g. at {excused[0].words(show)}"
    if not any(round_.accepted for round_ in report.rounds):
        words += "; no draft was accepted at all, so this says little: is it the right draft for this target?"
    return Check("greedy", True, words, figures)


def _check_logits(target, draft, prompts: list[torch.Tensor], plain: list[Text], max_new_tokens: int) -> Check:
    """The same texts once more, with the logits of every token and the length of the cache; half precision has no strict tolerance."""
    largest, problem = 0.0, None
    for number, (prompt, expected) in enumerate(progress(list(zip(prompts, plain)), "logits"), 1):
        text = _write(target, prompt, max_new_tokens, draft)
        if text.ids != expected.ids:
            if (found := first_difference(expected, text.ids, target.dtype)) and not found.excused:
                problem = problem or f"prompt {number}: with output_logits the text differs at new token {found.index + 1}"
            continue
        if text.cache_length != expected.cache_length:
            problem = problem or f"prompt {number}: the cache holds {text.cache_length} tokens, plain decoding's holds {expected.cache_length}"
        for index, (ours, theirs) in enumerate(zip(text.logits, expected.logits), 1):
            scale = max(1.0, theirs[theirs.isfinite()].abs().max().item())
            difference = (ours - theirs)[theirs.isfinite()].abs().max().item() / scale
            largest = max(largest, difference)
            if target.dtype.itemsize >= 4 and not difference <= LOGITS_TOLERANCE:
                what = f"the logits of new token {index} differ by {difference:.2g} of the largest"
                problem = problem or f"prompt {number}: {what}; the target saw another cache"
    words = problem or f"within {largest:.1e} of the largest logit; caches of equal length"
    return Check("logits", problem is None, words, {"largest_relative_difference": largest})


def _check_endings(target, draft, prompts: list[torch.Tensor], drafted: list[Text], report: GenerationReport, max_new_tokens: int, show) -> Check:
    """Stop tokens and budgets that end a text inside a block of accepted drafts."""
    tried, inside, problem = 0, 0, None
    for number, (prompt, text, request) in enumerate(progress(list(zip(prompts, drafted, report.requests)), "endings"), 1):
        stops, budgets = _stops_inside_blocks(text.ids, request), _budgets_inside_blocks(request)
        inside += len(_spread(stops)) + len(_spread(budgets))
        endings = [(anchor, max_new_tokens, stop_id) for anchor, stop_id in _spread(stops or _stops_anywhere(text.ids))]
        endings += [(0, budget, None) for budget in _spread(budgets)]
        for num_written, budget, stop_id in endings:
            # A text that goes on from the block's anchor drafts the same block, and holds no earlier copy of the stop token.
            start = torch.cat([prompt, prompt.new_tensor([text.ids[:num_written]])], dim=1)
            expected = _write(target, start, budget, stop_id=stop_id)
            found = first_difference(expected, _write(target, start, budget, draft, watched=False, stop_id=stop_id).ids, target.dtype)
            tried += 1
            if found is not None and not found.excused:
                what = f"max_new_tokens={budget}" if stop_id is None else f"stop token {show(stop_id)!r} ({stop_id})"
                problem = problem or f"prompt {number}, {what}: {found.words(show)}"
    words = problem or f"{tried} texts ended by a stop token or a budget, {inside} of them inside a block of accepted drafts, are identical"
    return Check("endings", problem is None, words, {"texts": tried, "inside_a_block": inside})


def _stops_inside_blocks(ids: list[int], request: RequestRecord) -> list[tuple[int, int]]:
    """(index of a round's anchor, token) where the token is followed by another one of that round and is new since the anchor."""
    stops, start = [], 1
    for round_ in request.rounds:
        stops += [(start - 1, ids[index]) for index in range(start, start + round_.tokens - 1) if ids[index] not in ids[start - 1 : index]]
        start += round_.tokens
    return stops


def _stops_anywhere(ids: list[int]) -> list[tuple[int, int]]:
    return [(0, token) for index, token in enumerate(ids) if index and token not in ids[:index]]


def _budgets_inside_blocks(request: RequestRecord) -> list[int]:
    """Numbers of new tokens after which another one of the same round followed."""
    budgets, start = [], 1
    for round_ in request.rounds:
        budgets += range(start + 1, start + round_.tokens)
        start += round_.tokens
    return budgets


def _spread(items: list) -> list:
    """Two of `items`, one near each end."""
    return items if len(items) <= 2 else [items[len(items) // 6], items[-1 - len(items) // 6]]
