"""Checkpoints that are refused, and by which name."""

import json
import struct

import pytest
import torch
from checkpoint_files import change_config, change_tensors
from oracle import tiny_draft
from transformers import Qwen3Config

from hf_dspark import DSparkDraftModel
from hf_dspark.modeling import checkpoints
from hf_dspark.modeling.checkpoints import unsupported_format


def delete(name):
    return lambda tensors: tensors.pop(name)


def put(name, *shape):
    return lambda tensors: tensors.update({name: torch.zeros(shape)})


TENSOR_FAULTS = {
    "missing backbone": (delete("layers.1.mlp.up_proj.weight"), r"missing layers\.1\.mlp\.up_proj\.weight \(32, 32\)"),
    "missing fc": (delete("fc.weight"), r"missing fc\.weight \(32, 64\)"),
    "promised Markov head": (delete("markov_head.markov_w2.weight"), r"missing markov_head\.markov_w2\.weight \(64, 4\)"),
    "promised confidence head": (delete("confidence_head.proj.bias"), r"missing confidence_head\.proj\.bias \(1,\)"),
    "extra": (put("layers.2.norm.weight", 3), r"unexpected layers\.2\.norm\.weight \(3,\)"),
    "extra head part": (put("markov_head.gate_proj.bias", 4), r"unexpected markov_head\.gate_proj\.bias"),
    "prefix": (put("model.fc.weight", 32, 64), r"unexpected model\.fc\.weight"),
    "shape": (put("norm.weight", 31), r"norm\.weight has shape \(31,\), the config asks for \(32,\)"),
    "shape of a Markov table": (put("markov_head.markov_w1.weight", 60, 4), r"markov_w1\.weight has shape \(60, 4\), the config asks for \(64, 4\)"),
    "shape of a copy": (put("embed_tokens.weight", 60, 32), r"embed_tokens\.weight has shape \(60, 32\), the config asks for \(64, 32\)"),
    "d2t of a full vocabulary": (put("d2t", 64), r"unexpected d2t"),
}


@pytest.mark.parametrize(("change", "message"), TENSOR_FAULTS.values(), ids=TENSOR_FAULTS.keys())
def test_every_tensor_is_accounted_for_both_ways(folder, change, message):
    change_tensors(folder, change)
    with pytest.raises(ValueError, match=message):
        DSparkDraftModel.from_pretrained(folder)


def test_all_faults_are_named_at_once(folder):
    def change(tensors):
        tensors.pop("fc.weight")
        tensors["odd"] = torch.zeros(1)
        tensors["norm.weight"] = torch.zeros(2)

    change_tensors(folder, change)
    with pytest.raises(ValueError, match=r"missing fc\.weight.*unexpected odd.*norm\.weight has shape"):
        DSparkDraftModel.from_pretrained(folder)


def test_a_head_in_the_file_that_the_config_does_not_mention(folder):
    change_config(folder, remove=("markov_head_type",), markov_rank=0, enable_confidence_head=False)
    with pytest.raises(ValueError, match=r"unexpected confidence_head\.proj\.bias.*unexpected markov_head\.markov_w1\.weight"):
        DSparkDraftModel.from_pretrained(folder)


@pytest.mark.parametrize("key", [*checkpoints._REQUIRED_KEYS])
def test_a_missing_key_is_named(folder, key):
    change_config(folder, remove=(key,))
    with pytest.raises(ValueError, match=rf"config.json lacks {key}; .*can't be guessed"):
        DSparkDraftModel.from_pretrained(folder)


def test_a_missing_rope_base_is_not_guessed(folder):
    change_config(folder, remove=("rope_theta", "rope_parameters"))
    with pytest.raises(ValueError, match=r"lacks rope_parameters"):
        DSparkDraftModel.from_pretrained(folder)


CONFIG_FAULTS = {
    "typo": (dict(blok_size=4), r"'blok_size'.*did you mean 'block_size'"),
    "type": (dict(block_size="4"), r"block_size"),
    "last layer": (dict(target_layer_ids=[0, 3]), r"last layer"),
    "mask": (dict(mask_token_id=64), r"mask_token_id 64 lies outside the embedding of 64 rows"),
    "anchor": (dict(sample_from_anchor=False), r"sample_from_anchor=False"),
    "null": (dict(sample_from_anchor=None), r"sample_from_anchor"),
    "tied": (dict(tie_word_embeddings=True), r"tie_word_embeddings must be False"),
}


@pytest.mark.parametrize(("changes", "message"), CONFIG_FAULTS.values(), ids=CONFIG_FAULTS.keys())
def test_a_bad_config_is_refused_by_name(folder, changes, message):
    change_config(folder, **changes)
    with pytest.raises(ValueError, match=message):
        DSparkDraftModel.from_pretrained(folder)


@pytest.mark.parametrize("text", ["", "{", "block_size: 7", "[1, 2]", "\x00\xff", '"text"'])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_garbage_json_is_a_value_error_that_names_the_file(folder, name, text):
    (folder / name).write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=rf"{name}.*(not valid JSON|must hold a JSON object)"):
        DSparkDraftModel.from_pretrained(folder)


@pytest.mark.parametrize("kept", [0, 5, 8, 100, 4000, -1])
def test_a_truncated_file_is_a_value_error_that_names_it(folder, kept):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ValueError, match=r"model.safetensors is damaged or truncated.*download or save it again"):
        DSparkDraftModel.from_pretrained(folder)


@pytest.mark.parametrize("content", [b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", struct.pack("<Q", 2) + b"{}" + b"x"])
def test_a_damaged_file_is_a_value_error(folder, content):
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=r"damaged|missing fc\.weight"):
        DSparkDraftModel.from_pretrained(folder)


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        ([-1, *[0] * 19], "from -1 to 19"),
        ([*[0] * 19, 45], "from 0 to 64"),
        ([0, 2, 0, *[0] * 17], "from 0 to 19"),
        ([0, 0, -1, *[0] * 17], "from 0 to 19"),
    ],
    ids=["below", "beyond", "disordered", "repeated"],
)
def test_offsets_of_a_reduced_vocabulary_are_checked(target, offsets, message, tmp_path):
    tiny_draft(target, draft_vocab_size=20).save_pretrained(tmp_path)
    change_tensors(tmp_path, lambda tensors: tensors["d2t"].copy_(torch.tensor(offsets)))
    with pytest.raises(ValueError, match=rf"d2t.*increasing ids below 64.*{message}"):
        DSparkDraftModel.from_pretrained(tmp_path)


# The other known layouts, by the marks of their config.json
DFLASH = {"mask_token_id": 5, "target_layer_ids": [1, 2]}
FOREIGN_FORMATS = {
    "speculators DSpark": (dict(speculators_model_type="dspark", architectures=["DSparkDraftModel"]), "speculators.*'dspark'"),
    "speculators DFlash": (dict(speculators_model_type="dflash", architectures=["DFlashSpeculator"]), "speculators.*'dflash'"),
    "speculators, disguised": (dict(speculators_model_type="dspark", architectures=["Qwen3DSparkModel"], model_type="qwen3"), "speculators"),
    "DeepSeek V4": (dict(architectures=["DeepseekV4ForCausalLM"], model_type="deepseek_v4", dspark_block_size=5), "base model with its draft inside"),
    "DeepSeek V4.1": (dict(model_type="deepseek_v41", dspark_target_layer_ids=[40]), "base model with its draft inside"),
    "DeepSpec Eagle3": (dict(architectures=["Qwen3Eagle3Model"], model_type="qwen3", ttt_length=7), "Eagle3.*Qwen3Eagle3Model"),
    "DeepSpec Gemma4": (dict(architectures=["Gemma4DSparkModel"], model_type="gemma4_text"), "Gemma4DSparkModel"),
    "NeMo": (dict(architectures=["KimiK3DSparkModel"], model_type="kimi"), "KimiK3DSparkModel"),
    "Qwen3 Omni": (dict(architectures=["Qwen3OmniDSparkModel"], model_type="qwen3"), "Qwen3OmniDSparkModel"),
    "SpecForge": (dict(architectures=["DSparkDraftModel"], model_type="qwen3", dflash_config=DFLASH | {"projector_type": "dspark"}), "SpecForge"),
    "ModelOpt": (
        dict(architectures=["DFlashDraftModel"], model_type="qwen3", dflash_config=DFLASH | {"projector_type": "dspark"}),
        "Model-Optimizer",
    ),
    "Domino": (dict(architectures=["DFlashDraftModel"], model_type="qwen3", dflash_config=DFLASH | {"projector_type": "domino"}), "'domino'"),
    "DFlash2": (dict(architectures=["DFlash2DraftModel"], model_type="qwen3", dflash_config=DFLASH), "DFlash2"),
    "z-lab DFlash": (dict(architectures=["DFlashDraftModel"], model_type="qwen3", block_size=16, dflash_config=DFLASH), r"z-lab.*block_size - 1"),
    "z-lab DFlash, newer": (dict(architectures=["DFlashDraftModel"], model_type="qwen3", dflash_config=DFLASH | {"block_size": 16}), "z-lab"),
    "transformers' DFlash": (dict(architectures=["MuseGlimmerAssistantModel"], model_type="muse_glimmer_assistant"), "speculation_type='dflash'"),
    "an ordinary model": (dict(architectures=["Qwen3ForCausalLM"], model_type="qwen3"), "Qwen3ForCausalLM"),
    "no architecture": (dict(model_type="qwen3"), r"architectures are \[\]"),
    "null architecture": (dict(architectures=None, model_type="qwen3", dflash_config=None), r"architectures are \[\]"),
    "another model type": (dict(architectures=["Qwen3DSparkModel"], model_type="llama"), "'llama'"),
}


@pytest.mark.parametrize(("values", "message"), FOREIGN_FORMATS.values(), ids=FOREIGN_FORMATS.keys())
def test_other_layouts_are_refused_by_name(values, message, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ValueError, match=rf"{tmp_path} can't be loaded as a DSpark draft: .*{message}"):
        DSparkDraftModel.from_pretrained(tmp_path)


def test_layouts_are_told_apart():
    """Formats that differ in meaning get different sentences; the two kinds of DFlash above all."""
    sentences = {name: unsupported_format(values) for name, (values, _) in FOREIGN_FORMATS.items()}
    for one, other in (("z-lab DFlash", "ModelOpt"), ("z-lab DFlash", "DFlash2"), ("SpecForge", "ModelOpt"), ("SpecForge", "speculators DSpark")):
        assert sentences[one] != sentences[other]
    assert unsupported_format(dict(architectures=["Qwen3DSparkModel"], model_type="qwen3", markov_rank=0)) is None


def test_a_mirrored_dflash_config_is_no_other_layout(folder):
    """TensorRT-LLM reads the layer ids there."""
    change_config(folder, dflash_config=dict(mask_token_id=63, target_layer_ids=[0, 2]))
    assert DSparkDraftModel.from_pretrained(folder).config.dflash_config["mask_token_id"] == 63


def test_an_adapter_alone_says_how_to_load_it(folder, tmp_path):
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"PEFT adapter alone.*PeftModel\.from_pretrained\(DSparkDraftModel\.from_pretrained\(base\), '.*adapter'\)"):
        DSparkDraftModel.from_pretrained(tmp_path / "adapter")


def test_what_does_not_exist_keeps_transformers_error(folder, tmp_path, monkeypatch):
    for name in ("no-such-owner/no-such-draft", tmp_path / "nowhere"):
        with pytest.raises(OSError):
            DSparkDraftModel.from_pretrained(name)
    (tmp_path / "empty").mkdir()
    with pytest.raises(OSError, match=r"config\.json"):
        DSparkDraftModel.from_pretrained(tmp_path / "empty")
    (folder / "model.safetensors").unlink()
    with pytest.raises(OSError, match=r"model\.safetensors"):
        DSparkDraftModel.from_pretrained(folder)


@pytest.mark.parametrize("key", ["target_layer_ids", "block_size", "markov_rank"])
def test_what_must_not_be_guessed_is_refused_as_null_too(folder, key):
    change_config(folder, **{key: None})
    with pytest.raises(ValueError, match=f"lacks {key}"):
        DSparkDraftModel.from_pretrained(folder)


@pytest.mark.parametrize("rope", [None, {}, {"rope_type": "default"}], ids=str)
def test_a_rope_base_is_never_guessed(folder, rope):
    change_config(folder, remove=("rope_theta",), rope_parameters=rope)
    with pytest.raises(ValueError, match="rope_theta"):
        DSparkDraftModel.from_pretrained(folder)


def test_integers_in_place_of_weights_are_refused(folder):
    change_tensors(folder, lambda tensors: tensors.update({"fc.weight": tensors["fc.weight"].to(torch.int8)}))
    with pytest.raises(ValueError, match=r"fc\.weight is stored as I8"):
        DSparkDraftModel.from_pretrained(folder)


@pytest.mark.parametrize("changes", [{"architectures": [1]}, {"architectures": "Qwen3DSparkModel"}, {"dflash_config": "x"}], ids=str)
def test_a_malformed_config_is_refused(folder, changes):
    change_config(folder, **changes)
    with pytest.raises(ValueError, match="malformed"):
        DSparkDraftModel.from_pretrained(folder)


def test_a_config_of_another_class_is_refused(folder):
    with pytest.raises(ValueError, match="must be a DSparkConfig, got Qwen3Config"):
        DSparkDraftModel.from_pretrained(folder, config=Qwen3Config())


def test_an_option_of_the_config_may_be_given_as_an_argument(folder):
    assert DSparkDraftModel.from_pretrained(folder, attention_dropout=0.25).config.attention_dropout == 0.25
    with pytest.raises(ValueError, match="block_size"):
        DSparkDraftModel.from_pretrained(folder, block_size=0)


def test_a_folder_that_does_not_exist_is_an_os_error(tmp_path):
    with pytest.raises(OSError, match="nowhere is no folder"):
        DSparkDraftModel.from_pretrained(tmp_path / "nowhere")
