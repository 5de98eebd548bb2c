"""The options of where target features come from, checked; sizes of disks as people write them."""

import re
from typing import TYPE_CHECKING

from hf_dspark.distillation.training_options import whole_weights_prevented_by

if TYPE_CHECKING:
    from hf_dspark.distillation.arguments import DistillationArguments

__all__ = ["check_feature_options", "readable_bytes", "size_in_bytes"]

_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def size_in_bytes(size: str | int) -> int:
    """Bytes of a size such as "200GB", "1.5 TiB" or 1000000.

    Raises:
        ValueError: it is none, or not positive.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?I?B)?", str(size).strip().upper())
    if match is None or match[2] == "IB" or float(match[1]) <= 0:
        raise ValueError(f"cache_budget must be a size such as 200GB (units: B, KB, MB, GB, TB, KiB, MiB, GiB, TiB), got {size!r}")
    return int(float(match[1]) * _UNITS[match[2] or "B"])


def readable_bytes(num_bytes: int) -> str:
    """`num_bytes` in the largest decimal unit that it fills."""
    unit = next(unit for unit in ("TB", "GB", "MB", "KB", "B") if num_bytes >= _UNITS[unit] or unit == "B")
    return f"{num_bytes} B" if unit == "B" else f"{num_bytes / _UNITS[unit]:.2f} {unit}"


def check_feature_options(args: "DistillationArguments") -> None:
    """Raises ValueError where the options of features can't work, alone or together."""
    if args.features not in ("online", "cached"):
        raise ValueError(f"features must be online or cached, got {args.features!r}")
    if args.features_dtype not in ("bfloat16", "int8", "float32"):
        raise ValueError(f"features_dtype must be bfloat16, int8 or float32, got {args.features_dtype!r}")
    if args.features == "online":
        for name, value in (("features_dir", args.features_dir), ("cache_budget", args.cache_budget), ("features_rank", args.features_rank)):
            if value is not None:
                raise ValueError(f"{name}={value!r} is of no effect while features are computed online; set features: cached, or leave it out")
        return
    if not args.features_dir:
        raise ValueError(f"features='cached' needs features_dir, a folder with room for them, got {args.features_dir!r}")
    if args.streaming:
        raise ValueError("features='cached' needs rows that can be read again in any order, which streaming=True does not give; turn one of them off")
    if args.cache_budget is not None:
        size_in_bytes(args.cache_budget)
    if args.features_rank is None:
        return
    if args.features_rank < 1:
        raise ValueError(f"features_rank must be at least 1 or None, got {args.features_rank}")
    # A subspace asks for a whole weight of fc that is trained (see subspace.py).
    if option := whole_weights_prevented_by(args):
        raise ValueError(f"features_rank={args.features_rank} projects the weight of fc while it is trained, which {option} prevents; leave one out")
