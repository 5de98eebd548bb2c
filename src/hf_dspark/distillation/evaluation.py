"""What an evaluation during training reports beside the losses: real accepted length, acceptance by slot, how honest the confidence is.

Axis words: `batch`; `anchors` blocks of a row; `block` the B slots of one.
"""

import re
from contextlib import contextmanager

import torch
from accelerate import Accelerator
from transformers import PreTrainedModel, TrainingArguments

from hf_dspark.evaluation.acceptance import REPEATED_NGRAM
from hf_dspark.evaluation.benchmarks import fixed_draft_length, repeated_ngram_share
from hf_dspark.generation.context_limits import ContextLimits
from hf_dspark.generation.hook import as_draft
from hf_dspark.generation.queue import generate_many
from hf_dspark.generation.report import record_generation
from hf_dspark.modeling import DSparkDraftModel

__all__ = ["accepted_length", "check_eval_options", "eval_prompts", "random_state_kept", "slot_metrics", "slot_sums"]

_BINS = 10
# What an evaluation reports by which drafts can be ranked, and whether more of it is better; `acceptance_k` and `survival_k` come to it.
_IS_BETTER_WHEN_GREATER = {
    **{"loss": False, "ce": False, "l1": False, "confidence": False, "confidence_calibration_error": False, "tau": True},
    **{"tokens_per_round": True, f"repeated_{REPEATED_NGRAM}gram_share": False},
    **{"sampled_tokens_per_round": True, f"sampled_repeated_{REPEATED_NGRAM}gram_share": False},
}


def check_eval_options(args: TrainingArguments) -> None:
    """Checks what `args` (DistillationArguments) say of evaluations, and sets `greater_is_better` where they leave it open.

    Raises:
        ValueError: a number outside its range, or a best checkpoint by what is not measured.
    """
    for name, least in (("eval_prompts", 0), ("eval_prompt_tokens", 1), ("eval_new_tokens", 2)):
        if getattr(args, name) < least:
            raise ValueError(f"{name} must be at least {least}, got {getattr(args, name)}")
    if args.eval_temperature is not None and not args.eval_temperature > 0:
        raise ValueError(f"eval_temperature must be positive or None, got {args.eval_temperature} (greedy decoding is measured anyway)")
    if args.metric_for_best_model is None:
        return
    metric = args.metric_for_best_model.removeprefix("eval_")
    decoded = metric.removeprefix("sampled_") in ("tokens_per_round", f"repeated_{REPEATED_NGRAM}gram_share")
    missing = "eval_prompts above 0" if args.eval_prompts == 0 else "an eval_temperature" if args.eval_temperature is None else None
    if missing and decoded and (args.eval_prompts == 0 or metric.startswith("sampled_")):
        raise ValueError(f"metric_for_best_model={args.metric_for_best_model!r} needs {missing}")
    if metric.startswith("confidence") and not args.enable_confidence_head and args.init_draft is None:
        raise ValueError(f"metric_for_best_model={args.metric_for_best_model!r} needs enable_confidence_head: true")
    slot = re.fullmatch(r"(?:acceptance|survival)_([1-9]\d*)", metric)
    # A draft at hand has a block size of its own.
    if metric not in _IS_BETTER_WHEN_GREATER and not (slot and (args.init_draft is not None or int(slot[1]) <= args.block_size)):
        raise ValueError(
            f"metric_for_best_model={args.metric_for_best_model!r} is not what an evaluation reports: {', '.join(_IS_BETTER_WHEN_GREATER)}, "
            f"acceptance_k and survival_k with k from 1 to block_size={args.block_size}"
        )
    if args.greater_is_better is None:
        args.greater_is_better = _IS_BETTER_WHEN_GREATER.get(metric, True)


@contextmanager
def random_state_kept():
    """PyTorch's sources of random numbers, of every device, are afterwards where they were: training goes on as if nothing had been."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=devices):
        yield


# From the laws


def slot_sums(slot_mask: torch.Tensor, acceptance: torch.Tensor, confidence: torch.Tensor | None) -> torch.Tensor:
    """Sums over a batch that `slot_metrics` turns into means; add up those of several batches and processes.

    Args:
        slot_mask: (batch, anchors, block) bool, the slots that count.
        acceptance: (batch, anchors, block), 1 - TV of each. confidence: the same shape, estimates of it; None: no confidence head.

    Returns:
        (4 * block + 10,) fp32: by slot the number that count, their acceptance, a_1 ... a_k and confidence; by tenth of the confidence,
        confidence less acceptance.
    """
    counted = slot_mask.float()
    confidence = torch.zeros_like(acceptance) if confidence is None else confidence
    values = [counted, acceptance * counted, (acceptance * counted).cumprod(dim=-1), confidence * counted]
    by_slot = torch.stack(values).sum(dim=(1, 2)).flatten()
    # Of a draft that has diverged the confidence is nan, which is no bin's number.
    bins = (confidence * _BINS).nan_to_num().clamp(min=0, max=_BINS - 1).long()[slot_mask]
    gaps = torch.zeros(_BINS, device=acceptance.device).index_add(0, bins, (confidence - acceptance)[slot_mask])
    return torch.cat([by_slot, gaps])


def slot_metrics(sums: torch.Tensor, has_confidence: bool) -> dict[str, float]:
    """Means from summed `slot_sums`.

    Returns:
        For each slot k from 1 `acceptance_k`, the mean of 1 - TV over the slots that count, and `survival_k`, the mean over blocks of
        a_1 ... a_k (their sum is tau - 1); with a confidence head `confidence_bias`, mean confidence less mean acceptance over all slots,
        and `confidence_calibration_error`, the expected calibration error (Guo et al., 2017) in 10 bins.
    """
    counted, acceptance, survival, confidence = sums[:-_BINS].view(4, -1).cpu().double()
    metrics = {f"acceptance_{k}": value for k, value in enumerate((acceptance / counted.clamp(min=1)).tolist(), start=1)}
    metrics |= {f"survival_{k}": value for k, value in enumerate((survival / counted[0].clamp(min=1)).tolist(), start=1)}
    if has_confidence:
        metrics["confidence_bias"] = ((confidence.sum() - acceptance.sum()) / counted.sum().clamp(min=1)).item()
        metrics["confidence_calibration_error"] = (sums[-_BINS:].cpu().double().abs().sum() / counted.sum().clamp(min=1)).item()
    return metrics


# From decoding


def eval_prompts(rows, args: TrainingArguments, context: int | None) -> list[list[int]]:
    """At most `args.eval_prompts` prompts, spread over `rows` (`input_ids`, perhaps `loss_mask`).

    The prompt of a conversation, whose first tokens are not supervised, is all that stands before its first supervised token; of a text
    it is its first `args.eval_prompt_tokens` tokens. Those that leave no room for `args.eval_new_tokens` tokens in the target's `context`
    (None: no bound) are left out.

    Raises:
        ValueError: the rows are a stream, or no prompt fits.
    """
    if not hasattr(rows, "__len__"):
        raise ValueError(f"prompts can't be chosen from a {type(rows).__name__}; evaluate on a Dataset, or set eval_prompts=0")
    count = min(args.eval_prompts, len(rows))
    found = [_prompt(rows[i * len(rows) // count], args.eval_prompt_tokens) for i in range(count)]
    fitting = [ids for ids in found if context is None or len(ids) + args.eval_new_tokens <= context]
    if found and not fitting:
        raise ValueError(
            f"eval_new_tokens={args.eval_new_tokens} leave no room for a prompt in the target's context of {context} tokens (the shortest has "
            f"{min(map(len, found))}); lower it or eval_prompt_tokens, or set eval_prompts=0"
        )
    return fitting


def _prompt(row: dict, num_tokens: int) -> list[int]:
    ids = torch.as_tensor(row["input_ids"]).tolist()
    supervised = torch.as_tensor(row["loss_mask"]).bool().tolist() if "loss_mask" in row else [True]
    first = supervised.index(True) if True in supervised else 0
    return ids[: first or num_tokens]


def accepted_length(draft, target: PreTrainedModel, rows, args: TrainingArguments, accelerator: Accelerator) -> dict[str, float]:
    """Decodes the prompts of `rows` with `draft` as it is, each process its share.

    Args:
        draft: a DSparkDraftModel, bare or wrapped by PEFT. It is in eval mode meanwhile; every round drafts a whole block.
        args: DistillationArguments. accelerator: of the processes, all of which must call this.

    Returns:
        `tokens_per_round` of greedy decoding, the target's own token included (paper, eq. 1): all tokens over all rounds, nan without a
        round; `repeated_8gram_share`, the mean over completions (a looping text flatters every draft). With `args.eval_temperature` the
        same two of sampling from the target's whole law, `sampled_tokens_per_round` and `sampled_repeated_8gram_share`.

    Raises:
        ValueError: the rows are a stream, or no prompt fits into the target's context.
        Exception: what ended a request, or made the draft fail.
    """
    draft = as_draft(draft)
    prompts = eval_prompts(rows, args, ContextLimits.of(target.config).context)
    ways = {"": {"do_sample": False}}
    if args.eval_temperature is not None:
        ways["sampled_"] = dict(do_sample=True, temperature=args.eval_temperature, top_k=0, top_p=1.0)
    requests = [{"input_ids": prompt, "seed": number} for number, prompt in enumerate(prompts)]
    own_share = requests[accelerator.process_index :: accelerator.num_processes]
    options = dict(max_new_tokens=args.eval_new_tokens, max_concurrency=args.eval_batch_size)
    options["show_progress"] = not args.disable_tqdm and accelerator.is_main_process
    metrics, was_training = {}, draft.training
    draft.eval()
    try:
        for name, way in ways.items():
            sums = _decoding_sums(draft, target, own_share, {**options, **way}).to(accelerator.device)
            tokens, rounds, repeated, completions = accelerator.reduce(sums, reduction="sum").tolist()
            metrics[f"{name}tokens_per_round"] = tokens / rounds if rounds else float("nan")
            metrics[f"{name}repeated_{REPEATED_NGRAM}gram_share"] = repeated / max(completions, 1)
    finally:
        draft.train(was_training)
    return metrics


def _decoding_sums(draft: DSparkDraftModel, target: PreTrainedModel, requests: list[dict], options: dict) -> torch.Tensor:
    """(tokens of all rounds, rounds, summed shares of repeated n-grams, completions)."""
    with record_generation() as report, fixed_draft_length(draft, draft.config.block_size):
        completions = list(generate_many(target, draft, requests, **options))
    for completion in completions:
        if completion.error is not None:
            raise completion.error
    if len(completions) < len(requests):  # after Ctrl-C generate_many ends in good order
        raise KeyboardInterrupt
    repeated = sum(repeated_ngram_share(completion.new_ids.tolist(), REPEATED_NGRAM) for completion in completions)
    return torch.tensor([sum(round_.tokens for round_ in report.rounds), len(report.rounds), repeated, len(completions)])
