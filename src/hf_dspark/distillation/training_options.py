"""The options of transformers' Trainer that can't work for a draft, or not on this machine, and those that train nothing."""

from typing import TYPE_CHECKING

import torch
from transformers.integrations import get_available_reporting_integrations
from transformers.training_args import OptimizerNames

if TYPE_CHECKING:
    from hf_dspark.distillation.arguments import DistillationArguments

__all__ = ["check_training_options", "whole_weights_prevented_by"]

# transformers has them, but its list of what is installed leaves them out.
_UNLISTED = ("azure_ml", "flyte")
_NO_OPTION = {"use_liger_kernel": "Liger's kernels replace parts of models that they know, of which a draft is none"}
_NO_OPTION["neftune_noise_alpha"] = "the noise goes into an embedding of the model's own, and a draft borrows its target's"


def check_training_options(args: "DistillationArguments") -> None:
    """Raises ValueError where nothing would be trained, or the Trainer is asked for what it can't do with a draft, or not here."""
    if args.max_steps == 0 or (args.max_steps < 0 and args.num_train_epochs <= 0):
        raise ValueError(f"max_steps={args.max_steps} and num_train_epochs={args.num_train_epochs} train no step; set one of them above 0")
    # Whether a draft at hand has a confidence head its own config says.
    has_confidence = args.enable_confidence_head or args.init_draft is not None
    if not args.ce_weight and not args.l1_weight and not (args.confidence_weight and has_confidence):
        raise ValueError(
            f"ce_weight={args.ce_weight}, l1_weight={args.l1_weight}, confidence_weight={args.confidence_weight} "
            f"(enable_confidence_head={args.enable_confidence_head}) leave nothing to learn; give one of the losses a positive weight"
        )
    for name, reason in _NO_OPTION.items():
        if getattr(args, name):
            raise ValueError(f"{name}={getattr(args, name)!r}: {reason}; leave it out")
    _check_reporting(args.report_to)
    if args.muon:
        _check_muon(args)


def whole_weights_prevented_by(args: "DistillationArguments") -> str | None:
    """The option, with its value, by which no process trains a whole weight of the draft; None: there is none."""
    options = (("lora_rank", args.lora_rank), ("fsdp", args.fsdp), ("deepspeed", args.deepspeed))
    return next((f"{name}={value!r}" for name, value in options if value), None)


def _check_muon(args: "DistillationArguments") -> None:
    if not hasattr(torch.optim, "Muon"):
        raise ValueError(f"muon=True needs torch 2.9 or later, this is {torch.__version__}; leave it out")
    # Muon's update of a matrix needs the whole of it; an adapter's two halves are no maps between hidden states.
    if option := whole_weights_prevented_by(args):
        raise ValueError(f"muon=True trains whole matrices, which {option} leaves it none of; leave one out")
    optim = OptimizerNames(args.optim).value  # a command line's is still text
    if optim not in ("adamw_torch", "adamw_torch_fused"):
        raise ValueError(f"muon=True stands beside AdamW (its learning rate is made for both), got optim={optim!r}; leave optim out")


def _check_reporting(report_to: str | list[str] | None) -> None:
    names = [report_to] if isinstance(report_to, str) else list(report_to or [])
    if not set(names) - {"all", "none"}:
        return
    usable = get_available_reporting_integrations()
    if missing := [name for name in names if name not in (*usable, *_UNLISTED, "all", "none")]:
        raise ValueError(
            f"report_to={report_to!r}: {missing[0]!r} is not installed, or unknown to transformers; usable here: {', '.join(usable) or 'nothing'}; "
            "install it, or set report_to: none"
        )
