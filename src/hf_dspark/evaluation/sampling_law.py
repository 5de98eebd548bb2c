"""Do sampled texts follow the target's own law? A test with the exact law of every position along the sampled texts.

Given what came before, the token at a position is drawn from a law that the target states exactly. For any way of sorting tokens
into categories, counts minus their expectation are then a martingale, whose covariance is the sum of diag(p) - p p^T over
positions: a chi-square test over all positions of all texts, whatever the size of the vocabulary. Three ways of sorting are
tried: by rank in the target's law, by token, and by the pair of the previous token and the token.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from transformers import LogitsProcessorList, PreTrainedModel

from hf_dspark.evaluation.output import progress
from hf_dspark.generation.report import GenerationReport, record_generation
from hf_dspark.modeling import DSparkDraftModel

__all__ = ["FALSE_ALARM_RATE", "LawTest", "SamplingCheck", "check_sampling", "law_test"]

# The tests of one run together raise an alarm on a right pair less often than this. The level they are held to is lower,
# because a chi-square law describes their tails only approximately.
FALSE_ALARM_RATE = 1e-3
_LEVEL = 1e-4
# Tokens of a position that are told apart; the rest is one category.
_NUM_TOLD_APART = 64
_NUM_CATEGORIES = 48
# Categories, and directions among them, with less than this many expected events say nothing that a chi-square law describes.
_LEAST_EXPECTED = 10.0
_RANK_BUCKETS = (1, 2, 3, 5, 9, 17, 33)


@dataclass(slots=True)
class SamplingCheck:
    """One way of drafting: its smallest p-value and the level below which it is an alarm, texts and tokens, and the finding."""

    name: str
    passed: bool
    p_value: float
    alarm_below: float
    num_texts: int
    num_tokens: int
    words: str


@dataclass(slots=True)
class LawTest:
    """A chi-square test: p-value, degrees of freedom, and the category that deviates most with its count and expectation."""

    p_value: float
    degrees: int
    worst_key: int = -1
    worst_count: int = 0
    worst_expected: float = 0.0


@dataclass(slots=True)
class _Law:
    """Rows are positions of sampled texts: the most likely tokens, their probabilities, the slot of the token drawn, the one before."""

    top_ids: torch.Tensor  # (rows, told apart) long
    top_probs: torch.Tensor  # (rows, told apart) fp64
    drawn_slots: torch.Tensor  # (rows,) long; told apart: none of them
    previous_ids: torch.Tensor  # (rows,) long


def check_sampling(
    target: PreTrainedModel,
    draft: DSparkDraftModel,
    prompts: list[torch.Tensor],
    max_new_tokens: int,
    num_samples: int,
    temperature: float,
    seed: int,
    show: Callable[[int], str],
) -> Iterator[SamplingCheck]:
    """Samples `num_samples` texts with each way of drafting (chain, argmax, cut by confidence) and tests them against the target's law.

    Texts are two blocks long, or `max_new_tokens`. The other options of sampling are those of the target's generation config.
    `prompts` are (1, tokens) each. The random state is left as it was.
    """
    options = dict(do_sample=True, temperature=temperature, max_new_tokens=min(max_new_tokens, 2 * draft.config.block_size + 2))
    settings = {"chain": dict(draft_sampling="chain"), "argmax": dict(draft_sampling="argmax")}
    if draft.confidence_head is not None:
        settings["cut by confidence"] = dict(draft_sampling="chain")
    alarm_below, cut = _LEVEL / (3 * len(settings)), 0.0
    for name, knobs in settings.items():
        if name == "cut by confidence":
            knobs["conditional_confidence_threshold"] = cut
        with _knobs(draft, **knobs), seeded(seed, target.device), record_generation() as report:
            texts = _sample(target, draft, prompts, num_samples, options, name)
        cut = cut or _median_confidence(report)
        yield _judge(target, texts, options, name, alarm_below, report, show)


@contextmanager
def seeded(seed: int, device: torch.device):
    """Random numbers from `seed` on, and the state of before afterwards."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


def _sample(target, draft, prompts, num_samples, options, label) -> list[tuple[torch.Tensor, list[int]]]:
    """(prompt, new ids) of each text, prompts in turn."""
    texts = []
    for index in progress(range(num_samples), f"sampling, {label}"):
        prompt = prompts[index % len(prompts)]
        ids = target.generate(input_ids=prompt, assistant_model=draft, **options)
        texts.append((prompt, ids[0, prompt.shape[1] :].tolist()))
    return texts


def _judge(target, texts, options, name: str, alarm_below: float, report: GenerationReport, show) -> SamplingCheck:
    num_tokens = sum(len(ids) for _, ids in texts)
    about = f"{len(texts)} texts, {num_tokens} tokens at temperature {options['temperature']:g}, {report.tokens_per_round:.2f} tokens a round"
    if problem := _wrong_ending(target, texts, options["max_new_tokens"]):
        return SamplingCheck(name, False, 0.0, alarm_below, len(texts), num_tokens, problem)
    law = _laws_along(target, texts, options)
    ranks = torch.bucketize(torch.arange(law.top_ids.shape[1]), torch.tensor(_RANK_BUCKETS), right=True)
    keys = {
        "tokens of a rank in the target's law": ranks.expand_as(law.top_ids),
        "tokens": law.top_ids,
        "pairs of tokens": law.previous_ids[:, None] * target.config.get_text_config().vocab_size + law.top_ids,
    }
    tests = {kind: law_test(key, law.top_probs, law.drawn_slots) for kind, key in keys.items()}
    kind, worst = min(tests.items(), key=lambda item: item[1].p_value)
    passed = worst.p_value >= alarm_below
    if not any(test.degrees for test in tests.values()):
        words = f"{about}; too few choices were left open to test anything (more --samples would)"
    elif passed:
        words = f"{about}; smallest p-value {worst.p_value:.2g} (alarm below {alarm_below:.1g})"
    else:
        words = f"{about}; the counts of {kind} are not the target's: p-value {worst.p_value:.1e}; {_describe(kind, worst, target, show)}"
    return SamplingCheck(name, passed, worst.p_value, alarm_below, len(texts), num_tokens, words)


def _describe(kind: str, test: LawTest, target, show) -> str:
    vocab = target.config.get_text_config().vocab_size
    if kind == "tokens":
        what = f"{show(test.worst_key)!r}"
    elif kind == "pairs of tokens":
        what = f"{show(test.worst_key % vocab)!r} after {show(test.worst_key // vocab)!r}"
    else:
        what = f"rank {(1, *(edge + 1 for edge in _RANK_BUCKETS))[test.worst_key]}"
    return f"{what} came {test.worst_count} times, expected {test.worst_expected:.1f}"


def _wrong_ending(target, texts, length: int) -> str | None:
    stop = target.generation_config.eos_token_id
    stop_ids = set(stop if isinstance(stop, list) else [] if stop is None else [stop])
    for _, ids in texts:
        if stop_ids & set(ids[:-1]):
            return f"a text goes on after a stop token: {ids}"
        if len(ids) != length and not (ids and ids[-1] in stop_ids):
            return f"a text has {len(ids)} tokens, but neither a stop token nor the budget of {length} ends it: {ids}"
    return None


def _laws_along(target: PreTrainedModel, texts: list[tuple[torch.Tensor, list[int]]], options: dict) -> _Law:
    """The target's processed law at every new token of `texts`, from one forward pass over each text."""
    parts = []
    for prompt, ids in progress(texts, "exact laws"):
        processors = _processors(target, prompt, options)
        whole = torch.cat([prompt, prompt.new_tensor([ids])], dim=1)
        start = prompt.shape[1]
        with torch.no_grad():
            logits = target(input_ids=whole[:, :-1], use_cache=False).logits[0, start - 1 :]  # (new, vocab)
        scores = torch.cat([processors(whole[:, : start + k], row[None].float().to(whole.device)) for k, row in enumerate(logits)])
        probs, top_ids = torch.softmax(scores.double(), dim=-1).topk(min(_NUM_TOLD_APART, scores.shape[-1]), dim=-1)
        hits = top_ids == whole[0, start:, None]
        drawn = torch.where(hits.any(dim=1), hits.long().argmax(dim=1), top_ids.shape[1])
        parts.append((top_ids.cpu(), probs.cpu(), drawn.cpu(), whole[0, start - 1 : -1].cpu()))
    return _Law(*(torch.cat(column) for column in zip(*parts)))


def _processors(target: PreTrainedModel, prompt: torch.Tensor, options: dict) -> LogitsProcessorList:
    """The logits processors that generate() makes for `prompt` (1, tokens)."""
    return target.generate(input_ids=prompt, **options, custom_generate=_return_processors)


def _return_processors(target, input_ids, logits_processor, stopping_criteria, generation_config, **model_kwargs):
    return logits_processor


def law_test(keys: torch.Tensor, probs: torch.Tensor, drawn_slots: torch.Tensor) -> LawTest:
    """Counts of drawn keys against their expectation under the laws they were drawn from.

    Args:
        keys: (rows, slots) long, the category of each told-apart token of each position.
        probs: (rows, slots) fp64, their probabilities; what is missing to 1 is the rest.
        drawn_slots: (rows,) long, the slot that was drawn; `slots`: the rest.
    """
    unique, inverse = keys.unique(return_inverse=True)
    expected = torch.zeros(len(unique), dtype=torch.float64).index_add_(0, inverse.flatten(), probs.flatten())
    order = expected.argsort(descending=True)[:_NUM_CATEGORIES]
    chosen = order[expected[order] >= _LEAST_EXPECTED]
    rest = len(chosen)
    category_of = torch.full((len(unique),), rest)
    category_of[chosen] = torch.arange(rest)
    categories = category_of[inverse]  # (rows, slots)
    law = torch.zeros(len(keys), rest + 1, dtype=torch.float64).scatter_add_(1, categories, probs)
    law[:, rest] += 1.0 - probs.sum(dim=1)
    drawn = torch.cat([categories, torch.full((len(keys), 1), rest)], dim=1).gather(1, drawn_slots[:, None])[:, 0]
    counts = torch.bincount(drawn, minlength=rest + 1).double()
    excess = counts - law.sum(dim=0)
    covariance = torch.diag(law.sum(dim=0)) - law.T @ law
    variances, directions = torch.linalg.eigh(covariance)
    open_ = variances >= _LEAST_EXPECTED
    degrees = int(open_.sum())
    if degrees == 0:
        return LawTest(1.0, 0)
    statistic = ((directions.T @ excess)[open_] ** 2 / variances[open_]).sum().item()
    worst = int((excess.abs() / covariance.diagonal().clamp(min=_LEAST_EXPECTED).sqrt())[:rest].argmax()) if rest else 0
    key = int(unique[chosen[worst]]) if rest else -1
    return LawTest(chi_square_tail(statistic, degrees), degrees, key, int(counts[worst]), law[:, worst].sum().item())


def chi_square_tail(statistic: float, degrees: int) -> float:
    """Probability that a chi-square variable with `degrees` of freedom exceeds `statistic`."""
    return torch.special.gammaincc(torch.tensor(degrees / 2, dtype=torch.float64), torch.tensor(statistic / 2, dtype=torch.float64)).item()


def _median_confidence(report: GenerationReport) -> float:
    values = sorted(confidence for position in report.confidence_outcomes for confidence, _ in position)
    return values[len(values) // 2] if values else 0.5


@contextmanager
def _knobs(draft: DSparkDraftModel, **knobs):
    """Sets options of `draft.generation_config` for a while."""
    before, draft.generation_config = draft.generation_config, copy.deepcopy(draft.generation_config)
    try:
        for name, value in knobs.items():
            setattr(draft.generation_config, name, value)
        yield
    finally:
        draft.generation_config = before
