"""The model card of a draft, from its config, what its training left, and a measurement."""

import hashlib
import json
import math
import shlex
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from huggingface_hub import ModelCardData
from jinja2 import Environment, StrictUndefined
from peft import PeftModel
from transformers import PreTrainedModel

from hf_dspark.hub.engines import engine_command, engine_obstacles
from hf_dspark.modeling import DSparkConfig, DSparkDraftModel
from hf_dspark.modeling.uploading import TAGS, is_hub_id, public_name, without_paths

__all__ = ["DraftCard", "write_draft_card"]

_FIGURES = ("completions", "tokens_per_round", "conditional_acceptance")
_VARIED = ("repeated_8gram_share", "tokens_per_round_below_30_percent_repeated", "completions_below_30_percent_repeated")
# Options of a training that a reader of the card looks for; training_args.json has all.
_TRAINING_OPTIONS = (
    *("max_length", "packing", "num_anchors", "init_draft", "warm_start", "lora_rank", "lora_alpha", "ce_weight", "l1_weight"),
    *("confidence_weight", "decay_gamma", "features", "features_dtype", "features_rank", "cache_budget", "muon"),
    *("learning_rate", "lr_scheduler_type", "warmup_steps", "per_device_train_batch_size", "gradient_accumulation_steps", "bf16", "fp16", "seed"),
)
_REPORTED = {
    "steps": "steps",
    "num_train_rows": "training rows",
    "eval_tau": "tokens a round on held-out rows, estimated from the overlap of both models' laws",
    "eval_loss": "loss on held-out rows",
}


_PLACEHOLDERS = {
    "TARGET": "`TARGET` stands for the model that the draft was trained for, which its config does not name.",
    "DRAFT": "`DRAFT` stands for this repository's name, or a folder with its files.",
    "ADAPTED": "`ADAPTED` stands for the draft that the adapter was trained on.",
}


@dataclass(slots=True, kw_only=True)
class DraftCard:
    """What a card says beyond the draft's config. What is None is left out, with its line; nothing is guessed.

    Args:
        arguments: options of the training (`DistillationArguments.to_dict()`, which masks tokens).
        report: what `hf-dspark distill` writes to distillation.json.
        evaluation: a file that `hf-dspark evaluate --json` wrote about this draft.
        machine: the machine that it was measured on, in words.
        license: the draft's, as the Hub spells it.
        repo_id: repository that the card is for; None: `hub_model_id` of the arguments.
        regenerated_share: share of the training rows, 0 to 1, that the base model wrote itself.
        sampling: how it wrote them, in words.
        chat_template_sha256: of the template that rendered the conversations.
        calibration: how the confidence estimates were calibrated, in words; None: they were not.
            These last four are taken from the report where they are None and it has them, then from the `training_data` of the draft's config.

    Raises:
        ValueError: regenerated_share lies outside [0, 1].
    """

    arguments: dict | None = None
    report: dict | None = None
    evaluation: str | Path | None = None
    machine: str | None = None
    license: str | None = None
    repo_id: str | None = None
    regenerated_share: float | None = None
    sampling: str | None = None
    chat_template_sha256: str | None = None
    calibration: str | None = None

    def __post_init__(self):
        self.arguments, self.report = self.arguments or {}, self.report or {}
        self.repo_id = self.repo_id or self.arguments.get("hub_model_id")
        for name in ("regenerated_share", "sampling", "chat_template_sha256", "calibration"):
            if getattr(self, name) is None:
                setattr(self, name, self.report.get(name))
        if self.regenerated_share is not None and not 0.0 <= self.regenerated_share <= 1.0:
            raise ValueError(f"regenerated_share must lie in [0, 1], got {self.regenerated_share}")

    @classmethod
    def from_folder(cls, folder: str | Path, **facts) -> "DraftCard":
        """A card from what training left in `folder` (training_args.json and distillation.json; either may be missing) and `facts`: to
        write it anew when more is known, such as a measurement."""
        for name, file in (("arguments", "training_args.json"), ("report", "distillation.json")):
            if (Path(folder) / file).exists():
                facts.setdefault(name, _read_json(Path(folder) / file))
        return cls(**facts)


def write_draft_card(draft: DSparkDraftModel | PeftModel, folder: str | Path, card: DraftCard) -> Path:
    """Writes README.md to `folder`, in place of another, and training_args.json where `card.arguments` are given. Returns the card's path.

    A PEFT-wrapped `draft` gets the card of its adapter. Whether serving engines can use the draft is read off its target where one is bound.

    Raises:
        ValueError: the evaluation is of a draft of another block size, or no file of `hf-dspark evaluate --json`.
        OSError: the evaluation can't be read, or the folder not be written.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    text = _render(draft, card)
    if card.arguments:
        (folder / "training_args.json").write_text(_dump(card.arguments), encoding="utf-8")
    (folder / "README.md").write_text(text, encoding="utf-8")
    return folder / "README.md"


def _render(wrapped: DSparkDraftModel | PeftModel, card: DraftCard) -> str:
    is_adapter = isinstance(wrapped, PeftModel)
    draft = wrapped.get_base_model() if is_adapter else wrapped
    config, base = draft.config, draft.config.base_model_name_or_path
    adapted = wrapped.active_peft_config.base_model_name_or_path if is_adapter else None
    metadata = _metadata(config, card, adapted).to_yaml()
    base, adapted = (name and public_name(name) for name in (base, adapted))
    base_title = base and base.removeprefix("./")
    target, names = _bound_target(draft), {"TARGET": base, "DRAFT": card.repo_id, **({"ADAPTED": adapted} if is_adapter else {})}
    revision = f" (revision `{config.base_model_revision}`)" if config.base_model_revision else ""
    engines = engine_obstacles(draft, target, is_adapter)
    environment = Environment(undefined=StrictUndefined, trim_blocks=True, keep_trailing_newline=True)
    template = environment.from_string(files("hf_dspark.model_cards").joinpath("draft.md.jinja").read_text(encoding="utf-8"))
    return template.render(
        metadata=metadata,
        title=("Adapter of a DSpark draft" if is_adapter else "DSpark draft") + (f" for {base_title}" if base else ""),
        base=f"`{base_title}`{revision}" if base else "the base model that it was trained for",
        block_size=config.block_size,
        is_slim=not draft.stored_tables,
        is_adapter=is_adapter,
        literals={name: json.dumps(value or name, ensure_ascii=False) for name, value in names.items()},
        placeholders=[_PLACEHOLDERS[name] for name, value in names.items() if not value],
        engines=[(name, obstacles, engine_command(name, base or "TARGET", card.repo_id or "DRAFT", config)) for name, obstacles in engines.items()],
        engine_notes=_engine_notes(engines, target),
        acceptance=None if card.evaluation is None else _acceptance(config, card),
        decoded=_decoded_in_training(card),
        data=_data(card, config.to_dict().get("training_data") or {}),
        training=_training(card),
        shape=_shape(config, card),
        limits=_limits(config, card),
    )


def _bound_target(draft: DSparkDraftModel) -> PreTrainedModel | None:
    try:
        return draft.tables.target
    except ValueError:
        return None


def _metadata(config: DSparkConfig, card: DraftCard, adapted: str | None) -> ModelCardData:
    base = next((name for name in (adapted, config.base_model_name_or_path) if is_hub_id(name)), None)
    return ModelCardData(
        base_model=base,
        # Of the relations that the Hub knows: a small addition to a base model, of no use without it.
        base_model_relation=base and "adapter",
        datasets=[name for name in _datasets(card) if _is_hub_dataset(name)] or None,
        library_name="hf-dspark",
        license=card.license,
        pipeline_tag="text-generation",
        tags=TAGS,
    )


def _datasets(card: DraftCard) -> list[str]:
    return [name for name in (card.arguments.get("dataset"), *(card.arguments.get("extra_rows") or [])) if name]


def _is_hub_dataset(name: str) -> bool:
    return name != "stdlib" and Path(name).suffix not in (".jsonl", ".json", ".parquet", ".txt") and is_hub_id(name)


def _engine_notes(engines: dict[str, list[str]], target: PreTrainedModel | None) -> list[str]:
    if all(engines.values()):
        return []
    notes = ["These commands follow the engines' documentation; this draft has not been measured there."]
    if target is None:
        notes.append(
            "Where the base model scales its embedding or its logits, or caps them, as Gemma, Granite and Cohere models do, use transformers: "
            "engines are not known to do so for a draft."
        )
    return notes


def _acceptance(config: DSparkConfig, card: DraftCard) -> dict:
    measured = _read_json(card.evaluation)
    missing = [name for name in ("greedy", "sampled", "options", "block_size", "dtype") if name not in measured]
    missing += [f"{part}.{name}" for part in ("greedy", "sampled") for name in _FIGURES if name not in measured.get(part, _FIGURES)]
    if missing or "command" not in measured["options"]:
        raise ValueError(f"{card.evaluation} has no {', '.join(missing) or 'options.command'}; write it with `hf-dspark evaluate --json`")
    if measured["block_size"] != config.block_size:
        raise ValueError(f"{card.evaluation} is about a draft of block_size {measured['block_size']}, this one has {config.block_size}")
    options = dict(measured["options"])
    command, temperature = options.pop("command"), options.pop("temperature", None)
    sampled = "sampled" if temperature is None else f"temperature {temperature:g}"
    words = (f"{name.replace('held_out', 'held-out').replace('_', ' ')} {value}" for name, value in without_paths(options).items())
    conditions = [measured["dtype"], *words]
    return {
        "command": _public_command(command),
        "conditions": [*conditions, *([f"on {card.machine}"] if card.machine else [])],
        "rows": [_acceptance_row("greedy", measured["greedy"]), _acceptance_row(sampled, measured["sampled"])],
    }


def _decoded_in_training(card: DraftCard) -> dict | None:
    """What the training's last evaluation decoded; None: nothing."""
    names = {"": "greedy", "sampled_": f"temperature {card.arguments.get('eval_temperature') or 1:g}" if card.arguments else "sampled"}
    rows = []
    for way, decoding in names.items():
        tau, share = (card.report.get(f"eval_{way}{name}") for name in ("tokens_per_round", "repeated_8gram_share"))
        if tau is not None and math.isfinite(tau):
            rows.append({"decoding": decoding, "tau": _figure(tau), "repeated": "-" if share is None else f"{100 * share:.1f} %"})
    if not rows:
        return None
    most = [card.arguments[name] for name in ("eval_prompts", "num_held_out", "max_eval_rows") if name in card.arguments]
    prompts = f"up to {min(most)} held-out prompts" if most else "held-out prompts"
    length = f", up to {card.arguments['eval_new_tokens']} new tokens each" if "eval_new_tokens" in card.arguments else ""
    return {"rows": rows, "where": prompts + length}


def _acceptance_row(decoding: str, summary: dict) -> dict:
    varied = None
    if all(name in summary for name in _VARIED):
        share, tau, count = (summary[name] for name in _VARIED)
        varied = f"{100 * share:.1f} % | {_figure(tau)} ({count} of {summary['completions']})"
    acceptance = ", ".join(map(_figure, summary["conditional_acceptance"])) or "-"
    return {"decoding": decoding, "tau": _figure(summary["tokens_per_round"]), "varied": varied, "acceptance": acceptance}


def _public_command(command: str) -> str:
    """`command` without paths of the machine it was given on."""
    words = []
    for word in shlex.split(command):
        option, equals, value = word.partition("=") if word.startswith("--") else ("", "", word)
        words.append(option + equals + without_paths(value))
    return shlex.join(words)


def _data(card: DraftCard, training_data: dict) -> list[tuple[str, str]]:
    thinking = card.arguments.get("enable_thinking")
    share = training_data.get("regenerated_share") if card.regenerated_share is None else card.regenerated_share
    template = card.chat_template_sha256 or training_data.get("chat_template_sha256")
    return _rows(
        ("dataset", ", ".join(_data_name(name) for name in _datasets(card)) or None),
        ("written by the base model itself", None if share is None else f"{100 * share:.3g} % of the rows"),
        ("how it wrote", card.sampling or training_data.get("sampling")),
        ("chat template (SHA-256)", template and f"`{template}`"),
        ("thinking", None if thinking is None else ("on" if thinking else "off")),
    )


def _data_name(name: str) -> str:
    if name == "stdlib":
        return "Python's standard library"
    # A path here means nothing elsewhere.
    return f"`{name}`" if _is_hub_dataset(name) else f"`{Path(name).name}` (local)"


def _training(card: DraftCard) -> list[tuple[str, str]]:
    rows = [(words, _figure(card.report[name])) for name, words in _REPORTED.items() if card.report.get(name) is not None]
    arguments = dict(card.arguments)
    if arguments.get("features") != "cached":
        arguments = {name: value for name, value in arguments.items() if not name.startswith("features")}
    if arguments.get("lora_rank") and arguments.get("lora_alpha") is None:
        arguments["lora_alpha"] = 2 * arguments["lora_rank"]
    for name in _TRAINING_OPTIONS:
        value = arguments.get(name)
        if value is not None and value is not False:
            rows.append((f"`{name}`", f"`{Path(value).name if name == 'init_draft' and not is_hub_id(value) else value}`"))
    if card.arguments:
        rows.append(("all options: `training_args.json` (SHA-256)", f"`{hashlib.sha256(_dump(card.arguments).encode()).hexdigest()}`"))
    return _rows(*rows)


def _shape(config: DSparkConfig, card: DraftCard) -> list[tuple[str, str]]:
    head = f"{config.markov_head_type}, rank {config.markov_rank}" if config.markov_rank else "none"
    size = f"{config.draft_vocab_size:,} of " if config.draft_vocab_size is not None else ""
    return _rows(
        ("block", f"{config.block_size} tokens a round"),
        ("layers", f"{config.num_hidden_layers}, hidden size {config.hidden_size}"),
        ("layers of the base model that it reads", f"{', '.join(map(str, config.target_layer_ids))} of {config.num_target_layers} (outputs, from 0)"),
        ("Markov head", head),
        ("confidence head", f"yes, {card.calibration or 'not calibrated'}" if config.enable_confidence_head else "none"),
        ("vocabulary", f"{size}the base model's {config.vocab_size:,} tokens"),
    )


def _limits(config: DSparkConfig, card: DraftCard) -> list[str]:
    limits = [
        "It is made for its base model alone, whose layers it reads and whose embedding and output head it borrows. A model fine-tuned from that one "
        "still writes its own text, but may accept fewer drafts, and then is no faster, or slower.",
        "What is written follows the base model's own law, with greedy decoding its own text. Rounding can part the two at near ties, in "
        "bfloat16 more often than in float32.",
    ]
    if config.enable_confidence_head and card.calibration is None:
        limits.append("Its confidence estimates are not calibrated: a threshold on them is no probability.")
    if config.draft_vocab_size is not None:
        limits.append(f"It never proposes a token outside its {config.draft_vocab_size:,}; where the base model writes one, the round ends.")
    if card.arguments.get("max_length"):
        limits.append(f"It was trained on texts of up to {card.arguments['max_length']:,} tokens; less may be accepted in longer ones.")
    return limits


def _rows(*rows: tuple[str, str | None]) -> list[tuple[str, str]]:
    """Rows of a table that have a value, each on one line."""
    return [(name, " ".join(str(value).replace("|", "\\|").split())) for name, value in rows if value is not None]


def _figure(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:.2f}"


def _read_json(path: str | Path) -> dict:
    try:
        values = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(values).__name__}")
    return values


def _dump(arguments: dict) -> str:
    return json.dumps(without_paths(arguments), indent=2, ensure_ascii=False) + "\n"
