"""Writes the target features of a training set once: shard by shard, checked against the target, the options, the text and the disk.

A folder holds `index.json` (the fingerprint of what was written), `features-00000.safetensors` and so on, each the rows that follow the last
one's, and, where features are kept in a subspace, `subspace.safetensors`. Every file is whole or absent, so a run that was killed goes on.
One training at a time writes, under the lock of the empty file `lock`; a complete folder is read without it.
"""

import errno
import hashlib
import json
import logging
import shutil
from bisect import bisect_right
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict
from itertools import accumulate
from pathlib import Path

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from hf_dspark.distillation.arguments import DistillationArguments
from hf_dspark.distillation.feature_cache import FeatureCache, Shard
from hf_dspark.distillation.feature_coding import FeatureCoding, bytes_per_token, stored_tensors
from hf_dspark.distillation.feature_options import readable_bytes, size_in_bytes
from hf_dspark.distillation.features import TargetFeatures, config_fingerprint, weights_fingerprint
from hf_dspark.distillation.subspace import Subspace, find_subspace
from hf_dspark.evaluation.output import write_whole

__all__ = ["check_features_dir", "open_feature_cache"]

logger = logging.getLogger(__name__)

# A shard is closed with the row that brings it to this many bytes.
SHARD_BYTES = 2**29
# Tokens that a subspace is found from, for each of its directions.
_TOKENS_PER_DIRECTION = 8

Compute = Callable[[list[dict]], TargetFeatures]


def open_feature_cache(
    rows: Sequence[dict],
    args: DistillationArguments,
    target: PreTrainedModel,
    layer_ids: list[int],
    compute: Compute,
    chat_template: str | None = None,
    partition: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> FeatureCache:
    """The cache of `rows` in `args.features_dir`; what is missing of it is written first, by all processes together, each its own shards.

    Args:
        compute: features of a list of rows, padded to the longest, in the way that the training would compute them.
        partition: the log partition (batch, tokens) of last hidden states (batch, tokens, hidden), kept too; None: it isn't needed.

    Raises:
        ValueError: the folder holds features of another target, other options or other text, or another training is filling it;
            `args.cache_budget` holds no row.
        OSError: the disk has too little room, or runs full; finished shards are kept.
    """
    folder, hidden_size = Path(args.features_dir), target.config.get_text_config().hidden_size
    hashes, lengths = [_row_hash(row) for row in rows], [len(row["input_ids"]) for row in rows]
    text = {"num_rows": len(hashes), "rows": hashlib.sha256(torch.tensor(hashes).numpy().tobytes()).hexdigest()[:16]}
    fingerprint = {**_fingerprint(args, target, layer_ids, chat_template, partition is not None), **text}
    shape = (hidden_size, len(layer_ids), args.features_dtype, args.features_rank, partition is not None)
    shards = _within_budget(_plan(folder, lengths, hashes, shape), lengths, args.cache_budget, shape)
    with ExitStack() as stack:
        is_busy = args.process_index == 0 and not _is_complete(folder, fingerprint, shards) and not _lock(folder, stack)
        if broadcast_object_list([is_busy])[0]:  # no process goes on to write
            raise ValueError(
                f"features_dir={str(folder)!r} is being filled by another training; start again when that one has begun its steps, and its "
                "features are read, or set features_dir to another folder"
            )
        with args.main_process_first(local=False, desc="checking the cached features"):  # the folder is one for all machines
            _check_index(folder, fingerprint)
            subspace = _subspace(folder, rows, lengths, args.features_rank, compute)
            key = _key(fingerprint, subspace)
            if args.process_index == 0:
                missing = sum(shard.num_bytes for shard in shards if not shard.is_whole(key))
                _check_disk(folder, missing, sum(shard.num_bytes for shard in shards), subspace)
                _write_index(folder, fingerprint, subspace)
        coding = FeatureCoding(len(layer_ids), args.features_dtype, subspace, partition)
        cache = FeatureCache(shards, coding, target.dtype)
        _write_missing(cache, rows, key, compute, args, shape)
        PartialState().wait_for_everyone()
    if lost := [shard.path.name for shard in shards if not shard.is_whole(key)]:
        raise ValueError(f"features_dir={str(folder)!r} lacks {lost[0]}, which another process wrote; it must be a folder that all processes see")
    if args.process_index == 0 and cache.num_rows < len(rows):
        print(f"cached features: {cache.num_rows:,} of {len(rows):,} rows, within {args.cache_budget}; the others are computed in the step")
    return cache


def check_features_dir(
    args: DistillationArguments, target: PreTrainedModel, layer_ids: list[int], chat_template: str | None, with_partition: bool
) -> None:
    """Raises ValueError where the folder can't be one, or holds features of another target or other options; the text is not looked at."""
    folder = Path(args.features_dir)
    nearest = next(path for path in (folder, *folder.absolute().parents) if path.exists() or path.is_symlink())
    if not nearest.is_dir():
        raise ValueError(f"features_dir={str(folder)!r} can't be a folder, {str(nearest)!r} is none; name another")
    _check_index(folder, _fingerprint(args, target, layer_ids, chat_template, with_partition))


def _row_hash(row: dict) -> int:
    """63 bits of the sha256 of a row's ids and, of a packed row, its texts' lengths."""
    content = torch.as_tensor(row["input_ids"]).int().numpy().tobytes()
    if "lengths" in row:
        content += b"lengths" + torch.as_tensor(row["lengths"]).int().numpy().tobytes()
    return int.from_bytes(hashlib.sha256(content).digest()[:8], "little") >> 1


def _fingerprint(args, target: PreTrainedModel, layer_ids: list[int], chat_template: str | None, with_partition: bool) -> dict:
    """What the features depend on beside the text, as plain values."""
    return {
        "format": 1,
        "target_config": config_fingerprint(target),
        "target_weights": weights_fingerprint(target),
        "target_layer_ids": list(layer_ids),
        "features_dtype": args.features_dtype,
        "features_rank": args.features_rank,
        "chat_template": None if chat_template is None else hashlib.sha256(str(chat_template).encode()).hexdigest()[:16],
        "max_length": args.max_length,
        "packing": args.packing,
        "log_partition": with_partition,
    }


def _key(fingerprint: dict, subspace: Subspace | None) -> str:
    """Marks a shard as written for this fingerprint and in this subspace."""
    content = json.dumps(fingerprint, sort_keys=True).encode()
    if subspace is not None:
        content += subspace.directions.cpu().numpy().tobytes()
    return hashlib.sha256(content).hexdigest()[:16]


def _file_bytes(num_tokens: int, num_rows: int, shape: tuple) -> int:
    """Bytes of a shard's file: its tensors and their header."""
    values, tensors = {}, stored_tensors(*shape)
    for name, (dtype, token_shape) in tensors.items():
        values[name] = torch.empty((num_tokens, *token_shape), dtype=dtype, device="meta")
    values["row_hashes"] = torch.empty(num_rows, dtype=torch.long, device="meta")
    size, header = 0, {"__metadata__": {"key": "0" * 16}}
    for name, tensor in values.items():
        header[name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [size, size + tensor.nbytes]}
        size += tensor.nbytes
    return size + 8 + -(-len(json.dumps(header, separators=(",", ":"))) // 8) * 8


def _plan(folder: Path, lengths: list[int], hashes: list[int], shape: tuple) -> list[Shard]:
    """All rows, in order, in shards of about SHARD_BYTES."""
    shards, start, per_token = [], 0, bytes_per_token(*shape)
    while start < len(lengths):
        end, num_tokens = start, 0
        while end < len(lengths) and num_tokens * per_token < SHARD_BYTES:
            num_tokens += lengths[end]
            end += 1
        path = folder / f"features-{len(shards):05d}.safetensors"
        shards.append(Shard(path, start, lengths[start:end], hashes[start:end], _file_bytes(num_tokens, end - start, shape)))
        start = end
    return shards


def _within_budget(shards: list[Shard], lengths: list[int], budget: str | None, shape: tuple) -> list[Shard]:
    """The shards, the last one cut, that fit into `budget`."""
    if budget is None:
        return shards
    left, kept = size_in_bytes(budget), []
    for shard in shards:
        fitting = len(shard.lengths)
        if shard.num_bytes > left:
            totals = [0, *accumulate(shard.lengths)]
            fitting = bisect_right(range(1, len(totals)), left, key=lambda count: _file_bytes(totals[count], count, shape))
        if fitting:
            size = _file_bytes(sum(shard.lengths[:fitting]), fitting, shape)
            kept.append(Shard(shard.path, shard.start, shard.lengths[:fitting], shard.hashes[:fitting], size))
            left -= size
        if fitting < len(shard.lengths):
            break
    if not kept:
        needed = readable_bytes(_file_bytes(lengths[0], 1, shape))
        raise ValueError(f"cache_budget={budget!r} does not hold the features of one row ({needed}); raise it, or set features: online")
    return kept


def _is_complete(folder: Path, fingerprint: dict, shards: list[Shard]) -> bool:
    """Whether nothing is left to write in `folder`."""
    has_subspace = fingerprint["features_rank"] is not None
    subspace = _stored_subspace(folder) if has_subspace else None
    if not (folder / "index.json").exists() or (has_subspace and subspace is None):
        return False
    key = _key(fingerprint, subspace)
    return all(shard.is_whole(key) for shard in shards)


def _lock(folder: Path, stack: ExitStack) -> bool:
    """Locks `folder` against other trainings until `stack` is left or this process ends, however it does; False: one of them has locked it."""
    folder.mkdir(parents=True, exist_ok=True)
    # The file stays: were it removed, one training could hold the lock of the old file and another that of a new one.
    file = stack.enter_context((folder / "lock").open("ab"))
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except (ImportError, OSError) as error:  # Windows, or a file system without locks
        logger.warning("features_dir=%r can't be locked (%s); let no other training fill it at the same time", str(folder), error)
    return True


def _check_index(folder: Path, fingerprint: dict) -> None:
    path = folder / "index.json"
    if not path.exists():
        return
    try:
        found = dict(json.loads(path.read_text(encoding="utf-8"))["fingerprint"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no index of cached features ({error!r}); set features_dir to a folder of its own") from error
    wrong = [f"{name} is {found.get(name)!r} there, {value!r} here" for name, value in fingerprint.items() if found.get(name) != value]
    if wrong:
        raise ValueError(
            f"features_dir={str(folder)!r} holds features of another run: {'; '.join(wrong)}; set features_dir to an empty folder, or delete "
            "this one to write it anew"
        )


def _check_disk(folder: Path, missing: int, total: int, subspace: Subspace | None) -> None:
    """`missing` bytes of shards, of `total`, must fit on the disk, and the subspace; says how much will be written."""
    if subspace is not None:
        size = sum(tensor.nbytes for tensor in asdict(subspace).values())
        total, missing = total + size, missing if (folder / "subspace.safetensors").exists() else missing + size
    if not missing:
        return
    there = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.exists())
    free = shutil.disk_usage(there).free
    if missing > free:
        raise OSError(
            errno.ENOSPC,
            f"the features to cache take {readable_bytes(missing)}, but the disk of features_dir={str(folder)!r} has {readable_bytes(free)} free; "
            f"set cache_budget (what does not fit is computed in the step), features_dtype: int8, or features_dir on another disk",
        )
    print(f"caching features: {readable_bytes(missing)} to write of {readable_bytes(total)}, {readable_bytes(free)} free at {folder}")


def _subspace(folder: Path, rows: Sequence[dict], lengths: list[int], rank: int | None, compute: Compute) -> Subspace | None:
    """The subspace at hand in `folder`, or one found from rows spread over all; None without a `rank`."""
    if rank is None:
        return None
    if (stored := _stored_subspace(folder)) is not None:
        return stored
    count = max(1, min(len(rows), -(-_TOKENS_PER_DIRECTION * rank * len(rows) // sum(lengths))))
    states = []
    for index in (i * len(rows) // count for i in range(count)):
        features = compute([rows[index]])
        states.append(torch.cat([layer[0].float().to(features.last_hidden.device) for layer in features.hidden_states], dim=-1))
    return find_subspace(torch.cat(states), rank).to("cpu")


def _stored_subspace(folder: Path) -> Subspace | None:
    """The one in `folder`; None: there is none, or its file is damaged."""
    with suppress(FileNotFoundError, SafetensorError, TypeError):  # TypeError: tensors of other names
        return Subspace(**load_file(folder / "subspace.safetensors"))
    return None


def _write_index(folder: Path, fingerprint: dict, subspace: Subspace | None) -> None:
    if subspace is not None and _stored_subspace(folder) is None:
        write_whole(folder / "subspace.safetensors", [save({name: tensor.contiguous() for name, tensor in asdict(subspace).items()})])
    if not (folder / "index.json").exists():
        write_whole(folder / "index.json", [json.dumps({"fingerprint": fingerprint}, indent=1).encode()])


def _write_missing(cache: FeatureCache, rows: Sequence[dict], key: str, compute: Compute, args: DistillationArguments, shape: tuple) -> None:
    """Writes this process's shards, as far as they are not whole: the share of each is the same however far the others have come."""
    missing = [shard for shard in cache.shards[args.process_index :: args.world_size] if not shard.is_whole(key)]
    hide = args.disable_tqdm or args.process_index != 0
    with tqdm(total=sum(len(shard.lengths) for shard in missing), desc="caching features", unit="row", disable=hide) as bar:
        for shard in missing:
            content = _shard_content(shard, rows, key, compute, cache.coding, args.per_device_train_batch_size, shape, bar)
            try:
                write_whole(shard.path, [content])
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                done = sum(shard.num_bytes for shard in cache.shards if shard.is_whole(key))
                budget = f"cache_budget: {done}B, to go on with these and compute the others in the step" if done else "features: online"
                raise OSError(
                    error.errno,
                    f"the disk of features_dir={str(shard.path.parent)!r} ran full; {readable_bytes(done)} of finished shards are kept: free some "
                    f"room and start again, or set {budget}",
                ) from error


def _shard_content(shard: Shard, rows, key: str, compute: Compute, coding: FeatureCoding, batch_size: int, shape: tuple, bar: tqdm) -> bytes:
    """The file of a shard; rows of like length share a forward."""
    offsets = [0, *accumulate(shard.lengths)]
    tensors = {name: torch.empty((offsets[-1], *token_shape), dtype=dtype) for name, (dtype, token_shape) in stored_tensors(*shape).items()}
    order = sorted(range(len(shard.lengths)), key=shard.lengths.__getitem__)
    for first in range(0, len(order), batch_size):
        group = order[first : first + batch_size]
        encoded = coding.encode(compute([rows[shard.start + i] for i in group]))
        for place, i in enumerate(group):
            for name, values in encoded.items():
                tensors[name][offsets[i] : offsets[i + 1]] = values[place, : shard.lengths[i]]
        bar.update(len(group))
    return save({**tensors, "row_hashes": torch.tensor(shard.hashes)}, metadata={"key": key})
