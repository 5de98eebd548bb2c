"""A kill during saving, at any file of a checkpoint, and what resuming makes of what is left."""

import copy
import json
import logging

import pytest
import torch
from oracle import tiny_draft, tiny_target
from peft import LoraConfig, get_peft_model
from test_trainer import make_trainer, weights
from transformers import Trainer, TrainerState

from hf_dspark.distillation.resumption import check_same_draft, checkpoint_to_resume, forget_whole, is_whole, whole_checkpoints


def write_checkpoint(folder, state: str | None) -> str:
    folder.mkdir(parents=True)
    if state is not None:
        (folder / "trainer_state.json").write_text(state)
    return str(folder)


WHOLE = json.dumps({"global_step": 1})


@pytest.mark.parametrize("torn", [None, "", WHOLE[:-3], "[]", "{}"], ids=["no state", "empty", "cut off", "a list", "no step"])
def test_the_newest_whole_checkpoint_is_taken_and_torn_ones_are_named(tmp_path, caplog, torn):
    write_checkpoint(tmp_path / "checkpoint-9", WHOLE)
    expected = write_checkpoint(tmp_path / "checkpoint-10", WHOLE)
    newest = write_checkpoint(tmp_path / "checkpoint-100", torn)
    write_checkpoint(tmp_path / "checkpoint-final", WHOLE)
    with caplog.at_level(logging.WARNING):
        assert checkpoint_to_resume(True, str(tmp_path)) == checkpoint_to_resume("True", str(tmp_path)) == expected
    assert f"{newest} is torn" in caplog.text
    with pytest.raises(ValueError, match=r"checkpoint-100' is no whole checkpoint: its trainer_state.json, which is written last"):
        checkpoint_to_resume(newest, str(tmp_path))
    assert checkpoint_to_resume(expected, "elsewhere") == expected


def test_nothing_to_resume_from(tmp_path):
    assert checkpoint_to_resume(None, str(tmp_path)) is checkpoint_to_resume(False, str(tmp_path)) is None
    write_checkpoint(tmp_path / "checkpoint-1", None)
    with pytest.raises(ValueError, match="resume_from_checkpoint=True finds no whole checkpoint in"):
        checkpoint_to_resume(True, str(tmp_path))
    with pytest.raises(ValueError, match="is no whole checkpoint"):
        checkpoint_to_resume(str(tmp_path / "nothing"), str(tmp_path))


def test_a_checkpoint_about_to_be_written_anew_is_torn(tmp_path):
    folder = write_checkpoint(tmp_path / "checkpoint-1", WHOLE)
    assert is_whole(folder)
    forget_whole(folder)
    assert not is_whole(folder)
    forget_whole(tmp_path / "nothing")


def test_whole_checkpoints_are_listed_newest_first(tmp_path):
    for name, state in (("checkpoint-9", WHOLE), ("checkpoint-10", WHOLE), ("checkpoint-11", None), ("checkpoint-best", WHOLE)):
        write_checkpoint(tmp_path / name, state)
    assert [folder.name for folder in whole_checkpoints(str(tmp_path))] == ["checkpoint-10", "checkpoint-9"]
    assert whole_checkpoints(str(tmp_path / "nothing")) == []


OTHERS = [
    ({"block_size": 3}, "block_size 4 there, 3 now"),
    ({"num_hidden_layers": 1}, "num_draft_layers 2 there, 1 now"),
    ({"target_layer_ids": [0, 1]}, r"target_layer_ids \[0, 2\] there, \[0, 1\] now"),
    ({"markov_rank": 8, "block_size": 5}, "block_size 4 there, 5 now; markov_rank 4 there, 8 now"),
    ({"markov_head_type": "gated"}, "markov_head_type 'vanilla' there, 'gated' now"),
    ({"enable_confidence_head": False}, "enable_confidence_head True there, False now"),
    ({"draft_vocab_size": 40}, "draft_vocab_size None there, 40 now"),
    ({"mask_token_id": 5}, r"mask_token_id \d+ there, 5 now"),
]


@pytest.mark.parametrize(("options", "message"), OTHERS, ids=lambda value: str(value))
def test_a_draft_of_other_options_does_not_go_on_from_a_checkpoint(tmp_path, options, message):
    target = tiny_target()
    tiny_draft(target).save_pretrained(tmp_path / "checkpoint-1")
    write_state = (tmp_path / "checkpoint-1" / "trainer_state.json").write_text
    write_state(WHOLE)
    check_same_draft(str(tmp_path / "checkpoint-1"), tiny_draft(target, seed=9))
    message = rf"resume_from_checkpoint: .*checkpoint-1 is of a draft with other options: .*{message}.*set them as they were, or train anew"
    with pytest.raises(ValueError, match=message):
        check_same_draft(str(tmp_path / "checkpoint-1"), tiny_draft(target, **options))
    with pytest.raises(ValueError, match=message):
        make_trainer(tmp_path, target, tiny_draft(target, **options)).train(resume_from_checkpoint=True)


def test_an_adapter_goes_on_from_one_of_its_kind(tmp_path):
    def adapted(rank: int = 2, alpha: int = 4, modules: tuple = ("q_proj", "v_proj")):
        return get_peft_model(tiny_draft(tiny_target()), LoraConfig(r=rank, lora_alpha=alpha, target_modules=list(modules)))

    adapted().save_pretrained(tmp_path / "adapter")
    tiny_draft(tiny_target()).save_pretrained(tmp_path / "whole")
    check_same_draft(str(tmp_path / "adapter"), adapted(modules=("v_proj", "q_proj")))
    for folder, draft, message in (
        ("adapter", adapted(rank=3), "lora_rank 2 there, 3 now"),
        ("adapter", adapted(alpha=8), "lora_alpha 4 there, 8 now"),
        ("adapter", adapted(modules=("q_proj",)), r"lora_target_modules \['q_proj', 'v_proj'\] there, \['q_proj'\] now"),
        ("adapter", tiny_draft(tiny_target()), "options: lora_rank 2 there, None now;"),
        ("whole", adapted(), "options: lora_rank None there, 2 now;"),
    ):
        with pytest.raises(ValueError, match=message):
            check_same_draft(str(tmp_path / folder), draft)
    (tmp_path / "sharded").mkdir()  # has no config to compare
    check_same_draft(str(tmp_path / "sharded"), adapted())


class Killed(BaseException):
    """Stands for a kill: nothing catches it."""


def killed_in(monkeypatch, owner, name: str, after: bool) -> None:
    """`owner.name` ends the process in its second call, before or after it has done its work."""
    original, calls = getattr(owner, name), []

    def dying(self, *args, **kwargs):
        calls.append(name)
        if len(calls) == 2 and not after:
            raise Killed
        result = original(self, *args, **kwargs)
        if len(calls) == 2:
            raise Killed
        return result

    monkeypatch.setattr(owner, name, dying)


MOMENTS = [
    (Trainer, "save_model", False),
    (Trainer, "save_model", True),
    (Trainer, "_save_optimizer_and_scheduler", True),
    (Trainer, "_save_rng_state", True),
    (TrainerState, "save_to_json", False),
]


@pytest.mark.parametrize("again", [False, True], ids=["first time", "over an old checkpoint"])
@pytest.mark.parametrize("moment", MOMENTS, ids=lambda moment: f"{moment[1]} {'done' if moment[2] else 'not begun'}")
def test_a_run_killed_while_saving_goes_on_and_ends_the_same(tmp_path, moment, again):
    target = tiny_target()
    draft = tiny_draft(target)
    options = {"max_steps": 5, "per_device_train_batch_size": 2, "save_strategy": "steps", "save_steps": 2, "lr_scheduler_type": "constant"}
    expected, resumed = copy.deepcopy(draft), copy.deepcopy(draft)
    make_trainer(tmp_path / "whole", target, expected, **options).train()
    if again:  # another run was here before, of another draft
        make_trainer(tmp_path / "run", target, tiny_draft(target, seed=5), **{**options, "max_steps": 4}).train()
        assert is_whole(tmp_path / "run" / "checkpoint-4")
    with pytest.MonkeyPatch.context() as patch:
        killed_in(patch, *moment)
        with pytest.raises(Killed):
            make_trainer(tmp_path / "run", target, draft, **options).train()
    assert is_whole(tmp_path / "run" / "checkpoint-2") and not is_whole(tmp_path / "run" / "checkpoint-4")
    make_trainer(tmp_path / "run", target, resumed, **options).train(resume_from_checkpoint=True)
    assert all(torch.equal(parameter, weights(expected)[name]) for name, parameter in resumed.named_parameters())
    assert is_whole(tmp_path / "run" / "checkpoint-4")


def test_a_run_with_muon_goes_on_exactly_and_only_with_muon(tmp_path):
    target = tiny_target()
    draft = tiny_draft(target)
    options = {"max_steps": 4, "per_device_train_batch_size": 2, "save_strategy": "steps", "save_steps": 2, "muon": True}
    expected, resumed = copy.deepcopy(draft), copy.deepcopy(draft)
    make_trainer(tmp_path, target, expected, **options).train()
    make_trainer(tmp_path, target, resumed, **options).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert all(torch.equal(parameter, weights(expected)[name]) for name, parameter in resumed.named_parameters())
    with pytest.raises(ValueError, match=r"checkpoint-2 holds the state of another optimizer than muon=False, optim=adamw_torch.*; go on as"):
        make_trainer(tmp_path, target, copy.deepcopy(draft), **{**options, "muon": False}).train(str(tmp_path / "checkpoint-2"))
