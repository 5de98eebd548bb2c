"""Checkpoints that a kill during saving leaves torn, or that are of another draft, are never gone on from."""

import json
import logging
from pathlib import Path

from peft import PeftModel

from hf_dspark.modeling import DSparkConfig, DSparkDraftModel

__all__ = ["SHAPE_OPTIONS", "check_same_draft", "checkpoint_to_resume", "forget_whole", "is_whole", "whole_checkpoints"]

logger = logging.getLogger(__name__)

# The Trainer writes it last.
_STATE_FILE = "trainer_state.json"
# Options that shape a draft, with their names in its config.
SHAPE_OPTIONS = {"num_draft_layers": "num_hidden_layers"} | {
    name: name
    for name in (
        *("block_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "target_layer_ids", "markov_rank"),
        *("markov_head_type", "enable_confidence_head", "confidence_head_with_markov", "mask_token_id", "draft_vocab_size"),
    )
}
# What else a draft's weights follow from: the target.
_TARGET_SHAPE = ("hidden_size", "vocab_size", "num_target_layers")


def checkpoint_to_resume(resume_from_checkpoint: str | bool | None, output_dir: str) -> str | None:
    """The folder that `resume_from_checkpoint` means; True: the newest whole checkpoint of `output_dir`, torn ones are passed over with a warning.

    Raises:
        ValueError: the folder named is torn, or True and there is no whole one.
    """
    word = str(resume_from_checkpoint).lower()  # transformers' option is a text, also where a flag says True
    if not resume_from_checkpoint or word == "false":
        return None
    if word != "true":
        if not is_whole(resume_from_checkpoint):
            raise ValueError(
                f"resume_from_checkpoint={str(resume_from_checkpoint)!r} is no whole checkpoint: its {_STATE_FILE}, which is written last, is "
                "missing or cut off; go on from an earlier one"
            )
        return str(resume_from_checkpoint)
    for folder in _checkpoints(output_dir):
        if is_whole(folder):
            return str(folder)
        logger.warning("%s is torn (its saving was interrupted), the one before it is taken", folder)
    raise ValueError(f"resume_from_checkpoint=True finds no whole checkpoint in {output_dir!r}; leave it out to start anew")


def whole_checkpoints(output_dir: str) -> list[Path]:
    """The whole checkpoints of `output_dir`, the newest first."""
    return [folder for folder in _checkpoints(output_dir) if is_whole(folder)]


def _checkpoints(output_dir: str) -> list[Path]:
    """Whole or torn, the newest first."""
    return sorted((path for path in Path(output_dir).glob("checkpoint-*") if path.name[11:].isdigit()), key=lambda path: -int(path.name[11:]))


def check_same_draft(checkpoint: str, draft: DSparkDraftModel | PeftModel) -> None:
    """The draft in the folder `checkpoint` must have the options of `draft`, which goes on from it. Sharded checkpoints don't say theirs.

    Raises:
        ValueError: it hasn't; the message has the names and both values.
    """
    ours, theirs = _options(draft), _saved_options(Path(checkpoint))
    # Of an adapter and a whole draft that alone is told.
    names = ours.keys() & theirs.keys() or {"lora_rank"} if theirs else ()
    different = [f"{name} {theirs.get(name)!r} there, {ours.get(name)!r} now" for name in sorted(names) if theirs.get(name) != ours.get(name)]
    if different:
        raise ValueError(
            f"resume_from_checkpoint: {checkpoint} is of a draft with other options: {'; '.join(different)}; set them as they were, or train anew "
            "in another output_dir"
        )


def _options(draft: DSparkDraftModel | PeftModel) -> dict:
    if isinstance(draft, PeftModel):
        config = draft.active_peft_config
        return {"lora_rank": config.r, "lora_alpha": config.lora_alpha, "lora_target_modules": sorted(config.target_modules)}
    return _shape(draft.config)


def _saved_options(folder: Path) -> dict:
    if (folder / "adapter_config.json").exists():
        config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
        return {"lora_rank": config["r"], "lora_alpha": config["lora_alpha"], "lora_target_modules": sorted(config["target_modules"])}
    if (folder / "config.json").exists():
        return _shape(DSparkConfig.from_dict(json.loads((folder / "config.json").read_text(encoding="utf-8"))))
    return {}


def _shape(config: DSparkConfig) -> dict:
    values = config.to_dict()  # leaves out what an absent head would be
    return {name: values.get(own) for name, own in (*SHAPE_OPTIONS.items(), *zip(_TARGET_SHAPE, _TARGET_SHAPE))}


def is_whole(folder: str | Path) -> bool:
    """Whether the saving of the Trainer's checkpoint in `folder` came to its end."""
    try:
        return isinstance(json.loads((Path(folder) / _STATE_FILE).read_text(encoding="utf-8"))["global_step"], int)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def forget_whole(folder: str | Path) -> None:
    """Marks the checkpoint in `folder`, if there is one, as torn: it is about to be written anew."""
    (Path(folder) / _STATE_FILE).unlink(missing_ok=True)
