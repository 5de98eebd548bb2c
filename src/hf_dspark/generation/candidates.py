"""Drafts one round for one request: context, parallel stage, sequential stage, confidence prefix (paper section 3.1)."""

import logging
import math
from dataclasses import dataclass

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel
from transformers.generation.candidate_generator import CandidateGenerator

from hf_dspark.generation.acceptance import choose
from hf_dspark.generation.context_limits import ContextLimits
from hf_dspark.generation.large_vocabulary import LARGE_VOCABULARY, best_tokens
from hf_dspark.generation.options import draft_options
from hf_dspark.generation.processors import draft_processors
from hf_dspark.generation.state import DraftState, draft_state, forget_draft_state
from hf_dspark.modeling import DSparkDraftModel
from hf_dspark.modeling.context_cache import PackedContext

__all__ = ["DSparkCandidateGenerator", "Proposal", "propose_all"]

logger = logging.getLogger(__name__)

# Over a large vocabulary the sequential stage works on each position's best base logits; the law is zero elsewhere.
_NUM_BEST = 512


@dataclass(slots=True)
class Proposal:
    """What the target is asked to verify.

    ids: drafted tokens in order. law: (len(ids), vocab) fp32, each token's law; None: chosen by argmax. confidence: c_k of each,
    None where nobody asked.
    """

    ids: list[int]
    law: torch.Tensor | None = None
    confidence: list[float] | None = None


class DSparkCandidateGenerator(CandidateGenerator):
    """Drafts for one request with a [`DSparkDraftModel`]; also fits transformers' own assisted loop (`get_candidates`).

    A failing draft never loses a request: its cause is kept in `failure`, and every later proposal is empty.
    """

    requires_model_outputs = True

    def __init__(
        self, draft: DSparkDraftModel, target: PreTrainedModel, generation_config: GenerationConfig, logits_processor: LogitsProcessorList | None
    ):
        self.draft = draft.bind(target)
        self.tables = draft.tables
        self.options = draft_options(draft)
        self.max_length, self.limits = generation_config.max_length, ContextLimits.of(target.config)
        self.samples_chain = generation_config.do_sample and self.options.draft_sampling == "chain"
        self.processors = logits_processor or LogitsProcessorList()
        self.keeps_confidence = False
        self.random: torch.Generator | None = None
        self.failure: str | None = None
        self.state: DraftState | None = None
        self.missing_context_tokens = 0
        self._target_cache = None
        self._next_slot = self._num_padded = 0
        self._unchecked_logits: torch.Tensor | None = None
        self._last_index = target.config.get_text_config().num_hidden_layers
        self._layer_indices = [layer + 1 for layer in draft.config.target_layer_ids]  # hidden_states[0] is the embedding's output
        checked = [] if target in draft.checked_targets else [self._last_index]
        self.model_kwargs_overrides = {"output_hidden_states": [*self._layer_indices, *checked]}

    def observe_prompt(self, outputs, input_ids: torch.Tensor, attention_mask: torch.Tensor | None, cache) -> None:
        """Notes the target's first forward: `input_ids` (1, tokens) committed before it, `attention_mask` (1, cache length) or None."""
        layers = self._layers(outputs)
        self._target_cache, self._next_slot = cache, int(cache.get_seq_length())
        if self._last_index in self.model_kwargs_overrides["output_hidden_states"]:
            self._unchecked_logits = outputs.logits[:, -1]
            self._unchecked_hidden = outputs.hidden_states[self._last_index][:, -1]
        try:
            self._note_prompt(layers, input_ids, attention_mask)
        except Exception as error:
            self._fail(error)

    def _note_prompt(self, layers: list[torch.Tensor], input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> None:
        num_rows, total = layers[0].shape[1], self._next_slot
        past = total - num_rows
        slots, positions = range(past, total), range(past, total)
        if attention_mask is not None:
            mask = attention_mask[0, :total].bool()
            self._num_padded = total - int(mask.sum())
            real = mask[past:].nonzero()[:, 0]
            position_of = (mask.long().cumsum(0) - 1).tolist()
            slots = (real + past).tolist()
            positions = [position_of[slot] for slot in slots]
            layers = [layer[:, real.to(layer.device)] for layer in layers]
        # input_ids holds the whole text unless only its new part, or embeddings, were passed.
        self.state = draft_state(self.draft, self._target_cache, past, input_ids)
        self.missing_context_tokens = max(0, past - self._num_padded - self.state.num_tokens)
        self.state.append(layers, list(slots), list(positions))

    def observe_verification(self, outputs, num_kept: int) -> None:
        """Notes a verification forward, of whose rows the first `num_kept` were committed."""
        first, self._next_slot = self._next_slot, self._next_slot + num_kept
        if self.failure is None:
            layers, slots = self._layers(outputs), list(range(first, first + num_kept))
            try:
                self.state.append([layer[:, :num_kept] for layer in layers], slots, [slot - self._num_padded for slot in slots])
            except Exception as error:
                self._fail(error)

    def finish(self, input_ids: torch.Tensor) -> None:
        """Keeps the text with the cache, to notice when a later call continues another one."""
        if self.state is not None and self.failure is None:
            self.state.token_ids = input_ids if input_ids.shape[1] > self._next_slot else None

    def forget(self) -> None:
        """Frees the draft's keys and values, which nothing continues."""
        if self._target_cache is not None:
            forget_draft_state(self._target_cache)
        self.state = self._target_cache = None

    def propose(self, input_ids: torch.Tensor, max_tokens: int) -> Proposal:
        """Drafts at most `max_tokens` tokens after `input_ids` (1, tokens), whose last token is the anchor.

        Raises:
            ValueError: the target's head is not what the draft borrows (checked once a target).
            Exception: whatever made the draft fail, with `raise_on_draft_failure`.
        """
        proposal = propose_all([self], [input_ids], [max_tokens])[0]
        if isinstance(proposal, Exception):
            raise proposal
        return proposal

    def _fail(self, error: Exception) -> None:
        """Ends drafting for this request, or raises with `raise_on_draft_failure`. Called where `error` is being handled."""
        forget_draft_state(self._target_cache)
        if self.options.raise_on_draft_failure:
            raise error
        self.state = None
        self.failure = f"{type(error).__name__}: {error}"
        logger.warning("the draft model failed (%s); the text is finished by the target alone, which only costs speed", self.failure)

    def _failed(self, error: Exception, proposal: Proposal | None = None) -> Proposal | Exception:
        """`_fail` while proposing: `proposal` (default: nothing) is the last one, or `error` takes its place."""
        try:
            self._fail(error)
        except Exception as raised:
            return raised
        return proposal or Proposal([])

    def _next_token(
        self, row: torch.Tensor, target_ids: torch.Tensor | None, input_ids: torch.Tensor, tokens: list[torch.Tensor], processors
    ) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        """The token after `input_ids` and the drafted `tokens`, () long, and its law (vocab,) fp32 or None; None: nothing is allowed here.

        row: (columns,) fp32 logits, of the target's tokens `target_ids` (None: each column is its own id).
        """
        if processors is not None:
            prefix = torch.cat([input_ids, torch.stack(tokens)[None].to(input_ids.device)], dim=1) if tokens else input_ids
            row, target_ids = processors(prefix, self._dense(row, target_ids, -torch.inf)[None].to(prefix.device))[0].to(row.device), None
            if torch.isneginf(row).all():
                return None  # nothing the draft can write is allowed here; the target goes on
        law = None
        if self.samples_chain:
            law = _finite(torch.softmax(row, dim=-1))
            index = choose(law[None], self.random)[0]
            law = self._dense(law, target_ids, 0.0)
        else:
            value, index = row.max(dim=-1)
            _finite(value)
        return index if target_ids is None else target_ids[index], law

    def _confident_prefix(self, confidence: list[float]) -> int:
        """Drafts before the first whose c_k or a_k = c_1 ... c_k falls below its threshold, or whose c_k is no number."""
        survival = 1.0
        for k, conditional in enumerate(confidence):
            survival *= conditional
            if not math.isfinite(conditional):
                return k
            if conditional < self.options.conditional_threshold or survival < self.options.survival_threshold:
                return k
        return len(confidence)

    def _target_ids(self, draft_ids: torch.Tensor | None) -> torch.Tensor | None:
        """`draft_ids`, or for None all of the draft's vocabulary, as ids of the target's; None: each column is its own id."""
        if self.draft.config.draft_vocab_size is None:
            return draft_ids
        if draft_ids is None:
            draft_ids = torch.arange(self.draft.config.draft_vocab_size, device=self.draft.d2t.device)
        return self.draft.target_ids(draft_ids)

    def _dense(self, row: torch.Tensor, target_ids: torch.Tensor | None, fill: float) -> torch.Tensor:
        if target_ids is None:
            return row
        return row.new_full((self.draft.config.vocab_size,), fill).scatter_(0, target_ids, row)

    def _layers(self, outputs) -> list[torch.Tensor]:
        if outputs.hidden_states is None or any(outputs.hidden_states[index] is None for index in self._layer_indices):
            layer_ids, name = self.draft.config.target_layer_ids, type(self.tables.target).__name__
            raise ValueError(f"{name} returned no hidden states of its layers {layer_ids}, which the draft reads")
        return [outputs.hidden_states[index] for index in self._layer_indices]

    def _check_head(self) -> None:
        if self._unchecked_logits is not None:
            self.tables.check_head(self._unchecked_hidden, self._unchecked_logits)
            self.draft.checked_targets.add(self.tables.target)
            self._unchecked_logits = self._unchecked_hidden = None

    def get_candidates(self, input_ids, model_kwargs, model_outputs, is_first_iteration, n_last_matches, **_):
        """transformers' interface: (1, tokens) committed ids -> (1, tokens + drafts) ids and (1, drafts, vocab) logits of their law or None."""
        if is_first_iteration:
            return input_ids, None
        if self.state is None and self.failure is None:
            mask = model_kwargs.get("attention_mask")
            self.observe_prompt(model_outputs, input_ids[:, :-1], mask, model_outputs.cache)
        else:
            self.observe_verification(model_outputs, int(n_last_matches) + 1)
        num_positions = self._next_slot - self._num_padded + 1
        proposal = self.propose(input_ids, self.limits.num_drafts(num_positions, self.max_length - input_ids.shape[1] - 1))
        if not proposal.ids:
            return input_ids, None
        ids = torch.cat([input_ids, torch.tensor([proposal.ids], device=input_ids.device)], dim=1)
        return ids, None if proposal.law is None else proposal.law.log()[None].to(input_ids.device)

    def update_candidate_strategy(self, input_ids, scores, num_matches):
        """Nothing of a call is kept between its rounds but the draft's state."""


def propose_all(generators: list[DSparkCandidateGenerator], texts: list[torch.Tensor], budgets: list[int]) -> list[Proposal | Exception]:
    """Drafts a round for requests of one draft at once: at most budgets[i] tokens after texts[i] (1, tokens), whose last token is the anchor.

    A request whose own law or processor fails is finished by the target alone, and the others go on. An exception in a proposal's
    place ends its request: the target's head is not what the draft borrows (checked once a target), or the draft failed and
    `raise_on_draft_failure` is set.
    """
    proposals: list[Proposal | Exception] = [Proposal([]) for _ in generators]
    budgets = [min(budget, generator.options.num_assistant_tokens) for generator, budget in zip(generators, budgets)]
    ready = [i for i, generator in enumerate(generators) if budgets[i] >= 1 and generator.failure is None]
    if not ready:
        return proposals
    try:
        for i in ready:
            generators[i]._check_head()
    except ValueError as error:
        return [error for _ in generators]
    try:
        drafters = [_Drafter(generators[i], texts[i], budgets[i]) for i in ready]
        hidden = _block_hidden(drafters)
    except Exception as error:
        # Nothing has been drawn yet, so each may try again alone, and only the one at fault fails.
        for i in ready:
            alone = [generators[i]], [texts[i]], [budgets[i]]
            proposals[i] = generators[i]._failed(error) if len(ready) == 1 else propose_all(*alone)[0]
        return proposals
    try:
        _sequential_stage(drafters, hidden)
        _cut_by_confidence(drafters, hidden)
    except Exception as error:
        for drafter in drafters:
            drafter.error = drafter.error or error
    for i, drafter in zip(ready, drafters):
        proposals[i] = drafter.proposal()
    return proposals


class _Drafter:
    """One request's part of a round: the tokens drafted so far, their laws and confidences.

    What a failure finds drawn is sent all the same: what is sent must not depend on what was drawn, or the law would be another.
    """

    def __init__(self, generator: DSparkCandidateGenerator, input_ids: torch.Tensor, max_tokens: int):
        self.generator, self.input_ids, self.max_tokens = generator, input_ids, max_tokens
        self.processors = draft_processors(generator.processors) if len(generator.processors) else None
        self.tokens: list[torch.Tensor] = []
        self.laws: list[torch.Tensor] = []
        self.confidence: list[float] | None = None
        self.error: Exception | None = None
        self.goes_on = True
        self.positions = generator.state.pending_positions()
        self.anchor = generator._next_slot - generator._num_padded

    def add(self, row: torch.Tensor, target_ids: torch.Tensor | None) -> None:
        """Drafts one more token from `row` (columns,) fp32, or stops."""
        try:
            drawn = self.generator._next_token(row, target_ids, self.input_ids, self.tokens, self.processors)
        except Exception as error:
            self.error, drawn = error, None
        if drawn is None:
            self.goes_on = False
            return
        token, law = drawn
        self.tokens.append(token)
        if law is not None:
            self.laws.append(law)
        self.goes_on = len(self.tokens) < self.max_tokens

    def proposal(self) -> Proposal | Exception:
        """What is sent to the target, or what ends the request."""
        proposal = Proposal([])
        try:
            ids = torch.stack(self.tokens).tolist() if self.tokens else []
            proposal = Proposal(ids, torch.stack(self.laws) if self.laws else None, self.confidence)
        except Exception as error:  # the device has lost it
            self.error = self.error or error
        return proposal if self.error is None else self.generator._failed(self.error, proposal)


def _block_hidden(drafters: list[_Drafter]) -> torch.Tensor:
    """Context (eq. 2, 3) and parallel stage of all requests in one row -> (requests, drafts, hidden), drafts as many as any may have."""
    draft, states = drafters[0].generator.draft, [drafter.generator.state for drafter in drafters]
    # Context: features of the tokens committed since each request's last round.
    pending = [layers for state in states if (layers := state.pending_layers())]
    if pending:
        features = draft.context_features([torch.cat(layer, dim=1) if len(pending) > 1 else layer[0] for layer in zip(*pending)])
    else:
        features = draft.fc.weight.new_zeros(1, 0, draft.config.hidden_size)
    # Always the whole block, so that fewer tokens keep the meaning of their slots.
    size, device = draft.config.block_size, features.device
    block_ids = torch.full((len(drafters), size), draft.config.mask_token_id, device=device)
    for row, drafter in zip(block_ids, drafters):
        row[0] = drafter.input_ids[0, -1]
    positions = [position for drafter in drafters for position in drafter.positions]
    positions += [drafter.anchor + slot for drafter in drafters for slot in range(size)]
    cache = PackedContext([state.cache for state in states], [len(drafter.positions) for drafter in drafters], size)
    hidden = draft(block_ids.view(1, -1), features, torch.tensor([positions], device=device), cache=cache)
    for state in states:
        state.settle()
    return hidden.view(len(drafters), size, -1)[:, : max(drafter.max_tokens for drafter in drafters)]


def _sequential_stage(drafters: list[_Drafter], hidden: torch.Tensor) -> None:
    """Tokens left to right from exp(U_k + B_k(prefix)) (eq. 4); `hidden` (requests, drafts, hidden)."""
    generator, draft = drafters[0].generator, drafters[0].generator.draft
    head, (num_requests, num_drafts, _) = draft.markov_head, hidden.shape
    logits, columns = draft.base_logits(hidden.flatten(0, 1)), None
    if logits.shape[-1] > LARGE_VOCABULARY:
        logits, columns = best_tokens(logits, _NUM_BEST)
        columns = columns.view(num_requests, num_drafts, -1)
    logits = logits.view(num_requests, num_drafts, -1)
    reachable_ids = generator._target_ids(columns)
    previous = torch.stack([drafter.input_ids[0, -1] for drafter in drafters]).to(hidden.device)
    state = None
    for k in range(num_drafts):
        rows = logits[:, k].float()
        if head is not None:
            features, state = head.features(head.markov_w1(previous), hidden[:, k], state)
            rows = rows + head.bias(features, None if columns is None else columns[:, k]).float()
        for i, drafter in enumerate(drafters):
            if drafter.goes_on:
                drafter.add(rows[i], reachable_ids if columns is None else reachable_ids[i, k])
        if not any(drafter.goes_on for drafter in drafters):
            return
        # A request that has stopped goes along with any token.
        previous = torch.stack([drafter.tokens[-1] if drafter.goes_on else previous[i] for i, drafter in enumerate(drafters)])


def _cut_by_confidence(drafters: list[_Drafter], hidden: torch.Tensor) -> None:
    """c_k (eq. 7) of each drafted token, where somebody asks for it, and the cut. c_k reads x_{k-1} and h_k, never x_k, so a cut before
    token k does not depend on it."""
    head, markov_head = drafters[0].generator.draft.confidence_head, drafters[0].generator.draft.markov_head
    for drafter, rows in zip(drafters, hidden):
        options, generator, count = drafter.generator.options, drafter.generator, len(drafter.tokens)
        if head is None or not (generator.keeps_confidence or options.survival_threshold or options.conditional_threshold):
            continue
        embedding = None
        if head.with_markov:
            anchor = drafter.input_ids[0, -1].to(rows.device)
            embedding = markov_head.markov_w1(torch.stack([anchor, *drafter.tokens])[:count])
        confidence = torch.sigmoid(head(rows[:count], embedding).float()).tolist() if count else []
        if not all(map(math.isfinite, confidence)):
            drafter.error = FloatingPointError("the draft's confidence is not finite")
        keep = generator._confident_prefix(confidence)
        drafter.tokens, drafter.laws, drafter.confidence = drafter.tokens[:keep], drafter.laws[:keep], confidence[:keep]


def _finite(values: torch.Tensor) -> torch.Tensor:
    # A NaN would reach the sampler, which on a GPU takes the whole process down.
    if not torch.isfinite(values).all():
        raise FloatingPointError("the draft's law is not finite")
    return values
