"""What can be known to go wrong before any data is read: folders written to or read, what the target allows, options without effect."""

import json
import logging
from dataclasses import fields
from pathlib import Path

from transformers import PreTrainedModel

from hf_dspark.distillation.arguments import DistillationArguments
from hf_dspark.distillation.feature_writing import check_features_dir
from hf_dspark.distillation.resumption import SHAPE_OPTIONS, checkpoint_to_resume, whole_checkpoints
from hf_dspark.generation.context_limits import ContextLimits
from hf_dspark.modeling import DSparkConfig
from hf_dspark.modeling.checkpoints import unsupported_format

__all__ = ["check_cached_features", "check_context", "check_held_out", "check_output_dir", "checked_folders", "warn_of_ignored_options"]

logger = logging.getLogger(__name__)


def checked_folders(args: DistillationArguments) -> str | None:
    """The checkpoint to go on from, if any, once it is known that `args.output_dir` can be written to without harm.

    Raises:
        ValueError: see `check_output_dir`; there is no such checkpoint, or there are those of another training.
    """
    check_output_dir(args)
    checkpoint, found = checkpoint_to_resume(args.resume_from_checkpoint, args.output_dir), whole_checkpoints(args.output_dir)
    is_own = checkpoint is not None and Path(checkpoint).resolve().parent == Path(args.output_dir).resolve()
    # `resume_from_checkpoint: true` would later take them for this training's, and save_total_limit would count them.
    if found and not is_own:
        raise ValueError(
            f"output_dir={args.output_dir!r} holds checkpoints of an earlier training ({found[0].name}); go on from there with "
            "resume_from_checkpoint: true, choose another output_dir, or remove them"
        )
    return checkpoint


def check_output_dir(args: DistillationArguments) -> None:
    """The folder that is written to must be no other model's, and hold nothing of another kind than what is written.

    Raises:
        ValueError: it is the target's or the initial draft's folder; it holds a model that is no draft, or an adapter where a whole draft
            is written, or the reverse.
    """
    output = Path(args.output_dir)
    for option in ("target", "init_draft"):
        model = getattr(args, option)
        if model is not None and output.is_dir() and Path(model).is_dir() and output.samefile(model):
            raise ValueError(
                f"output_dir={args.output_dir!r} is the folder of {option}={model!r}, which would be overwritten; choose another output_dir"
            )
    if (problem := _not_a_draft(output / "config.json")) is not None:
        raise ValueError(f"output_dir={args.output_dir!r} holds a model that is no DSpark draft: {problem}; choose another folder")
    adapter = [name for name in ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin") if (output / name).exists()]
    whole = [path.name for path in (output / "config.json", *sorted(output.glob("model*.safetensors"))) if path.exists()]
    if args.lora_rank is None and adapter:
        raise ValueError(
            f"output_dir={args.output_dir!r} holds an adapter ({adapter[0]}), which would be taken for the whole draft that is written there; "
            "choose another folder, or remove the adapter's files"
        )
    if args.lora_rank is not None and whole:
        raise ValueError(
            f"output_dir={args.output_dir!r} holds a whole model ({whole[0]}), and lora_rank={args.lora_rank} writes an adapter, which must lie "
            "alone; choose another folder"
        )


def _not_a_draft(config_file: Path) -> str | None:
    """Why `config_file` is none of a draft; None: it is one, or there is no such file."""
    if not config_file.exists():
        return None
    try:
        values = json.loads(config_file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return f"its config.json can't be read ({error})"
    return unsupported_format(values) if isinstance(values, dict) else "its config.json holds no options"


def check_held_out(args: DistillationArguments) -> None:
    """Raises ValueError where evaluations are asked for and no row is kept for them."""
    if args.eval_strategy != "no" and not min(args.num_held_out, args.max_eval_rows):
        raise ValueError(
            f"eval_strategy={str(args.eval_strategy.value)!r} needs rows to evaluate on, but num_held_out={args.num_held_out} and "
            f"max_eval_rows={args.max_eval_rows}; raise both above 0, or set eval_strategy: 'no'"
        )


def check_context(args: DistillationArguments, target: PreTrainedModel) -> None:
    """Raises ValueError where rows, or decoded prompts, are longer than `target`'s context."""
    context = ContextLimits.of(target.config).context
    if context is None:
        return
    if args.max_length > context:
        raise ValueError(f"max_length={args.max_length} is beyond the context of {args.target}, {context} tokens; set it to {context} or less")
    if args.eval_prompts and args.num_held_out and args.eval_new_tokens >= context:
        raise ValueError(
            f"eval_new_tokens={args.eval_new_tokens} leave no room for a prompt in the context of {args.target}, {context} tokens; lower it, or set "
            "eval_prompts=0"
        )


def check_cached_features(args: DistillationArguments, target: PreTrainedModel, config: DSparkConfig, chat_template: str | None) -> None:
    """Raises ValueError where `args.features_dir` holds features of another target, or others than a draft with `config` reads."""
    if args.features == "cached":
        check_features_dir(args, target, config.target_layer_ids, chat_template, with_partition=config.draft_vocab_size is not None)


def warn_of_ignored_options(args: DistillationArguments, config: DSparkConfig) -> None:
    """Warns of options for new drafts that say otherwise than `config`, of the draft at hand, which decides."""
    defaults = {option.name: option.default for option in fields(args)}
    ignored = [
        f"{name}={getattr(args, name)!r} (the draft's: {getattr(config, own)!r})"
        for name, own in SHAPE_OPTIONS.items()
        if getattr(args, name) not in (defaults[name], getattr(config, own))
    ]
    if ignored:
        logger.warning("init_draft=%r keeps its own shape; without effect: %s", args.init_draft, ", ".join(ignored))
