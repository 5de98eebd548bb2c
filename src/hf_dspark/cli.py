"""The command line: `hf-dspark COMMAND --help`."""

import argparse
import os
import shlex
import sys
import time

__all__ = ["main"]


def main(argv: list[str] | None = None) -> int:
    """Runs one command; returns the exit code: 0, 1 for a negative finding (not lossless, not identical), 2 for bad input."""
    argv = sys.argv[1:] if argv is None else argv
    arguments = _parser().parse_args(argv)
    arguments.command_line = shlex.join(["hf-dspark", *argv])
    try:
        _check_folder_of(getattr(arguments, "json", None))
        if getattr(arguments, "threads", None) is not None:
            _set_threads(arguments.threads)
        return arguments.command(arguments)
    except BrokenPipeError:
        # The reader of the output has gone; Python would complain once more when it flushes at exit.
        sys.stdout = None
        return 0
    except (ValueError, OSError) as error:
        print("hf-dspark:", " ".join(str(error).split()), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _quickstart(arguments) -> int:
    from pathlib import Path

    from hf_dspark.evaluation.output import write_json
    from hf_dspark.evaluation.pairs import load_pair
    from hf_dspark.evaluation.quickstart import quickstart

    folder = None if arguments.pair is None else Path(arguments.pair)
    names = (None, None) if folder is None else (str(folder / "draft"), str(folder / "target"))
    pair = load_pair(*names, dtype="float32", device="cpu")
    figures = quickstart(pair, arguments.output, arguments.max_new_tokens, arguments.completions, arguments.runs)
    if arguments.json:
        write_json(arguments.json, figures)
    return 0 if figures["identical"] else 1


def _evaluate(arguments) -> int:
    from hf_dspark.evaluation.acceptance import evaluate_pair, held_out_prompts, render_evaluation
    from hf_dspark.evaluation.output import write_json
    from hf_dspark.evaluation.pairs import encode, read_prompts

    _check_held_out_options(arguments)
    texts = read_prompts(arguments.prompts) if arguments.prompts else None
    pair = _load(arguments)
    if texts is None:
        prompts, chosen = held_out_prompts(pair, arguments.held_out_modules, arguments.prompt_tokens), ("held_out_modules", "prompt_tokens")
        words = f"{len(prompts)} held-out modules of Python's standard library, {arguments.prompt_tokens} prompt tokens"
    else:
        prompts, chosen = [encode(pair, text, arguments.raw) for text in texts], ("prompts", "raw")
        words = f"{len(prompts)} prompts of {arguments.prompts}"
    print(f"{pair.description}\n{words}, up to {arguments.max_new_tokens} new tokens\n")
    summaries = evaluate_pair(pair, prompts, arguments.max_new_tokens, arguments.temperature, arguments.seed)
    print(render_evaluation(summaries, arguments.temperature))
    if arguments.json:
        options = {name: getattr(arguments, name) for name in (*chosen, "max_new_tokens", "temperature", "seed")}
        write_json(arguments.json, {**_names(pair), "options": {"command": arguments.command_line, **options}, **summaries})
    return 0


def _check_held_out_options(arguments) -> None:
    """Held-out modules and prompts of a file exclude each other; fills in the defaults."""
    for name in ("held_out_modules", "prompt_tokens"):
        value = getattr(arguments, name)
        if value is None:
            setattr(arguments, name, 64)
        elif arguments.prompts:
            option = f"--{name.replace('_', '-')}"
            raise ValueError(f"{option} {value} is about held-out modules, in whose place --prompts {arguments.prompts} is read; leave one out")
    if arguments.raw and not arguments.prompts:
        raise ValueError("--raw is about the texts of --prompts=FILE, which is not given; held-out modules never go through the chat template")


def _verify(arguments) -> int:
    from hf_dspark.evaluation.lossless import verify
    from hf_dspark.evaluation.output import write_json
    from hf_dspark.evaluation.pairs import DEFAULT_PROMPTS, encode, read_prompts

    texts = [*arguments.prompt, *(read_prompts(arguments.prompts) if arguments.prompts else [])] or DEFAULT_PROMPTS
    pair = _load(arguments)
    prompts = [encode(pair, text, arguments.raw) for text in texts]
    lengths = [prompt.shape[1] for prompt in prompts]
    print(f"{pair.description}\n{len(prompts)} prompts of {min(lengths)} to {max(lengths)} tokens, {arguments.max_new_tokens} new tokens each\n")
    checks = []
    options = dict(max_new_tokens=arguments.max_new_tokens, num_samples=arguments.samples, temperature=arguments.temperature, seed=arguments.seed)
    for check in verify(pair.target, pair.draft, prompts, **options, show=lambda token: pair.tokenizer.decode([token])):
        print(f"{'ok  ' if check.passed else 'FAIL'}  {check.name}: {check.words}", flush=True)
        checks.append(check)
    failed = [check for check in checks if not check.passed]
    if failed:
        print(f"\nNOT lossless: {'; '.join(f'{check.name}: {check.words}' for check in failed)}")
    else:
        print(f"\nlossless on these prompts: {_what_was_shown(pair, arguments.samples)}")
    if arguments.json:
        findings = [{"name": check.name, "passed": check.passed, "words": check.words, **check.figures} for check in checks]
        write_json(arguments.json, {"lossless": not failed, **_names(pair), "prompts": len(prompts), "checks": findings})
    return 1 if failed else 0


def _names(pair) -> dict:
    return {
        "target": pair.target_name,
        "draft": pair.draft_name,
        "dtype": str(pair.target.dtype).removeprefix("torch."),
        "block_size": pair.draft.config.block_size,
    }


def _what_was_shown(pair, num_samples: int) -> str:
    from hf_dspark.evaluation.lossless import NEAR_TIE_UNITS
    from hf_dspark.evaluation.sampling_law import FALSE_ALARM_RATE

    greedy = "greedy texts are plain decoding's, token for token"
    if pair.target.dtype.itemsize < 4:
        greedy += f", up to near ties of {NEAR_TIE_UNITS} units in the last place"
    if num_samples == 0:
        return f"{greedy} (sampling was not tested: --samples 0)"
    sampled = f"sampled texts follow the target's law as far as {num_samples} of them can tell"
    return f"{greedy}; {sampled} (a right pair fails in fewer than 1 of {round(1 / FALSE_ALARM_RATE)} runs)"


def _generate(arguments) -> int:
    from transformers import TextStreamer, set_seed

    from hf_dspark.evaluation.pairs import encode
    from hf_dspark.generation.report import record_generation

    sampling = {name: getattr(arguments, name) for name in ("temperature", "top_p", "top_k") if getattr(arguments, name) is not None}
    if sampling and not arguments.do_sample:
        raise ValueError(f"{', '.join(f'{name}={value:g}' for name, value in sampling.items())} has no effect on greedy decoding; add --do-sample")
    if arguments.top_p is not None and not 0.0 < arguments.top_p <= 1.0:
        raise ValueError(f"top-p must lie in (0, 1], got {arguments.top_p:g}")
    prompt = arguments.prompt if arguments.prompt is not None else _read_stdin()
    pair = _load(arguments)
    ids = encode(pair, prompt, arguments.raw)
    if arguments.seed is not None:
        set_seed(arguments.seed)
    options = dict(max_new_tokens=arguments.max_new_tokens, do_sample=arguments.do_sample, **sampling)
    streamer = TextStreamer(pair.tokenizer, skip_prompt=True, skip_special_tokens=True)
    started = time.perf_counter()
    with record_generation() as report:
        pair.target.generate(input_ids=ids, assistant_model=pair.draft, streamer=streamer, **options)
    seconds, request = time.perf_counter() - started, report.requests[0]
    speed = f"{request.new_tokens / seconds:.1f} tokens/s, the first after {request.time_to_first_token_seconds:.2f} s"
    numbers = [f"{request.new_tokens} tokens in {seconds:.2f} s ({speed})"]
    if request.rounds:
        numbers.append(f"{report.tokens_per_round:.2f} tokens a round")
    if report.conditional_acceptance:
        numbers.append("accepted by draft position " + " ".join(f"{rate:.2f}" for rate in report.conditional_acceptance))
    print("; ".join(numbers), file=sys.stderr)
    return 0


def _pretrain(arguments) -> int:
    from hf_dspark.distillation.pretraining import PretrainArguments, pretrain
    from hf_dspark.recipe import read_recipe

    pretrain(read_recipe(PretrainArguments, arguments.recipe, arguments.overrides, "hf-dspark pretrain"))
    return 0


def _regenerate(arguments) -> int:
    from hf_dspark.distillation.regeneration import RegenerationArguments, regenerate
    from hf_dspark.recipe import read_recipe

    regenerate(read_recipe(RegenerationArguments, arguments.recipe, arguments.overrides, "hf-dspark regenerate"))
    return 0


def _distill(arguments) -> int:
    from transformers.training_args import ParallelMode

    from hf_dspark.distillation.arguments import DistillationArguments
    from hf_dspark.distillation.distill import distill
    from hf_dspark.recipe import read_recipe

    args = read_recipe(DistillationArguments, arguments.recipe, arguments.overrides, "hf-dspark distill")
    if args.fsdp and not args.fsdp_config["xla"] and args.parallel_mode != ParallelMode.DISTRIBUTED:
        start = f"torchrun --nproc_per_node 8 --no-python hf-dspark distill {arguments.recipe}"
        raise ValueError(f"fsdp={args.fsdp} spreads the draft over processes, and this is one alone; start it with `{start}`, or leave fsdp out")
    try:
        distill(args)
    except KeyboardInterrupt:
        if args.process_index == 0:
            print(f"hf-dspark: interrupted; {_how_to_go_on(args.output_dir)}", file=sys.stderr)
        raise
    return 0


def _how_to_go_on(output_dir: str) -> str:
    from hf_dspark.distillation.resumption import whole_checkpoints

    newest = next(iter(whole_checkpoints(output_dir)), None)
    if newest is None:
        return f"there is no checkpoint in {output_dir}, so the same command begins anew"
    return f"the same command with --resume_from_checkpoint true goes on from {newest}"


def _card(arguments) -> int:
    from pathlib import Path

    from hf_dspark.evaluation.card import pair_card

    text = pair_card(Path(arguments.target), Path(arguments.draft), Path(arguments.evaluation), arguments.machine)
    if arguments.output is None:
        print(text)
    else:
        Path(arguments.output).write_text(text, encoding="utf-8")
    return 0


def _load(arguments):
    from hf_dspark.evaluation.pairs import load_pair

    return load_pair(arguments.draft, arguments.target, arguments.dtype, arguments.device)


def _read_stdin() -> str:
    if sys.stdin.isatty():
        print("prompt (end with Ctrl-D on a line of its own):", file=sys.stderr)
    return sys.stdin.read().removesuffix("\n")


def _check_folder_of(path: str | None) -> None:
    """Before hours of work, not after them."""
    folder = os.path.dirname(path or "")
    if folder and not os.path.isdir(folder):
        raise FileNotFoundError(f"--json {path}: there is no folder {folder}")


def _set_threads(num_threads: int) -> None:
    import torch

    most = 4 * (os.cpu_count() or 1)
    if not 1 <= num_threads <= most:
        raise ValueError(f"threads must lie between 1 and {most} on this machine, got {num_threads}")
    torch.set_num_threads(num_threads)


def _parser() -> argparse.ArgumentParser:
    summary = "DSpark speculative decoding for transformers: faster generate(), the same answers."
    parser = argparse.ArgumentParser(prog="hf-dspark", description=summary)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_quickstart(commands)
    _add_generate(commands)
    _add_verify(commands)
    _add_evaluate(commands)
    _add_recipe(commands, "pretrain", _pretrain, "train a small target on the source code of Python's standard library")
    _add_recipe(commands, "regenerate", _regenerate, "let a target write text to train its draft on")
    _add_recipe(commands, "distill", _distill, "train a draft for a target")
    _add_card(commands)
    return parser


def _add_command(commands, name: str, command, summary: str) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=summary, description=summary[0].upper() + summary[1:] + ".", allow_abbrev=False)
    parser.set_defaults(command=command)
    return parser


def _add_pair(parser: argparse.ArgumentParser, dtype: str) -> None:
    parser.add_argument("--draft", metavar="FOLDER_OR_HUB_ID", help="the draft (default: the bundled pair)")
    parser.add_argument("--target", metavar="FOLDER_OR_HUB_ID", help="its target (default: the one that the draft's config names)")
    parser.add_argument("--dtype", default=dtype, choices=("auto", "float32", "bfloat16", "float16"), help="of both models (default: %(default)s)")
    parser.add_argument("--device", help="cpu, cuda, cuda:1, ... (default: the first GPU, else the CPU)")
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads (default: PyTorch's choice)")


def _add_quickstart(commands) -> None:
    parser = _add_command(commands, "quickstart", _quickstart, "show the bundled pair at work, offline, in under a minute")
    parser.add_argument("--output", default=".", metavar="FOLDER", help="where quickstart.png goes (default: the current folder)")
    parser.add_argument("--json", metavar="FILE", help="write the figures to this file too")
    parser.add_argument("--max-new-tokens", type=int, default=128, metavar="N", help="length of each text (default: %(default)s)")
    parser.add_argument("--completions", type=int, default=4, metavar="N", help="texts (default: %(default)s)")
    parser.add_argument("--runs", type=int, metavar="N", help="timed runs of each text (default: up to 5, as time allows)")
    parser.add_argument("--pair", metavar="FOLDER", help="another pair: a folder that holds 'target' and 'draft'")
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads (default: PyTorch's choice)")


def _add_generate(commands) -> None:
    parser = _add_command(commands, "generate", _generate, "write with a pair; the text streams to stdout, the numbers go to stderr")
    _add_pair(parser, "auto")
    parser.add_argument("--prompt", help="the prompt (default: read from stdin)")
    parser.add_argument("--raw", action="store_true", help="the prompt as it is, without the chat template")
    parser.add_argument("--max-new-tokens", type=int, default=256, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--do-sample", action="store_true", help="sample instead of greedy decoding")
    parser.add_argument("--temperature", type=float)
    parser.add_argument("--top-p", type=float)
    parser.add_argument("--top-k", type=int)
    parser.add_argument("--seed", type=int, help="makes a sampled text repeatable")


def _add_verify(commands) -> None:
    parser = _add_command(commands, "verify", _verify, "check that a pair is lossless on your prompts; exit code 1 when it is not")
    _add_pair(parser, "float32")
    parser.add_argument("--prompts", metavar="FILE.jsonl", help='a prompt a line: {"turns": ["..."]} or {"prompt": "..."}')
    parser.add_argument("--prompt", action="append", default=[], metavar="TEXT", help="a prompt; may be repeated (default: four short ones)")
    parser.add_argument("--raw", action="store_true", help="prompts as they are, without the chat template")
    parser.add_argument("--max-new-tokens", type=int, default=64, metavar="N", help="length of the greedy texts (default: %(default)s)")
    parser.add_argument("--samples", type=int, default=200, metavar="N", help="sampled texts of each way of drafting; 0: none (default: %(default)s)")
    parser.add_argument("--temperature", type=float, default=0.7, help="of the sampled texts (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    parser.add_argument("--json", metavar="FILE", help="write the findings to this file too")


def _add_evaluate(commands) -> None:
    summary = "measure how much of a draft is accepted, on your prompts or on held-out modules of Python's standard library"
    parser = _add_command(commands, "evaluate", _evaluate, summary)
    _add_pair(parser, "float32")
    parser.add_argument(
        "--prompts", metavar="FILE.jsonl", help='a prompt a line: {"turns": ["..."]} or {"prompt": "..."} (default: held-out modules)'
    )
    parser.add_argument("--raw", action="store_true", help="the prompts of --prompts as they are, without the chat template")
    parser.add_argument("--held-out-modules", type=int, metavar="N", help="without --prompts (default: 64)")
    parser.add_argument("--prompt-tokens", type=int, metavar="N", help="of each module, after the bos token (default: 64)")
    parser.add_argument("--max-new-tokens", type=int, default=128, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--temperature", type=float, default=1.0, help="of the sampled texts; greedy ones are measured too (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    parser.add_argument("--json", metavar="FILE", help="write the figures to this file too")


def _add_recipe(commands, name: str, command, summary: str) -> None:
    parser = _add_command(commands, name, command, summary)
    parser.add_argument("recipe", metavar="RECIPE.yaml")
    parser.add_argument("overrides", nargs=argparse.REMAINDER, metavar="--option value")
    # With a recipe before --help or without: what it may say is listed by the parser that reads it.
    parser.print_help = lambda: command(argparse.Namespace(recipe="RECIPE.yaml", overrides=["--help"]))


def _add_card(commands) -> None:
    parser = _add_command(commands, "card", _card, "write the model card of a pair that the recipes made")
    parser.add_argument("--target", required=True, metavar="FOLDER", help="the target, with its pretraining.json")
    parser.add_argument("--draft", required=True, metavar="FOLDER", help="the draft")
    parser.add_argument("--evaluation", required=True, metavar="FILE", help="what `hf-dspark evaluate --json` wrote")
    parser.add_argument("--machine", required=True, metavar="TEXT", help="the machine it was measured on, in words")
    parser.add_argument("--output", metavar="FILE", help="where the card goes (default: stdout)")
