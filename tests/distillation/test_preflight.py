"""What is refused before any data is read: folders that would be overwritten or mixed up, what the target's context doesn't hold."""

import json
import logging
from types import SimpleNamespace

import pytest
from oracle import tiny_draft, tiny_target
from test_distill import SPECIAL, arguments, folder  # noqa: F401 (a fixture)
from test_resumption import WHOLE, write_checkpoint

from hf_dspark.distillation.feature_writing import _fingerprint
from hf_dspark.distillation.preflight import (
    check_cached_features,
    check_context,
    check_held_out,
    check_output_dir,
    checked_folders,
    warn_of_ignored_options,
)
from hf_dspark.generation.context_limits import ContextLimits


def test_the_folder_of_the_target_or_of_the_initial_draft_is_not_written_to(folder, monkeypatch):  # noqa: F811
    tiny_draft(tiny_target(vocab_size=280, **SPECIAL)).save_pretrained(folder / "draft")
    (folder / "link").symlink_to(folder / "target")
    monkeypatch.chdir(folder)
    for name in (folder / "target", folder / "link", "target", "draft/../target"):
        with pytest.raises(ValueError, match=rf"output_dir='{name}' is the folder of target='.*target', which would be overwritten; choose another"):
            check_output_dir(arguments(folder, output_dir=str(name)))
    with pytest.raises(ValueError, match=r"output_dir='draft' is the folder of init_draft='.*draft', which would be overwritten"):
        check_output_dir(arguments(folder, output_dir="draft", init_draft=str(folder / "draft")))
    # A folder inside, a Hub id of the same name, and an own earlier draft are no harm.
    check_output_dir(arguments(folder, output_dir=str(folder / "target" / "draft")))
    check_output_dir(arguments(folder, output_dir="org/model", target="org/model"))
    check_output_dir(arguments(folder, output_dir="draft"))


def test_a_folder_with_another_kind_of_model_is_not_written_to(folder):  # noqa: F811
    output = folder / "draft"
    lora = dict(init_draft="elsewhere", lora_rank=2)
    tiny_draft(tiny_target(vocab_size=280, **SPECIAL)).save_pretrained(output)
    with pytest.raises(ValueError, match=r"holds a whole model .config.json., and lora_rank=2 writes an adapter.*choose another folder"):
        check_output_dir(arguments(folder, **lora))
    (output / "adapter_config.json").write_text("{}")
    with pytest.raises(
        ValueError, match=r"holds an adapter .adapter_config.json., which would be taken for the whole draft.*remove the adapter's files"
    ):
        check_output_dir(arguments(folder))
    for name in ("config.json", "model.safetensors"):
        (output / name).unlink()
    check_output_dir(arguments(folder, **lora))
    for text, problem in (("[]", "holds no options"), ("{", "can't be read"), (json.dumps({"model_type": "qwen3"}), "model_type is 'qwen3'")):
        (output / "config.json").write_text(text)
        for options in ({}, lora):
            with pytest.raises(ValueError, match=rf"output_dir='.*draft' holds a model that is no DSpark draft: .*{problem}"):
                check_output_dir(arguments(folder, **options))


def test_checkpoints_of_an_earlier_training_are_gone_on_from_or_left_alone(folder):  # noqa: F811
    output, message = folder / "draft", r"output_dir='.*draft' holds checkpoints of an earlier training .checkpoint-6.; go on from there with"
    assert checked_folders(arguments(folder)) is None
    torn = write_checkpoint(output / "checkpoint-8", None)
    assert checked_folders(arguments(folder)) is None  # a torn one is never gone on from
    write_checkpoint(output / "checkpoint-2", WHOLE)
    newest, elsewhere = write_checkpoint(output / "checkpoint-6", WHOLE), write_checkpoint(folder / "other" / "checkpoint-4", WHOLE)
    for resumed in (None, "false", elsewhere):
        with pytest.raises(ValueError, match=message):
            checked_folders(arguments(folder, resume_from_checkpoint=resumed))
    assert checked_folders(arguments(folder, resume_from_checkpoint="true")) == newest
    assert checked_folders(arguments(folder, resume_from_checkpoint=str(output / "checkpoint-2"))) == str(output / "checkpoint-2")
    with pytest.raises(ValueError, match="is no whole checkpoint"):
        checked_folders(arguments(folder, resume_from_checkpoint=torn))


@pytest.mark.parametrize("options", [{"num_held_out": 0}, {"max_eval_rows": 0}], ids=str)
def test_evaluations_need_rows(folder, options):  # noqa: F811
    check_held_out(arguments(folder, **options))
    with pytest.raises(ValueError, match=r"eval_strategy='steps' needs rows to evaluate on, but num_held_out=\d and max_eval_rows=\d"):
        check_held_out(arguments(folder, **options, eval_strategy="steps", eval_steps=1))


def test_rows_and_prompts_stay_in_the_context(folder):  # noqa: F811
    target = tiny_target(vocab_size=280, max_position_embeddings=64)
    assert ContextLimits.of(target.config).context == 64
    check_context(arguments(folder, max_length=64, eval_prompts=1, eval_new_tokens=63), target)
    with pytest.raises(ValueError, match=r"max_length=65 is beyond the context of .*target, 64 tokens; set it to 64 or less"):
        check_context(arguments(folder, max_length=65), target)
    with pytest.raises(ValueError, match=r"eval_new_tokens=64 leave no room for a prompt in the context of .*target, 64 tokens"):
        check_context(arguments(folder, eval_prompts=1, eval_new_tokens=64), target)
    check_context(arguments(folder, eval_prompts=1, eval_new_tokens=64, num_held_out=0), target)
    endless = SimpleNamespace(config=SimpleNamespace(get_text_config=SimpleNamespace))
    check_context(arguments(folder, max_length=65, eval_prompts=1, eval_new_tokens=64), endless)


def test_a_folder_with_other_features_than_the_draft_reads_is_refused(folder):  # noqa: F811
    target = tiny_target(vocab_size=280, **SPECIAL)
    config, options = tiny_draft(target).config, dict(features="cached", features_dir=str(folder / "cache"))
    check_cached_features(arguments(folder, **options), target, config, None)
    fingerprint = _fingerprint(arguments(folder, **options), target, config.target_layer_ids, None, with_partition=False)
    (folder / "cache").mkdir()
    (folder / "cache" / "index.json").write_text(json.dumps({"fingerprint": {**fingerprint, "num_rows": 3, "rows": "0"}}))
    check_cached_features(arguments(folder, **options), target, config, None)
    with pytest.raises(ValueError, match=r"features_dir='.*cache' holds features of another run: max_length is 32 there, 16 here; set features_dir"):
        check_cached_features(arguments(folder, **options, max_length=16), target, config, None)
    reduced = tiny_draft(target, draft_vocab_size=20).config
    with pytest.raises(ValueError, match="log_partition is False there, True here"):
        check_cached_features(arguments(folder, **options), target, reduced, None)
    check_cached_features(arguments(folder, max_length=16), target, reduced, None)  # online
    (folder / "file").write_text("x")
    (folder / "dangling").symlink_to("nowhere")
    for name in ("file", "file/below", "dangling"):
        with pytest.raises(ValueError, match=rf"features_dir='.*{name}' can't be a folder, '.*(file|dangling)' is none; name another"):
            check_cached_features(arguments(folder, features="cached", features_dir=str(folder / name)), target, config, None)


def test_options_that_a_draft_at_hand_overrides_are_named(folder, caplog):  # noqa: F811
    config = tiny_draft(tiny_target(vocab_size=280)).config  # block 4, 2 layers, rank 4
    shape = dict(block_size=4, num_draft_layers=2, markov_rank=4, num_key_value_heads=1)
    # Defaults say nothing, and neither does what the draft has anyway.
    for options in (shape, dict(block_size=7, num_draft_layers=5, markov_rank=256, num_key_value_heads=None)):
        with caplog.at_level(logging.WARNING):
            warn_of_ignored_options(arguments(folder, init_draft="draft", **options), config)
        assert not caplog.text
    with caplog.at_level(logging.WARNING):
        warn_of_ignored_options(arguments(folder, init_draft="draft", **{**shape, "markov_rank": 8, "draft_vocab_size": 20}), config)
    assert caplog.messages == [
        "init_draft='draft' keeps its own shape; without effect: markov_rank=8 (the draft's: 4), draft_vocab_size=20 (the draft's: None)"
    ]
