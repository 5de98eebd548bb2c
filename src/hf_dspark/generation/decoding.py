"""The loop over rounds. One place decides acceptance, one stopping, one budgets; drafting nothing is plain decoding."""

import time

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria
from transformers.generation.utils import GenerateDecoderOnlyOutput

from hf_dspark.generation import steps
from hf_dspark.generation.acceptance import accept_or_replace
from hf_dspark.generation.candidates import DSparkCandidateGenerator, Proposal
from hf_dspark.generation.report import RequestRecord, RoundRecord, active_report

__all__ = ["Request", "decode"]


class Request:
    """One sequence being decoded: its text, its cache (in `model_kwargs`), its rules, and what writes its drafts (None: nobody)."""

    def __init__(
        self,
        target: PreTrainedModel,
        input_ids: torch.Tensor,
        generation_config: GenerationConfig,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        model_kwargs: dict,
        generator: DSparkCandidateGenerator | None = None,
        streamer=None,
    ):
        self.target, self.input_ids, self.generation_config, self.model_kwargs = target, input_ids, generation_config, model_kwargs
        self.logits_processor, self.stopping_criteria = logits_processor, stopping_criteria
        self.generator, self.streamer = generator, streamer
        self.finished = False
        self.recorded_past: list[tuple[object, bool]] = []
        self.num_begun = 0  # positions of this round whose token has been asked for
        wants = generation_config.return_dict_in_generate
        self.scores = () if wants and generation_config.output_scores else None
        self.logits = () if wants and generation_config.output_logits else None
        self.keep_rows = self.scores is not None or self.logits is not None
        self.stop_ids = _plain_stop_ids(stopping_criteria)
        # A length criterion given by the user takes the place of the one made from max_length.
        limits = [criterion.max_length for criterion in stopping_criteria if isinstance(criterion, MaxLengthCriteria)]
        self.max_length = min(limits, default=generation_config.max_length)
        report = active_report.get()
        self.clock = None if report is None else _Clock(report, input_ids.shape[1], target.device)
        if generator is not None:
            generator.keeps_confidence = report is not None

    @property
    def overrides(self) -> dict:
        """Model arguments that make the target return what the draft reads."""
        return {} if self.generator is None or self.generator.failure else self.generator.model_kwargs_overrides

    @property
    def budget(self) -> int:
        """Tokens that may still be written."""
        return self.max_length - self.input_ids.shape[1]

    def start(self) -> None:
        """Prefill and the first token, which leaves before the draft is touched."""
        mask = self.model_kwargs.get("attention_mask")
        prompt_ids = self.input_ids
        with _timed(self.clock, "target_seconds"):
            outputs = steps.prefill(self.target, prompt_ids, self.generation_config, self.model_kwargs, self.overrides)
        cache = outputs.get("cache")
        if cache is None:
            raise ValueError(f"decoding with a DSpark draft needs a cache, which {type(self.target).__name__} does not return")
        if not cache.is_croppable:
            raise ValueError(
                f"{type(self.target).__name__} keeps a state that can't be rolled back after a rejected draft (a recurrent layer, or a static cache "
                "past its sliding window); generate without assistant_model"
            )
        self.recorded_past = _record_past(cache)
        steps.rollback(cache, 0)
        self._commit(Proposal([]), outputs)
        if self.clock is not None:
            self.clock.record.time_to_first_token_seconds = time.perf_counter() - self.clock.started
        if self.generator is not None:
            self.generator.observe_prompt(outputs, prompt_ids, mask, cache)
            if self.clock is not None:
                self.clock.record.missing_context_tokens = self.generator.missing_context_tokens

    def round(self) -> None:
        """One round: draft, verify, accept, commit."""
        proposal = Proposal([])
        # The round's last token is the target's own, so the budget holds one draft less.
        if self.generator is not None and self.budget > 1:
            with _timed(self.clock, "draft_seconds"):
                proposal = self.generator.propose(self.input_ids, self.budget - 1)
        with _timed(self.clock, "target_seconds"):
            outputs = steps.verify(self.target, self.input_ids, proposal.ids, self.model_kwargs, self.overrides)
        try:
            num_tokens = self._commit(proposal, outputs)
        except BaseException:
            # A streamer, a processor, a criterion or the user interrupts: the cache is left as plain decoding would leave it.
            steps.rollback(outputs.cache, 1 + len(proposal.ids) - self.num_begun)
            raise
        # The last committed token has not been through the target; what it replaced, and all after it, is taken back.
        steps.rollback(outputs.cache, 1 + len(proposal.ids) - num_tokens)
        if self.generator is not None:
            self.generator.observe_verification(outputs, num_tokens)

    def finish(self) -> None:
        """Closes state and stream."""
        if self.generator is not None:
            self.generator.finish(self.input_ids)
        if self.streamer is not None:
            self.streamer.end()

    def release(self) -> None:
        """Closes the record, and stops the cache's layers from keeping what only a rollback needs; also after an interruption."""
        if self.clock is not None:
            self.clock.close(None if self.generator is None else self.generator.failure)
        for layer, recorded in self.recorded_past:
            layer.record_past = recorded

    def output(self) -> torch.Tensor | GenerateDecoderOnlyOutput:
        """What generate() returns: ids (1, tokens), or the dictionary of it."""
        if not self.generation_config.return_dict_in_generate:
            return self.input_ids
        return GenerateDecoderOnlyOutput(sequences=self.input_ids, scores=self.scores, logits=self.logits, cache=self.model_kwargs["cache"])

    def _commit(self, proposal: Proposal, outputs) -> int:
        """Accepts drafts until the first is replaced or the text ends; returns how many tokens were written."""
        rows = outputs.logits[0, -1 - len(proposal.ids) :]  # (1 + drafts, vocab)
        plain = not self.logits_processor and not self.generation_config.do_sample
        # Greedy needs no fp32 copy of the logits; a device answers once for all rows, a CPU only for those before the first rejection.
        best = rows.argmax(dim=-1).tolist() if plain and rows.device.type != "cpu" else None
        tokens, accepted = [], 0
        for k, draft_id in enumerate([*proposal.ids, None]):
            self.num_begun = k + 1
            scores = self._scores(rows[k], tokens, plain)
            if plain:
                token = rows[k].argmax().item() if best is None else best[k]
            else:
                law = None if proposal.law is None or draft_id is None else proposal.law[k]
                token = accept_or_replace(scores, self.generation_config.do_sample, draft_id, law)
            tokens.append(token)
            accepted += token == draft_id
            if self.streamer is not None:
                self.streamer.put(torch.tensor([token]))
            self.finished = self._stops(tokens)
            if self.finished or token != draft_id:
                break
        self.input_ids = self._prefix(tokens)
        self.model_kwargs = steps.advance(self.target, self.model_kwargs, len(tokens), outputs)
        if self.clock is not None:
            self.clock.note(len(tokens), len(proposal.ids), accepted, proposal.confidence)
        return len(tokens)

    def _scores(self, row: torch.Tensor, tokens: list[int], plain: bool) -> torch.Tensor | None:
        """Processed scores (1, vocab) fp32 of the position after `tokens`; None where greedy decoding needs no row of its own."""
        if plain and not self.keep_rows:
            return None
        logits = row[None].to(copy=True, dtype=torch.float32, device=self.input_ids.device)
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
    """Runs requests to their ends, a round of each in turn."""
    try:
        for request in requests:
            request.start()
        while running := [request for request in requests if not request.finished]:
            for request in running:
                request.round()
    finally:
        for request in requests:
            request.release()
    for request in requests:
        request.finish()


def _plain_stop_ids(criteria: StoppingCriteriaList) -> set[int] | None:
    """The stop tokens where length and stop tokens are all that ends the text (decided without a device's round trip), else None."""
    if any(type(criterion) not in (MaxLengthCriteria, EosTokenCriteria) for criterion in criteria):
        return None
    return {token for criterion in criteria if type(criterion) is EosTokenCriteria for token in criterion.eos_token_id.tolist()}


def _record_past(cache) -> list[tuple[object, bool]]:
    """Makes sliding layers keep what a rollback needs, from now on; returns what to restore. The prefill needs none of it."""
    before = [(layer, layer.record_past) for layer in cache.layers if hasattr(layer, "record_past")]
    cache.activate_past_recording()
    return before


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

    def close(self, failure: str | None) -> None:
        self.record.draft_failure = failure
        self.record.total_seconds = time.perf_counter() - self.started


class _timed:
    """Adds the seconds spent inside to a field of the clock's record; does nothing without a clock."""

    def __init__(self, clock: _Clock | None, name: str):
        self.clock, self.name = clock, name

    def __enter__(self):
        if self.clock is not None:
            self.clock.synchronize()
            self.started = time.perf_counter()

    def __exit__(self, *_):
        if self.clock is not None:
            self.clock.synchronize()
            setattr(self.clock.record, self.name, getattr(self.clock.record, self.name) + time.perf_counter() - self.started)
