"""The model card of the bundled pair, from the files its recipes and measurements wrote: `hf-dspark card`."""

import hashlib
import json
import math
import platform
from importlib.resources import files
from pathlib import Path

from huggingface_hub import ModelCard, ModelCardData
from safetensors import safe_open
from transformers import AutoConfig

from hf_dspark.modeling import DSparkDraftModel

__all__ = ["pair_card"]

RECIPES = ("stdlib_target.yaml", "stdlib_regenerate.yaml", "stdlib_draft.yaml")


def pair_card(target: Path, draft: Path, evaluation: Path, machine: str) -> str:
    """The card's text.

    Args:
        target: folder with the target and `pretraining.json`. draft: folder with the draft.
        evaluation: what `hf-dspark evaluate --json` wrote. machine: the machine it was measured on, in words.

    Raises:
        OSError: one of these files is missing. ValueError: one of them is not what it should be.
    """
    pretraining = json.loads((target / "pretraining.json").read_text(encoding="utf-8"))
    measured = json.loads(evaluation.read_text(encoding="utf-8"))
    for name in ("greedy", "sampled", "options"):
        if name not in measured:
            raise ValueError(f"{evaluation} has no {name!r}; write it with `hf-dspark evaluate --json`")
    target_config, draft_config = AutoConfig.from_pretrained(target), DSparkDraftModel.from_pretrained(draft).config
    options = measured["options"]
    return ModelCard.from_template(
        ModelCardData(license="apache-2.0", library_name="hf-dspark"),
        template_str=files("hf_dspark.model_cards").joinpath("pair.md.jinja").read_text(encoding="utf-8"),
        title="hf-dspark: a pair on Python's standard library",
        target_parameters=_parameters(target),
        target_shape=f"Qwen3, {target_config.num_hidden_layers} layers, hidden {target_config.hidden_size}, vocabulary {target_config.vocab_size}",
        draft_parameters=_parameters(draft),
        draft_shape=f"{draft_config.num_hidden_layers} layers, block {draft_config.block_size}, {draft_config.markov_head_type} Markov head of rank "
        f"{draft_config.markov_rank}, target layers {draft_config.target_layer_ids}",
        num_train_modules=pretraining["num_train_modules"],
        num_held_out_modules=len(pretraining["held_out_modules"]),
        train_tokens=f"{pretraining['train_tokens_seen']:,}",
        python_version=platform.python_version(),
        recipes=[(name, hashlib.sha256(files("hf_dspark.recipes").joinpath(name).read_bytes()).hexdigest()) for name in RECIPES],
        bits_per_byte=f"{pretraining['held_out_bits_per_byte']:.3f}",
        block_size=draft_config.block_size,
        num_modules=measured["greedy"]["completions"],
        new_tokens=options["max_new_tokens"],
        prompt_tokens=options["prompt_tokens"],
        rows=[_row("greedy", measured["greedy"]), _row(f"temperature {options['temperature']:g}", measured["sampled"])],
        command=options["command"],
        machine=machine,
    ).content


def _row(decoding: str, summary: dict) -> dict[str, str]:
    varied = summary["tokens_per_round_below_30_percent_repeated"]  # None: every completion repeats itself
    return {
        "decoding": decoding,
        "tau": f"{summary['tokens_per_round']:.2f}",
        "repeated": f"{100 * summary['repeated_8gram_share']:.1f} %",
        "tau_low": "-" if varied is None else f"{varied:.2f}",
        "num_low": f"{summary['completions_below_30_percent_repeated']} of {summary['completions']}",
        "acceptance": ", ".join(f"{rate:.2f}" for rate in summary["conditional_acceptance"]),
    }


def _parameters(folder: Path) -> str:
    with safe_open(folder / "model.safetensors", framework="pt") as tensors:
        total = sum(math.prod(tensors.get_slice(name).get_shape()) for name in tensors.keys())  # noqa: SIM118 (an open file is no dict)
    return f"{total / 1e6:.1f}M"
