"""Plain decoding, our loop without a draft, prompt lookup and DSpark: same target, prompts and budget, greedy, interleaved.

    python benchmarks/decode.py                                                     the bundled pair
    python benchmarks/decode.py --draft DRAFT --target TARGET --prompt-file P.jsonl --dtype float32 --json out.json

Prints tokens/s, medians of paired ratios, tokens a round beside the share of distinct bigrams (a looping text flatters every
draft), and where the time of a round with the draft goes. `--memory` adds peak memory above plain decoding.
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_dspark import GenerationReport, record_generation
from hf_dspark.evaluation.benchmarks import (
    DRAFTED,
    OWN_LOOP,
    PLAIN,
    decoding_variants,
    distinct_ngram_share,
    paired_ratio,
    time_interleaved,
)
from hf_dspark.evaluation.output import progress, table, write_json
from hf_dspark.evaluation.pairs import DEFAULT_PROMPTS, Pair, encode, load_pair, read_prompts

PROMPT_LOOKUP_TOKENS = 10


def main(argv: list[str] | None = None) -> int:
    """Measures, prints the tables, writes `--json`; returns 0, or 1 where an fp32 text differs from plain decoding's."""
    argv = sys.argv[1:] if argv is None else argv
    arguments = parser().parse_args(argv)
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    if arguments.peak_of:
        print(json.dumps(peak_bytes(arguments)))
        return 0
    pair = load_pair(arguments.draft, arguments.target, arguments.dtype, arguments.device)
    prompts = [encode(pair, text, arguments.raw) for text in texts_of(arguments)]
    result = measure(pair, prompts, arguments.max_new_tokens, arguments.runs)
    print(f"{pair.description}; {torch.get_num_threads()} threads")
    print(f"{len(prompts)} prompts, {arguments.max_new_tokens} new tokens each, {arguments.runs} interleaved runs\n\n{render(result)}")
    if arguments.memory:
        result["memory"] = memory_above_plain(pair, argv)
        print(render_memory(result["memory"]))
    if arguments.json:
        names = {"target": pair.target_name, "draft": pair.draft_name, "dtype": str(pair.target.dtype).removeprefix("torch.")}
        options = {"prompts": len(prompts), "max_new_tokens": arguments.max_new_tokens, "runs": arguments.runs, "threads": torch.get_num_threads()}
        write_json(arguments.json, {**names, **options, **result})
    return 1 if pair.target.dtype == torch.float32 and not all(way["identical"] for way in result["ways"].values()) else 0


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draft", help="folder or hub id (default: the bundled pair)")
    parser.add_argument("--target", help="folder or hub id (default: the one that the draft's config names)")
    parser.add_argument(
        "--dtype", default="float32", choices=("auto", "float32", "bfloat16", "float16"), help="of both models (default: %(default)s)"
    )
    parser.add_argument("--device", help="cpu, cuda, ... (default: the first GPU, else the CPU)")
    parser.add_argument("--prompts", nargs="+", default=[], metavar="TEXT", help="prompts (default: four short ones)")
    parser.add_argument("--prompt-file", metavar="FILE.jsonl", help='a prompt a line: {"turns": ["..."]} or {"prompt": "..."}')
    parser.add_argument("--num-prompts", type=int, metavar="N", help="only the first N of them")
    parser.add_argument("--raw", action="store_true", help="prompts as they are, without the chat template")
    parser.add_argument("--max-new-tokens", type=int, default=128, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--runs", type=int, default=5, metavar="N", help="timed runs of each prompt (default: %(default)s)")
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads (default: PyTorch's choice)")
    parser.add_argument("--memory", action="store_true", help="measure peak memory too (on a CPU: once more, in processes of their own)")
    parser.add_argument("--json", metavar="FILE", help="write the figures to this file too")
    parser.add_argument("--peak-of", choices=(PLAIN, DRAFTED), help=argparse.SUPPRESS)
    return parser


def texts_of(arguments) -> list[str]:
    """The prompts the command line names."""
    texts = [*arguments.prompts, *(read_prompts(arguments.prompt_file) if arguments.prompt_file else [])] or DEFAULT_PROMPTS
    return texts[: arguments.num_prompts]


def measure(pair: Pair, prompts: list[torch.Tensor], max_new_tokens: int, num_runs: int) -> dict:
    """Figures of every way of decoding `prompts`, each (1, tokens), and of a round with the draft."""
    variants = decoding_variants(pair.target, pair.draft, prompt_lookup_tokens=PROMPT_LOOKUP_TOKENS)
    texts, seconds = ({name: [] for name in variants} for _ in range(2))
    forwards, report = dict.fromkeys(variants, 0), GenerationReport()
    for prompt in progress(prompts, "decoding"):
        arguments = dict(input_ids=prompt, max_new_tokens=max_new_tokens, do_sample=False)
        for name, write in variants.items():  # also warms up
            with counted_forwards(pair.target) as calls:
                texts[name].append(write(**arguments)[0, prompt.shape[1] :].tolist())
            forwards[name] += calls.count
        with record_generation() as recorded:
            variants[DRAFTED](**arguments)
        report.requests += recorded.requests
        runs = {name: lambda write=write, arguments=arguments: write(**arguments) for name, write in variants.items()}
        for name, measured in time_interleaved(runs, num_runs).items():
            seconds[name] += measured
    ways = {name: figures_of(texts[name], texts[PLAIN], forwards[name], seconds[name], seconds) for name in variants}
    return {"ways": ways, "conditional_acceptance": report.conditional_acceptance, "round": split_of_a_round(report)}


class counted_forwards:
    """Counts the target's forward passes inside a `with` block."""

    def __init__(self, target: torch.nn.Module):
        self.target, self.count = target, 0

    def __enter__(self):
        self.handle = self.target.register_forward_pre_hook(self._note)
        return self

    def _note(self, *_):
        self.count += 1

    def __exit__(self, *_):
        self.handle.remove()


def figures_of(texts: list[list[int]], plain_texts: list[list[int]], num_forwards: int, seconds: list[float], all_seconds: dict) -> dict:
    """Speed, tokens a round (the prefill, whose token needs no draft, left out) and variety of one way of decoding."""
    num_tokens, num_rounds = sum(map(len, texts)), num_forwards - len(texts)
    return {
        "tokens_per_second": num_tokens * len(seconds) / len(texts) / sum(seconds),
        "seconds_median": statistics.median(seconds),
        "speedup": paired_ratio(all_seconds[PLAIN], seconds),
        "speedup_over_own_plain": paired_ratio(all_seconds[OWN_LOOP], seconds),
        "tokens_per_round": (num_tokens - len(texts)) / num_rounds if num_rounds else float("nan"),
        "distinct_bigram_share": statistics.mean(distinct_ngram_share(text, 2) for text in texts),
        "identical": texts == plain_texts,
    }


def split_of_a_round(report: GenerationReport) -> dict:
    """Milliseconds of a round in the target, the draft and the rest; the prefill is left out."""
    num_rounds, first = len(report.rounds), report.seconds("first_token")
    if not num_rounds:
        return {}
    parts = {"target": report.seconds("target") - first, "draft": report.seconds("draft"), "rest": report.seconds("rest")}
    milliseconds = {name: 1000 * seconds / num_rounds for name, seconds in parts.items()}
    return {"rounds": num_rounds, **{f"{name}_milliseconds": value for name, value in milliseconds.items()}}


def render(result: dict) -> str:
    """The tables of `measure`'s figures."""
    header = ["", "tokens/s", "median", "x generate()", "x our loop", "tokens a round", "distinct bigrams", "same text"]
    rows = [
        [
            name,
            f"{way['tokens_per_second']:.1f}",
            f"{way['seconds_median']:.2f} s",
            f"{way['speedup']:.2f}",
            f"{way['speedup_over_own_plain']:.2f}",
            f"{way['tokens_per_round']:.2f}",
            f"{100 * way['distinct_bigram_share']:.1f} %",
            "yes" if way["identical"] else "NO",
        ]
        for name, way in result["ways"].items()
    ]
    lines = [table(header, rows), ""]
    if result["round"]:
        parts = {name: result["round"][f"{name}_milliseconds"] for name in ("target", "draft", "rest")}
        total = sum(parts.values())
        split = ", ".join(f"{name} {value:.2f} ms ({100 * value / total:.1f} %)" for name, value in parts.items())
        lines.append(f"a round with the draft: {total:.2f} ms = {split}")
    if result["conditional_acceptance"]:
        lines.append("conditional acceptance by draft position: " + " ".join(f"{rate:.2f}" for rate in result["conditional_acceptance"]))
    return "\n".join(lines)


def memory_above_plain(pair: Pair, argv: list[str]) -> dict:
    """Peak bytes of plain decoding and of decoding with the draft, each in a process of its own, and the draft's weights."""
    peaks = {}
    for name in (PLAIN, DRAFTED):
        names = ["--target", pair.target_name, "--draft", pair.draft_name]
        run = subprocess.run([sys.executable, __file__, *argv, *names, "--peak-of", name], capture_output=True, text=True)
        if run.returncode:
            raise RuntimeError(f"measuring the memory of {name} failed: {run.stderr[-2000:]}")
        peaks[name] = json.loads(run.stdout.splitlines()[-1])
    weights = sum(parameter.numel() * parameter.element_size() for parameter in pair.draft.parameters())
    return {"plain_bytes": peaks[PLAIN], "draft_bytes": peaks[DRAFTED], "draft_weights_bytes": weights}


def peak_bytes(arguments) -> int:
    """Peak memory of this process (GPU memory where the target is on a GPU) after decoding every prompt in one way."""
    if arguments.peak_of == DRAFTED:
        pair = load_pair(arguments.draft, arguments.target, arguments.dtype, arguments.device)
        options = {"assistant_model": pair.draft}
    else:
        device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
        target = AutoModelForCausalLM.from_pretrained(arguments.target, dtype=arguments.dtype).to(device).eval()
        pair = Pair(target, None, AutoTokenizer.from_pretrained(arguments.target), arguments.target, arguments.draft)
        options = {}
    status, on_gpu = Path("/proc/self/status"), pair.target.device.type == "cuda"
    if not on_gpu and not status.exists():
        raise ValueError("--memory reads /proc/self/status, which this system does not have")
    # What loading took is another matter: the high-water mark starts anew.
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5")
    for text in texts_of(arguments):
        pair.target.generate(input_ids=encode(pair, text, arguments.raw), max_new_tokens=arguments.max_new_tokens, do_sample=False, **options)
    if on_gpu:
        return torch.cuda.max_memory_allocated(pair.target.device)
    line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
    return 1024 * int(line.split()[1])


def render_memory(memory: dict) -> str:
    """Peak memory above plain decoding beside the draft's weights."""
    above, weights = (value / 2**20 for value in (memory["draft_bytes"] - memory["plain_bytes"], memory["draft_weights_bytes"]))
    return f"peak memory: {memory['plain_bytes'] / 2**20:.1f} MiB plain, {above:+.1f} MiB with the draft (its weights: {weights:.1f} MiB)"


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (ValueError, OSError) as error:
        sys.exit(f"decode.py: {error}")
