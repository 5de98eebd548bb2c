"""The target's features, for several families of targets."""

import pytest
import torch
from oracle import VOCAB, build, tiny_target
from transformers import FalconConfig, FalconForCausalLM, Gemma3ForCausalLM, Gemma3TextConfig, GPT2Config, GPT2LMHeadModel

from hf_dspark.distillation.features import target_features

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


def test_a_target_without_hidden_states_is_refused():
    target = tiny_target()
    forward = target.forward

    def silent(*args, logits_to_keep=0, **kwargs):
        return forward(*args, logits_to_keep=logits_to_keep, **{**kwargs, "output_hidden_states": False})

    target.forward = silent
    with pytest.raises(ValueError, match=r"Qwen3ForCausalLM returned no hidden states of its layers \[0\]"):
        target_features(target, torch.zeros(1, 3, dtype=torch.long), None, [0])
