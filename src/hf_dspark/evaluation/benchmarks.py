"""Measuring speed: ways of decoding the same text, or many at a time, run in turn, compared in pairs; and how repetitive a text is."""

import copy
import math
import statistics
import time
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch.nn.functional import pad
from transformers import ContinuousBatchingConfig, GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList

from hf_dspark.generation.batches import joined_output, row_requests
from hf_dspark.generation.decoding import decode
from hf_dspark.generation.queue import generate_many
from hf_dspark.modeling import DSparkDraftModel

__all__ = [
    "Load", "decode_continuously", "decode_padded", "decode_queue", "decoding_variants", "distinct_ngram_share", "fixed_draft_length",
    "generate_without_draft", "paired_ratio", "repeated_ngram_share", "time_interleaved", "timed",
]  # fmt: skip

PLAIN, OWN_LOOP, PROMPT_LOOKUP, DRAFTED = "transformers' generate()", "our loop, drafting nothing", "prompt lookup", "our loop with the draft"
CONTINUOUS = "transformers' continuous batching"

# Prompt tokens of one forward of continuous batching, at most; its attention mask grows with the square of them.
_MOST_PREFILL_TOKENS = 4096


@dataclass(slots=True)
class Load:
    """Requests decoded at a time: prompts (1, tokens) long, new tokens that each may have, generate()'s options, stop tokens."""

    prompts: list[torch.Tensor]
    budgets: list[int]
    options: dict
    stop_ids: set[int]

    def committed(self, texts: list[list[int]]) -> list[list[int]]:
        """New ids of each request up to its own budget and its first stop token, which counts."""
        return [self._cut(ids[:budget]) for ids, budget in zip(texts, self.budgets, strict=True)]

    def _cut(self, ids: list[int]) -> list[int]:
        return ids[: next((index + 1 for index, token in enumerate(ids) if token in self.stop_ids), len(ids))]


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


def decode_padded(target: PreTrainedModel, load: Load) -> tuple[list[list[int]], float]:
    """New ids of every request by generate() on a left-padded batch, which runs until its longest text is done; and seconds."""
    width, pad_id = max(prompt.shape[1] for prompt in load.prompts), target.generation_config.pad_token_id or 0
    missing = [(width - prompt.shape[1], 0) for prompt in load.prompts]
    ids = torch.cat([pad(prompt, sides, value=pad_id) for prompt, sides in zip(load.prompts, missing)])
    mask = torch.cat([pad(torch.ones_like(prompt), sides) for prompt, sides in zip(load.prompts, missing)])
    arguments = dict(input_ids=ids, attention_mask=mask, max_new_tokens=max(load.budgets), pad_token_id=pad_id, **load.options)
    output, seconds = timed(lambda: target.generate(**arguments))
    return load.committed(output[:, width:].tolist()), seconds


def decode_queue(target: PreTrainedModel, draft: DSparkDraftModel | None, load: Load, num_drafts: int | None = None) -> tuple[list[list[int]], float]:
    """New ids of every request by `generate_many` with all of them at a time; and seconds.

    `num_drafts`: tokens drafted a round, without thresholds; None: what the draft's own options say.

    Raises:
        Exception: what ended a request.
    """
    requests = [{"input_ids": prompt, "max_new_tokens": budget} for prompt, budget in zip(load.prompts, load.budgets)]
    arguments = dict(max_concurrency=len(requests), show_progress=False, **load.options)
    with nullcontext() if num_drafts is None else fixed_draft_length(draft, num_drafts):
        completions, seconds = timed(lambda: list(generate_many(target, draft, requests, **arguments)))
    for completion in completions:
        if completion.error is not None:
            raise completion.error
    if len(completions) < len(requests):  # after Ctrl-C generate_many ends in good order
        raise KeyboardInterrupt
    return load.committed([completion.new_ids.tolist() for completion in completions]), seconds


def decode_continuously(target: PreTrainedModel, load: Load) -> tuple[list[list[int]], float]:
    """New ids of every request by transformers' continuous batching; and seconds from the first request to the last result.

    It is what `generate_batch` runs, with a budget for each request, which `generate_batch` has no argument for.

    Raises:
        Exception: the target can't be decoded so, or what ended a request.
    """
    config, stop_ids = copy.deepcopy(target.generation_config), sorted(load.stop_ids) or -1  # -1: never
    config.update(**load.options, max_new_tokens=max(load.budgets), eos_token_id=stop_ids)
    lengths = [prompt.shape[1] for prompt in load.prompts]
    limits = ContinuousBatchingConfig(max_requests_per_batch=len(lengths), allow_block_sharing=False)
    limits.max_batch_tokens = max(len(lengths), min(_MOST_PREFILL_TOKENS, sum(lengths)))
    # Room for every request at once, and for the share of blocks that its scheduler keeps free; by default it fills the memory.
    pages = sum(math.ceil((length + budget) / limits.page_size) + 1 for length, budget in zip(lengths, load.budgets))
    limits.num_blocks = 8 + math.ceil(1.5 * pages)
    with target.continuous_batching_context_manager(generation_config=config, continuous_batching_config=limits) as manager:
        texts, seconds = timed(lambda: _served(manager, load, stop_ids))
    return load.committed(texts), seconds


def _served(manager, load: Load, stop_ids: list[int] | int) -> list[list[int]]:
    requests = [
        manager.add_request(prompt[0].tolist(), max_new_tokens=budget, eos_token_id=stop_ids) for prompt, budget in zip(load.prompts, load.budgets)
    ]
    done = {}
    while len(done) < len(requests):
        result = manager.get_result(timeout=1)
        if result is None and not manager.is_running():
            raise RuntimeError(f"its thread ended early: {manager.background_thread_status.fatal_error}")
        if result is not None:
            if result.error is not None:
                raise RuntimeError(result.error)
            done[result.request_id] = result.generated_tokens
    return [done[request] for request in requests]


@contextmanager
def fixed_draft_length(draft: DSparkDraftModel, num_tokens: int):
    """For a while every round drafts `num_tokens` tokens, as far as the budget goes: no threshold cuts them, and a failing draft raises."""
    before, draft.generation_config = draft.generation_config, copy.deepcopy(draft.generation_config)
    knobs = dict(assistant_confidence_threshold=0.0, conditional_confidence_threshold=0.0, raise_on_draft_failure=True)
    try:
        for name, value in {"num_assistant_tokens": num_tokens, **knobs}.items():
            setattr(draft.generation_config, name, value)
        yield
    finally:
        draft.generation_config = before


def timed(run: Callable[[], object]) -> tuple[object, float]:
    """What `run()` returns and the seconds it took, the device's work included."""
    _synchronize()
    started = time.perf_counter()
    result = run()
    _synchronize()
    return result, time.perf_counter() - started


def time_interleaved(variants: dict[str, Callable[[], object]], num_runs: int) -> dict[str, list[float]]:
    """Seconds of each run of each variant, in the order A B C A B C ..., so that a slow moment of the machine falls on all of them."""
    seconds = {name: [] for name in variants}
    for _ in range(num_runs):
        for name, run in variants.items():
            seconds[name].append(timed(run)[1])
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
