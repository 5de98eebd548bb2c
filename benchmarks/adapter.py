"""What a fine-tune of the target costs its draft, and how much of that a LoRA adapter of the draft brings back.

    python benchmarks/adapter.py                                     the bundled pair, its target fine-tuned on the source code of sympy
    python benchmarks/adapter.py --target TARGET --draft DRAFT --package PACKAGE --steps 820 --json adapter.json

1. The target is fine-tuned on the modules of an installed package. 2. The fine-tuned target continues beginnings of those modules, half of them
greedily, half at temperature 1. 3. An adapter of the draft is distilled on that text. Tokens a round (tau, the target's own token included) are
means over held-out modules: of the draft with the target it was made for, of the draft with the fine-tuned target, and of draft and adapter with it.
Recovered is the share of the first difference that the adapter brings back. --whole N also goes on training the whole draft, for N steps.
"""

import argparse
import importlib.util
import json
import math
import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

from hf_dspark import generate_many
from hf_dspark.distillation.arguments import DistillationArguments
from hf_dspark.distillation.corpus import held_out_split, source_modules
from hf_dspark.distillation.distill import distill
from hf_dspark.distillation.pretraining import pack
from hf_dspark.evaluation.acceptance import evaluate_pair
from hf_dspark.evaluation.output import table, write_json
from hf_dspark.evaluation.pairs import bundled_pair, load_pair

WAYS = ("greedy", "sampled")


def main(argv: list[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    for name in ("fine_tuning_steps", "steps", "rows", "new_tokens", "held_out", "rank"):
        if getattr(arguments, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(arguments, name)}")
    names = arguments.draft or str(bundled_pair() / "draft"), arguments.target or str(bundled_pair() / "target")
    train, held_out = held_out_split(modules_of(arguments.package), arguments.held_out)
    print(f"{len(train)} modules of {arguments.package} to train on, {len(held_out)} held out", flush=True)
    with tempfile.TemporaryDirectory() as kept:
        folder = Path(kept if arguments.output is None else arguments.output)
        tuned = folder / "target"
        if not (tuned / "tokenizer_config.json").exists():  # written last
            fine_tune(names[1], list(train.values()), tuned, arguments)
        if not (folder / "rows.jsonl").exists():
            write_rows(tuned, list(train.values()), folder / "rows.jsonl", arguments)
        pairs = {"draft, its own target": names, "draft, fine-tuned target": (names[0], str(tuned))}
        pairs[f"adapter, {arguments.steps} steps"] = str(distilled(folder, names[0], tuned, arguments, arguments.steps, arguments.rank)), str(tuned)
        if arguments.whole:
            pairs[f"whole draft, {arguments.whole} steps"] = str(distilled(folder, names[0], tuned, arguments, arguments.whole, None)), str(tuned)
        figures = {name: measured(*pair, list(held_out.values()), arguments) for name, pair in pairs.items()}
    print(render(figures))
    if arguments.json is not None:
        write_json(arguments.json, {"options": vars(arguments), "pairs": figures, "recovered": recovered(figures)})
    return 0


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("--draft", help="folder or hub id (default: the bundled one)")
    parser.add_argument("--target", help="folder or hub id (default: the bundled one)")
    parser.add_argument("--package", default="sympy", help="an installed package, whose modules are the new domain (default: %(default)s)")
    parser.add_argument("--held-out", type=int, default=32, metavar="N", help="modules kept for measuring (default: %(default)s)")
    parser.add_argument("--fine-tuning-steps", type=int, default=300, metavar="N", help="of 16 rows of 256 tokens (default: %(default)s)")
    parser.add_argument("--rows", type=int, default=4096, metavar="N", help="rows that the fine-tuned target writes (default: %(default)s)")
    parser.add_argument("--new-tokens", type=int, default=128, metavar="N", help="of a row, and of a measured text (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=820, metavar="N", help="of 8 rows, of the adapter (default: %(default)s)")
    parser.add_argument("--rank", type=int, default=32, metavar="N", help="of the adapter (default: %(default)s)")
    parser.add_argument("--learning-rate", type=float, default=4e-3, help="of the adapter (default: %(default)s)")
    parser.add_argument("--whole", type=int, default=0, metavar="N", help="also train the whole draft for N steps")
    parser.add_argument("--output", metavar="FOLDER", help="keep the fine-tuned target, its text and the adapter there, and go on from what is there")
    parser.add_argument("--json", metavar="FILE", help="write the figures to this file too")
    return parser


def modules_of(package: str) -> dict[str, str]:
    """Raises ValueError where there is no such package."""
    specification = importlib.util.find_spec(package)
    if specification is None or not specification.submodule_search_locations:
        raise ValueError(f"--package must name an installed package, got {package!r}")
    return source_modules(Path(specification.submodule_search_locations[0]))


def trainer_options(folder: Path, steps: int, learning_rate: float, rows: int) -> dict:
    """What both trainings have in common."""
    options = dict(output_dir=str(folder), max_steps=steps, learning_rate=learning_rate, per_device_train_batch_size=rows)
    schedule = dict(lr_scheduler_type="cosine", warmup_steps=max(1, steps // 20))
    return {
        **options,
        **schedule,
        "bf16": True,
        "use_cpu": not torch.cuda.is_available(),
        "save_strategy": "no",
        "report_to": "none",
        "logging_steps": max(1, steps // 10),
        "seed": 0,
    }


def fine_tune(target: str, texts: list[str], folder: Path, arguments) -> None:
    """Goes on training all of the target's weights on `texts`."""
    tokenizer, model = AutoTokenizer.from_pretrained(target), AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    options = TrainingArguments(**trainer_options(folder, arguments.fine_tuning_steps, 1e-3, 16))
    Trainer(model=model, args=options, train_dataset=pack(tokenizer, texts, 256)).train()
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def write_rows(target: Path, texts: list[str], file: Path, arguments) -> None:
    """Beginnings of 32 tokens, cut from the texts at random places, continued by the target."""
    tokenizer, model = AutoTokenizer.from_pretrained(target), AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    stream = pack(tokenizer, texts, 32)
    places = torch.randint(len(stream), (arguments.rows,), generator=torch.Generator().manual_seed(0)).tolist()
    prompts = [{"input_ids": stream[place]["input_ids"], "do_sample": row % 2 == 1, "seed": row} for row, place in enumerate(places)]
    num_written = 0
    with file.with_suffix(".unfinished").open("w", encoding="utf-8") as lines:
        for completion in generate_many(model, None, prompts, max_concurrency=128, max_new_tokens=arguments.new_tokens, top_k=0, top_p=1.0):
            if completion.error is not None:
                raise completion.error
            lines.write(json.dumps({"input_ids": completion.output[0].tolist()}) + "\n")
            num_written = completion.index + 1
    if num_written < len(prompts):  # after Ctrl-C generate_many ends in good order
        raise KeyboardInterrupt
    file.with_suffix(".unfinished").replace(file)


def distilled(folder: Path, draft: str, target: Path, arguments, steps: int, rank: int | None) -> Path:
    """The folder of the adapter, or of the whole draft where `rank` is None."""
    output = folder / ("whole" if rank is None else "adapter")
    data = dict(target=str(target), dataset=str(folder / "rows.jsonl"), init_draft=draft, num_held_out=32, max_length=256, num_anchors=64)
    options = trainer_options(output, steps, arguments.learning_rate, 8)
    return distill(DistillationArguments(**data, **options, lora_rank=rank, eval_strategy="no"))


def measured(draft: str, target: str, texts: list[str], arguments) -> dict:
    """evaluate_pair's summaries on the first 64 tokens of each of `texts`."""
    pair = load_pair(draft, target, dtype="float32")
    ids = pair.tokenizer(texts, truncation=True, max_length=65)["input_ids"]
    return evaluate_pair(pair, [torch.tensor([row], device=pair.target.device) for row in ids], arguments.new_tokens)


def recovered(figures: dict[str, dict]) -> dict[str, dict[str, float]]:
    """Of every pair after the second: the share of the tau lost by fine-tuning that it has back; nan where none was lost."""
    own, lost, *rest = figures
    tau = {name: {way: summaries[way]["tokens_per_round"] for way in WAYS} for name, summaries in figures.items()}
    lack = {way: tau[own][way] - tau[lost][way] for way in WAYS}
    return {name: {way: (tau[name][way] - tau[lost][way]) / lack[way] if lack[way] > 0 else math.nan for way in WAYS} for name in rest}


def render(figures: dict[str, dict]) -> str:
    """One row a pair: tau, repeated 8-grams and the share recovered, greedy and at temperature 1."""
    shares, rows = recovered(figures), []
    for name, summaries in figures.items():
        cells = [name]
        for way in WAYS:
            cells += [f"{summaries[way]['tokens_per_round']:.2f}", f"{100 * summaries[way]['repeated_8gram_share']:.1f} %"]
            cells.append(f"{100 * shares[name][way]:.0f} %" if name in shares else "-")
        rows.append(cells)
    return table(["", "greedy tau", "repeated 8-grams", "recovered", "tau at temperature 1", "repeated 8-grams", "recovered"], rows)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (ValueError, OSError) as error:
        print("adapter.py:", " ".join(str(error).split()), file=sys.stderr)
        sys.exit(2)
