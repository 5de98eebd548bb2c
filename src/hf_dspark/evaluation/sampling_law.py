"""Do sampled texts follow the target's own law? A test with the exact law of every position along the sampled texts.

Counts are compared with what the target's law expects, over all positions, in three ways: by token; by pair of the previous token
and the token; and, where a draft was sent, by place in the draft's law, on which most faults of acceptance leave their mark. A
fourth test asks whether drafts sent were drawn from the law that acceptance was told.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from transformers import LogitsProcessorList, PreTrainedModel

from hf_dspark.evaluation.law_test import LawTest, law_test
from hf_dspark.evaluation.output import progress
from hf_dspark.generation.candidates import DSparkCandidateGenerator, Proposal
from hf_dspark.generation.decoding import Request, decode
from hf_dspark.generation.report import GenerationReport, record_generation
from hf_dspark.generation.steps import CachedSequence
from hf_dspark.modeling import DSparkDraftModel

__all__ = ["FALSE_ALARM_RATE", "SamplingCheck", "check_sampling", "seeded", "stop_tokens"]

# The tests of one run together raise an alarm on a right pair less often than this. The level they are held to is lower,
# because a chi-square law describes their tails only approximately.
FALSE_ALARM_RATE = 1e-3
_LEVEL = 1e-4
# Tokens of a position that are told apart; the rest is one category.
_NUM_TOLD_APART = 64
_DRAFT_PLACES = 4
_TOKENS, _PAIRS, _PLACES, _DRAFTS = "tokens", "pairs of tokens", "places in the draft's law", "drafts"


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
class SampledText:
    """A prompt (1, tokens) and the new ids.

    draft_choices: by index of new token the draft's first choices there, where a draft was decided on.
    draft_laws: of every draft sent, the probabilities of its law's first choices (places,) and the place of the token sent.
    """

    prompt: torch.Tensor
    ids: list[int]
    draft_choices: dict[int, list[int]] = field(default_factory=dict)
    draft_laws: list[tuple[torch.Tensor, int]] = field(default_factory=list)


class WatchedRequest(Request):
    """Keeps what was proposed to it, with the length of the text it was proposed for."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.proposals: list[tuple[int, Proposal]] = []

    def accept(self, proposal: Proposal, outputs) -> None:
        """What `Request.accept` does."""
        if self.num_to_draft > 0:
            self.proposals.append((self.input_ids.shape[1], proposal))
        super().accept(proposal, outputs)


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
    alarm_below, cut = _LEVEL / (4 * len(settings)), 0.0
    for name, knobs in settings.items():
        if name == "cut by confidence":
            knobs["conditional_confidence_threshold"] = cut
        with _knobs(draft, **knobs), seeded(seed, target.device), record_generation() as report:
            numbers = progress(range(num_samples), f"sampling, {name}")
            texts = [sample(target, draft, prompts[number % len(prompts)], options) for number in numbers]
        cut = cut or _median_confidence(report)
        yield _judge(target, texts, options, name, alarm_below, report, show)


@contextmanager
def seeded(seed: int, device: torch.device):
    """Random numbers from `seed` on, and the state of before afterwards."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


def sample(target: PreTrainedModel, draft: DSparkDraftModel, prompt: torch.Tensor, options: dict) -> SampledText:
    """Decodes one text after `prompt` (1, tokens) as generate() with the draft does, watching what is proposed."""

    def decode_watched(target, input_ids, logits_processor, stopping_criteria, generation_config, **model_kwargs):
        generator = DSparkCandidateGenerator(draft, target, generation_config, logits_processor)
        sequence = CachedSequence(target, generation_config, model_kwargs)
        request = WatchedRequest(target, input_ids, generation_config, logits_processor, stopping_criteria, sequence, generator)
        decode([request])
        return request.input_ids, request.proposals

    ids, proposals = target.generate(input_ids=prompt, **options, custom_generate=decode_watched)
    text = SampledText(prompt, ids[0, prompt.shape[1] :].tolist())
    for length, proposal in proposals:
        _note(text, length - prompt.shape[1], proposal)
    return text


def _note(text: SampledText, first: int, proposal: Proposal) -> None:
    """Notes a proposal for the new tokens from index `first` on."""
    decided = True
    for k, drafted_id in enumerate(proposal.ids):
        # Of a law, the choices of the draft are known before its draw; an argmax draft is its own only choice.
        choices = [drafted_id]
        if proposal.law is not None:
            probs, choices = (column.tolist() for column in proposal.law[k].topk(min(_DRAFT_PLACES, len(proposal.law[k]))))
            place = choices.index(drafted_id) if drafted_id in choices else len(choices)
            text.draft_laws.append((torch.tensor(probs, dtype=torch.float64), place))
        if decided and first + k < len(text.ids):
            text.draft_choices[first + k] = choices
            decided = text.ids[first + k] == drafted_id


def _judge(target, texts: list[SampledText], options, name: str, alarm_below: float, report: GenerationReport, show) -> SamplingCheck:
    num_tokens = sum(len(text.ids) for text in texts)
    about = f"{len(texts)} texts, {num_tokens} tokens at temperature {options['temperature']:g}, {report.tokens_per_round:.2f} tokens a round"
    if problem := _wrong_ending(target, texts, options["max_new_tokens"]):
        return SamplingCheck(name, False, 0.0, alarm_below, len(texts), num_tokens, problem)
    tests = _test_laws(target, texts, options)
    kind, worst = min(tests.items(), key=lambda item: item[1].p_value)
    passed = worst.p_value >= alarm_below
    if not any(test.degrees for test in tests.values()):
        words = f"{about}; too few choices were left open to test anything (more --samples would)"
    elif passed:
        words = f"{about}; smallest p-value {worst.p_value:.2g} (alarm below {alarm_below:.1g})"
    else:
        what = _describe(kind, worst.worst_key, target.config.get_text_config().vocab_size, show)
        whose = "law that the draft reports" if kind == _DRAFTS else "target's law"
        words = f"{about}; the {kind} do not follow the {whose} (p-value {worst.p_value:.1e}): "
        words += f"{what} came {worst.worst_count} times, expected {worst.worst_expected:.1f}"
    return SamplingCheck(name, passed, worst.p_value, alarm_below, len(texts), num_tokens, words)


def _describe(kind: str, key: int, vocab: int, show) -> str:
    if kind == _TOKENS:
        return f"{show(key)!r}"
    if kind == _PAIRS:
        return f"{show(key % vocab)!r} after {show(key // vocab)!r}"
    return f"the draft's choice number {key + 1}" if key < _DRAFT_PLACES else "what is none of the draft's first choices"


def stop_tokens(target: PreTrainedModel) -> list[int]:
    """The stop tokens of the target's generation config, as a list."""
    stop = target.generation_config.eos_token_id
    return stop if isinstance(stop, list) else [] if stop is None else [stop]


def _wrong_ending(target, texts: list[SampledText], length: int) -> str | None:
    stop_ids = set(stop_tokens(target))
    for ids in (text.ids for text in texts):
        if stop_ids & set(ids[:-1]):
            return f"a text goes on after a stop token: {ids}"
        if len(ids) != length and not (ids and ids[-1] in stop_ids):
            return f"a text has {len(ids)} tokens, but neither a stop token nor the budget of {length} ends it: {ids}"
    return None


def _test_laws(target: PreTrainedModel, texts: list[SampledText], options: dict) -> dict[str, LawTest]:
    vocab, parts = target.config.get_text_config().vocab_size, []
    for text in progress(texts, "exact laws"):
        top_ids, probs, drawn = _laws_along(target, text, options)
        previous = torch.tensor([text.prompt[0, -1].item(), *text.ids[:-1]])
        places = torch.full_like(top_ids, _DRAFT_PLACES)
        for index, choices in text.draft_choices.items():
            for place, token in enumerate(choices):
                places[index][top_ids[index] == token] = place
        drafted = torch.tensor([index in text.draft_choices for index in range(len(text.ids))])
        parts.append((top_ids, previous[:, None] * vocab + top_ids, places, drafted, probs, drawn))
    tokens, pairs, places, drafted, probs, drawn = (torch.cat(column) for column in zip(*parts))
    return {
        _TOKENS: law_test(tokens, probs, drawn),
        _PAIRS: law_test(pairs, probs, drawn),
        _PLACES: law_test(places[drafted], probs[drafted], drawn[drafted]),
        _DRAFTS: _test_drafts(texts),
    }


def _test_drafts(texts: list[SampledText]) -> LawTest:
    laws = [law for text in texts for law in text.draft_laws]
    if not laws:
        return LawTest(1.0, 0)
    probs = torch.stack([probs for probs, _ in laws])
    return law_test(torch.arange(probs.shape[1]).expand_as(probs), probs, torch.tensor([place for _, place in laws]))


def _laws_along(target: PreTrainedModel, text: SampledText, options: dict) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The target's processed law at every new token, from one forward pass over the text.

    Returns the most likely tokens (new, told apart) long, their probabilities fp64, and the slot of the token drawn (new,) long;
    a slot behind the last one says that it was none of them.
    """
    processors = target.generate(input_ids=text.prompt, **options, custom_generate=_return_processors)
    whole = torch.cat([text.prompt, text.prompt.new_tensor([text.ids])], dim=1)
    start = text.prompt.shape[1]
    with torch.no_grad():
        logits = target(input_ids=whole[:, :-1], use_cache=False).logits[0, start - 1 :]  # (new, vocab)
    scores = torch.cat([processors(whole[:, : start + k], row[None].float().to(whole.device)) for k, row in enumerate(logits)])
    probs, top_ids = torch.softmax(scores.double(), dim=-1).topk(min(_NUM_TOLD_APART, scores.shape[-1]), dim=-1)
    hits = top_ids == whole[0, start:, None]
    drawn = torch.where(hits.any(dim=1), hits.long().argmax(dim=1), top_ids.shape[1])
    return top_ids.cpu(), probs.cpu(), drawn.cpu()


def _return_processors(target, input_ids, logits_processor: LogitsProcessorList, stopping_criteria, generation_config, **model_kwargs):
    return logits_processor


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
