"""Cached features: sizes foretold, folders checked, writing interrupted, disks that run full, several processes."""

import errno
import json
import os
import shutil
import signal
import socket
from collections import namedtuple
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from oracle import VOCAB, tiny_target
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from test_trainer_steps import as_dataset

from hf_dspark.distillation import feature_writing
from hf_dspark.distillation.arguments import DistillationArguments
from hf_dspark.distillation.collator import BlockCollator
from hf_dspark.distillation.feature_cache import FeatureCache, Shard
from hf_dspark.distillation.feature_coding import bytes_per_token
from hf_dspark.distillation.features import target_features

HIDDEN, LAYER_IDS = 32, [-1, 0, 2]
LENGTHS = [9, 16, 12, 30, 7, 21]


def text_rows(lengths: list[int] = LENGTHS) -> list[dict]:
    generator = torch.Generator().manual_seed(3)
    return [{"input_ids": torch.randint(VOCAB - 1, (length,), generator=generator)} for length in lengths]


class Opener:
    """Opens the cache at `folder`; `computed` collects the ids of the rows that the target was asked about."""

    def __init__(self, folder: Path, rows: list[dict] | None = None, target=None):
        self.folder, self.rows, self.target = folder, text_rows() if rows is None else rows, tiny_target() if target is None else target
        self.computed: list[tuple] = []
        self.num_allowed = float("inf")

    def compute(self, rows: list[dict]):
        self.num_allowed -= 1
        if self.num_allowed < 0:
            raise KeyboardInterrupt
        self.computed += [tuple(torch.as_tensor(row["input_ids"]).tolist()) for row in rows]
        batch = BlockCollator(num_anchors=1)(rows)
        return target_features(self.target, batch["input_ids"], batch["attention_mask"], LAYER_IDS)

    def arguments(self, **options) -> DistillationArguments:
        values = {"target": "tiny", "output_dir": str(self.folder / "run"), "features": "cached", "features_dir": str(self.folder / "cache")}
        values |= {"use_cpu": True, "disable_tqdm": True, "features_dtype": "float32", "per_device_train_batch_size": 2}
        return DistillationArguments(**{**values, **options})

    def __call__(self, layer_ids=LAYER_IDS, chat_template=None, partition=None, **options) -> FeatureCache:
        self.computed.clear()
        args = self.arguments(**options)
        return feature_writing.open_feature_cache(self.rows, args, self.target, layer_ids, self.compute, chat_template, partition)


def partition(last_hidden: torch.Tensor) -> torch.Tensor:
    return last_hidden.float().logsumexp(dim=-1)


@pytest.fixture
def opener(tmp_path) -> Opener:
    return Opener(tmp_path)


@pytest.fixture
def small_shards(monkeypatch):
    """A shard for every one or two rows."""
    monkeypatch.setattr(feature_writing, "SHARD_BYTES", 10 * bytes_per_token(HIDDEN, 3, "float32"))


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (folder / "cache").iterdir() if path.name != "lock"}


def numbers(folder: Path) -> dict[str, int]:
    """What a file is, by name: it changes when the file is written again."""
    return {path.name: path.stat().st_ino for path in (folder / "cache").iterdir() if path.name != "lock"}


@pytest.mark.parametrize("container", [list, as_dataset])
def test_the_cache_holds_each_row_as_the_target_computes_it_alone(tmp_path, small_shards, container):
    opener = Opener(tmp_path, container(text_rows()))
    cache = opener()
    assert cache.num_rows == len(LENGTHS) and len(cache.shards) > 2 and sorted(map(len, opener.computed)) == sorted(LENGTHS)
    order = [3, 0, 5]
    found = cache.read(order, 33, torch.device("cpu"))
    for i, row in enumerate(order):
        alone = target_features(opener.target, text_rows()[row]["input_ids"][None], None, LAYER_IDS)
        for ours, theirs in zip([*found.hidden_states, found.last_hidden], [*alone.hidden_states, alone.last_hidden]):
            torch.testing.assert_close(ours[i : i + 1, : LENGTHS[row]], theirs, rtol=1e-4, atol=1e-4)
            assert ours.shape == (3, 33, HIDDEN)


@pytest.mark.parametrize("partition", [None, partition], ids=["", "partition"])
@pytest.mark.parametrize("options", [{}, {"features_dtype": "bfloat16"}, {"features_dtype": "int8"}, {"features_dtype": "int8", "features_rank": 8}])
def test_the_size_is_foretold(tmp_path, monkeypatch, capsys, small_shards, options, partition):
    foretold = []
    check = feature_writing._check_disk
    monkeypatch.setattr(feature_writing, "_check_disk", lambda folder, missing, *rest: foretold.append(missing) or check(folder, missing, *rest))
    cache = Opener(tmp_path, text_rows([40, 50, 60, 70, 80]))(partition=partition, **options)
    written = sum(path.stat().st_size for path in (tmp_path / "cache").glob("features-*"))
    assert foretold == [sum(shard.num_bytes for shard in cache.shards)] and foretold[0] == pytest.approx(written, rel=0.02)
    # Large shards are their tokens and little else.
    monkeypatch.setattr(feature_writing, "SHARD_BYTES", 2**30)
    [shard] = Opener(tmp_path / "large", text_rows([100] * 30))(partition=partition, **options).shards
    per_token = bytes_per_token(HIDDEN, 3, options.get("features_dtype", "float32"), options.get("features_rank"), partition is not None)
    assert shard.path.stat().st_size == pytest.approx(3000 * per_token, rel=0.02)
    assert "caching features: " in capsys.readouterr().out


def usage(monkeypatch, free: int) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: namedtuple("usage", "total used free")(10**12, 0, free))


def test_a_disk_too_small_is_refused_before_the_first_byte(opener, tmp_path, monkeypatch):
    usage(monkeypatch, 20_000)
    # 95 tokens of (3 + 1) * 32 * 4 bytes, and the header
    message = r"the features to cache take (48\.[6-9]|49\.[0-5])\d KB, but the disk of features_dir='.*cache' has 20\.00 KB free; set cache_budget"
    with pytest.raises(OSError, match=message):
        opener()
    assert files(tmp_path) == {} and opener.computed == []
    opener(cache_budget="19KB")
    # What is there already needs no room.
    usage(monkeypatch, 0)
    opener(cache_budget="19KB")
    assert opener.computed == []


# Interruptions


def test_a_killed_run_goes_on_where_it_was(opener, tmp_path, small_shards):
    opener.num_allowed = 2
    with pytest.raises(KeyboardInterrupt):
        opener()
    kept = numbers(tmp_path)
    assert "index.json" in kept and len(kept) == 3 and not [name for name in kept if name.endswith(".tmp")]
    opener.num_allowed = float("inf")
    cache = opener()
    assert numbers(tmp_path).items() >= kept.items() and 0 < len(opener.computed) < len(LENGTHS)
    again = Opener(tmp_path)
    assert again().num_rows == cache.num_rows and again.computed == []


def test_a_torn_or_foreign_shard_is_written_anew_and_the_others_are_kept(opener, tmp_path, small_shards):
    cache = opener()
    whole, kept = files(tmp_path), numbers(tmp_path)
    torn, foreign, lost = (shard.path for shard in cache.shards[:3])
    torn.write_bytes(whole[torn.name][:-100])
    foreign.write_bytes(whole[torn.name])
    lost.unlink()
    save_file({"weight": torch.zeros(2)}, tmp_path / "others.safetensors")
    assert not Shard(tmp_path / "others.safetensors", 0, [1], [7], 8).is_whole("key")
    (tmp_path / "cache" / "features-00000.safetensors.tmp").write_bytes(b"half")
    opener()
    assert files(tmp_path) == whole
    changed = {name for name, number in numbers(tmp_path).items() if kept[name] != number}
    assert cache.shards[-1].path.name not in changed and "index.json" not in changed
    assert len(opener.computed) == sum(len(shard.lengths) for shard in cache.shards[:3])


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_that_runs_full_keeps_the_finished_shards(opener, tmp_path, monkeypatch, small_shards, error):
    replace, left = os.replace, [3]  # the index and two shards

    def full(source, destination):
        left[0] -= 1
        if left[0] < 0:
            raise OSError(error, os.strerror(error))
        replace(source, destination)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        message = r"ran full; .* of finished shards are kept: free some room and start again, or set cache_budget: (\d+)B"
        with pytest.raises(OSError, match=message) as caught:
            opener()
    assert caught.value.errno == error and len(files(tmp_path)) == 3
    budget = str(caught.value).split("cache_budget: ")[1].split(",")[0]
    cache = opener(cache_budget=budget)
    assert opener.computed == [] and [shard.path.exists() for shard in cache.shards] == [True, True] and cache.num_rows < len(LENGTHS)
    assert opener().num_rows == len(LENGTHS)


# Budgets


def test_as_many_rows_as_fit_are_cached(opener, tmp_path, small_shards, capsys):
    for budget in (9_000, 20_000, 40_000):
        cache = opener(cache_budget=f"{budget}B")
        used = sum(shard.path.stat().st_size for shard in cache.shards)
        next_row = LENGTHS[cache.num_rows] * bytes_per_token(HIDDEN, 3, "float32")
        assert used <= budget < used + next_row + 1000
        assert f"{cache.num_rows} of 6 rows" in capsys.readouterr().out
    # Less again: the larger shard at hand serves.
    kept = numbers(tmp_path)
    assert opener(cache_budget="9000B").num_rows == 1 and numbers(tmp_path) == kept and opener.computed == []
    assert opener(cache_budget="1GB").num_rows == len(LENGTHS)


def test_a_budget_below_one_row_is_refused(opener):
    with pytest.raises(ValueError, match=r"cache_budget='100B' does not hold the features of one row \(.* KB\); raise it"):
        opener(cache_budget="100B")


# Mismatches


def changed_weights():
    target = tiny_target()
    with torch.no_grad():
        target.model.layers[1].mlp.up_proj.weight.mul_(1.01)
    return target


MISMATCHES = {
    "target_weights": {"target": changed_weights},
    "target_config": {"target": lambda: tiny_target(rms_norm_eps=1e-5)},
    "target_layer_ids is [-1, 0, 2] there, [-1, 0, 1] here": {"layer_ids": [-1, 0, 1]},
    "features_dtype is 'float32' there, 'int8' here": {"features_dtype": "int8"},
    "features_rank is None there, 8 here": {"features_rank": 8},
    "max_length is 4096 there, 64 here": {"max_length": 64},
    "packing is False there, True here": {"packing": True},
    "log_partition is False there, True here": {"partition": partition},
    "chat_template is None there, ": {"chat_template": "{{ messages }}"},
    "num_rows is 6 there, 5 here": {"rows": text_rows(LENGTHS[:5])},
    "rows is '": {"rows": text_rows(LENGTHS[::-1])},
}


@pytest.mark.parametrize("named", MISMATCHES)
def test_each_mismatch_is_named_with_both_values(tmp_path, named):
    Opener(tmp_path)()
    before, options = files(tmp_path), dict(MISMATCHES[named])
    other = Opener(tmp_path, options.pop("rows", None), options.pop("target", tiny_target)())
    message = "holds features of another run: .* is .* there, .* here.*set features_dir to an empty folder, or delete"
    with pytest.raises(ValueError, match=message) as caught:
        other(**options)
    assert named in str(caught.value) and other.computed == [] and files(tmp_path) == before
    others = {name.split()[0] for name in MISMATCHES if f"{name.split()[0]} is " in str(caught.value)} - {named.split()[0]}
    assert others <= {"rows"}
    # All but what is of the text is known before it is read.
    if "rows" not in named:
        options = {"layer_ids": LAYER_IDS, "chat_template": None, "partition": None} | MISMATCHES[named]
        options.pop("target", None)
        known = (options.pop("layer_ids"), options.pop("chat_template"), options.pop("partition") is not None)
        with pytest.raises(ValueError, match=message) as caught:
            feature_writing.check_features_dir(other.arguments(**options), other.target, *known)
        assert named in str(caught.value)


def test_a_folder_that_fits_or_is_not_there_yet_passes_before_the_text_is_known(opener, tmp_path):
    for _ in range(2):
        feature_writing.check_features_dir(opener.arguments(), opener.target, LAYER_IDS, None, with_partition=False)
        opener()


def test_a_file_that_is_no_index_is_named(opener, tmp_path):
    (tmp_path / "cache").mkdir()
    for content in ("{", "[]", json.dumps({"other": 1}), json.dumps({"fingerprint": 3})):
        (tmp_path / "cache" / "index.json").write_text(content)
        with pytest.raises(ValueError, match=r"index\.json is no index of cached features"):
            opener()


def test_a_lost_subspace_makes_its_shards_void(opener, tmp_path):
    opener(features_rank=8)
    opener(features_rank=8)
    assert opener.computed == []
    whole = files(tmp_path)
    (tmp_path / "cache" / "subspace.safetensors").unlink()
    opener(features_rank=8)
    assert opener.computed  # of the sample, at least
    assert files(tmp_path).keys() == whole.keys()
    # Another subspace under the same name: the coordinates at hand are not its own.
    subspace = feature_writing.load_file(tmp_path / "cache" / "subspace.safetensors")
    subspace["directions"] = -subspace["directions"]
    (tmp_path / "cache" / "subspace.safetensors").write_bytes(feature_writing.save(subspace))
    opener(features_rank=8)
    assert sorted(map(len, opener.computed)) == sorted(LENGTHS)


def test_a_damaged_subspace_is_written_anew_once(opener, tmp_path):
    opener(features_rank=8)
    whole, path = files(tmp_path), tmp_path / "cache" / "subspace.safetensors"
    tensors = load_file(path)
    for content in (whole[path.name][:-100], b"", feature_writing.save({"directions": tensors["directions"]})):
        path.write_bytes(content)
        opener(features_rank=8)
        assert load_file(path).keys() == tensors.keys() and opener.computed
        opener(features_rank=8)
        assert opener.computed == [] and files(tmp_path).keys() == whole.keys()


# Processes


def test_a_second_training_is_refused_while_the_first_one_fills_the_folder(opener, tmp_path, small_shards):
    second, compute, refused = Opener(tmp_path), opener.compute, []

    def compute_meanwhile(rows):
        with pytest.raises(ValueError, match=r"features_dir='.*cache' is being filled by another training; start again when .* to another folder"):
            second()
        refused.append(second.computed == [])
        return compute(rows)

    opener.compute = compute_meanwhile
    opener()
    assert len(refused) > 2 and all(refused)
    # The lock is over, and what is complete is read without it.
    second()
    assert second.computed == []
    with ExitStack() as stack:
        assert feature_writing._lock(tmp_path / "cache", stack) and not feature_writing._lock(tmp_path / "cache", stack)
        second()
        next(iter(second().shards)).path.unlink()
        with pytest.raises(ValueError, match="is being filled by another training"):
            second()
    second()
    assert second.computed


def test_the_lock_of_a_killed_training_is_void(opener, tmp_path):
    opener.compute = lambda rows: os.kill(os.getpid(), signal.SIGKILL)
    process = torch.multiprocessing.get_context("fork").Process(target=opener)
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL and (tmp_path / "cache" / "lock").exists()
    assert Opener(tmp_path)().num_rows == len(LENGTHS)


def test_a_file_system_without_locks_is_warned_of(opener, monkeypatch, caplog):
    monkeypatch.setattr("fcntl.flock", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOLCK, "No locks available")))
    assert opener().num_rows == len(LENGTHS)
    assert [message for message in caplog.messages if "can't be locked" in message and "let no other training fill it" in message]


def test_a_process_writes_its_own_shards_however_far_the_others_are(opener, tmp_path, small_shards):
    """Two processes, one of which has ended before the other looks what is missing."""
    cache = opener()
    with safe_open(cache.shards[0].path, framework="pt") as file:
        key = file.metadata()["key"]
    for shard in cache.shards:
        shard.path.unlink()
    args = SimpleNamespace(world_size=2, disable_tqdm=True, per_device_train_batch_size=2)
    for args.process_index in range(2):
        feature_writing._write_missing(cache, opener.rows, key, opener.compute, args, (HIDDEN, 3, "float32", None))
    assert len(cache.shards) > 2 and all(shard.is_whole(key) for shard in cache.shards)


def open_in_process(rank: int, port: int, folder: str) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    opener = Opener(Path(folder))
    cache = opener(ddp_backend="gloo", features_rank=8)
    torch.save((cache.num_rows, len(opener.computed)), f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


def test_two_processes_share_the_writing_and_both_read_all(tmp_path, small_shards):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torch.multiprocessing.start_processes(open_in_process, (port, str(tmp_path)), nprocs=2, start_method="fork")
    found = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    assert [num_rows for num_rows, _ in found] == [len(LENGTHS)] * 2
    assert all(num_computed > 0 for _, num_computed in found)
    alone = Opener(tmp_path)
    alone(features_rank=8)
    assert alone.computed == []
