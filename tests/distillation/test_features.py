"""The target's features, for several families of targets."""

import pytest
import torch
from oracle import VOCAB, build, tiny_target
from peft import LoraConfig, get_peft_model
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    FalconConfig,
    FalconForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    MistralConfig,
    MistralForCausalLM,
)

from hf_dspark.distillation.features import config_fingerprint, target_features, weights_fingerprint

SIZES = dict(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=4, num_attention_heads=4, eos_token_id=None, bos_token_id=None, pad_token_id=None)
TARGETS = {
    "qwen3": lambda: tiny_target(),
    "gemma3": lambda: build(
        Gemma3ForCausalLM,
        Gemma3TextConfig(**SIZES, intermediate_size=48, num_key_value_heads=2, head_dim=8, sliding_window=4, tie_word_embeddings=True),
    ),
    "gpt2": lambda: build(
        GPT2LMHeadModel, GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=4, n_head=4, n_positions=64, bos_token_id=None, eos_token_id=None)
    ),
    "mistral with a window": lambda: build(
        MistralForCausalLM, MistralConfig(**SIZES, intermediate_size=48, num_key_value_heads=2, head_dim=8, sliding_window=4)
    ),
    # Takes no list of layers: it returns them all.
    "falcon": lambda: build(FalconForCausalLM, FalconConfig(**SIZES)),
}
LAYERS = [-1, 0, 2]


@pytest.mark.parametrize("name", TARGETS)
def test_layers_and_last_hidden_state_are_the_targets_own(name):
    target = TARGETS[name]()
    ids = torch.randint(VOCAB, (2, 9), generator=torch.Generator().manual_seed(0))
    plain = target(ids, output_hidden_states=True)
    features = target_features(target, ids, torch.ones_like(ids), LAYERS)
    for layer, hidden in zip(LAYERS, features.hidden_states):
        torch.testing.assert_close(hidden, plain.hidden_states[layer + 1], rtol=0, atol=1e-5)
    torch.testing.assert_close(target.get_output_embeddings()(features.last_hidden), plain.logits, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(features.last_logits, plain.logits[:, -1], rtol=1e-4, atol=1e-4)


def test_logits_are_computed_at_one_position_only_and_without_gradient():
    target = tiny_target()
    calls = []
    target.lm_head.register_forward_hook(lambda module, args, output: calls.append((tuple(output.shape), args[0].is_contiguous())))
    features = target_features(target, torch.zeros(2, 9, dtype=torch.long), None, [0])
    # A view that is not contiguous makes a CPU copy the whole head, once for each sequence.
    assert calls == [((2, 1, VOCAB), True)]
    assert not features.last_hidden.requires_grad and not features.hidden_states[0].requires_grad and not features.last_logits.requires_grad


def test_padding_on_the_right_changes_nothing():
    target = tiny_target()
    ids = torch.randint(VOCAB, (1, 6), generator=torch.Generator().manual_seed(0))
    alone = target_features(target, ids, None, [0, 2])
    mask = torch.tensor([[1] * 6 + [0] * 3], dtype=torch.bool)
    padded = target_features(target, torch.nn.functional.pad(ids, (0, 3)), mask, [0, 2])
    for expected, hidden in zip([*alone.hidden_states, alone.last_hidden], [*padded.hidden_states, padded.last_hidden]):
        torch.testing.assert_close(hidden[:, :6], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("name", TARGETS)
def test_packed_documents_get_what_they_get_alone(name, implementation):
    target = TARGETS[name]()
    target.set_attn_implementation(implementation)
    lengths = [5, 1, 8, 6]  # two of them longer than the sliding windows
    ids = torch.randint(VOCAB, (2, 24), generator=torch.Generator().manual_seed(0))
    # The first row ends with four tokens of padding, the second is one document.
    positions = torch.stack([torch.cat([torch.arange(length) for length in [*lengths, 4]]), torch.arange(24)])
    packed = target_features(target, ids, None, LAYERS, positions)
    starts = [sum(lengths[:i]) for i in range(4)]
    for row, start, length in [*zip([0] * 4, starts, lengths), (1, 0, 24)]:
        part = slice(start, start + length)
        alone = target_features(target, ids[row : row + 1, part], None, LAYERS)
        for found, expected in zip([*packed.hidden_states, packed.last_hidden], [*alone.hidden_states, alone.last_hidden]):
            torch.testing.assert_close(found[row : row + 1, part], expected, rtol=1e-4, atol=1e-4)


def test_a_target_without_position_ids_is_refused_for_packed_rows():
    target = build(BloomForCausalLM, BloomConfig(vocab_size=VOCAB, hidden_size=32, n_layer=2, n_head=4))
    with pytest.raises(ValueError, match=r"packing=True: BloomForCausalLM takes no position_ids.*set packing=False"):
        target_features(target, torch.zeros(1, 4, dtype=torch.long), None, [0], torch.tensor([[0, 1, 0, 1]]))


def test_a_target_with_an_adapter_computes_logits_at_one_position_and_takes_packed_rows():
    target = tiny_target()
    ids = torch.randint(VOCAB, (1, 8), generator=torch.Generator().manual_seed(0))
    packed = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])
    adapted = get_peft_model(tiny_target(), LoraConfig(target_modules=["q_proj"]))  # its update is 0 at the start
    widths = []
    adapted.lm_head.register_forward_hook(lambda module, args, output: widths.append(output.shape[1]))
    for positions in (None, packed):
        expected, found = target_features(target, ids, None, [0, 2], positions), target_features(adapted, ids, None, [0, 2], positions)
        torch.testing.assert_close(found.last_hidden, expected.last_hidden, rtol=1e-5, atol=1e-5)
    assert widths == [1, 1]


def test_a_target_without_hidden_states_is_refused():
    target = tiny_target()
    forward = target.forward

    def silent(*args, logits_to_keep=0, **kwargs):
        return forward(*args, logits_to_keep=logits_to_keep, **{**kwargs, "output_hidden_states": False})

    target.forward = silent
    with pytest.raises(ValueError, match=r"Qwen3ForCausalLM returned no hidden states of its layers \[0\]"):
        target_features(target, torch.zeros(1, 3, dtype=torch.long), None, [0])


# Fingerprints


def test_a_fingerprint_is_of_the_weights_all_of_them_and_of_nothing_else():
    first = weights_fingerprint(tiny_target())
    assert weights_fingerprint(tiny_target()) == first and weights_fingerprint(tiny_target(seed=1)) != first
    assert weights_fingerprint(tiny_target().bfloat16()) != first
    for name in dict(tiny_target().named_parameters()):
        target = tiny_target()
        with torch.no_grad():
            target.get_parameter(name).mul_(1.001)
        assert weights_fingerprint(target) != first, name


def test_a_rounded_fingerprint_is_of_the_weights_in_whatever_type_they_are_loaded():
    first = weights_fingerprint(tiny_target(), rounded=True)
    assert weights_fingerprint(tiny_target().bfloat16(), rounded=True) == first
    assert weights_fingerprint(tiny_target().bfloat16().float(), rounded=True) == first
    assert weights_fingerprint(tiny_target(seed=1), rounded=True) != first


def test_a_fingerprint_tells_adapters_apart():
    adapted = get_peft_model(tiny_target(), LoraConfig(r=2, target_modules=["q_proj"]))
    found = [weights_fingerprint(tiny_target()), weights_fingerprint(adapted)]
    adapted.add_adapter("other", LoraConfig(r=2, target_modules=["q_proj"]))
    found.append(weights_fingerprint(adapted))
    adapted.set_adapter("other")
    found.append(weights_fingerprint(adapted))
    assert len(set(found)) == 4


def test_tensors_that_lie_elsewhere_and_empty_ones_have_a_fingerprint_too():
    target = tiny_target()
    target.register_buffer("nothing", torch.zeros(0))
    target.register_buffer("number", torch.tensor(3.0))
    assert weights_fingerprint(target) != weights_fingerprint(tiny_target())
    assert len(weights_fingerprint(target.to("meta"))) == 16


def test_a_config_fingerprint_sees_what_changes_the_forward(tmp_path):
    target = tiny_target()
    first = config_fingerprint(target)
    target.save_pretrained(tmp_path)
    assert config_fingerprint(type(target).from_pretrained(tmp_path)) == first
    target.config.use_cache, target.config.name_or_path = False, "elsewhere"
    assert config_fingerprint(target) == first
    for options in ({"rms_norm_eps": 1e-5}, {"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}}, {"num_hidden_layers": 3}):
        assert config_fingerprint(tiny_target(**options)) != first, options
