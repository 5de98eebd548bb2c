"""The loop over rounds. One place decides acceptance, one stopping, one budgets; drafting nothing is plain decoding."""

import time

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria
from transformers.generation.utils import GenerateDecoderOnlyOutput

from hf_dspark.generation.acceptance import accept_or_replace
from hf_dspark.generation.candidates import DSparkCandidateGenerator, Proposal, propose_all
from hf_dspark.generation.context_limits import ContextLimits
from hf_dspark.generation.large_vocabulary import draw, largest_token
from hf_dspark.generation.report import RequestRecord, RoundRecord, active_report
from hf_dspark.generation.steps import CachedSequence, PackedSequence, forward_all

__all__ = ["Request", "decode", "length_limit", "step"]


class Request:
    """One sequence being decoded: its text, how the target runs it, its rules, and what writes its drafts (None: nobody)."""

    def __init__(
        self,
        target: PreTrainedModel,
        input_ids: torch.Tensor,
        generation_config: GenerationConfig,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        sequence: CachedSequence | PackedSequence,
        generator: DSparkCandidateGenerator | None = None,
        streamer=None,
        random: torch.Generator | None = None,
    ):
        self.target, self.generation_config, self.sequence = target, generation_config, sequence
        self.logits_processor, self.stopping_criteria = logits_processor, stopping_criteria
        self.generator, self.streamer, self.random = generator, streamer, random
        self.prompt_ids = self._joined_ids = input_ids
        self._unjoined: list[int] = []  # tokens behind `_joined_ids`; joined where somebody wants the text as a tensor
        self.started = self.finished = False
        self.error: Exception | None = None
        self.num_begun = 0  # positions of this round whose token has been asked for
        wants = generation_config.return_dict_in_generate
        self.scores = () if wants and generation_config.output_scores else None
        self.logits = () if wants and generation_config.output_logits else None
        self.keep_rows = self.scores is not None or self.logits is not None
        self.stop_ids = _plain_stop_ids(stopping_criteria)
        self.max_length = length_limit(generation_config, stopping_criteria)
        self.limits = ContextLimits.of(target.config)
        report = active_report.get()
        self.clock = None if report is None else _Clock(report, input_ids.shape[1], target.device)
        if generator is not None:
            generator.keeps_confidence = report is not None
            generator.random = random

    @property
    def input_ids(self) -> torch.Tensor:
        """The text so far, (1, tokens) long."""
        if self._unjoined:
            self._joined_ids = torch.cat([self._joined_ids, self._joined_ids.new_tensor([self._unjoined])], dim=1)
            self._unjoined = []
        return self._joined_ids

    @property
    def num_tokens(self) -> int:
        """Tokens of the text so far."""
        return self._joined_ids.shape[1] + len(self._unjoined)

    @property
    def overrides(self) -> dict:
        """Model arguments that make the target return what the draft reads."""
        return {} if self.generator is None or self.generator.failure else self.generator.model_kwargs_overrides

    @property
    def budget(self) -> int:
        """Tokens that may still be written."""
        return self.max_length - self.num_tokens

    @property
    def num_to_draft(self) -> int:
        """Drafts that fit: the round's last token is the target's own, and the first token leaves before the draft is touched."""
        if not self.started or self.generator is None:
            return 0
        return self.limits.num_drafts(self.sequence.num_positions, self.budget - 1)

    def accept(self, proposal: Proposal, outputs) -> None:
        """The end of a round: accept drafts, commit tokens, take back the rest."""
        num_rows = 1 + len(proposal.ids)
        try:
            num_tokens = self._commit(proposal, outputs)
        except BaseException:
            # A streamer, a processor, a criterion or the user interrupts: the cache is left as plain decoding would leave it.
            self.sequence.rollback(num_rows - self.num_begun)
            raise
        # The last committed token has not been through the target; what it replaced, and all after it, is taken back.
        self.sequence.rollback(num_rows - num_tokens)
        if not self.started:
            self._note_start(outputs)
        elif self.generator is not None:
            self.generator.observe_verification(outputs, num_tokens)

    def _note_start(self, outputs) -> None:
        self.started = True
        if self.clock is not None:
            self.clock.record.time_to_first_token_seconds = time.perf_counter() - self.clock.started
        if self.generator is not None:
            sequence = self.sequence
            packed = isinstance(sequence, PackedSequence)
            # A packed cache has no padded slots, so there the prompt is the text without them.
            self.generator.observe_prompt(outputs, sequence.prompt_ids[None] if packed else self.prompt_ids, sequence.attention_mask, sequence.cache)
            if self.clock is not None:
                self.clock.record.missing_context_tokens = self.generator.missing_context_tokens

    def fail_forward(self, error: Exception) -> None:
        """Ends the request with what a forward raised."""
        num_positions = self.sequence.num_positions if self.started else self.num_tokens
        self.fail(self.limits.explained(error, num_positions, type(self.target).__name__))

    def fail(self, error: Exception) -> None:
        """Ends the request with `error`."""
        self.error, self.finished = error, True

    def finish(self) -> None:
        """Closes state and stream."""
        if self.generator is not None and isinstance(self.sequence, CachedSequence):
            self.generator.finish(self.input_ids)
        if self.streamer is not None:
            self.streamer.end()

    def release(self) -> None:
        """Closes the record, and frees or restores what the sequence holds; also after an interruption. May be called again."""
        if self.clock is not None:
            self.clock.record.draft_failure = None if self.generator is None else self.generator.failure
        self.sequence.release()
        if self.generator is not None and isinstance(self.sequence, PackedSequence):
            self.generator.forget()

    def output(self) -> torch.Tensor | GenerateDecoderOnlyOutput:
        """What generate() returns: ids (1, tokens), or the dictionary of it."""
        if not self.generation_config.return_dict_in_generate:
            return self.input_ids
        cache = self.sequence.cache if isinstance(self.sequence, CachedSequence) else None
        return GenerateDecoderOnlyOutput(sequences=self.input_ids, scores=self.scores, logits=self.logits, cache=cache)

    def _commit(self, proposal: Proposal, outputs) -> int:
        """Accepts drafts until the first is replaced or the text ends; returns how many tokens were written."""
        rows = outputs.logits[0, -1 - len(proposal.ids) :]  # (1 + drafts, vocab)
        do_sample = self.generation_config.do_sample
        plain = not self.logits_processor and not do_sample
        # Greedy needs no fp32 copy of the logits; a device answers once for all rows, a CPU only for those before the first rejection.
        best = rows.argmax(dim=-1).tolist() if plain and rows.device.type != "cpu" else None
        tokens, accepted = [], 0
        for k, draft_id in enumerate([*proposal.ids, None]):
            self.num_begun = k + 1
            law = None if proposal.law is None or draft_id is None else proposal.law[k]
            # A draft of the one-hot law is accepted where the target draws it, so that the target may draw in any exact way.
            token = draw(rows[k], self.logits_processor, self.random) if do_sample and law is None and not self.keep_rows else None
            if token is None:
                scores = self._scores(rows[k], tokens, plain)
                if do_sample:
                    token = accept_or_replace(scores, draft_id, law, self.random)
                else:
                    token = best[k] if best is not None else largest_token(rows[k] if plain else scores[0])
            tokens.append(token)
            accepted += token == draft_id
            if self.streamer is not None:
                self.streamer.put(torch.tensor([token]))
            self.finished = self._stops(tokens)
            if self.finished or token != draft_id:
                break
        self._unjoined += tokens
        self.sequence.advance(tokens, outputs)
        if self.clock is not None:
            self.clock.note(len(tokens), len(proposal.ids), accepted, proposal.confidence)
        return len(tokens)

    def _scores(self, row: torch.Tensor, tokens: list[int], plain: bool) -> torch.Tensor | None:
        """Processed scores (1, vocab) fp32 of the position after `tokens`; None where greedy decoding needs no row of its own."""
        if plain and not self.keep_rows:
            return None
        logits = row[None].to(copy=True, dtype=torch.float32, device=self._joined_ids.device)
        if self.logits is not None:
            self.logits += (logits.clone(),)
        scores = self.logits_processor(self._prefix(tokens), logits) if self.logits_processor else logits
        if self.scores is not None:
            self.scores += (scores,)
        return scores

    def _prefix(self, tokens: list[int]) -> torch.Tensor:
        return torch.cat([self.input_ids, self.input_ids.new_tensor([tokens])], dim=1) if tokens else self.input_ids

    def _stops(self, tokens: list[int]) -> bool:
        """Whether the text ends after `tokens`; asked once for every token, as plain decoding asks."""
        if self.stop_ids is not None:
            return tokens[-1] in self.stop_ids or len(tokens) >= self.budget
        return bool(self.stopping_criteria(self._prefix(tokens), self.scores).all())


def decode(requests: list[Request]) -> None:
    """Runs requests to their ends, a round of each in turn.

    Raises:
        Exception: what ended a request early; the others are then given up as well.
    """
    try:
        while running := [request for request in requests if not request.finished]:
            step(running)
            for request in running:
                if request.error is not None:
                    raise request.error
                if request.finished:
                    request.release()
    finally:
        for request in requests:
            request.release()
    for request in requests:
        request.finish()


def step(running: list[Request]) -> None:
    """One round of every request: draft, verify, accept, commit. An error ends its request alone and is kept in `request.error`."""
    with _timed(running, "total_seconds"):
        drafting = [request for request in running if request.num_to_draft > 0]
        proposals = {}
        if drafting:
            with _timed(drafting, "draft_seconds"):
                generators, texts = [request.generator for request in drafting], [request.input_ids for request in drafting]
                drafted = propose_all(generators, texts, [request.num_to_draft for request in drafting])
            proposals = dict(zip(drafting, drafted))
        going = []
        for request in running:
            if isinstance(proposals.setdefault(request, Proposal([])), Exception):
                request.fail(proposals[request])
            else:
                going.append(request)
        if not going:
            return
        with _timed(going, "target_seconds"):
            results = forward_all(going, [proposals[request] for request in going])
        for request, outputs in zip(going, results):
            if isinstance(outputs, Exception):
                request.fail_forward(outputs)
                continue
            try:
                request.accept(proposals[request], outputs)
            except Exception as error:
                request.fail(error)


def length_limit(generation_config: GenerationConfig, criteria: StoppingCriteriaList) -> int:
    """Tokens a text may have: a length criterion given by the user takes the place of the one made from max_length."""
    limits = [criterion.max_length for criterion in criteria if isinstance(criterion, MaxLengthCriteria)]
    return min(limits, default=generation_config.max_length)


def _plain_stop_ids(criteria: StoppingCriteriaList) -> set[int] | None:
    """The stop tokens where length and stop tokens are all that ends the text (decided without a device's round trip), else None."""
    ids = [criterion.eos_token_id for criterion in criteria if type(criterion) is EosTokenCriteria]
    for own in ids:
        if own.dim() != 1:
            raise ValueError(f"eos_token_id must be a token id or a list of them, got {own.tolist()}")
    if any(type(criterion) not in (MaxLengthCriteria, EosTokenCriteria) for criterion in criteria):
        return None
    return {token for own in ids for token in own.tolist()}


class _Clock:
    """Times one request for the report."""

    def __init__(self, report, prompt_tokens: int, device: torch.device):
        self.record = RequestRecord(prompt_tokens=prompt_tokens)
        report.requests.append(self.record)
        self.synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda: None
        self.started = time.perf_counter()

    def note(self, tokens: int, drafted: int, accepted: int, confidence: list[float] | None) -> None:
        if self.record.new_tokens:  # the prefill is no round
            self.record.rounds.append(RoundRecord(tokens, drafted, accepted, confidence if drafted else None))
        self.record.new_tokens += tokens


class _timed:
    """Adds the seconds spent inside to a field of each request's record, in equal shares; does nothing where nothing is recorded."""

    def __init__(self, requests: list[Request], name: str):
        self.clocks, self.name, self.share = [request.clock for request in requests if request.clock is not None], name, 1 / max(1, len(requests))

    def __enter__(self):
        if self.clocks:
            self.clocks[0].synchronize()
            self.started = time.perf_counter()

    def __exit__(self, *_):
        if self.clocks:
            self.clocks[0].synchronize()
            seconds = (time.perf_counter() - self.started) * self.share
            for clock in self.clocks:
                setattr(clock.record, self.name, getattr(clock.record, self.name) + seconds)
