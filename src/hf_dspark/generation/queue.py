"""A queue of prompts through one target: waiting requests join as soon as a place is free, each ends on its own."""

import copy
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from transformers import GenerationConfig, PreTrainedModel, StoppingCriteriaList, StopStringCriteria
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.utils import GenerateDecoderOnlyOutput
from transformers.utils import logging as transformers_logging

from hf_dspark.generation.batches import unpacked_reason, warn_unpacked
from hf_dspark.generation.candidates import DSparkCandidateGenerator
from hf_dspark.generation.context_limits import ContextLimits
from hf_dspark.generation.decoding import Request, length_limit, step
from hf_dspark.generation.hook import as_draft, refuse_unsupported, refuse_virtual_tokens
from hf_dspark.generation.key_values import KeyValueStore
from hf_dspark.generation.processors import row_criteria, row_processors
from hf_dspark.generation.steps import CachedSequence, PackedSequence
from hf_dspark.modeling import DSparkDraftModel

__all__ = ["Completion", "generate_many"]

logger = logging.getLogger(__name__)

# Prompt tokens that join in one round, at most, unless a single prompt is longer.
_PREFILL_ROWS = 4096


@dataclass(slots=True)
class Completion:
    """One finished request: its place in the queue, and either what generate() returns for it or the error that ended it.

    output: ids (1, tokens), prompt included, or the dictionary that holds them. new_ids: (new,) long. Both None beside an `error`.
    """

    index: int
    output: torch.Tensor | GenerateDecoderOnlyOutput | None = None
    new_ids: torch.Tensor | None = None
    error: Exception | None = None


def generate_many(
    target: PreTrainedModel,
    draft: DSparkDraftModel | None,
    prompts: Iterable,
    *,
    max_concurrency: int = 16,
    max_cached_tokens: int | None = None,
    ordered: bool = True,
    on_tokens: Callable[[int, list[int]], None] | None = None,
    show_progress: bool = True,
    generation_config: GenerationConfig | None = None,
    **options,
) -> Iterator[Completion]:
    """Decodes every prompt as `target.generate(prompt, assistant_model=draft, **options)` would alone, many in one forward.

    Args:
        draft: a DSpark draft, or None for plain decoding.
        prompts: any iterable, read as places become free, of token ids (a list, or a tensor (tokens,) or (1, tokens)), or of
            dictionaries with `input_ids` and generate()'s options for this request alone, and `seed`, its own source of random
            numbers (without one: the global one, in the order of the rounds).
        max_concurrency: requests decoded at a time, at most.
        max_cached_tokens: tokens of prompts and budgets that keys and values are held for, at most; more requests wait. None: no bound.
        ordered: yield in the order of the prompts; False: as they finish.
        on_tokens: called with a request's index and its new token ids, as they are committed.
        options: generate()'s, for all requests.

    Yields:
        A [`Completion`] for every prompt. A request that fails ends alone, and its error is its completion. After Ctrl-C the
        finished ones are yielded and the others given up, with a warning. An error of `prompts` itself is raised at the end, when
        what was read before it is finished.

    Raises:
        ValueError: one prompt in place of many, max_concurrency or max_cached_tokens below 1, a draft that is none or does not fit
            the target, options that generate() refuses, or that have no meaning here (streamer, assistant_model, custom_generate, a
            cache, an attention_mask for all).
    """
    for name, value in (("max_concurrency", max_concurrency), ("max_cached_tokens", max_cached_tokens)):
        unbounded = value is None and name == "max_cached_tokens"
        if not unbounded and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
    _check_prompts(prompts)
    if not hasattr(target, "generate"):
        raise ValueError(f"target must be a model, got {type(target).__name__}")
    if on_tokens is not None and not callable(on_tokens):
        raise ValueError(f"on_tokens must be a function of an index and its new token ids, got {on_tokens!r}")
    _refuse_options(options)
    for name in ("input_ids", "attention_mask", "seed"):
        if options.get(name) is not None:
            raise ValueError(f"{name} belongs to one request: give it in its dictionary, an entry of prompts")
    if draft is not None:
        if (found := as_draft(draft)) is None:
            raise ValueError(f"draft must be a DSparkDraftModel or None, got {type(draft).__name__}")
        draft = found.bind(target)
    if generation_config is not None:
        options["generation_config"] = generation_config
    queue = _Queue(target, draft, prompts, max_concurrency, max_cached_tokens, on_tokens, options)
    queue.check_options()
    return queue.run(ordered, show_progress)


class _Queue:
    """The requests in flight and the prompts behind them."""

    def __init__(self, target, draft, prompts, max_concurrency, max_cached_tokens, on_tokens, options):
        self.target, self.draft, self.on_tokens, self.options = target, draft, on_tokens, options
        self.model = target  # what generate() of a wrapped target (PEFT, torch.compile) runs
        self.total = len(prompts) if hasattr(prompts, "__len__") else None
        self.prompts, self.max_concurrency, self.max_cached_tokens = enumerate(prompts), max_concurrency, max_cached_tokens
        self.store = KeyValueStore()
        self.running: list[tuple[int, Request]] = []
        self.waiting: tuple[int, Request] | None = None  # read, but without room for its keys and values yet
        self.finished: deque[Completion] = deque()
        self.prompts_error: Exception | None = None

    def run(self, ordered: bool, show_progress: bool) -> Iterator[Completion]:
        held, next_index = {}, 0
        bar = transformers_logging.tqdm(total=self.total, desc="generating", unit="text", disable=None if show_progress else True)
        try:
            while True:
                try:
                    going_on = self._round()
                except KeyboardInterrupt:
                    self._collect()
                    logger.warning("interrupted: %d requests in flight are given up, with all that wait", len(self.running))
                    going_on, self.prompts_error = False, None
                while self.finished:
                    completion = self.finished.popleft()
                    bar.update()
                    if not ordered:
                        yield completion
                        continue
                    held[completion.index] = completion
                    while next_index in held:
                        yield held.pop(next_index)
                        next_index += 1
                if not going_on:
                    break
            # Only an interruption leaves some behind a gap.
            yield from (held[index] for index in sorted(held))
            if self.prompts_error is not None:
                raise self.prompts_error
        finally:
            bar.close()
            for _, request in [*self.running, *([self.waiting] if self.waiting else [])]:
                request.release()

    def _round(self) -> bool:
        """Admits what there is room for and runs a round of every request; False when there is nothing left to do."""
        self._admit()
        if not self.running:
            return bool(self.finished)
        with torch.no_grad():
            step([request for _, request in self.running])
        self._collect()
        return True

    def _collect(self) -> None:
        for index, request in self.running:
            if request.finished:
                self.finished.append(_completion(index, request))
        self.running = [(index, request) for index, request in self.running if not request.finished]

    def _admit(self) -> None:
        num_rows = 0
        while len(self.running) < self.max_concurrency:
            self.waiting = self.waiting or self._read()
            if self.waiting is None:
                return
            _, request = self.waiting
            reserved = sum(running.max_length for _, running in self.running)
            if self.max_cached_tokens is not None and self.running and reserved + request.max_length > self.max_cached_tokens:
                return
            num_rows += request.num_tokens
            if num_rows > max(_PREFILL_ROWS, request.num_tokens):
                return
            self.running.append(self.waiting)
            self.waiting = None

    def _read(self) -> tuple[int, Request] | None:
        """The next prompt as a request. None: there is none, or it can't be decoded and is finished at once, with its error."""
        try:
            index, prompt = next(self.prompts, (None, None))
        except Exception as error:
            self.prompts_error = error
            return None
        if index is None:
            return None
        try:
            return index, self._request(index, prompt)
        except Exception as error:
            if isinstance(error, ValueError | TypeError):  # what transformers raises for an option of the wrong type
                error = ValueError(f"request {index}: {error}").with_traceback(error.__traceback__)
            self.finished.append(Completion(index, error=error))
            return None

    def _request(self, index: int, prompt) -> Request:
        own = dict(prompt) if isinstance(prompt, Mapping) else {"input_ids": prompt}
        _refuse_options(own)
        seed, input_ids = own.pop("seed", None), _checked_ids(own.pop("input_ids", None), self.model)
        if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
            raise ValueError(f"seed must be a whole number, got {seed!r}")
        if own.get("attention_mask") is not None:
            own["attention_mask"] = _checked_mask(own["attention_mask"], input_ids)

        def prepared(target, input_ids, logits_processor, stopping_criteria, generation_config, **model_kwargs):
            """Called by generate() after its usual preparation, in place of a loop."""
            return self._prepared_request(index, input_ids, logits_processor, stopping_criteria, generation_config, model_kwargs, seed)

        options = _with_stop_strings(self.target, {**self._shared_options(), **own})
        return self.target.generate(input_ids=input_ids, **options, custom_generate=prepared)

    def check_options(self) -> None:
        """Raises for the whole queue what transformers or this library would raise for the options of each request."""
        pad_token_id = self.options.get("pad_token_id", self.target.generation_config.pad_token_id)
        probe = torch.tensor([[1 if pad_token_id == 0 else 0]], device=self.target.device)

        def prepared(target, input_ids, logits_processor, stopping_criteria, generation_config, **model_kwargs):
            refuse_virtual_tokens(target)
            self.model = target
            self._refuse_modes(generation_config, model_kwargs)

        options = _with_stop_strings(self.target, self._shared_options())
        self.target.generate(input_ids=probe, attention_mask=torch.ones_like(probe), **options, custom_generate=prepared)

    def _refuse_modes(self, generation_config: GenerationConfig, model_kwargs: dict) -> None:
        _refuse_modes(generation_config)
        if model_kwargs.get("cache") is None:
            raise ValueError("generate_many needs a cache; leave use_cache out")
        if self.draft is not None:
            refuse_unsupported(self.model, self.draft, generation_config, {})

    def _shared_options(self) -> dict:
        """The options for all requests, with processors and criteria that keep nothing of another's text."""
        options = dict(self.options)
        if options.get("logits_processor"):
            options["logits_processor"] = row_processors(options["logits_processor"], 0, 1)
        if options.get("stopping_criteria"):
            options["stopping_criteria"] = row_criteria(options["stopping_criteria"])
        return options

    def _prepared_request(self, index, input_ids, logits_processor, stopping_criteria, generation_config, model_kwargs, seed) -> Request:
        self._refuse_modes(generation_config, model_kwargs)
        limit = length_limit(generation_config, stopping_criteria)
        if self.max_cached_tokens is not None and limit > self.max_cached_tokens:
            raise ValueError(
                f"the text may grow to {limit} tokens, more than max_cached_tokens={self.max_cached_tokens}; lower its "
                "max_new_tokens or raise the bound"
            )
        generator = None if self.draft is None else DSparkCandidateGenerator(self.draft, self.model, generation_config, logits_processor)
        events = None if self.on_tokens is None else _Events(index, self.on_tokens)
        random = None if seed is None else torch.Generator(self.model.device).manual_seed(seed)
        reason = unpacked_reason(self.model, generation_config, model_kwargs, limit)
        if reason is None:  # last, because it takes a place
            sequence = PackedSequence(self.model, input_ids, model_kwargs.get("attention_mask"), self.store, limit)
        else:
            warn_unpacked(self.model, reason)
            sequence = CachedSequence(self.model, generation_config, model_kwargs)
        return Request(
            self.model, input_ids, generation_config, logits_processor, stopping_criteria, sequence, generator, streamer=events, random=random
        )


@dataclass(slots=True)
class _Events:
    """A request's streamer that hands its tokens on with its index."""

    index: int
    on_tokens: Callable[[int, list[int]], None]

    def put(self, ids: torch.Tensor) -> None:
        self.on_tokens(self.index, ids.tolist())

    def end(self) -> None:
        """The completion says it."""


def _completion(index: int, request: Request) -> Completion:
    try:
        if request.error is not None:
            return Completion(index, error=request.error)
        request.finish()
        new_ids = request.input_ids[0, request.prompt_ids.shape[1] :]
        return Completion(index, request.output(), new_ids)
    finally:
        request.release()


def _check_prompts(prompts) -> None:
    """Raises ValueError for one prompt in place of many, texts, and what is no iterable."""
    is_list = isinstance(prompts, list | tuple) and len(prompts) > 0
    is_text = is_list and (isinstance(prompts[0], int) or getattr(prompts[0], "ndim", 1) == 0)
    if isinstance(prompts, str) or getattr(prompts, "ndim", 2) < 2 or is_text:
        raise ValueError(f"prompts must be several prompts of token ids (tokenizer(text).input_ids for each text), got one: {prompts!r:.60}")
    if isinstance(prompts, Mapping):
        raise ValueError(f"prompts must be an iterable of prompts, got one dictionary of {sorted(prompts)}: give its input_ids")
    if is_list and isinstance(prompts[0], str):
        raise ValueError(f"prompts must be token ids, got texts such as {prompts[0]!r:.60}: give tokenizer(texts).input_ids")
    if not isinstance(prompts, Iterable):
        raise ValueError(f"prompts must be an iterable of prompts, got {prompts!r:.60}")


def _refuse_options(options: Mapping) -> None:
    for name, instead in (
        ("streamer", "use on_tokens"),
        ("assistant_model", "give the draft as the argument draft"),
        ("custom_generate", "use generate()"),
        ("adapter_names", "activate one adapter with set_adapter"),
        ("synced_gpus", "each process has its own queue"),
        ("cache", "every text starts anew, with a cache of its own"),
        ("past_key_values", "every text starts anew, with a cache of its own"),
    ):
        if options.get(name) is not None:
            raise ValueError(f"{name} is not an option of generate_many; {instead}")
    if options.get("cache_implementation") == "paged":
        raise ValueError("cache_implementation='paged' is transformers' own way of decoding many; leave it out")


def _with_stop_strings(target: PreTrainedModel, options: dict) -> dict:
    """generate() loses the tokenizer on the way to a loop of one's own, so its criterion is made here."""
    tokenizer, config, default = options.pop("tokenizer", None), options.get("generation_config"), target.generation_config.stop_strings
    stop_strings = options.pop("stop_strings", None) or (config.stop_strings if config is not None else None) or default
    if not stop_strings:
        return options
    if tokenizer is None:
        raise ValueError(f"stop_strings={stop_strings!r} needs the option tokenizer as well")
    if config is not None:
        options["generation_config"] = copy.deepcopy(config)
        options["generation_config"].stop_strings = None
    if default:
        options["stop_strings"] = None  # the target's own would be filled in again
    criteria = StoppingCriteriaList([*(options.get("stopping_criteria") or []), StopStringCriteria(tokenizer, stop_strings)])
    return {**options, "stopping_criteria": criteria}


def _refuse_modes(generation_config: GenerationConfig) -> None:
    """What a loop of one token after the other would silently leave out."""
    if (value := generation_config.num_return_sequences) not in (None, 1):
        raise ValueError(f"num_return_sequences={value} is not an option of generate_many; repeat the prompt instead")
    mode = generation_config.get_generation_mode()
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE) or generation_config.dola_layers is not None:
        raise ValueError(f"generate_many decodes greedily or samples, its options ask for {mode.value}; use generate()")
    if generation_config.return_dict_in_generate:
        for name in ("output_hidden_states", "output_attentions"):
            if getattr(generation_config, name):
                raise ValueError(f"{name}=True is not supported by generate_many; output_scores and output_logits are")


def _checked_mask(mask, input_ids: torch.Tensor) -> torch.Tensor:
    """`mask` as (1, tokens). Raises ValueError: of another length than the ids, all zeros, or padded on the right."""
    mask = torch.as_tensor(mask, device=input_ids.device)
    mask = mask[None] if mask.dim() == 1 else mask
    if mask.shape != input_ids.shape:
        raise ValueError(f"attention_mask has the shape {tuple(mask.shape)}, its input_ids {tuple(input_ids.shape)}")
    if not mask.any():
        raise ValueError("the prompt is empty: its attention_mask has no 1")
    if not mask[0, -1]:
        raise ValueError("the prompt is padded on the right; a text is continued from its last token: use padding_side='left'")
    return mask


def _checked_ids(ids, target: PreTrainedModel) -> torch.Tensor:
    """`ids` as (1, tokens) long on the target's device.

    Raises:
        ValueError: no ids, none of the target's vocabulary, or too many for its context.
    """
    try:
        ids = torch.as_tensor(ids)
    except Exception as error:
        advice = "; give tokenizer(text).input_ids" if isinstance(ids, str) else ""
        raise ValueError(f"input_ids must be token ids, got {type(ids).__name__}{advice}") from error
    ids = ids[None] if ids.dim() == 1 else ids
    no_ids = ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool
    if ids.dim() != 2 or ids.shape[0] != 1 or (no_ids and ids.shape[1]):
        raise ValueError(f"input_ids must be whole numbers of shape (tokens,) or (1, tokens), got {ids.dtype} {tuple(ids.shape)}")
    if ids.shape[1] == 0:
        raise ValueError(f"the prompt is empty (input_ids of shape {tuple(ids.shape)}); give it at least one token, for example the bos token")
    ids, config = ids.long(), target.config.get_text_config()  # reductions know few of the integer types
    if ids.min() < 0 or ids.max() >= config.vocab_size:
        raise ValueError(f"token ids must lie below {config.vocab_size}, got {ids.min().item()} to {ids.max().item()}")
    context = ContextLimits.of(config).context
    if context is not None and ids.shape[1] >= context:
        raise ValueError(f"the prompt has {ids.shape[1]} tokens, the context of {type(target).__name__} holds {context}")
    return ids.to(target.device)
