"""Checkpoints: what loads, round trips, tables, sharding, the wrong door, the Hub."""

import json
import logging
import shutil

import pytest
import torch
from checkpoint_files import TABLES, assert_same_draft, change_config, change_tensors
from oracle import tiny_draft, tiny_target
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from hf_dspark import DSparkDraftModel, record_generation

PROMPT = torch.tensor([[3, 14, 15, 9, 26]])


@pytest.mark.parametrize("kind", ["dspark_vanilla", "dflash"])
@pytest.mark.parametrize("slim", [False, True])
def test_deepspecs_own_checkpoints_load(deepspec_fixtures, kind, slim, tmp_path):
    shutil.copytree(deepspec_fixtures / kind, tmp_path / kind)
    if slim:
        change_tensors(tmp_path / kind, lambda tensors: [tensors.pop(name) for name in TABLES])
    draft, info = DSparkDraftModel.from_pretrained(tmp_path / kind, output_loading_info=True)
    assert not info["missing_keys"] and not info["mismatched_keys"]
    assert set(draft.stored_tables) == (set() if slim else TABLES)
    assert (draft.markov_head is None) == (draft.confidence_head is None) == (kind == "dflash")
    for name, tensor in load_file(deepspec_fixtures / kind / "model.safetensors").items():
        held = draft.stored_tables if name in TABLES else draft.state_dict()
        if not (slim and name in TABLES):
            assert torch.equal(held[name], tensor)


@pytest.mark.parametrize("head_type", ["vanilla", "gated", "rnn"])
@pytest.mark.parametrize("slim", [False, True])
def test_deepspecs_layout_loads(target, head_type, slim, tmp_path):
    """Its file as it writes one: no rope_theta, no sample_from_anchor, no generation config, keys of the target, frozen copies."""
    draft = tiny_draft(target, markov_head_type=head_type).bind(target)
    draft.save_pretrained(tmp_path, slim=slim)
    change_config(tmp_path, remove=("rope_theta", "sample_from_anchor"), max_window_layers=36, pretraining_tp=1, transformers_version="5.10.2")
    (tmp_path / "generation_config.json").unlink()
    loaded = DSparkDraftModel.from_pretrained(tmp_path)
    assert loaded.config.sample_from_anchor is True and loaded.config.pretraining_tp == 1
    for name, tensor in draft.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor)
    assert set(loaded.stored_tables) == (set() if slim else TABLES)
    assert loaded.generation_config.num_assistant_tokens is None and loaded.generation_config.assistant_confidence_threshold == 0.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [dict(), dict(markov_head_type="rnn", draft_vocab_size=20), dict(markov_rank=0, enable_confidence_head=False)])
def test_a_round_trip_is_bit_equal(target, dtype, options, tmp_path):
    draft = tiny_draft(target, **options).to(dtype)
    draft.generation_config.num_assistant_tokens = 3
    draft.generation_config.draft_sampling = "argmax"
    draft.generation_config.raise_on_draft_failure = True
    if draft.confidence_head is not None:
        draft.generation_config.assistant_confidence_threshold = 0.25
        draft.generation_config.conditional_confidence_threshold = 0.5
    if draft.config.draft_vocab_size:
        draft.d2t.copy_(torch.arange(20) * 2)
    draft.save_pretrained(tmp_path)
    loaded = DSparkDraftModel.from_pretrained(tmp_path)
    assert_same_draft(loaded, draft)
    first = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    loaded.save_pretrained(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == first
    assert set(first) == {"config.json", "generation_config.json", "model.safetensors"}


def test_another_dtype_at_loading(folder):
    draft = DSparkDraftModel.from_pretrained(folder, dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in draft.parameters()} == {torch.bfloat16}
    assert draft.rotary_emb.inv_freq.dtype == torch.float32


def test_a_generation_config_of_the_targets_kind_is_no_obstacle(target, folder):
    """As it lies in folders that were copied from a target's."""
    values = {"bos_token_id": 1, "do_sample": True, "eos_token_id": [1, 2], "temperature": 0.6, "top_k": 20, "transformers_version": "4.51.0"}
    (folder / "generation_config.json").write_text(json.dumps(values))
    draft = DSparkDraftModel.from_pretrained(folder)
    assert draft.generation_config.num_assistant_tokens is None
    with record_generation() as report:
        target.generate(PROMPT, assistant_model=draft, max_new_tokens=8, do_sample=False)
    assert report.requests[0].draft_failure is None and max(round_.drafted for round_ in report.rounds) == 4


def test_a_draft_placed_by_a_device_map_decodes(target, folder):
    draft = DSparkDraftModel.from_pretrained(folder, device_map="cpu")
    draft.generation_config.raise_on_draft_failure = True
    expected = target.generate(PROMPT, max_new_tokens=12, do_sample=False)
    assert torch.equal(target.generate(PROMPT, assistant_model=draft, max_new_tokens=12, do_sample=False), expected)


def test_a_draft_of_a_tied_target_stores_both_tables_apart(tmp_path):
    target = tiny_target(tie_word_embeddings=True)
    tiny_draft(target).bind(target).save_pretrained(tmp_path, slim=False)
    tensors = load_file(tmp_path / "model.safetensors")
    assert torch.equal(tensors["embed_tokens.weight"], tensors["lm_head.weight"])
    assert DSparkDraftModel.from_pretrained(tmp_path).bind(target).stored_tables == {}


def test_full_saving_writes_the_targets_tables_in_the_drafts_dtype(target, tmp_path):
    draft = tiny_draft(target).to(torch.bfloat16).bind(target)
    draft.save_pretrained(tmp_path, slim=False)
    tensors = load_file(tmp_path / "model.safetensors")
    assert set(tensors) == set(draft.state_dict()) | TABLES
    assert torch.equal(tensors["embed_tokens.weight"], target.model.embed_tokens.weight.to(torch.bfloat16))
    assert torch.equal(tensors["lm_head.weight"], target.lm_head.weight.to(torch.bfloat16))


def test_full_saving_of_a_reduced_vocabulary_keeps_the_drafts_head(target, tmp_path):
    draft = tiny_draft(target, draft_vocab_size=20).bind(target)
    draft.save_pretrained(tmp_path, slim=False)
    tensors = load_file(tmp_path / "model.safetensors")
    assert tensors["lm_head.weight"].shape == (20, 32) and tensors["embed_tokens.weight"].shape == (64, 32)
    assert_same_draft(DSparkDraftModel.from_pretrained(tmp_path), draft)


def test_full_saving_needs_tables(target, tmp_path):
    with pytest.raises(ValueError, match=r"not bound"):
        tiny_draft(target).save_pretrained(tmp_path / "unbound", slim=False)
    target_with_bias = tiny_target()
    target_with_bias.lm_head.bias = torch.nn.Parameter(torch.zeros(64))
    with pytest.raises(ValueError, match=r"slim=False needs lm_head.weight.*Linear.*bias"):
        tiny_draft(target).bind(target_with_bias).save_pretrained(tmp_path / "bias", slim=False)
    # Copies that came with a checkpoint need no target.
    tiny_draft(target).bind(target).save_pretrained(tmp_path / "full", slim=False)
    DSparkDraftModel.from_pretrained(tmp_path / "full").save_pretrained(tmp_path / "again", slim=False)
    assert set(load_file(tmp_path / "again" / "model.safetensors")) >= TABLES


# Sharding


@pytest.fixture
def sharded(target, tmp_path):
    draft = tiny_draft(target)
    draft.save_pretrained(tmp_path / "sharded", max_shard_size=2000)
    assert len(list((tmp_path / "sharded").glob("model-*.safetensors"))) > 2
    return draft, tmp_path / "sharded"


def test_sharded_checkpoints_load(sharded):
    draft, folder = sharded
    assert_same_draft(DSparkDraftModel.from_pretrained(folder), draft)


def test_faults_of_a_sharded_checkpoint_are_named(sharded):
    _, folder = sharded
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    shard = folder / index["weight_map"]["fc.weight"]
    content = shard.read_bytes()
    shard.write_bytes(content[:-10])
    with pytest.raises(ValueError, match=rf"{shard.name} is damaged or truncated"):
        DSparkDraftModel.from_pretrained(folder)
    shard.unlink()
    with pytest.raises(OSError, match=shard.name):
        DSparkDraftModel.from_pretrained(folder)
    for broken in ({}, {"weight_map": 3, "metadata": {}}, {"weight_map": {}}):
        (folder / "model.safetensors.index.json").write_text(json.dumps(broken))
        with pytest.raises(ValueError, match=r"index\.json.*lacks weight_map or metadata"):
            DSparkDraftModel.from_pretrained(folder)


def test_a_single_file_is_read_and_checked_before_an_index(sharded, target):
    """As transformers does, so that what is checked is what is loaded."""
    _, folder = sharded
    other = tiny_draft(target, seed=9)
    save_file(other.state_dict(), folder / "model.safetensors", metadata={"format": "pt"})
    assert torch.equal(DSparkDraftModel.from_pretrained(folder).fc.weight, other.fc.weight)
    change_tensors(folder, lambda tensors: tensors.pop("fc.weight"))
    with pytest.raises(ValueError, match=r"missing fc\.weight"):
        DSparkDraftModel.from_pretrained(folder)


def test_shards_and_tables_do_not_go_together(target, tmp_path):
    draft = tiny_draft(target).bind(target)
    with pytest.raises(ValueError, match=r"one file.*max_shard_size"):
        draft.save_pretrained(tmp_path, slim=False, max_shard_size=2000)
    assert not (tmp_path / "config.json").exists()


# The wrong door


def test_a_draft_loaded_as_a_language_model_warns_and_stays_lossless(target, folder, caplog):
    wrong = AutoModelForCausalLM.from_pretrained(folder)
    assert type(wrong).__name__ == "Qwen3ForCausalLM"
    expected = target.generate(PROMPT, max_new_tokens=12, do_sample=False)
    with caplog.at_level(logging.WARNING, logger="hf_dspark"):
        assert torch.equal(target.generate(PROMPT, assistant_model=wrong, max_new_tokens=12, do_sample=False), expected)
    warnings = [record.getMessage() for record in caplog.records if record.name.startswith("hf_dspark")]
    assert len(warnings) == 1
    assert "Qwen3ForCausalLM" in warnings[0] and "DSparkDraftModel.from_pretrained" in warnings[0]


# The Hub


def fake_hub_cache(folder, cache) -> str:
    """Puts `folder` into a Hub cache as a downloaded repository; returns its id."""
    commit, repository = "0123456789abcdef0123456789abcdef01234567", cache / "models--me--draft"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    shutil.copytree(folder, repository / "snapshots" / commit)
    return "me/draft"


@pytest.mark.parametrize("with_knobs", [True, False])
@pytest.mark.parametrize("shard_size", ["5GB", 2000])
def test_a_downloaded_hub_id_loads_offline(target, with_knobs, shard_size, tmp_path):
    draft = tiny_draft(target)
    if with_knobs:
        draft.generation_config.num_assistant_tokens = 2
    draft.save_pretrained(tmp_path / "draft", max_shard_size=shard_size)
    if not with_knobs:
        (tmp_path / "draft" / "generation_config.json").unlink()
    name = fake_hub_cache(tmp_path / "draft", tmp_path / "cache")
    for options in (dict(), dict(local_files_only=True), dict(revision="main"), dict(revision="0123456789abcdef0123456789abcdef01234567")):
        loaded = DSparkDraftModel.from_pretrained(name, cache_dir=tmp_path / "cache", **options)
        assert_same_draft(loaded, draft)
    with pytest.raises(OSError):
        DSparkDraftModel.from_pretrained(name, cache_dir=tmp_path / "cache", revision="another-branch")
