"""DSparkConfig: defaults of the published drafts, refusals by name, what a saved config.json says."""

import json

import pytest
from transformers import AutoConfig, Qwen3Config

from hf_dspark import DSparkConfig
from hf_dspark.modeling.configuration_dspark import spread_target_layers


def saved(config, folder) -> dict:
    """The `config.json` that this config writes."""
    config.save_pretrained(folder)
    return json.loads((folder / "config.json").read_text())


def test_defaults_are_those_of_the_published_qwen3_4b_draft():
    config = DSparkConfig()
    assert (config.block_size, config.markov_rank, config.mask_token_id, config.num_anchors) == (7, 256, 151669, 512)
    assert (config.num_hidden_layers, config.num_target_layers, config.markov_head_type) == (5, 36, "vanilla")
    assert config.enable_confidence_head and config.confidence_head_with_markov and config.sample_from_anchor
    assert config.draft_vocab_size is None and not config.tie_word_embeddings


@pytest.mark.parametrize(("num_target_layers", "published"), [(36, [1, 9, 17, 25, 33]), (40, [1, 10, 19, 28, 37])])
def test_default_layers_are_the_published_ones(num_target_layers, published):
    assert DSparkConfig(num_target_layers=num_target_layers).target_layer_ids == published


@pytest.mark.parametrize("num_layers", [1, 2, 5])
def test_spread_layers_never_name_the_last_one(num_layers):
    for num_target_layers in range(2, 100):
        ids = spread_target_layers(num_target_layers, num_layers)
        assert len(ids) == min(num_layers, num_target_layers - 1)
        assert ids == sorted(set(ids)) and ids[0] >= 0 and ids[-1] <= num_target_layers - 2


def test_a_target_of_one_layer_has_nothing_to_capture():
    with pytest.raises(ValueError, match=r"at least 2 layers.*num_target_layers=1"):
        spread_target_layers(1)


REFUSED = {
    "markov features, rank 0": (dict(markov_rank=0), "confidence_head_with_markov=True.*markov_rank is 0"),
    "negative rank": (dict(markov_rank=-1), "markov_rank.*-1"),
    "head type": (dict(markov_head_type="lstm"), "markov_head_type.*vanilla.*gated.*rnn.*'lstm'"),
    "ids unordered": (dict(target_layer_ids=[9, 1]), r"target_layer_ids.*increasing.*\[9, 1\]"),
    "ids repeated": (dict(target_layer_ids=[1, 1, 9]), r"target_layer_ids.*increasing.*\[1, 1, 9\]"),
    "ids empty": (dict(target_layer_ids=[]), r"target_layer_ids.*non-empty.*\[\]"),
    "ids below the embedding": (dict(target_layer_ids=[-2, 3]), r"target_layer_ids \[-2, 3\].*-1"),
    "ids beyond the target": (dict(target_layer_ids=[1, 36]), r"target_layer_ids \[1, 36\].*34"),
    "ids name the last layer": (dict(target_layer_ids=[1, 35]), "target_layer_ids.*last layer.*35 of 36.*up to 34"),
    "block 0": (dict(block_size=0), "block_size must be at least 1, got 0"),
    "anchors 0": (dict(num_anchors=0), "num_anchors must be at least 1, got 0"),
    "anchor row predicts nothing": (dict(sample_from_anchor=False), "sample_from_anchor=False"),
    "mask outside": (dict(vocab_size=100, mask_token_id=100), "mask_token_id 100.*100 rows"),
    "mask negative": (dict(mask_token_id=-1), "mask_token_id -1"),
    "mask is the stop token": (dict(eos_token_id=151669), "mask_token_id 151669 is also a stop or pad token"),
    "mask is a stop token": (dict(eos_token_id=[5, 151669]), r"mask_token_id 151669.*eos_token_id=\[5, 151669\]"),
    "mask is the pad token": (dict(pad_token_id=151669), "mask_token_id 151669.*pad_token_id=151669"),
    "draft vocabulary 0": (dict(draft_vocab_size=0), "draft_vocab_size.*got 0"),
    "draft vocabulary too large": (dict(draft_vocab_size=200_000), "draft_vocab_size.*151936.*200000"),
    "tied": (dict(tie_word_embeddings=True), "tie_word_embeddings must be False"),
    "sliding layers": (
        dict(num_hidden_layers=2, layer_types=["full_attention", "sliding_attention"], use_sliding_window=True, sliding_window=64),
        "layer_types.*'sliding_attention'",
    ),
    "heads": (dict(num_attention_heads=6, num_key_value_heads=4), "num_attention_heads=6.*num_key_value_heads=4"),
}


@pytest.mark.parametrize(("options", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_work_is_refused_by_name(options, message):
    with pytest.raises(ValueError, match=message):
        DSparkConfig(**options)


@pytest.mark.parametrize(
    "name", ["block_size", "mask_token_id", "num_target_layers", "markov_rank", "num_anchors", "hidden_size", "num_hidden_layers"]
)
@pytest.mark.parametrize("value", ["7", 7.0, None])
def test_numbers_are_integers(name, value):
    with pytest.raises(ValueError, match=name):
        DSparkConfig(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("target_layer_ids", (1, 9)),
        ("target_layer_ids", ["1", "9"]),
        ("target_layer_ids", "1,9"),
        ("enable_confidence_head", 1),
        ("confidence_head_with_markov", "true"),
        ("sample_from_anchor", None),
        ("markov_head_type", None),
        ("draft_vocab_size", "100"),
        ("base_model_name_or_path", 3),
    ],
)
def test_types_are_strict(name, value):
    with pytest.raises(ValueError, match=name):
        DSparkConfig(**{name: value})


def test_a_bad_value_assigned_later_surfaces_at_the_latest_when_saved(tmp_path):
    config = DSparkConfig()
    config.block_size = 0
    with pytest.raises(Exception, match=r"block_size must be at least 1, got 0"):
        config.save_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("misspelt", "meant"),
    [
        ("blok_size", "block_size"),
        ("blocksize", "block_size"),
        ("mask_tokn_id", "mask_token_id"),
        ("mask_token_ids", "mask_token_id"),
        ("target_layers_ids", "target_layer_ids"),
        ("num_target_layer", "num_target_layers"),
        ("markov_rnak", "markov_rank"),
        ("markov_head_typ", "markov_head_type"),
        ("enable_confidence_heads", "enable_confidence_head"),
        ("confidence_head_with_markv", "confidence_head_with_markov"),
        ("draft_vocab_sise", "draft_vocab_size"),
        ("sample_from_ancor", "sample_from_anchor"),
        ("num_anchor", "num_anchors"),
        ("hiden_size", "hidden_size"),
    ],
)
def test_a_misspelt_option_is_an_error_that_names_the_true_one(misspelt, meant):
    with pytest.raises(ValueError, match=f"{misspelt!r}.*3.*did you mean {meant!r}"):
        DSparkConfig(**{misspelt: 3})


# What a draft's config inherits when it is made as a deep copy of its target's: keys of Llama, Gemma, DeepSeek, MiMo, Qwen.
FOREIGN = dict(
    pretraining_tp=1,
    mlp_bias=False,
    final_logit_softcapping=30.0,
    attn_logit_softcapping=None,
    query_pre_attn_scalar=256,
    global_head_dim=512,
    num_global_key_value_heads=1,
    num_kv_shared_layers=0,
    hidden_size_per_layer_input=0,
    vocab_size_per_layer_input=262144,
    target_model_type="gemma4_unified",
    boi_token_id=255999,
    eoi_token_id=256000,
    eod_token_id=151643,
    v_head_dim=128,
    qk_rope_head_dim=64,
    moe_intermediate_size=768,
    moe_layer_freq=1,
    n_routed_experts=8,
    swa_num_attention_heads=16,
    swa_num_key_value_heads=4,
    max_2d_position_embeddings=1024,
    logits_scaling=8.0,
    logit_scale=0.0625,
    torch_dtype="bfloat16",
    mlp_only_layers=[],
)


@pytest.mark.parametrize("name", FOREIGN)
def test_the_targets_own_keys_are_kept(name, tmp_path):
    config = DSparkConfig(**{name: FOREIGN[name]})
    written = saved(config, tmp_path)
    if name != "torch_dtype":  # the old spelling of dtype
        assert getattr(config, name) == FOREIGN[name] == getattr(DSparkConfig.from_pretrained(tmp_path), name)
        assert written[name] == FOREIGN[name]


def test_every_known_option_is_an_option():
    for name in ("num_anchors", "mask_token_id", "rope_scaling", "rope_theta", "max_window_layers"):
        value = {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}.get(name, 28)
        assert DSparkConfig(**{name: value})


@pytest.mark.parametrize(
    "options",
    [
        dict(markov_head_type="rnn", base_model_name_or_path="org/base", base_model_revision="abc"),
        dict(draft_vocab_size=32_000),
        dict(markov_rank=0, confidence_head_with_markov=False),
        dict(markov_rank=0, enable_confidence_head=False),
        dict(target_layer_ids=[-1, 4], eos_token_id=[1, 2], pad_token_id=0),
    ],
)
def test_saving_and_loading_keeps_everything(options, tmp_path):
    config = DSparkConfig(**options, v_head_dim=12)
    written = saved(config, tmp_path)
    reloaded = DSparkConfig.from_pretrained(tmp_path)
    assert reloaded.to_dict() == config.to_dict()
    for name, value in options.items():
        assert getattr(reloaded, name) == value
    assert saved(reloaded, tmp_path) == written


def test_the_file_is_the_canonical_layout(tmp_path):
    written = saved(DSparkConfig(rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0}), tmp_path)
    assert written["architectures"] == ["Qwen3DSparkModel"]
    assert written["model_type"] == "qwen3"
    assert written["sample_from_anchor"] is True
    assert written["tie_word_embeddings"] is False
    assert written["layer_types"] == ["full_attention"] * 5
    assert written["rope_theta"] == written["rope_parameters"]["rope_theta"] == 1_000_000.0
    assert written["target_layer_ids"] == [1, 9, 17, 25, 33]
    for name in ("block_size", "mask_token_id", "num_target_layers", "markov_rank", "markov_head_type", "num_anchors"):
        assert name in written
    assert written["enable_confidence_head"] is True and written["confidence_head_with_markov"] is True
    for name in ("draft_vocab_size", "base_model_name_or_path", "base_model_revision", "dflash_config", "auto_map", "n_predict"):
        assert name not in written


def test_keys_of_absent_heads_are_not_written(tmp_path):
    written = saved(DSparkConfig(markov_rank=0, enable_confidence_head=False), tmp_path)
    assert written["markov_rank"] == 0 and written["enable_confidence_head"] is False
    assert "markov_head_type" not in written and "confidence_head_with_markov" not in written


@pytest.mark.parametrize(
    "rope",
    [
        dict(rope_theta=5e5),
        dict(rope_parameters={"rope_type": "default", "rope_theta": 5e5}),
        dict(rope_parameters={"rope_type": "default", "rope_theta": 5e5}, rope_theta=5e5),
        dict(rope_parameters={"rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0, "original_max_position_embeddings": 1024}),
        dict(rope_theta=5e5, rope_scaling={"rope_type": "linear", "factor": 2.0}),
    ],
)
def test_the_rope_base_is_read_from_every_spelling(rope, tmp_path):
    written = saved(DSparkConfig(**rope), tmp_path)
    reloaded = DSparkConfig.from_pretrained(tmp_path)
    assert reloaded.rope_parameters["rope_theta"] == written["rope_theta"] == written["rope_parameters"]["rope_theta"] == 5e5
    scaling = rope.get("rope_scaling") or rope.get("rope_parameters") or {"rope_type": "default"}
    assert scaling.items() <= reloaded.rope_parameters.items()


def test_two_rope_bases_that_disagree_are_refused():
    with pytest.raises(ValueError, match=r"rope_theta.*10000.*500000"):
        DSparkConfig(rope_theta=10_000, rope_parameters={"rope_type": "default", "rope_theta": 500_000})


def test_auto_config_reads_it_as_qwen3_and_keeps_every_key(tmp_path):
    written = saved(DSparkConfig(block_size=5), tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    assert type(config) is Qwen3Config
    assert config.block_size == 5 and config.sample_from_anchor is True and config.target_layer_ids == written["target_layer_ids"]


def test_configs_share_no_lists():
    first, second = DSparkConfig(), DSparkConfig()
    first.target_layer_ids.append(34)
    assert second.target_layer_ids == [1, 9, 17, 25, 33]


@pytest.mark.parametrize(
    "options",
    [
        {"rope_parameters": {"rope_type": "default", "rope_theta": "10000"}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": -1.0}},
        {"rope_parameters": {"rope_type": "yarnx", "rope_theta": 10000.0}},
        {"hidden_act": "abc"},
        {"head_dim": 0},
        {"num_key_value_heads": 0},
        {"hidden_size": -1},
        {"dtype": "abc"},
    ],
    ids=str,
)
def test_a_backbone_that_can_not_be_built_is_refused_by_name(options):
    (name, _), *_ = options.items()
    named = "rope_t" if name == "rope_parameters" else name
    with pytest.raises(ValueError, match=named):
        DSparkConfig(**options)
