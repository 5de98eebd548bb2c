"""Each fault that would train a useless draft without a sound is planted once, and named."""

import logging

import pytest
import torch
from oracle import VOCAB, build, tiny_draft, tiny_target
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel, GptOssConfig, GptOssForCausalLM, OPTConfig, OPTForCausalLM

from hf_dspark.distillation.collator import BlockCollator
from hf_dspark.distillation.features import TargetFeatures, target_features
from hf_dspark.distillation.first_batch import check_first_batch, check_optimizer

PACKED = [{"input_ids": list(range(1, 13))}, {"input_ids": list(range(20, 32)), "lengths": [5, 1, 6]}]


def make(target=None, packing: bool = False, **options):
    target = (tiny_target() if target is None else target).requires_grad_(False)
    draft = tiny_draft(target, **options).bind(target)
    return target, draft, BlockCollator(num_anchors=4, packing=packing)(PACKED)


def features_of(target, draft, inputs, shift: int = 0) -> TargetFeatures:
    layer_ids = [layer + shift for layer in draft.config.target_layer_ids]
    return target_features(target, inputs["input_ids"], inputs["attention_mask"], layer_ids, inputs.get("position_ids"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("packing", [False, True])
def test_a_sound_batch_passes_and_leaves_no_hooks(packing, dtype):
    target, draft, inputs = make(tiny_target().to(dtype), packing, target_layer_ids=[-1, 0, 2])
    features = features_of(target, draft, inputs)
    hooks = [(len(layer._forward_hooks), len(layer._forward_pre_hooks)) for layer in target.model.layers]
    check_first_batch(draft, target, inputs, features)
    assert hooks == [(len(layer._forward_hooks), len(layer._forward_pre_hooks)) for layer in target.model.layers]


# The last layer's output is known after the final norm alone.
@pytest.mark.parametrize("layer, shift", [(1, -1), (1, 1), (4, -1), (4, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_off_by_one_are_named(dtype, layer, shift):
    target, draft, inputs = make(tiny_target(num_hidden_layers=6).to(dtype), target_layer_ids=[layer])
    with pytest.raises(ValueError, match=f"output of its layer {layer} .of target_layer_ids .{layer}.. is the output of layer {layer + shift}:"):
        check_first_batch(draft, target, inputs, features_of(target, draft, inputs, shift))


def test_the_embedding_in_place_of_a_layer_is_named():
    target, draft, inputs = make(target_layer_ids=[0])
    with pytest.raises(ValueError, match=r"layer 0 .* is the output of layer -1"):
        check_first_batch(draft, target, inputs, features_of(target, draft, inputs, -1))


def test_layers_of_another_family_are_found():
    sizes = dict(vocab_size=VOCAB, n_embd=32, n_layer=4, n_head=4, n_positions=64, bos_token_id=None, eos_token_id=None)
    target, draft, inputs = make(build(GPT2LMHeadModel, GPT2Config(**sizes)), target_layer_ids=[-1, 1])
    check_first_batch(draft, target, inputs, features_of(target, draft, inputs))
    features = features_of(target, draft, inputs)
    features.hidden_states[1] = features.hidden_states[0]
    with pytest.raises(ValueError, match=r"layer 1 .* is the output of layer -1"):
        check_first_batch(draft, target, inputs, features)


def test_a_target_whose_layers_cannot_be_found_is_let_through_with_a_warning(caplog):
    target, draft, inputs = make()
    features = features_of(target, draft, inputs)
    target.config.num_hidden_layers = 99
    with caplog.at_level(logging.WARNING), pytest.MonkeyPatch.context() as patch:
        patch.setattr("hf_dspark.distillation.first_batch.target_features", lambda *args: features)
        check_first_batch(draft, target, inputs, features)
    assert "Qwen3ForCausalLM has no list of layers" in caplog.text


def test_a_last_hidden_state_before_the_final_norm_is_named():
    target, draft, inputs = make()
    features = features_of(target, draft, inputs)
    unnormed = []
    with target.model.norm.register_forward_pre_hook(lambda module, args: unnormed.append(args[0])):
        features_of(target, draft, inputs)
    with pytest.raises(ValueError, match="its head applied to its last hidden state differs from its own logits"):
        check_first_batch(draft, target, inputs, features._replace(last_hidden=unnormed[0]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_target_that_mixes_packed_texts_is_named(dtype):
    target, draft, inputs = make(tiny_target().to(dtype), packing=True)
    features = target_features(target, inputs["input_ids"], inputs["attention_mask"], draft.config.target_layer_ids)
    with pytest.raises(ValueError, match=r"packing=True: Qwen3ForCausalLM \(sdpa attention\) does not keep packed texts apart.*set packing=False"):
        check_first_batch(draft, target, inputs, features)


SIZES = dict(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=4, num_attention_heads=4, bos_token_id=None, eos_token_id=None, pad_token_id=None)
# Take position_ids, but their masks (of transformers 5.24) don't see that these start again.
MIXING = {
    "gpt-oss": lambda: build(
        GptOssForCausalLM, GptOssConfig(**SIZES, intermediate_size=32, num_key_value_heads=2, head_dim=8, num_local_experts=4, sliding_window=4)
    ),
    "opt": lambda: build(OPTForCausalLM, OPTConfig(**SIZES, ffn_dim=48, word_embed_proj_dim=32)),
}


@pytest.mark.parametrize("name", MIXING)
def test_families_that_mix_packed_texts_are_refused(name):
    target, draft, inputs = make(MIXING[name](), packing=True)
    try:
        check_first_batch(draft, target, inputs, features_of(target, draft, inputs))
    except ValueError as error:
        assert "does not keep packed texts apart" in str(error)
        return
    # A later transformers may keep them apart: then they must really be.
    positions, ids = inputs["position_ids"][1:], inputs["input_ids"][1:]
    packed = target_features(target, ids, None, [0], positions).last_hidden[:, 6:]
    torch.testing.assert_close(packed, target_features(target, ids[:, 6:], None, [0]).last_hidden, rtol=1e-4, atol=1e-4)


def test_a_target_that_is_not_frozen_is_named():
    target, draft, inputs = make()
    features = features_of(target, draft, inputs)
    target.get_output_embeddings().requires_grad_(True)
    with pytest.raises(ValueError, match=r"the target must be frozen, but 1 of its parameters require a gradient, such as lm_head.weight"):
        check_first_batch(draft, target, inputs, features)
    target.requires_grad_(False).train()
    with pytest.raises(ValueError, match=r"Qwen3ForCausalLM is in training mode.*target.eval\(\)"):
        check_first_batch(draft, target, inputs, features)


def adapted(draft):
    return get_peft_model(draft, LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))


@pytest.mark.parametrize("wrap", [lambda draft: draft, adapted], ids=["whole draft", "adapter"])
def test_the_optimizer_holds_the_trainable_parameters_and_nothing_else(wrap):
    target, draft, _ = make()
    model = wrap(draft)
    own = [parameter for parameter in model.parameters() if parameter.requires_grad]
    check_optimizer(torch.optim.SGD(own, lr=1.0), model, target)
    check_optimizer(torch.optim.SGD([{"params": own[:2]}, {"params": own[2:]}], lr=1.0), model, target)
    with pytest.raises(ValueError, match=r"the optimizer holds parameters of the target: \['lm_head.weight'\]"):
        check_optimizer(torch.optim.SGD([*own, target.lm_head.weight], lr=1.0), model, target)
    with pytest.raises(ValueError, match="the optimizer lacks 1 trainable parameters of the draft, such as"):
        check_optimizer(torch.optim.SGD(own[1:], lr=1.0), model, target)
    with pytest.raises(ValueError, match=f"the optimizer holds {len(own) + 1} parameters, the draft has {len(own)} trainable ones"):
        check_optimizer(torch.optim.SGD([*own, torch.zeros(1)], lr=1.0), model, target)


def test_the_frozen_weights_below_an_adapter_are_none_of_the_optimizers_business():
    target, draft, _ = make()
    model = adapted(draft)
    with pytest.raises(ValueError, match="parameters, the draft has"):
        check_optimizer(torch.optim.SGD(model.parameters(), lr=1.0), model, target)
