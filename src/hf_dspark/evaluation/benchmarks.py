"""Measuring speed: ways of decoding the same text, run in turn, compared in pairs; and how repetitive a text is."""

import statistics
import time
from collections.abc import Callable

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList

from hf_dspark.generation.batches import joined_output, row_requests
from hf_dspark.generation.decoding import decode
from hf_dspark.modeling import DSparkDraftModel

__all__ = ["decoding_variants", "distinct_ngram_share", "generate_without_draft", "paired_ratio", "repeated_ngram_share", "time_interleaved"]

PLAIN, OWN_LOOP, PROMPT_LOOKUP, DRAFTED = "transformers' generate()", "our loop, drafting nothing", "prompt lookup", "our loop with the draft"


def generate_without_draft(target: PreTrainedModel, **arguments):
    """`target.generate(**arguments)` by this library's loop with nobody drafting: what of the speed is the loop's and not the draft's.

    Takes and returns what generate() does, without a streamer.
    """
    return target.generate(**arguments, custom_generate=_decode_alone)


def _decode_alone(
    target: PreTrainedModel,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    **model_kwargs,
):
    """What generate() calls after its usual preparation, with `input_ids` (batch, tokens)."""
    requests = row_requests(target, None, input_ids, logits_processor, stopping_criteria, generation_config, model_kwargs)
    decode(requests)
    return joined_output(requests)


def decoding_variants(target: PreTrainedModel, draft: DSparkDraftModel, prompt_lookup_tokens: int | None = None) -> dict[str, Callable]:
    """Ways to write the same greedy text, by name; each takes generate()'s arguments.

    `prompt_lookup_tokens`: tokens that prompt lookup drafts; None: without prompt lookup.
    """
    variants = {
        PLAIN: target.generate,
        OWN_LOOP: lambda **arguments: generate_without_draft(target, **arguments),
        DRAFTED: lambda **arguments: target.generate(**arguments, assistant_model=draft),
    }
    if prompt_lookup_tokens is not None:
        variants[PROMPT_LOOKUP] = lambda **arguments: target.generate(**arguments, prompt_lookup_num_tokens=prompt_lookup_tokens)
    return variants


def time_interleaved(variants: dict[str, Callable[[], object]], num_runs: int) -> dict[str, list[float]]:
    """Seconds of each run of each variant, in the order A B C A B C ..., so that a slow moment of the machine falls on all of them."""
    seconds = {name: [] for name in variants}
    for _ in range(num_runs):
        for name, run in variants.items():
            _synchronize()
            started = time.perf_counter()
            run()
            _synchronize()
            seconds[name].append(time.perf_counter() - started)
    return seconds


def paired_ratio(baseline_seconds: list[float], seconds: list[float]) -> float:
    """How many times faster than the baseline: the median of the ratios of runs that stood beside each other."""
    return statistics.median(base / other for base, other in zip(baseline_seconds, seconds, strict=True))


def distinct_ngram_share(ids: list[int], n: int) -> float:
    """Distinct n-grams over all n-grams of `ids`; 1 for a text too short to have two."""
    ngrams = [tuple(ids[i : i + n]) for i in range(len(ids) - n + 1)]
    return len(set(ngrams)) / len(ngrams) if ngrams else 1.0


def repeated_ngram_share(ids: list[int], n: int = 8) -> float:
    """Share of the n-grams of `ids` that had occurred before: what a looping text has much of. Such a text flatters every draft."""
    return 1.0 - distinct_ngram_share(ids, n)


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
