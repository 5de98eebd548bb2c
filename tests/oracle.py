"""Scripted drafts and the comparison with plain decoding.

A scripted draft is a real [`DSparkDraftModel`] bound to its target: features, backbone, caches, sequential stage, thresholds and
acceptance run as they are; only the base logits are written by a script that knows the target's own plain continuation.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from hf_dspark import DSparkConfig, DSparkDraftModel, GenerationReport, record_generation
from hf_dspark.generation import decoding
from hf_dspark.generation.candidates import Proposal

VOCAB = 64


def tiny_target(seed: int = 0, **options):
    """A random Qwen3 target, 4 layers, whose greedy texts vary (large weights); no stop token unless given."""
    values = dict(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=1024,
        initializer_range=0.5,
        tie_word_embeddings=False,
        eos_token_id=None,
        pad_token_id=None,
        bos_token_id=None,
    )
    return build(Qwen3ForCausalLM, Qwen3Config(**{**values, **options}), seed)


def build(model_class, config, seed: int = 0):
    """A random model in evaluation mode."""
    torch.manual_seed(seed)
    return model_class(config).eval()


def tiny_draft(target, draft_class=DSparkDraftModel, seed: int = 1, **options):
    """A random draft that fits `target`: block 4, rank 4, 2 layers; `options` replace any of it."""
    text_config = target.config.get_text_config()
    values = dict(
        vocab_size=text_config.vocab_size,
        hidden_size=text_config.hidden_size,
        num_target_layers=text_config.num_hidden_layers,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        block_size=4,
        mask_token_id=text_config.vocab_size - 1,
        markov_rank=4,
        target_layer_ids=[0, text_config.num_hidden_layers - 2],
        initializer_range=0.5,
        eos_token_id=None,
        pad_token_id=None,
        bos_token_id=None,
    )
    torch.manual_seed(seed)
    return draft_class(DSparkConfig(**{**values, **options})).eval()


class ScriptedDraft(DSparkDraftModel):
    """Drafts `script(position, slot)` at every true position; `drafted` collects (anchor position, tokens) of each block drafted.

    In a packed forward each block is drafted for itself, in order. `script` serves all of them unless `texts` holds the whole text of
    each row (without padding; prompt and continuation) and `scripts` a script for each: a block then gets the script of the first row
    whose text has the block's anchor at the anchor's position, a row that no block of this forward has yet before one that has. Where
    that picks another row's script, or where no row fits (the first one's script), drafts are rejected; the output is the target's.

        draft.texts = [plain_row0, plain_row1]
        draft.scripts = [right_with_probability(text, seed=row) for row, text in enumerate(draft.texts)]
    """

    script: Callable[[int, int], int] | None = None
    texts: list[list[int]] | None = None
    scripts: list[Callable[[int, int], int]] | None = None

    def __init__(self, config):
        super().__init__(config)
        self.drafted: list[tuple[int, list[int]]] = []
        self.widths: list[int] = []

    def forward(self, block_ids, context_features, position_ids, attention_mask=None, cache=None):
        size = self.config.block_size
        self.anchors = list(zip(position_ids[0, -block_ids.shape[1] :: size].tolist(), block_ids[0, ::size].tolist()))
        self.widths.append(context_features.shape[1])
        return super().forward(block_ids, context_features, position_ids, attention_mask, cache)

    def base_logits(self, hidden):
        logits = super().base_logits(hidden)
        num_drafts = hidden.shape[0] // len(self.anchors)
        tokens = []
        for (position, _), script in zip(self.anchors, self._scripts_of_blocks()):
            drafted = [script(position + 1 + slot, slot) for slot in range(num_drafts)]
            self.drafted.append((position, drafted))
            tokens += drafted
        scripted = torch.full_like(logits, -5.0)
        scripted[torch.arange(len(tokens)), torch.tensor(tokens)] = 5.0
        return scripted

    def _scripts_of_blocks(self) -> list[Callable[[int, int], int]]:
        if self.texts is None:
            return [self.script] * len(self.anchors)
        rows = []
        for position, token in self.anchors:
            fitting = [row for row, text in enumerate(self.texts) if text[position : position + 1] == [token]]
            rows.append(next((row for row in fitting if row not in rows), fitting[0] if fitting else 0))
        return [self.scripts[row] for row in rows]


def right_with_probability(text: list[int], probability: float = 0.7, seed: int = 0, vocab: int = VOCAB) -> Callable[[int, int], int]:
    """Writes the token of `text` with this probability a position, else another one; beyond `text` always another one."""

    def script(position: int, slot: int) -> int:
        right = position < len(text) and random.Random(f"{seed}/{position}").random() < probability
        return text[position] if right else _other(text, position, vocab)

    return script


def right_for(text: list[int], num_right: int, vocab: int = VOCAB) -> Callable[[int, int], int]:
    """Right for the first `num_right` slots of every block, then wrong."""

    def script(position: int, slot: int) -> int:
        return text[position] if slot < num_right and position < len(text) else _other(text, position, vocab)

    return script


def _other(text: list[int], position: int, vocab: int) -> int:
    true = text[position] if position < len(text) else 0
    return (true + 1) % (vocab - 1)  # never the mask token, which is the last one


@dataclass
class Comparison:
    """Outputs of plain and drafted decoding of the same request, and the drafted one's report."""

    plain: object
    drafted: object
    report: GenerationReport

    @property
    def new_tokens(self) -> list[int]:
        count = self.report.requests[-1].new_tokens
        return self.drafted.sequences[0, -count:].tolist()


def kinds_of_acceptance(report: GenerationReport) -> set[str]:
    """Which of "none", "some" and "all" of a block's drafts were accepted in some round."""
    kinds = set()
    for round_ in report.rounds:
        if round_.drafted:
            kinds.add("none" if round_.accepted == 0 else "all" if round_.accepted == round_.drafted else "some")
    return kinds


ALL_KINDS = {"none", "some", "all"}


def compare_greedy(
    target,
    draft,
    fresh: Callable[[], dict] | None = None,
    *,
    make_script=right_with_probability,
    text_offset: int = 0,
    tolerance=1e-4,
    compare_logits=True,
    **inputs,
) -> Comparison:
    """Generates plainly and with `draft` (scripted from the plain text) and asserts that both are equal in everything generate() returns.

    `inputs`: generate()'s arguments; `fresh` gives those that a run uses up (streamers, stateful processors, caches), anew for
    each run. `text_offset`: tokens before the returned ones (inputs_embeds, or only new tokens beside a cache).
    """
    fresh = fresh or dict
    options = dict(do_sample=False, return_dict_in_generate=True, output_scores=True, output_logits=True, **inputs)
    mask = inputs.get("attention_mask")
    plain = target.generate(**options, **fresh())
    if isinstance(draft, ScriptedDraft):
        num_padded = 0 if mask is None else int((mask == 0).sum())
        draft.script = make_script([0] * text_offset + plain.sequences[0, num_padded:].tolist(), vocab=draft.config.vocab_size)
    with record_generation() as report:
        drafted = target.generate(**options, **fresh(), assistant_model=draft)
    assert drafted.sequences.tolist() == plain.sequences.tolist()
    assert_outputs_close(drafted, plain, tolerance, ("scores", "logits") if compare_logits else ("scores",))
    request = report.requests[-1]
    assert request.new_tokens == len(plain.logits) == 1 + sum(round_.tokens for round_ in request.rounds)
    return Comparison(plain, drafted, report)


def assert_outputs_close(drafted, plain, tolerance: float = 1e-4, names=("scores", "logits")) -> None:
    """Scores, logits and the cache's length and contents."""
    for name in names:
        ours, theirs = drafted[name], plain[name]
        assert len(ours) == len(theirs), f"{len(ours)} {name} for {len(theirs)} of plain"
        for step, (row, expected) in enumerate(zip(ours, theirs)):
            assert row.shape == expected.shape and row.dtype == expected.dtype
            assert torch.allclose(row, expected, rtol=tolerance, atol=tolerance), f"{name} of step {step} differ"
    assert int(drafted.cache.get_seq_length()) == int(plain.cache.get_seq_length())
    length = int(plain.cache.get_seq_length())
    for ours, theirs in zip(drafted.cache.layers, plain.cache.layers):
        if not hasattr(theirs, "keys"):  # a layer of convolution states
            continue
        assert ours.keys.shape == theirs.keys.shape
        assert torch.allclose(ours.keys[:, :, :length], theirs.keys[:, :, :length], rtol=tolerance, atol=tolerance)
        assert torch.allclose(ours.values[:, :, :length], theirs.values[:, :, :length], rtol=tolerance, atol=tolerance)


def spy(monkeypatch, owner, name: str, note: Callable) -> None:
    """Calls `note` with the arguments of every call of `owner.name`."""
    original = getattr(owner, name)

    @wraps(original)  # generate() reads the signature of a target's forward
    def spied(*args, **kwargs):
        note(*args, **kwargs)
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, spied)


def watch_proposals(monkeypatch) -> list[tuple[list[int], Proposal]]:
    """(text so far, proposal) of every request in every round that the loop asks drafts for, from here on; the test may clear it."""
    collected = []
    propose_all = decoding.propose_all

    def watched(generators, texts, budgets):
        proposals = propose_all(generators, texts, budgets)
        collected.extend((text[0].tolist(), proposal) for text, proposal in zip(texts, proposals, strict=True))
        return proposals

    monkeypatch.setattr(decoding, "propose_all", watched)
    return collected


def walk_every_outcome(monkeypatch, run: Callable[[], tuple]) -> dict[tuple, float]:
    """The exact law of `run()`: it is called once for every outcome of the one seam that draws random numbers, depth first."""
    law: dict[tuple, float] = {}
    pending: list[list[int]] = [[]]
    path: list[int] = []
    probability = 1.0

    def scripted(weights: torch.Tensor, generator=None) -> torch.Tensor:
        nonlocal probability
        assert weights.shape[0] == 1 and bool((weights >= 0).all())
        outcomes = (weights[0].double() / weights[0].double().sum()).tolist()
        if len(path) == len(forced):
            possible = [index for index, share in enumerate(outcomes) if share > 1e-9]
            pending.extend([*path, index] for index in possible[1:])
            forced.append(possible[0])
        path.append(forced[len(path)])
        probability *= outcomes[path[-1]]
        return torch.tensor(path[-1:])

    for module in ("acceptance", "candidates"):
        monkeypatch.setattr(f"hf_dspark.generation.{module}.choose", scripted)
    while pending:
        forced, path, probability = pending.pop(), [], 1.0
        result = run()
        law[result] = law.get(result, 0.0) + probability
    return law


def chain_law(target, prompt: torch.Tensor, num_tokens: int, **options) -> dict[tuple, float]:
    """The target's own law of the next `num_tokens` tokens: the product of the laws that plain sampling draws each from."""
    if num_tokens == 0:
        return {(): 1.0}
    step = target.generate(prompt, do_sample=True, max_new_tokens=1, return_dict_in_generate=True, output_scores=True, **options)
    law = {}
    for token, share in enumerate(step.scores[0][0].double().softmax(-1).tolist()):
        if share > 0:
            rest = chain_law(target, torch.cat([prompt, torch.tensor([[token]])], dim=1), num_tokens - 1, **options)
            law |= {(token, *tokens): share * probability for tokens, probability in rest.items()}
    return law


def largest_difference(law: dict[tuple, float], expected: dict[tuple, float]) -> float:
    """Over all outcomes of either law."""
    return max(abs(law.get(outcome, 0.0) - expected.get(outcome, 0.0)) for outcome in law.keys() | expected.keys())
