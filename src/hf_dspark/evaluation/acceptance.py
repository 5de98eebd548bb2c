"""How much of a draft is accepted on text that training never saw: `hf-dspark evaluate`."""

import statistics
from dataclasses import dataclass, field

import torch

from hf_dspark.evaluation.benchmarks import distinct_ngram_share, repeated_ngram_share
from hf_dspark.evaluation.output import progress, table
from hf_dspark.evaluation.pairs import Pair, held_out_texts
from hf_dspark.evaluation.sampling_law import seeded
from hf_dspark.generation.report import GenerationReport, record_generation

__all__ = ["Acceptance", "accepted_on", "evaluate_pair", "held_out_prompts"]

REPEATED_NGRAM = 8
# A completion of which more than this repeats itself is a loop, which every draft predicts.
LOOPING_SHARE = 0.3


@dataclass(slots=True)
class Acceptance:
    """Completions of one way of decoding: tokens a round, shares of repeated 8-grams and distinct bigrams of each, and the report of all
    their rounds.

    A completion that ended with its first token has no round; its tokens a round are nan and left out of every mean.
    """

    report: GenerationReport
    tokens_per_round: list[float] = field(default_factory=list)
    repeated_shares: list[float] = field(default_factory=list)
    distinct_bigrams: list[float] = field(default_factory=list)
    new_tokens: list[int] = field(default_factory=list)

    def summary(self) -> dict:
        """Means over completions, for a table or JSON; `tokens_per_round_pooled` is all tokens over all rounds."""
        varied = [tau for tau, share in zip(self.tokens_per_round, self.repeated_shares) if share < LOOPING_SHARE]
        return {
            "completions": len(self.new_tokens),
            "new_tokens_mean": statistics.mean(self.new_tokens),
            "tokens_per_round": _mean(self.tokens_per_round),
            "tokens_per_round_pooled": self.report.tokens_per_round,
            "repeated_8gram_share": statistics.mean(self.repeated_shares),
            "distinct_bigram_share": statistics.mean(self.distinct_bigrams),
            "completions_below_30_percent_repeated": len(varied),
            "tokens_per_round_below_30_percent_repeated": _mean(varied),
            "conditional_acceptance": self.report.conditional_acceptance,
        }


def held_out_prompts(pair: Pair, num_modules: int, prompt_tokens: int) -> list[torch.Tensor]:
    """The first `prompt_tokens` tokens of each held-out module after the tokenizer's bos token, each (1, tokens) long."""
    if prompt_tokens < 1:
        raise ValueError(f"prompt_tokens must be at least 1, got {prompt_tokens}")
    bos = [] if pair.tokenizer.bos_token_id is None else [pair.tokenizer.bos_token_id]
    texts = held_out_texts(pair.target_name, num_modules)
    ids = pair.tokenizer(texts, add_special_tokens=False)["input_ids"]
    return [torch.tensor([[*bos, *module[:prompt_tokens]]], device=pair.target.device) for module in ids]


def accepted_on(pair: Pair, prompts: list[torch.Tensor], label: str, **options) -> Acceptance:
    """Completes each of `prompts` (1, tokens) with the draft; `options` are generate()'s. `label` stands beside the progress bar."""
    with record_generation() as report:
        acceptance = Acceptance(report)
        for prompt in progress(prompts, label):
            ids = pair.target.generate(input_ids=prompt, assistant_model=pair.draft, **options)
            request = GenerationReport(report.requests[-1:])
            acceptance.tokens_per_round.append(request.tokens_per_round)
            new_ids = ids[0, prompt.shape[1] :].tolist()
            acceptance.repeated_shares.append(repeated_ngram_share(new_ids, REPEATED_NGRAM))
            acceptance.distinct_bigrams.append(distinct_ngram_share(new_ids, 2))
            acceptance.new_tokens.append(request.requests[0].new_tokens)
    return acceptance


def evaluate_pair(pair: Pair, prompts: list[torch.Tensor], max_new_tokens: int = 128, temperature: float = 1.0, seed: int = 0) -> dict[str, dict]:
    """tau on `prompts`, each (1, tokens) long, in greedy decoding and sampled from the target's whole law at `temperature`.

    Returns:
        One [`Acceptance`] summary for "greedy" and one for "sampled". tau counts every token a round yields, the target's own
        included (paper, eq. 1), and is the mean over prompts.

    Raises:
        ValueError: an option outside its range, or a prompt and its budget that the target's context can't hold.
    """
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature} (greedy decoding is measured anyway)")
    if max_new_tokens < 2:
        raise ValueError(f"max_new_tokens must be at least 2 (the first token is no round), got {max_new_tokens}")
    context, longest = pair.target.config.get_text_config().max_position_embeddings, max(prompt.shape[1] for prompt in prompts)
    if longest + max_new_tokens > context:
        raise ValueError(f"a prompt of {longest} tokens and max_new_tokens={max_new_tokens} do not fit into the target's context of {context} tokens")
    greedy = accepted_on(pair, prompts, "greedy", max_new_tokens=max_new_tokens, do_sample=False)
    with seeded(seed, pair.target.device):
        sampling = dict(do_sample=True, temperature=temperature, top_k=0, top_p=1.0)
        sampled = accepted_on(pair, prompts, "sampled", max_new_tokens=max_new_tokens, **sampling)
    return {"greedy": greedy.summary(), "sampled": sampled.summary()}


def render_evaluation(summaries: dict[str, dict], temperature: float) -> str:
    """The summaries of `evaluate_pair` as two tables."""
    labels = {"greedy": "greedy", "sampled": f"temperature {temperature:g}"}
    rows = [
        [
            labels[name],
            _figure(s["tokens_per_round"]),
            _figure(s["tokens_per_round_pooled"]),
            f"{100 * s['repeated_8gram_share']:.1f} %",
            f"{100 * s['distinct_bigram_share']:.1f} %",
            f"{_figure(s['tokens_per_round_below_30_percent_repeated'])} ({s['completions_below_30_percent_repeated']} of {s['completions']})",
            f"{s['new_tokens_mean']:.1f}",
        ]
        for name, s in summaries.items()
    ]
    header = ["", "tokens a round", "pooled", "repeated 8-grams", "distinct bigrams", "tokens a round where < 30 %", "new tokens"]
    acceptance = acceptance_table({labels[name]: s["conditional_acceptance"] for name, s in summaries.items()})
    return f"{table(header, rows)}\n\nconditional acceptance by draft position\n{acceptance}"


def acceptance_table(acceptance: dict[str, list[float]]) -> str:
    """Conditional acceptance, one row for each way of decoding, one column for each draft position (from 1)."""
    depth = max(map(len, acceptance.values()))
    rows = [[name, *(f"{rate:.2f}" for rate in rates), *["-"] * (depth - len(rates))] for name, rates in acceptance.items()]
    return table(["", *map(str, range(1, depth + 1))], rows)


def _mean(values: list[float]) -> float:
    known = [value for value in values if value == value]
    return statistics.mean(known) if known else float("nan")


def _figure(value: float) -> str:
    return "-" if value != value else f"{value:.2f}"
