"""Saving: failing and killed saves, existing folders, several processes."""

import os
from unittest import mock

import pytest
import torch
from checkpoint_files import assert_same_draft
from oracle import tiny_draft

from hf_dspark import DSparkDraftModel


class Killed(BaseException):
    """Ends a save the way a signal does."""


def knobs_of(draft):
    return draft.generation_config.num_assistant_tokens


def two_drafts(target):
    """Two drafts of the same config, other weights and other knobs."""
    old, new = tiny_draft(target, seed=1), tiny_draft(target, seed=2)
    old.generation_config.num_assistant_tokens, new.generation_config.num_assistant_tokens = 1, 2
    return old, new


def assert_old_new_or_nothing(folder, old, new) -> str:
    try:
        loaded = DSparkDraftModel.from_pretrained(folder)
    except (OSError, ValueError):
        return "nothing"
    which = old if torch.equal(loaded.fc.weight, old.fc.weight) else new
    assert_same_draft(loaded, which)
    return "old" if which is old else "new"


WRITES = {
    "tempfile.mkdtemp": "tempfile.mkdtemp",
    "config": "transformers.configuration_utils.PreTrainedConfig.save_pretrained",
    "weights": "transformers.modeling_utils.safe_save_file",
    "knobs": "transformers.GenerationConfig.save_pretrained",
    "tables": "hf_dspark.modeling.checkpoints.save_file",
    "remove": "pathlib.Path.unlink",
    "move": "os.replace",
}


@pytest.mark.parametrize("name", WRITES.values(), ids=WRITES.keys())
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("existing", [True, False])
def test_a_save_that_fails_leaves_the_old_draft_or_none(target, name, when, existing, tmp_path, monkeypatch):
    """Every kind of write fails before or after it happened, at its first, second, ... use."""

    old, new = two_drafts(target)
    new.stored_tables = {"lm_head.weight": torch.zeros(64, 32)}  # so that tables are written too
    for failing in range(6):
        folder, calls = tmp_path / str(failing), []
        if existing:
            old.save_pretrained(folder)
        module, _, attribute = name.rpartition(".")
        original = getattr(__import__("pkgutil").resolve_name(module), attribute)

        def write(*args, failing=failing, calls=calls, original=original, **kwargs):
            calls.append(None)
            if len(calls) == failing + 1 and when == "before":
                raise Killed
            result = original(*args, **kwargs)
            if len(calls) == failing + 1:
                raise Killed
            return result

        with mock.patch(name, write):
            try:
                new.save_pretrained(folder)
            except Killed:
                assert assert_old_new_or_nothing(folder, old, new) in (("old", "nothing", "new") if when == "after" else ("old", "nothing"))
                continue
        assert failing >= 1, "the write was never reached"
        break
    assert assert_old_new_or_nothing(folder, old, new) == "new"


@pytest.mark.parametrize("existing", [True, False])
def test_a_killed_process_leaves_the_old_draft_or_none(target, existing, tmp_path):
    """The process ends at its n-th move, so that nothing is cleaned up; the next save repairs the folder."""
    old, new = two_drafts(target)
    outcomes = []
    for step in range(5):
        folder = tmp_path / str(step)
        if existing:
            old.save_pretrained(folder)
        process = os.fork()
        if process == 0:
            moves, replace = [], os.replace

            def replace_until_killed(source, destination, moves=moves, replace=replace, step=step):
                if len(moves) == step:
                    os._exit(9)
                moves.append(None)
                replace(source, destination)

            os.replace = replace_until_killed
            try:
                new.save_pretrained(folder)
            finally:
                os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        outcomes.append(assert_old_new_or_nothing(folder, old, new))
        assert outcomes[-1] == ("nothing" if code == 9 else "new")
        new.save_pretrained(folder)
        assert assert_old_new_or_nothing(folder, old, new) == "new"
    assert outcomes == ["nothing"] * 3 + ["new"] * 2


def test_saving_over_a_folder_keeps_foreign_files_and_no_stale_weights(target, tmp_path):
    old, new = two_drafts(target)
    old.save_pretrained(tmp_path, max_shard_size=2000)
    assert (tmp_path / "model.safetensors.index.json").exists()
    (tmp_path / "README.md").write_text("mine")
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "run.txt").write_text("mine too")
    new.save_pretrained(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"README.md", "logs", "config.json", "generation_config.json", "model.safetensors"}
    assert (tmp_path / "README.md").read_text() == "mine" and (tmp_path / "logs" / "run.txt").exists()
    assert_same_draft(DSparkDraftModel.from_pretrained(tmp_path), new)
    old.save_pretrained(tmp_path, max_shard_size=2000)
    assert not (tmp_path / "model.safetensors").exists()
    assert_same_draft(DSparkDraftModel.from_pretrained(tmp_path), old)


def test_saving_into_the_folder_a_draft_was_loaded_from(folder):
    draft = DSparkDraftModel.from_pretrained(folder)
    before = {name: tensor.clone() for name, tensor in draft.state_dict().items()}
    draft.save_pretrained(folder)
    for loaded in (draft, DSparkDraftModel.from_pretrained(folder)):
        assert all(torch.equal(loaded.state_dict()[name], tensor) for name, tensor in before.items())


def test_only_the_main_process_writes(target, tmp_path):
    """`is_main_process=False` is what the other processes of a distributed run pass; they leave the main one's files alone."""
    old, new = two_drafts(target)
    new.save_pretrained(tmp_path / "other", is_main_process=False)
    assert list((tmp_path / "other").iterdir()) == []
    old.save_pretrained(tmp_path)
    new.save_pretrained(tmp_path, is_main_process=False)
    assert_same_draft(DSparkDraftModel.from_pretrained(tmp_path), old)


def test_a_given_state_dict_is_what_is_written(target, tmp_path):
    """As transformers' Trainer saves."""
    old, new = two_drafts(target)
    old.save_pretrained(tmp_path, state_dict=new.state_dict())
    assert torch.equal(DSparkDraftModel.from_pretrained(tmp_path).fc.weight, new.fc.weight)


def test_relative_nested_and_occupied_places(target, tmp_path, monkeypatch):
    draft = tiny_draft(target)
    monkeypatch.chdir(tmp_path)
    for place in ("here", "a/b/c", str(tmp_path / "trailing") + "/", "."):
        draft.save_pretrained(place)
        assert_same_draft(DSparkDraftModel.from_pretrained(place), draft)
    (tmp_path / "file").write_text("x")
    with pytest.raises(ValueError, match=r"needs a folder, but .*file is a file"):
        draft.save_pretrained(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "x"


def test_only_the_folder_itself_is_written_to(target, tmp_path):
    """Its parent may be read-only, or on another disk (a mounted volume)."""
    folder, draft = tmp_path / "volume", tiny_draft(target)
    folder.mkdir()
    moved, replace = [], os.replace

    def replace_inside(source, destination):
        moved.append(os.path.commonpath([source, destination]))
        replace(source, destination)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "replace", replace_inside)
        draft.save_pretrained(folder)
    assert set(moved) == {str(folder)}
    assert [path.name for path in tmp_path.iterdir()] == ["volume"]


def test_other_files_of_the_folder_stay(folder):
    for name in ("model_backup.safetensors", "model.fp32.safetensors", "notes.txt"):
        (folder / name).write_bytes(b"mine")
    DSparkDraftModel.from_pretrained(folder).save_pretrained(folder)
    assert all((folder / name).read_bytes() == b"mine" for name in ("model_backup.safetensors", "model.fp32.safetensors", "notes.txt"))


def test_a_variant_is_refused_before_anything_is_touched(folder):
    before = sorted(path.name for path in folder.iterdir())
    with pytest.raises(ValueError, match="variant='fp16'"):
        DSparkDraftModel.from_pretrained(folder).save_pretrained(folder, variant="fp16")
    assert sorted(path.name for path in folder.iterdir()) == before
