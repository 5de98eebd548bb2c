"""A LoRA adapter of an existing draft in place of a new draft: for a target that was itself fine-tuned, or for a new domain."""

import os
import tempfile
import warnings
from pathlib import Path

from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn

from hf_dspark.distillation.arguments import DistillationArguments
from hf_dspark.modeling import DSparkDraftModel

__all__ = ["add_adapter", "save_adapter"]


def add_adapter(draft: DSparkDraftModel, args: DistillationArguments) -> PeftModel:
    """`draft` with a fresh LoRA adapter over its linear layers, or those that `args.lora_target_modules` names; only the adapter is trained.

    Raises:
        ValueError: one of the names is no module's, or of one that can't be adapted.
    """
    modules = dict(draft.named_modules())
    if unknown := [name for name in args.lora_target_modules or [] if not any(f".{path}".endswith(f".{name}") for path in modules)]:
        linear = sorted({path.rsplit(".", 1)[-1] for path, module in modules.items() if isinstance(module, nn.Linear)})
        raise ValueError(
            f"lora_target_modules={args.lora_target_modules}: {', '.join(unknown)} not found in the draft, which has {', '.join(linear)}"
        )
    config = LoraConfig(
        r=args.lora_rank, lora_alpha=args.lora_alpha or 2 * args.lora_rank, target_modules=args.lora_target_modules or "all-linear", lora_dropout=0.0
    )
    try:
        with warnings.catch_warnings():
            # PEFT asks by the name that transformers is about to drop.
            warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing", category=FutureWarning)
            return get_peft_model(draft, config)
    except ValueError as error:
        raise ValueError(f"lora_target_modules={args.lora_target_modules}: {error}") from error


def save_adapter(draft: PeftModel, folder: Path) -> None:
    """Writes the adapter alone to `folder`, each file whole or not at all, the weights last."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as unfinished:
        draft.save_pretrained(unfinished)
        for name in ("adapter_config.json", "adapter_model.safetensors"):
            os.replace(Path(unfinished) / name, folder / name)
