"""Training steps of a recipe, measured: anchors a second, peak memory, and where the time of a step goes.

    python benchmarks/distill.py                                               the bundled target, Python's standard library
    python benchmarks/distill.py --recipe recipes/gemma3_270m.yaml --steps 20 --target FOLDER --json out.json

Options of the recipe follow as flags (--num_anchors 128). The device is waited for at the borders of the parts, so that work on a GPU
counts where it belongs; nothing is saved or evaluated. The loss works out the gradients of its own logits, which count as loss.
"""

import argparse
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback, set_seed

from hf_dspark.distillation import trainer as trainer_module
from hf_dspark.distillation.arguments import DistillationArguments
from hf_dspark.distillation.data import load_rows
from hf_dspark.distillation.distill import starting_draft
from hf_dspark.distillation.provenance import take_provenance
from hf_dspark.distillation.trainer import DSparkTrainer
from hf_dspark.evaluation.output import table, write_json
from hf_dspark.evaluation.pairs import bundled_pair
from hf_dspark.recipe import read_recipe

# What each part of a step is called in the trainer, and where it is looked up.
PARTS = {
    "target": (trainer_module, "target_features"),
    "draft": (trainer_module, "block_hidden_states"),
    "loss": (trainer_module, "dspark_loss"),
    "backward": (Accelerator, "backward"),
    "optimizer": (AcceleratedOptimizer, "step"),
}


def main(argv: list[str] | None = None) -> int:
    """Measures, prints the tables, writes `--json`; returns 0."""
    arguments, flags = parser().parse_known_args(argv)
    if arguments.steps < 1 or arguments.warmup < 1:
        raise ValueError(f"--steps and --warmup must be at least 1, got {arguments.steps} and {arguments.warmup}")
    with tempfile.TemporaryDirectory() as scratch:
        args = recipe_options(arguments, flags, scratch)
        result = measure(args, arguments.warmup)
    print(f"{args.target}: {arguments.steps} steps after {arguments.warmup} of warm-up, {result['device']}, {torch.get_num_threads()} CPU threads\n")
    print(render(result))
    if arguments.json:
        write_json(arguments.json, {"recipe": arguments.recipe, "options": flags, "threads": torch.get_num_threads(), **result})
    return 0


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument(
        "--recipe", metavar="RECIPE.yaml", help="of `hf-dspark distill` (default: the bundled draft's, on the standard library alone)"
    )
    parser.add_argument("--steps", type=int, default=10, metavar="N", help="measured steps (default: %(default)s)")
    parser.add_argument("--warmup", type=int, default=2, metavar="N", help="steps before them (default: %(default)s)")
    parser.add_argument("--json", metavar="FILE", help="write the figures to this file too")
    return parser


def recipe_options(arguments, flags: list[str], folder: str) -> DistillationArguments:
    """The recipe's options, without what would save, evaluate, log or upload."""
    if arguments.recipe is None:
        flags = ["--target", str(bundled_pair() / "target"), *flags]
    quiet = {"--output_dir": folder, "--max_steps": str(arguments.steps + arguments.warmup), "--save_strategy": "no", "--eval_strategy": "no"}
    quiet |= {"--report_to": "none", "--logging_strategy": "no", "--disable_tqdm": "true", "--push_to_hub": "false", "--eval_prompts": "0"}
    options = [*flags, *(word for pair in quiet.items() for word in pair), "--load_best_model_at_end", "false"]
    args = read_recipe(DistillationArguments, arguments.recipe or "stdlib_draft.yaml", options)
    if arguments.recipe is None:
        args.extra_rows = None  # what the bundled draft's recipe had written before
    return args


class Stopwatch(TrainerCallback):
    """Seconds of each of `PARTS`, and of all, over the steps from the step numbered `warmup` on; anchors that were trained on, and memory."""

    def __init__(self, warmup: int, device: torch.device):
        self.warmup, self.device = warmup, device
        self.seconds, self.num_anchors, self.started, self.total, self.peak_bytes = dict.fromkeys(PARTS, 0.0), 0, None, 0.0, None

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == self.warmup and self.started is None:
            self.seconds, self.num_anchors = dict.fromkeys(PARTS, 0.0), 0
            reset_peak(self.device)
            self.started = self.now()

    def on_step_end(self, args, state, control, **kwargs):
        if self.started is not None:
            self.total, self.peak_bytes = self.now() - self.started, peak_bytes(self.device)

    def now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def timed(self, part: str, function):
        """`function` with its seconds added to `part`."""

        def run(*args, **kwargs):
            started = self.now()
            result = function(*args, **kwargs)
            self.seconds[part] += self.now() - started
            if part == "loss":
                blocks = next(value for value in args if isinstance(value, trainer_module.Blocks))
                self.num_anchors += int(blocks.slot_mask[..., 0].sum())
            return result

        return run


def measure(args: DistillationArguments, warmup: int) -> dict:
    """Trains `args.max_steps` steps, of which the first `warmup` don't count."""
    set_seed(args.seed)
    target, tokenizer = AutoModelForCausalLM.from_pretrained(args.target, dtype="auto"), AutoTokenizer.from_pretrained(args.target)
    rows, _ = load_rows(args, tokenizer)
    rows, _ = take_provenance(rows)
    draft = starting_draft(args, target, tokenizer, rows)
    trainer = DSparkTrainer(draft, target, args, train_dataset=rows, chat_template=tokenizer.chat_template)
    watch = Stopwatch(warmup, args.device)
    trainer.add_callback(watch)
    with ExitStack() as stack:
        for part, (owner, name) in PARTS.items():
            function = getattr(owner, name)
            stack.enter_context(mock.patch.object(owner, name, watch.timed(part, function)))
        trainer.train()
    if not watch.total:
        raise ValueError(f"the training ended after {trainer.state.global_step} steps, before a step was measured; lower --warmup")
    num_steps = trainer.state.global_step - warmup
    seconds = {**watch.seconds, "rest": watch.total - sum(watch.seconds.values())}
    return {
        "device": str(args.device),
        "steps": num_steps,
        "anchors_per_step": watch.num_anchors / num_steps,
        "anchors_per_second": watch.num_anchors / watch.total,
        "seconds_per_step": watch.total / num_steps,
        "peak_bytes": watch.peak_bytes,
        "share": {part: value / watch.total for part, value in seconds.items()},
    }


def reset_peak(device: torch.device) -> None:
    """The high-water mark of memory starts anew, where the system can do that."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif Path("/proc/self/clear_refs").exists():
        Path("/proc/self/clear_refs").write_text("5")


def peak_bytes(device: torch.device) -> int | None:
    """High-water mark of the GPU's memory, or of this process's; None where the system does not tell."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status")
    if not status.exists():
        return None
    line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
    return 1024 * int(line.split()[1])


def render(result: dict) -> str:
    """The figures of `measure` as a table of parts and a line."""
    step = 1000 * result["seconds_per_step"]
    rows = [[part, f"{share * step:.1f}", f"{share:.1%}"] for part, share in result["share"].items()]
    memory = "" if result["peak_bytes"] is None else f"; peak memory {result['peak_bytes'] / 2**20:,.0f} MiB"
    line = f"{result['anchors_per_second']:,.0f} anchors/s, {result['anchors_per_step']:,.1f} anchors a step{memory}"
    return f"{table(['', 'ms a step', 'share'], [*rows, ['step', f'{step:.1f}', '']])}\n\n{line}"


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (ValueError, OSError) as error:
        sys.exit(f"distill.py: {error}")
