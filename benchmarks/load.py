"""Many requests at a time: transformers' padded generate(), its continuous batching, our loop without a draft and with drafts of fixed lengths.

    python benchmarks/load.py                                                     the bundled pair, 1 to 64 requests
    python benchmarks/load.py --target TARGET --draft DRAFT --prompts P.jsonl --dtype bfloat16 --json load.json --output FOLDER
    python benchmarks/load.py --target TARGET --plain-only --concurrency 32 --ignore-eos

For each number of requests every way decodes the same prompts, taken in turn, in interleaved runs A B C A B C; speeds are medians over
runs, ratios to padded generate() medians of paired runs. Only tokens that a request asked for are counted, up to its stop token.

rows/token: target rows computed (places in the target's forwards, padding counted) a committed token, without the prompts (padded ones
for generate()) and without the first token of each text, which the prompt's forward yields. Plain decoding of equal lengths: 1.
rejected: drafts sent to the target and not accepted. Both come from a run that is not timed.
Continuous batching is timed from its first request to its last result, without the start and the stop of its manager (about a second a
call of generate_batch), and shares no prompt prefixes, which no other way does.
"""

import argparse
import itertools
import math
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_dspark import GenerationReport, record_generation
from hf_dspark.evaluation.benchmarks import CONTINUOUS, OWN_LOOP, PLAIN, Load, decode_continuously, decode_padded, decode_queue, paired_ratio
from hf_dspark.evaluation.output import progress, table, write_json
from hf_dspark.evaluation.pairs import DEFAULT_PROMPTS, DTYPES, Pair, encode, load_pair, read_prompts
from hf_dspark.evaluation.plots import plot_load
from hf_dspark.evaluation.sampling_law import stop_tokens
from hf_dspark.generation.packing import packing_failure

GREEDY = {"do_sample": False}


@dataclass(slots=True)
class Setting:
    """What the requests of one table have in common: generate()'s options, whether budgets differ, and the two in words."""

    name: str
    options: dict
    mixed_budgets: bool

    @property
    def title(self) -> str:
        """For a table or a plot."""
        return f"{self.name}, {'mixed' if self.mixed_budgets else 'equal'} budgets"


@dataclass(slots=True)
class Observation:
    """An untimed run of one way: committed ids of each request, target rows after the prompts, and the report where drafts were sent."""

    texts: list[list[int]]
    num_rows: int
    report: GenerationReport

    @property
    def rows_per_token(self) -> float:
        """nan where no text has a second token."""
        num_tokens = sum(len(ids) - 1 for ids in self.texts)
        return self.num_rows / num_tokens if num_tokens else math.nan

    @property
    def rejected_share(self) -> float:
        """nan where no draft was sent."""
        drafted = sum(round_.drafted for round_ in self.report.rounds)
        return 1 - sum(round_.accepted for round_ in self.report.rounds) / drafted if drafted else math.nan


class counted_rows:
    """Counts the tokens, padding included, that go through the target inside a `with` block."""

    def __init__(self, target: torch.nn.Module):
        self.target, self.count = target, 0

    def __enter__(self):
        self.handle = self.target.register_forward_pre_hook(self._note, with_kwargs=True)
        return self

    def _note(self, _, args, kwargs):
        self.count += (kwargs["input_ids"] if "input_ids" in kwargs else args[0]).numel()

    def __exit__(self, *_):
        self.handle.remove()


def main(argv: list[str] | None = None) -> int:
    """Measures, prints the tables, writes `--json` and the plot; returns 0, or 1 where a greedy fp32 text of our loop differs from generate()'s."""
    arguments = parser().parse_args(argv)
    check(arguments)
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    pair = open_pair(arguments)
    if arguments.ignore_eos:
        pair.target.generation_config.eos_token_id = None
    ways = ways_of(pair, arguments.draft_lengths, arguments.plain_only)
    texts = DEFAULT_PROMPTS if arguments.prompts is None else read_prompts(arguments.prompts)
    prompts = [encode(pair, text, arguments.raw) for text in texts[: max(arguments.concurrency)]]
    check_context(pair, prompts, arguments.max_new_tokens)
    print(describe(pair, prompts, arguments))
    packing_failure(pair.target)  # compares forwards at a target's first use, which is no decoding
    loads = measure_all(pair, prompts, ways, arguments)
    print(render(loads))
    if arguments.output is not None and loads:
        Path(arguments.output).mkdir(parents=True, exist_ok=True)
        print(f"\nplot: {plot_load(Path(arguments.output) / 'load.png', panels_of(loads))}")
    if arguments.json is not None:
        write_json(arguments.json, {**figures_of_run(pair, prompts, arguments), "loads": loads})
    ours = [way for load in loads for name, way in load["ways"].items() if name != CONTINUOUS]
    return 1 if pair.target.dtype == torch.float32 and any(way["identical"] is False for way in ours) else 0


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("--draft", help="folder or hub id (default: the bundled pair)")
    parser.add_argument("--target", help="folder or hub id (default: the one that the draft's config names)")
    parser.add_argument("--dtype", default="float32", choices=DTYPES, help="of both models (default: %(default)s)")
    parser.add_argument("--device", help="cpu, cuda, ... (default: the first GPU, else the CPU)")
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads (default: PyTorch's choice)")
    counts = [1, 2, 4, 8, 16, 32, 64]
    parser.add_argument("--concurrency", type=int, nargs="+", default=counts, metavar="N", help="requests at a time (default: 1 2 4 .. 64)")
    parser.add_argument("--prompts", metavar="FILE.jsonl", help='a prompt a line: {"turns": ["..."]} or {"prompt": "..."} (default: four short ones)')
    parser.add_argument("--raw", action="store_true", help="prompts as they are, without the chat template")
    parser.add_argument("--max-new-tokens", type=int, default=128, metavar="N", help="budget of a request (default: %(default)s)")
    mixed = "budgets from a quarter of it to all of it, evenly spread; generate() runs until the longest is done"
    parser.add_argument("--mixed-budgets", action="store_true", help=mixed)
    parser.add_argument("--ignore-eos", action="store_true", help="write every text to its budget, whatever stop tokens it has")
    parser.add_argument("--runs", type=int, default=3, metavar="N", help="timed runs of each way (default: %(default)s)")
    lengths = "tokens drafted a round, without thresholds (default: 1, 3 and the whole block)"
    parser.add_argument("--draft-lengths", type=int, nargs="+", metavar="N", help=lengths)
    parser.add_argument("--do-sample", action="store_true", help="sample instead of greedy decoding")
    parser.add_argument("--temperature", type=float, help="of sampling (default: 1)")
    parser.add_argument("--top-k", type=int, help="of sampling (default: 0, none)")
    parser.add_argument("--top-p", type=float, help="of sampling (default: 1, none)")
    plain = "only padded generate() and our loop without a draft: greedy, top-k 64, top-p 0.9 and neither, with equal and with mixed budgets"
    parser.add_argument("--plain-only", action="store_true", help=f"{plain}; a target needs no draft then")
    parser.add_argument("--json", metavar="FILE", help="write the figures to this file too")
    parser.add_argument("--output", metavar="FOLDER", help="write load.png, tokens/s against requests, into this folder")
    return parser


def check(arguments) -> None:
    """Raises ValueError or OSError for options that no model is needed to refuse."""
    for name in ("concurrency", "max_new_tokens", "runs", "threads"):
        values = getattr(arguments, name)
        for value in values if isinstance(values, list) else [values]:
            if value is not None and value < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
    given = {name: getattr(arguments, name) for name in ("temperature", "top_k", "top_p") if getattr(arguments, name) is not None}
    if given and not (arguments.do_sample or (arguments.plain_only and set(given) == {"temperature"})):
        words = ", ".join(f"--{name.replace('_', '-')} {value:g}" for name, value in given.items())
        raise ValueError(f"{words} has no effect on {'what --plain-only samples' if arguments.plain_only else 'greedy decoding; add --do-sample'}")
    for name, valid, expected in (
        ("temperature", lambda value: 0 < value < math.inf, "be positive"),
        ("top_k", lambda value: value >= 0, "be at least 0"),
        ("top_p", lambda value: 0 < value <= 1, "lie in (0, 1]"),
    ):
        if name in given and not valid(given[name]):
            raise ValueError(f"--{name.replace('_', '-')} must {expected}, got {given[name]:g}")
    for name in ("do_sample", "mixed_budgets", "draft_lengths"):
        if arguments.plain_only and getattr(arguments, name):
            flag = f"--{name.replace('_', '-')}"
            raise ValueError(f"{flag} does not go with --plain-only, which drafts nothing and measures greedy, sampled and mixed budgets anyway")
    if arguments.json is not None:
        folder = Path(arguments.json).resolve().parent
        if Path(arguments.json).is_dir() or not folder.is_dir():
            raise ValueError(f"--json must be a file in a folder that exists, got {arguments.json!r}")
    if arguments.output is not None and Path(arguments.output).exists() and not Path(arguments.output).is_dir():
        raise ValueError(f"--output must be a folder, but {arguments.output} is a file")


def open_pair(arguments) -> Pair:
    """The pair that the command line names; its draft is None where `--plain-only` names a target alone."""
    if not (arguments.plain_only and arguments.target and arguments.draft is None):
        return load_pair(arguments.draft, arguments.target, arguments.dtype, arguments.device)
    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    target = AutoModelForCausalLM.from_pretrained(arguments.target, dtype=arguments.dtype)
    try:
        target.to(device).eval()
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"the device {device!r} can't be used here: {str(error).splitlines()[0]}") from error
    return Pair(target, None, AutoTokenizer.from_pretrained(arguments.target), arguments.target, "none")


def ways_of(pair: Pair, draft_lengths: list[int] | None, plain_only: bool) -> dict[str, Callable[[Load], tuple[list[list[int]], float]]]:
    """Ways of decoding a load by name; each returns the new ids of every request and the seconds it took.

    Raises:
        ValueError: a draft length outside the block.
    """
    plain, own_loop = partial(decode_padded, pair.target), partial(decode_queue, pair.target, None)
    if plain_only:
        return {PLAIN: plain, OWN_LOOP: own_loop}
    block_size = pair.draft.config.block_size
    lengths = draft_lengths or [length for length in (1, 3, block_size) if length <= block_size]
    for length in lengths:
        if not 1 <= length <= block_size:
            raise ValueError(f"--draft-lengths must lie between 1 and the draft's block size {block_size}, got {length}")
    drafted = {
        f"our loop, {length}-token drafts": partial(decode_queue, pair.target, pair.draft, num_drafts=length) for length in sorted(set(lengths))
    }
    return {PLAIN: plain, CONTINUOUS: partial(decode_continuously, pair.target), OWN_LOOP: own_loop, **drafted}


def check_context(pair: Pair, prompts: list[torch.Tensor], max_new_tokens: int) -> None:
    """Raises ValueError where a prompt (1, tokens) and its budget are more than the target's context holds."""
    context = pair.target.config.get_text_config().max_position_embeddings
    for number, prompt in enumerate(prompts, 1):
        if prompt.shape[1] + max_new_tokens > context:
            raise ValueError(
                f"prompt {number} has {prompt.shape[1]} tokens, which with --max-new-tokens {max_new_tokens} is more than the context of "
                f"{pair.target_name}, {context}; shorten one of the two"
            )


def settings_of(arguments) -> list[Setting]:
    """One setting, or the eight of `--plain-only`."""
    temperature = 1.0 if arguments.temperature is None else arguments.temperature
    sampled = {"do_sample": True, "temperature": temperature}
    at = "" if temperature == 1 else f" at temperature {temperature:g}"
    if arguments.plain_only:
        samplings = {
            "greedy": GREEDY,
            f"top-k 64{at}": {**sampled, "top_k": 64, "top_p": 1.0},
            f"top-p 0.9{at}": {**sampled, "top_k": 0, "top_p": 0.9},
            f"the whole law{at}": {**sampled, "top_k": 0, "top_p": 1.0},
        }
        return [Setting(name, options, mixed) for mixed in (False, True) for name, options in samplings.items()]
    if not arguments.do_sample:
        return [Setting("greedy", GREEDY, arguments.mixed_budgets)]
    top_k, top_p = arguments.top_k or 0, 1.0 if arguments.top_p is None else arguments.top_p
    name = f"sampled at temperature {temperature:g}" + (f", top-k {top_k}" if top_k else "") + (f", top-p {top_p:g}" if top_p < 1 else "")
    return [Setting(name, {**sampled, "top_k": top_k, "top_p": top_p}, arguments.mixed_budgets)]


def budgets_of(concurrency: int, max_new_tokens: int, mixed: bool) -> list[int]:
    """New tokens of each request: all `max_new_tokens`, or evenly spread from a quarter of it to all of it."""
    if not mixed or concurrency == 1:
        return [max_new_tokens] * concurrency
    return [max(1, round(max_new_tokens * (1 + 3 * index / (concurrency - 1)) / 4)) for index in range(concurrency)]


def measure_all(pair: Pair, prompts: list[torch.Tensor], ways: dict[str, Callable], arguments) -> list[dict]:
    """The figures of every setting and number of requests; after Ctrl-C those that are complete."""
    loads, stop_ids = [], set(stop_tokens(pair.target))
    try:
        for setting in settings_of(arguments):
            for concurrency in sorted(set(arguments.concurrency)):
                budgets = budgets_of(concurrency, arguments.max_new_tokens, setting.mixed_budgets)
                load = Load(list(itertools.islice(itertools.cycle(prompts), concurrency)), budgets, setting.options, stop_ids)
                figures = measure(pair, load, ways, arguments.runs, f"{setting.title}, {concurrency} requests")
                names = {"setting": setting.title, "options": setting.options, "mixed_budgets": setting.mixed_budgets}
                loads.append({**names, "concurrency": concurrency, **figures})
    except KeyboardInterrupt:
        print("interrupted; what follows is what was complete", file=sys.stderr)
    return loads


def measure(pair: Pair, load: Load, ways: dict[str, Callable], num_runs: int, label: str) -> dict:
    """Figures of every way by name, and why continuous batching was skipped where it doesn't run. `label` stands beside the progress bar."""
    observed, runs, skipped = {}, {name: [] for name in ways}, {}
    for number in progress(range(1 + num_runs), label):
        for name, way in ways.items():
            if name in skipped:
                continue
            try:
                if number == 0:  # also warms up
                    observed[name] = observe(pair, load, name, way)
                else:
                    texts, seconds = way(load)
                    runs[name].append((sum(map(len, texts)), seconds))
            except Exception as error:
                if name != CONTINUOUS:
                    raise
                skipped[name] = f"{type(error).__name__}: {error}"
    measured = {name: figures_of(observed[name], observed[PLAIN].texts, runs[name], runs[PLAIN], load) for name in observed if name not in skipped}
    return {"ways": measured, "skipped": skipped}


def observe(pair: Pair, load: Load, name: str, way: Callable) -> Observation:
    """One run with rows counted and rounds recorded."""
    with counted_rows(pair.target) as rows, record_generation() as report:
        texts, _ = way(load)
    lengths = [prompt.shape[1] for prompt in load.prompts]
    prompt_rows = max(lengths) * len(lengths) if name == PLAIN else sum(lengths)
    return Observation(texts, rows.count - prompt_rows, report)


def figures_of(observed: Observation, plain_texts: list[list[int]], runs: list[tuple[int, float]], plain_runs: list[tuple], load: Load) -> dict:
    """Figures of one way, of timed `runs` (committed tokens, seconds) beside those of padded generate(). Sampled texts are not compared."""
    speed = statistics.median(tokens / seconds for tokens, seconds in runs)
    num_identical = sum(ids == plain for ids, plain in zip(observed.texts, plain_texts)) if not load.options["do_sample"] else None
    return {
        "tokens_per_second": speed,
        "tokens_per_second_per_user": speed / len(load.prompts),
        "speedup": paired_ratio(*([seconds / tokens for tokens, seconds in side] for side in (plain_runs, runs))),
        "rows_per_token": observed.rows_per_token,
        "rejected_share": observed.rejected_share,
        "tokens_per_round": observed.report.tokens_per_round,
        "identical_texts": num_identical,
        "identical": None if num_identical is None else num_identical == len(plain_texts),
        "seconds": [seconds for _, seconds in runs],
        "new_tokens": [tokens for tokens, _ in runs],
    }


def describe(pair: Pair, prompts: list[torch.Tensor], arguments) -> str:
    """What is measured, in lines above the tables."""
    if pair.draft is None:
        models = f"target {pair.target_name} ({type(pair.target).__name__}, {str(pair.target.dtype).removeprefix('torch.')}, {pair.target.device})"
    else:
        models = pair.description
    lengths = sorted(prompt.shape[1] for prompt in prompts)
    ends = "to the budget" if arguments.ignore_eos else "or up to a stop token"
    texts = f"{len(prompts)} prompts of {lengths[0]} to {lengths[-1]} tokens in turn, {arguments.max_new_tokens} new tokens each {ends}"
    return f"{models}; {torch.get_num_threads()} threads\n{texts}, {arguments.runs} interleaved runs\n"


def render(loads: list[dict]) -> str:
    """A table for each setting, and why a way was skipped."""
    header = ["requests, way", "tokens/s", "a user", "x generate()", "rows/token", "rejected", "same text"]
    parts = []
    for title in dict.fromkeys(load["setting"] for load in loads):
        own = [load for load in loads if load["setting"] == title]
        rows = [row_of(load["concurrency"], name, way) for load in own for name, way in load["ways"].items()]
        skipped = {f"{name} was skipped: {reason}" for load in own for name, reason in load["skipped"].items()}
        parts.append("\n".join([title, table(header, rows), *sorted(skipped)]))
    return "\n\n".join(parts)


def row_of(concurrency: int, name: str, way: dict) -> list[str]:
    """Cells of one way at one number of requests."""
    return [
        f"{concurrency:>3}  {name}",
        f"{way['tokens_per_second']:.1f}",
        f"{way['tokens_per_second_per_user']:.1f}",
        f"{way['speedup']:.2f}",
        "-" if math.isnan(way["rows_per_token"]) else f"{way['rows_per_token']:.2f}",
        "-" if math.isnan(way["rejected_share"]) else f"{100 * way['rejected_share']:.1f} %",
        "-" if way["identical"] is None else f"{way['identical_texts']} of {concurrency}",
    ]


def panels_of(loads: list[dict]) -> dict[str, dict[str, dict[int, float]]]:
    """Tokens a second by setting, way and number of requests."""
    panels: dict[str, dict[str, dict[int, float]]] = {}
    for load in loads:
        for name, way in load["ways"].items():
            panels.setdefault(load["setting"], {}).setdefault(name, {})[load["concurrency"]] = way["tokens_per_second"]
    return panels


def figures_of_run(pair: Pair, prompts: list[torch.Tensor], arguments) -> dict:
    """What the figures in the JSON were measured on."""
    names = {"target": pair.target_name, "draft": None if pair.draft is None else pair.draft_name}
    kept = {name: getattr(arguments, name) for name in ("max_new_tokens", "runs", "ignore_eos", "raw", "plain_only")}
    machine = {"dtype": str(pair.target.dtype).removeprefix("torch."), "device": str(pair.target.device), "threads": torch.get_num_threads()}
    return {**names, **machine, "prompt_tokens": [prompt.shape[1] for prompt in prompts], **kept}


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (ValueError, OSError) as error:
        print("load.py:", " ".join(str(error).split()), file=sys.stderr)
        sys.exit(2)
