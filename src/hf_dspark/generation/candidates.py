"""Drafts one round for one request: context, parallel stage, sequential stage, confidence prefix (paper section 3.1)."""

import logging
from dataclasses import dataclass

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel
from transformers.generation.candidate_generator import CandidateGenerator

from hf_dspark.generation.acceptance import choose
from hf_dspark.generation.options import draft_options
from hf_dspark.generation.processors import draft_processors
from hf_dspark.generation.state import DraftState, draft_state, forget_draft_state
from hf_dspark.modeling import DSparkDraftModel

__all__ = ["DSparkCandidateGenerator", "Proposal"]

logger = logging.getLogger(__name__)

# Over a large vocabulary the sequential stage works on each position's best base logits; the law is zero elsewhere.
_LARGE_VOCABULARY = 16_384
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
        self.max_length = generation_config.max_length
        self.samples_chain = generation_config.do_sample and self.options.draft_sampling == "chain"
        self.processors = logits_processor or LogitsProcessorList()
        self.keeps_confidence = False
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

    def propose(self, input_ids: torch.Tensor, max_tokens: int) -> Proposal:
        """Drafts at most `max_tokens` tokens after `input_ids` (1, tokens), whose last token is the anchor.

        Raises:
            ValueError: the target's head is not what the draft borrows (checked once a target).
            Exception: whatever made the draft fail, with `raise_on_draft_failure`.
        """
        max_tokens = min(max_tokens, self.options.num_assistant_tokens)
        if max_tokens < 1 or self.failure is not None:
            return Proposal([])
        self._check_head()
        try:
            return self._draft_round(input_ids, max_tokens)
        except Exception as error:
            self._fail(error)
            return Proposal([])

    def _fail(self, error: Exception) -> None:
        """Ends drafting for this request, or raises with `raise_on_draft_failure`. Called where `error` is being handled."""
        forget_draft_state(self._target_cache)
        if self.options.raise_on_draft_failure:
            raise error
        self.state = None
        self.failure = f"{type(error).__name__}: {error}"
        logger.warning("the draft model failed (%s); the text is finished by the target alone, which only costs speed", self.failure)

    def _draft_round(self, input_ids: torch.Tensor, max_tokens: int) -> Proposal:
        draft, config = self.draft, self.draft.config
        # Context (eq. 2, 3): features of the tokens committed since the last round.
        features, positions = self.state.take_pending(draft)
        # Parallel stage: always the whole block, so that fewer tokens keep the meaning of their slots.
        anchor = self._next_slot - self._num_padded
        device = features.device
        block_ids = torch.full((1, config.block_size), config.mask_token_id, device=device)
        block_ids[0, 0] = input_ids[0, -1]
        position_ids = torch.tensor([[*positions, *range(anchor, anchor + config.block_size)]], device=device)
        hidden = draft(block_ids, features, position_ids, cache=self.state.cache)[0, :max_tokens]  # (drafts, hidden)
        self.state.cache.advance(len(positions))
        # Sequential stage (eq. 4).
        ids, law = self._sequential_stage(hidden, input_ids)
        # Confidence prefix (eq. 7): c_k reads x_{k-1} and h_k, never x_k, so a cut before token k does not depend on it.
        confidence, hidden = None, hidden[: len(ids)]
        if draft.confidence_head is not None and (self.keeps_confidence or self.options.survival_threshold or self.options.conditional_threshold):
            confidence = self._confidence(hidden, torch.cat([block_ids[0, :1], ids])[: len(ids)])
            keep = self._confident_prefix(confidence)
            ids, confidence = ids[:keep], confidence[:keep]
        ids = ids.tolist()
        return Proposal(ids, None if law is None else law[: len(ids)], confidence)

    def _sequential_stage(self, hidden: torch.Tensor, input_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Tokens left to right from exp(U_k + B_k(prefix)), (drafts,) long, and their laws (drafts, vocab) fp32 or None."""
        draft, head = self.draft, self.draft.markov_head
        logits, columns = draft.base_logits(hidden), None
        if logits.shape[-1] > _LARGE_VOCABULARY:
            logits, columns = logits.topk(_NUM_BEST, dim=-1)
        reachable_ids = self._target_ids(columns)
        processors = draft_processors(self.processors) if len(self.processors) else None
        tokens, laws, best, state = [], [], [], None
        previous = input_ids[0, -1].to(hidden.device)
        for k in range(hidden.shape[0]):
            row = logits[k].float()
            if head is not None:
                features, state = head.features(head.markov_w1(previous), hidden[k], state)
                row = row + head.bias(features, None if columns is None else columns[k]).float()
            target_ids = reachable_ids if columns is None else reachable_ids[k]
            if processors is not None:
                prefix = torch.cat([input_ids, torch.stack(tokens)[None].to(input_ids.device)], dim=1) if tokens else input_ids
                row, target_ids = processors(prefix, self._dense(row, target_ids, -torch.inf)[None].to(prefix.device))[0].to(hidden.device), None
                if torch.isneginf(row).all():
                    break  # nothing the draft can write is allowed here; the target goes on
            if self.samples_chain:
                law = _finite(torch.softmax(row, dim=-1))
                index = choose(law[None])[0]
                laws.append(self._dense(law, target_ids, 0.0))
            else:
                value, index = row.max(dim=-1)
                best.append(value)
            previous = index if target_ids is None else target_ids[index]
            tokens.append(previous)
        if best:
            _finite(torch.stack(best))
        return torch.stack(tokens) if tokens else input_ids.new_zeros(0), torch.stack(laws) if laws else None

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

    def _confidence(self, hidden: torch.Tensor, previous_ids: torch.Tensor) -> list[float]:
        head = self.draft.confidence_head
        embedding = self.draft.markov_head.markov_w1(previous_ids) if head.with_markov else None
        return _finite(torch.sigmoid(head(hidden, embedding).float())).tolist()

    def _confident_prefix(self, confidence: list[float]) -> int:
        """Drafts before the first whose c_k or a_k = c_1 ... c_k falls below its threshold."""
        survival = 1.0
        for k, conditional in enumerate(confidence):
            survival *= conditional
            if conditional < self.options.conditional_threshold or survival < self.options.survival_threshold:
                return k
        return len(confidence)

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
        proposal = self.propose(input_ids, self.max_length - input_ids.shape[1] - 1)
        if not proposal.ids:
            return input_ids, None
        ids = torch.cat([input_ids, torch.tensor([proposal.ids], device=input_ids.device)], dim=1)
        return ids, None if proposal.law is None else proposal.law.log()[None].to(input_ids.device)

    def update_candidate_strategy(self, input_ids, scores, num_matches):
        """Nothing of a call is kept between its rounds but the draft's state."""


def _finite(values: torch.Tensor) -> torch.Tensor:
    # A NaN would reach the sampler, which on a GPU takes the whole process down.
    if not torch.isfinite(values).all():
        raise FloatingPointError("the draft's law is not finite")
    return values
