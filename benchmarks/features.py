"""Bytes a token and tau of a small draft by where the target's features come from: same seeds, rows, anchors and steps.

    python benchmarks/features.py --steps 300 --seeds 0 1 2                          the bundled target
    python benchmarks/features.py --modes online int8 subspace --rank 96 --json out.json
    python benchmarks/features.py --target TARGET --mask-token-id ID --dataset rows.jsonl --folder /big/disk

Trains a draft from each mode and prints, beside the bytes that a token takes (the target's, and those of Qwen3-4B), tau estimated from
the distance of the two laws on held-out rows, and its difference to online as the mean over seeds of each seed's own, with the largest.
`subspace` keeps the chosen layers' coordinates in their first `--rank` principal directions (default: the target's hidden size) in 8 bits.
"""

import argparse
import contextlib
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, set_seed

from hf_dspark.distillation.arguments import DistillationArguments
from hf_dspark.distillation.data import load_rows
from hf_dspark.distillation.distill import draft_config, starting_draft
from hf_dspark.distillation.feature_coding import bytes_per_token
from hf_dspark.distillation.provenance import take_provenance
from hf_dspark.distillation.trainer import DSparkTrainer
from hf_dspark.evaluation.output import table, write_json
from hf_dspark.evaluation.pairs import bundled_pair

MODES = ("online", "bfloat16", "int8", "half cached", "subspace")
# Hidden size and chosen layers of Qwen3-4B, whose features the reference stores in bfloat16.
QWEN3_4B = (2560, 5)
REFERENCE_BYTES = bytes_per_token(*QWEN3_4B, "bfloat16")


def main(argv: list[str] | None = None) -> int:
    """Trains a draft for each mode and seed, prints the table, writes `--json`; returns 0."""
    arguments = parser().parse_args(argv)
    with contextlib.ExitStack() as stack:
        folder = Path(arguments.folder or stack.enter_context(tempfile.TemporaryDirectory()))
        result = measure(arguments, folder)
    print(f"{result['target']}: {arguments.steps} steps of {arguments.batch_size} rows out of {result['num_rows']}, seeds {arguments.seeds}\n")
    print(render(result))
    if arguments.json:
        write_json(arguments.json, result)
    return 0


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="folder or hub id (default: the bundled target)")
    parser.add_argument("--dataset", default="stdlib", help="as in a recipe (default: %(default)s)")
    parser.add_argument("--mask-token-id", type=int, metavar="ID", help="where the tokenizer has no mask token")
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=MODES, help="(default: all)")
    parser.add_argument("--rank", type=int, metavar="R", help="dimensions of the subspace (default: the target's hidden size)")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], metavar="N", help="(default: 0 1 2)")
    parser.add_argument("--steps", type=int, default=300, metavar="N", help="of each training (default: %(default)s)")
    parser.add_argument("--rows", type=int, default=1000, metavar="N", help="training rows, spread over the dataset (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=8, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--max-length", type=int, default=256, metavar="N", help="tokens of a row (default: %(default)s)")
    parser.add_argument("--held-out", type=int, default=96, metavar="N", help="held-out texts (default: %(default)s)")
    parser.add_argument("--learning-rate", type=float, default=6e-3, metavar="X", help="(default: %(default)s)")
    parser.add_argument("--draft-layers", type=int, default=2, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--anchors", type=int, default=64, metavar="N", help="blocks drawn from a row (default: %(default)s)")
    parser.add_argument("--cold-start", action="store_true", help="start from random layers, not from copies of the target's last")
    parser.add_argument("--muon", action="store_true", help="train with Muon, and so get further in the same steps")
    parser.add_argument("--folder", metavar="DIR", help="where features are kept, a folder a mode (default: a temporary one)")
    parser.add_argument("--json", metavar="FILE", help="write the figures to this file too")
    return parser


def measure(arguments, folder: Path) -> dict:
    """Figures of every mode of `arguments.modes`."""
    name = arguments.target or str(bundled_pair() / "target")
    target, tokenizer = AutoModelForCausalLM.from_pretrained(name, dtype="auto"), AutoTokenizer.from_pretrained(name)
    args = options(arguments, name, folder, seed=0)
    rows, held_out = load_rows(args, tokenizer)
    rows, _ = take_provenance(rows)
    count = min(arguments.rows, len(rows))
    rows = rows.select([i * len(rows) // count for i in range(count)])
    hidden_size, num_layers = target.config.get_text_config().hidden_size, len(draft_config(target, tokenizer, args).target_layer_ids)
    num_tokens = sum(map(len, rows["input_ids"]))
    modes = {}
    for mode in arguments.modes:
        rank = (arguments.rank or hidden_size) if mode == "subspace" else None
        dtype = {"online": None, "bfloat16": "bfloat16"}.get(mode, "int8")
        size = 0 if dtype is None else bytes_per_token(hidden_size, num_layers, dtype, rank)
        qwen3_4b = 0 if dtype is None else bytes_per_token(*QWEN3_4B, dtype, None if rank is None else max(1, rank * QWEN3_4B[0] // hidden_size))
        share = 0.5 if mode == "half cached" else 1
        cache = {"features": "cached", "features_dir": str(folder / mode.replace(" ", "_")), "features_dtype": dtype, "features_rank": rank}
        cache["cache_budget"] = f"{num_tokens * size // 2}B" if share < 1 else None
        runs = []
        for seed in arguments.seeds:
            args = options(arguments, name, folder, seed=seed, **({} if dtype is None else cache))
            runs.append({"seed": seed, **train(args, target, tokenizer, rows, held_out)})
        modes[mode] = {"bytes_per_token": size * share, "qwen3_4b_bytes_per_token": qwen3_4b * share, "rank": rank, "runs": runs}
    return {"target": name, "num_rows": count, "num_tokens": num_tokens, "steps": arguments.steps, "modes": modes}


def options(arguments, target: str, folder: Path, **more) -> DistillationArguments:
    """The options of one training."""
    return DistillationArguments(
        target=target,
        dataset=arguments.dataset,
        mask_token_id=arguments.mask_token_id,
        num_held_out=arguments.held_out,
        max_length=arguments.max_length,
        num_draft_layers=arguments.draft_layers,
        markov_rank=64,
        num_anchors=arguments.anchors,
        max_steps=arguments.steps,
        per_device_train_batch_size=arguments.batch_size,
        per_device_eval_batch_size=arguments.batch_size,
        learning_rate=arguments.learning_rate,
        lr_scheduler_type="cosine",
        output_dir=str(folder / "run"),
        use_cpu=not torch.cuda.is_available(),
        bf16=True,
        eval_prompts=0,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=not sys.stderr.isatty(),
        warm_start=not arguments.cold_start,
        muon=arguments.muon,
        **more,
    )


def train(args: DistillationArguments, target, tokenizer, rows, held_out) -> dict:
    """tau on the held-out rows after a training, its seconds a step, and those that writing the cache took before."""
    set_seed(args.seed)
    draft = starting_draft(args, target, tokenizer, rows)
    start = time.perf_counter()
    trainer = DSparkTrainer(draft, target, args, train_dataset=rows, eval_dataset=held_out, chat_template=tokenizer.chat_template)
    trainer.remove_callback(PrinterCallback)
    written = time.perf_counter()
    trainer.train()
    trained = time.perf_counter()
    metrics = trainer.evaluate()
    figures = {"tau": metrics["eval_tau"], "loss": metrics["eval_loss"], "seconds_per_step": (trained - written) / args.max_steps}
    return {**figures, "opening_seconds": written - start}


def render(result: dict) -> str:
    """The table of `measure`'s figures."""
    online = result["modes"].get("online")
    header = ["features", "bytes a token", "Qwen3-4B", "of the reference's", "tau", "to online", "largest", "s a step"]
    lines = []
    for mode, figures in result["modes"].items():
        taus = [run["tau"] for run in figures["runs"]]
        changes = [100 * (run["tau"] / base["tau"] - 1) for run, base in zip(figures["runs"], online["runs"])] if online and mode != "online" else []
        lines.append(
            [
                mode if figures["rank"] is None else f"{mode} of {figures['rank']}",
                f"{figures['bytes_per_token']:,.0f}",
                f"{figures['qwen3_4b_bytes_per_token']:,.0f}",
                f"{100 * figures['qwen3_4b_bytes_per_token'] / REFERENCE_BYTES:.1f} %",
                f"{statistics.mean(taus):.3f}",
                f"{statistics.mean(changes):+.2f} %" if changes else "",
                f"{max(changes, key=abs):+.2f} %" if changes else "",
                f"{statistics.median(run['seconds_per_step'] for run in figures['runs']):.2f}",
            ]
        )
    return table(header, lines)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (ValueError, OSError) as error:
        sys.exit(f"features.py: {error}")
