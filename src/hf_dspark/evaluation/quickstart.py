"""The bundled pair at work, offline: the same text with and without the draft, and what the draft was worth."""

import time
from dataclasses import dataclass
from pathlib import Path

import torch

from hf_dspark.evaluation.acceptance import acceptance_table, held_out_prompts
from hf_dspark.evaluation.benchmarks import DRAFTED, OWN_LOOP, PLAIN, decoding_variants, paired_ratio, time_interleaved
from hf_dspark.evaluation.marking import PROMPT_END, accepted_marks, render_marked, terminal_has_colour
from hf_dspark.evaluation.output import progress, table
from hf_dspark.evaluation.pairs import Pair
from hf_dspark.evaluation.plots import plot_pair
from hf_dspark.generation.report import GenerationReport, record_generation

__all__ = ["Demonstration", "demonstrate", "quickstart"]

PROMPT_TOKENS = 64
# Without a number of runs from the user, further runs begin only within this time.
MAX_RUNS, TIMING_SECONDS = 5, 25.0


@dataclass(slots=True)
class Demonstration:
    """What was written and measured: per prompt the ids (tokens,) of each way of decoding; seconds of each way, run by run."""

    prompts: list[torch.Tensor]
    texts: list[dict[str, list[int]]]
    report: GenerationReport
    seconds: dict[str, list[float]]

    @property
    def identical(self) -> bool:
        """Whether every way of decoding wrote the same tokens."""
        return all(text == texts[PLAIN] for texts in self.texts for text in texts.values())

    @property
    def new_tokens(self) -> int:
        """Tokens of one run over all prompts."""
        return sum(len(texts[PLAIN]) - prompt.shape[1] for texts, prompt in zip(self.texts, self.prompts))

    def summary(self) -> dict:
        """The figures of `hf-dspark quickstart --json`; speeds are medians of paired ratios."""
        return {
            "identical": self.identical,
            "tokens_per_round": self.report.tokens_per_round,
            "speedup": paired_ratio(self.seconds[PLAIN], self.seconds[DRAFTED]),
            "speedup_over_own_plain": paired_ratio(self.seconds[OWN_LOOP], self.seconds[DRAFTED]),
            "conditional_acceptance": self.report.conditional_acceptance,
            "draft_time_share": self.report.seconds("draft") / self.report.seconds("total"),
        }


def demonstrate(pair: Pair, prompts: list[torch.Tensor], max_new_tokens: int, num_runs: int | None = None) -> Demonstration:
    """Writes a greedy completion of each of `prompts` (1, tokens) in three ways, then times them in interleaved runs.

    `num_runs` of each prompt; None: as many as fit into `TIMING_SECONDS`, from 1 to `MAX_RUNS`.
    """
    variants = decoding_variants(pair.target, pair.draft)
    texts, seconds = [], {name: [] for name in variants}
    with record_generation() as report:
        for prompt in progress(prompts, "writing"):  # also warms up every way before it is timed
            arguments = dict(input_ids=prompt, max_new_tokens=max_new_tokens, do_sample=False)
            texts.append({name: _ids(write(**arguments), name, report) for name, write in variants.items()})
    started = time.perf_counter()
    for _ in progress(range(num_runs or MAX_RUNS), "timing"):
        for prompt in prompts:
            arguments = dict(input_ids=prompt, max_new_tokens=max_new_tokens, do_sample=False)
            runs = {name: lambda write=write, arguments=arguments: write(**arguments) for name, write in variants.items()}
            for name, measured in time_interleaved(runs, 1).items():
                seconds[name] += measured
        if num_runs is None and time.perf_counter() - started > TIMING_SECONDS:
            break
    return Demonstration(prompts, texts, report, seconds)


def _ids(output: torch.Tensor, name: str, report: GenerationReport) -> list[int]:
    if name == OWN_LOOP:
        report.requests.pop()  # the report is of the draft alone
    return output[0].tolist()


def quickstart(pair: Pair, output: str = ".", max_new_tokens: int = 128, num_completions: int = 4, num_runs: int | None = None) -> dict:
    """Prints completions, the table and where the plot is; returns the figures. Writes `quickstart.png` into the folder `output` alone.

    Raises:
        ValueError: an option outside its range, or `output` is no folder.
    """
    for name, value, least in (
        ("max_new_tokens", max_new_tokens, 2),
        ("completions", num_completions, 1),
        ("runs", 1 if num_runs is None else num_runs, 1),
    ):
        if value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}")
    if Path(output).exists() and not Path(output).is_dir():
        raise ValueError(f"output must be a folder, but {output} is a file")
    print(pair.description)
    result = demonstrate(pair, held_out_prompts(pair, num_completions, PROMPT_TOKENS), max_new_tokens, num_runs)
    colour = terminal_has_colour()
    print(f"{len(result.prompts)} modules of Python's standard library that training never saw, continued.")
    marks = "The prompt is dim; green is" if colour else f"The prompt ends at {PROMPT_END}; carets (^) stand below"
    print(f"{marks} what the draft wrote and the target accepted.\n")
    for prompt, texts, request in zip(result.prompts, result.texts, result.report.requests):
        prompt_ids = prompt[0].tolist()
        print(render_marked(pair.tokenizer, prompt_ids, texts[DRAFTED][len(prompt_ids) :], accepted_marks(request), colour))
        print("-" * 80)
    figures = result.summary()
    print(f"\n{render_figures(result, figures)}")
    Path(output).mkdir(parents=True, exist_ok=True)
    speeds = {name: paired_ratio(result.seconds[PLAIN], seconds) for name, seconds in result.seconds.items()}
    print(f"\nplot: {plot_pair(Path(output) / 'quickstart.png', figures['conditional_acceptance'], speeds)}")
    return figures


def render_figures(result: Demonstration, figures: dict) -> str:
    """The table of speeds and the figures of the draft below it."""
    num_tokens, num_runs = result.new_tokens, len(result.seconds[PLAIN]) // len(result.prompts)
    rows = [
        [
            name,
            f"{num_tokens * num_runs / sum(seconds):.1f}",
            f"{1000 * sum(seconds) / num_tokens / num_runs:.2f} ms",
            f"{paired_ratio(result.seconds[PLAIN], seconds):.2f}",
            f"{paired_ratio(result.seconds[OWN_LOOP], seconds):.2f}",
        ]
        for name, seconds in result.seconds.items()
    ]
    same = "identical token for token" if result.identical else "NOT IDENTICAL: the draft changed the text, which is a bug"
    return "\n".join(
        [
            f"{num_tokens} tokens in {len(result.prompts)} texts, all ways of decoding: {same}",
            "",
            table(["", "tokens/s", "a token", "x generate()", "x our loop"], rows),
            f"(medians of paired ratios over {num_runs} interleaved runs of each text; {torch.get_num_threads()} threads)",
            "",
            f"tokens a round (tau)     {figures['tokens_per_round']:.2f}",
            f"time in the draft        {100 * figures['draft_time_share']:.1f} %",
            "",
            "conditional acceptance by draft position",
            acceptance_table({"accepted": figures["conditional_acceptance"]}),
        ]
    )
