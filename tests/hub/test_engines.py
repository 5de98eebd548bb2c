"""Which engine can run which draft, and the command that does."""

import json
import shlex

import pytest
import torch
from oracle import build, tiny_draft, tiny_target
from transformers import CohereConfig, CohereForCausalLM, Gemma2Config, Gemma2ForCausalLM, GraniteConfig, GraniteForCausalLM

from hf_dspark.hub.engines import engine_command, engine_obstacles

SHAPE = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=8)
SPECIAL = dict(pad_token_id=None, bos_token_id=None, eos_token_id=None)


@pytest.fixture(scope="module")
def target():
    return tiny_target()


def test_the_commands_hold_any_name():
    config = tiny_draft(tiny_target(), block_size=5).config
    for target, draft in (("Qwen/Qwen3-4B", "me/draft"), ("/my models/it's", 'a "b"')):
        vllm = shlex.split(engine_command("vLLM", target, draft, config))
        assert vllm[:4] == ["vllm", "serve", target, "--speculative-config"]
        assert json.loads(vllm[4]) == {"method": "dspark", "model": draft, "num_speculative_tokens": 5}
        sglang = shlex.split(engine_command("SGLang", target, draft, config))
        options = ["--model-path", target, "--speculative-algorithm", "DSPARK", "--speculative-draft-model-path", draft]
        assert sglang == ["python", "-m", "sglang.launch_server", *options]


@pytest.mark.parametrize(
    ("options", "vllm", "sglang"),
    [
        ({}, None, None),
        ({"markov_rank": 0, "confidence_head_with_markov": False}, "no Markov head", "no Markov head"),
        ({"markov_head_type": "gated"}, "type gated", None),
        ({"markov_head_type": "rnn"}, "type rnn", None),
        ({"draft_vocab_size": 16}, None, "vocabulary is reduced"),
        ({"hidden_act": "gelu"}, "use gelu", "use gelu"),
        ({"target_layer_ids": [-1, 1]}, None, "target layer -1"),
    ],
)
def test_heads_and_vocabularies(target, options, vllm, sglang):
    found = engine_obstacles(tiny_draft(target, **options), target=None)
    for engine, expected in (("vLLM", vllm), ("SGLang", sglang)):
        assert len(found[engine]) == (expected is not None) and (expected is None or expected in found[engine][0])


@pytest.mark.parametrize(
    ("model_class", "config", "words"),
    [
        (Gemma2ForCausalLM, Gemma2Config(**SHAPE, **SPECIAL), ["scales its embedding", "caps its logits"]),
        (Gemma2ForCausalLM, Gemma2Config(**SHAPE, **SPECIAL, final_logit_softcapping=None), ["scales its embedding"]),
        (GraniteForCausalLM, GraniteConfig(**{**SHAPE, **SPECIAL}, logits_scaling=8.0), ["scales its logits"]),
        (GraniteForCausalLM, GraniteConfig(**{**SHAPE, **SPECIAL}, logits_scaling=1.0), []),
        (CohereForCausalLM, CohereConfig(**{**SHAPE, **SPECIAL}), ["scales its logits"]),
    ],
    ids=["gemma2", "gemma2-uncapped", "granite", "granite-unscaled", "cohere"],
)
def test_targets_whose_tables_are_not_all(model_class, config, words):
    target = build(model_class, config)
    found = engine_obstacles(tiny_draft(target).bind(target), target)
    assert [next(word for word in words if word in reason) for reason in found["vLLM"]] == words
    assert found["vLLM"] == found["SGLang"]


def test_own_tables_and_adapters(target):
    draft = tiny_draft(target)
    draft.stored_tables = {"lm_head.weight": torch.randn(64, 32)}
    found = engine_obstacles(draft.bind(target), target)
    assert found["vLLM"] == [] and "output head of its own" in found["SGLang"][0]
    assert all("merge the adapter" in reasons[0] for reasons in engine_obstacles(tiny_draft(target), None, is_adapter=True).values())
