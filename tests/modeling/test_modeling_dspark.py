"""The draft model: its forward against a naive twin and the reference values, what it borrows and leaves alone, copies, PEFT."""

import copy
import gc
import io
import itertools
import json
import pickle
import weakref

import pytest
import torch
from drafts import PROMPT, inputs_of, loss_of, random_draft
from oracle import tiny_draft, tiny_target
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from hf_dspark import DSparkConfig, DSparkDraftModel, record_generation
from hf_dspark.modeling.context_cache import ContextCache


@pytest.fixture
def target():
    return tiny_target()


def naive_forward(draft, rows, context_features, position_ids):
    """The parallel stage position by position. `rows` (block, hidden) embedded, `context_features` (context, hidden) -> (block, hidden)."""
    config = draft.config

    def rms_norm(module, vector):
        return module.weight * vector / (vector.square().mean() + config.rms_norm_eps).sqrt()

    def rotate(vector, position):
        half = config.head_dim // 2
        turned = torch.empty_like(vector)
        for i in range(half):
            angle = torch.tensor(float(position)) * config.rope_parameters["rope_theta"] ** (-2 * i / config.head_dim)
            turned[i] = vector[i] * angle.cos() - vector[i + half] * angle.sin()
            turned[i + half] = vector[i + half] * angle.cos() + vector[i] * angle.sin()
        return turned

    num_context, group = len(context_features), config.num_attention_heads // config.num_key_value_heads
    for layer in draft.layers:
        attention = layer.self_attn
        normed = [rms_norm(layer.input_layernorm, row) for row in rows]
        sources = [*context_features, *normed]  # no input norm on the context stream
        keys = [
            [rotate(rms_norm(attention.k_norm, head), p) for head in attention.k_proj(s).split(config.head_dim)]
            for s, p in zip(sources, position_ids)
        ]
        values = [attention.v_proj(source).split(config.head_dim) for source in sources]
        updated = []
        for k, row in enumerate(rows):
            heads = []
            for h, query in enumerate(attention.q_proj(normed[k]).split(config.head_dim)):
                query = rotate(rms_norm(attention.q_norm, query), position_ids[num_context + k])
                scores = torch.stack([query @ key[h // group] for key in keys]) / config.head_dim**0.5
                heads.append(sum(weight * value[h // group] for weight, value in zip(scores.softmax(0), values)))
            row = row + attention.o_proj(torch.cat(heads))
            updated.append(row + layer.mlp(rms_norm(layer.post_attention_layernorm, row)))
        rows = updated
    return torch.stack([rms_norm(draft.norm, row) for row in rows])


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("context", [0, 1, 6])
def test_forward_equals_the_naive_twin(target, implementation, context):
    draft = random_draft(target, num_attention_heads=4, num_key_value_heads=2, attention_bias=True).bind(target)
    draft.set_attn_implementation(implementation)
    ids, features, positions = inputs_of(draft, context)
    with torch.no_grad():
        hidden = draft(ids, features, positions)
        expected = naive_forward(draft, list(target.get_input_embeddings()(ids[0])), list(features[0]), positions[0].tolist())
    torch.testing.assert_close(hidden[0], expected, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_forward_in_pieces_through_the_cache_equals_one_piece(target):
    draft = random_draft(target).bind(target)
    block, cache, start = draft.config.block_size, ContextCache(2), 0
    _, features, _ = inputs_of(draft, context=9)
    for pieces, new in enumerate((4, 1, 0, 3, 1)):
        ids, _, _ = inputs_of(draft, seed=pieces)
        end = start + new
        in_pieces = draft(ids, features[:, start:end], torch.arange(start, end + block)[None], cache=cache)
        cache.advance(new)
        at_once = draft(ids, features[:, :end], torch.arange(end + block)[None])
        torch.testing.assert_close(in_pieces, at_once, rtol=1e-5, atol=1e-5)
        start = end


@torch.no_grad()
def test_every_block_position_sees_the_whole_block_and_the_context(target):
    draft = random_draft(target).bind(target)
    ids, features, positions = inputs_of(draft)
    hidden = draft(ids, features, positions)
    for slot in range(draft.config.block_size):
        changed = ids.clone()
        changed[0, slot] = (ids[0, slot] + 1) % draft.config.vocab_size
        assert ((draft(changed, features, positions) - hidden).abs().amax(dim=(0, 2)) > 1e-6).all()
    for token in range(features.shape[1]):
        changed = features.clone()
        changed[0, token] += 1
        assert ((draft(ids, changed, positions) - hidden).abs().amax(dim=(0, 2)) > 1e-6).all()


@torch.no_grad()
def test_only_distances_between_positions_matter(target):
    draft = random_draft(target).bind(target)
    ids, features, positions = inputs_of(draft)
    torch.testing.assert_close(draft(ids, features, positions + 500), draft(ids, features, positions), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kind", ["dspark_vanilla", "dflash"])
@torch.no_grad()
def test_features_hidden_states_and_logits_equal_the_reference(deepspec_fixtures, kind):
    target = AutoModelForCausalLM.from_pretrained(deepspec_fixtures / "target_qwen3").eval()
    draft = DSparkDraftModel.from_pretrained(deepspec_fixtures / kind).bind(target).eval()
    expected = load_file(deepspec_fixtures / kind / "expected.safetensors")
    for number in range(4):
        values = {name.split(".")[1]: value for name, value in expected.items() if name.startswith(f"round{number}.")}
        prompt = values["prompt_ids"]
        layers = target(prompt, output_hidden_states=True).hidden_states
        layers = [layers[layer + 1] for layer in draft.config.target_layer_ids]
        torch.testing.assert_close(torch.cat(layers, dim=-1), values["context_features"], rtol=1e-5, atol=1e-5)
        ids = torch.full((1, draft.config.block_size), draft.config.mask_token_id)
        ids[0, 0] = values["anchor_id"]
        positions = torch.arange(prompt.shape[1] + draft.config.block_size)[None]
        hidden = draft(ids, draft.context_features(layers), positions)
        torch.testing.assert_close(hidden, values["block_hidden"], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(draft.base_logits(hidden), values["base_logits"], rtol=1e-5, atol=1e-5)


def test_an_unbound_draft_says_how_to_bind(target):
    draft = tiny_draft(target)
    for use in (lambda: draft(*inputs_of(draft)), lambda: draft.base_logits(torch.zeros(1, 32)), lambda: draft.tables):
        with pytest.raises(ValueError, match=r"not bound.*draft\.bind\(target\).*target\.generate\(\.\.\., assistant_model=draft\)"):
            use()


def test_the_target_is_not_kept_alive(target):
    draft = tiny_draft(target).bind(target)
    target.generate(PROMPT, assistant_model=draft, max_new_tokens=4)
    alive = weakref.ref(target)
    # The test's own frame holds it through the fixture, so a second one is made to die.
    other = tiny_target(seed=2)
    other.generate(PROMPT, assistant_model=draft, max_new_tokens=4)
    dying = weakref.ref(other)
    del other
    gc.collect()
    assert alive() is not None and dying() is None
    with pytest.raises(ValueError, match=r"no longer exists.*draft\.bind\(target\)"):
        draft(*inputs_of(draft))
    assert draft.bind(target)(*inputs_of(draft)).isfinite().all()


def test_nothing_of_the_target_is_registered_moved_or_retyped(target):
    draft = tiny_draft(target)
    names, theirs = set(draft.state_dict()), {id(tensor) for tensor in [*target.parameters(), *target.buffers()]}
    draft.bind(target)
    target.generate(PROMPT, assistant_model=draft, max_new_tokens=8)
    assert set(draft.state_dict()) == names and not {"embed_tokens.weight", "lm_head.weight"} & names
    assert not theirs & {id(tensor) for tensor in [*draft.parameters(), *draft.buffers()]}
    assert not set(target.modules()) & set(draft.modules())
    draft.to(torch.float64)
    assert {parameter.dtype for parameter in target.parameters()} == {torch.float32}
    draft.to("meta")
    assert {parameter.device.type for parameter in target.parameters()} == {"cpu"}
    draft.requires_grad_(False)
    assert all(parameter.requires_grad for parameter in target.parameters())


def test_gradients_reach_every_parameter_of_the_draft_and_none_of_a_frozen_target(target):
    target.requires_grad_(False)
    draft = random_draft(target, markov_head_type="rnn").bind(target)
    loss_of(draft, target).backward()
    assert [name for name, parameter in draft.named_parameters() if parameter.grad is None or not parameter.grad.abs().sum() > 0] == []
    assert all(parameter.grad is None and not parameter.requires_grad for parameter in target.parameters())


def test_the_borrowed_embedding_gets_no_gradient_even_where_the_target_is_not_frozen(target):
    draft = random_draft(target).bind(target)
    loss_of(draft, target).backward()
    assert target.get_input_embeddings().weight.grad is None


def test_nothing_is_thawed_or_frozen(target, tmp_path):
    for parameter in list(target.parameters())[::2]:
        parameter.requires_grad_(False)
    flags = [parameter.requires_grad for parameter in target.parameters()]
    tiny_draft(target).save_pretrained(tmp_path)
    draft = DSparkDraftModel.from_pretrained(tmp_path).bind(target)
    target.generate(PROMPT, assistant_model=draft, max_new_tokens=6)
    assert [parameter.requires_grad for parameter in target.parameters()] == flags
    assert all(parameter.requires_grad for parameter in draft.parameters())
    draft.layers[0].requires_grad_(False)
    target.generate(PROMPT, assistant_model=draft, max_new_tokens=6)
    assert {name.split(".")[1] for name, parameter in draft.named_parameters() if not parameter.requires_grad} == {"0"}
    assert draft.training is False and target.training is False


@pytest.mark.parametrize("how", ["pickle", "torch.save", "deepcopy"])
@pytest.mark.parametrize("bound", [True, False])
def test_copies_have_the_weights_and_are_bound_anew(target, how, bound):
    draft = random_draft(target)
    draft.generation_config.num_assistant_tokens = 3
    if bound:
        target.generate(PROMPT, assistant_model=draft, max_new_tokens=6)
    if how == "pickle":
        twin = pickle.loads(pickle.dumps(draft))
    elif how == "torch.save":
        buffer = io.BytesIO()
        torch.save(draft, buffer)
        buffer.seek(0)
        twin = torch.load(buffer, weights_only=False)
    else:
        twin = copy.deepcopy(draft)
    assert twin.generation_config.num_assistant_tokens == 3 and twin.config.to_dict() == draft.config.to_dict()
    for name, tensor in draft.state_dict().items():
        assert torch.equal(twin.state_dict()[name], tensor) and twin.state_dict()[name].data_ptr() != tensor.data_ptr()
    with pytest.raises(ValueError, match=r"not bound"):
        twin(*inputs_of(twin))
    expected = target.generate(PROMPT, max_new_tokens=12, do_sample=False)
    assert torch.equal(target.generate(PROMPT, assistant_model=twin, max_new_tokens=12, do_sample=False), expected)


GRID = list(itertools.product([0, 4], [False, True], [False, True]))


@pytest.mark.parametrize(("rank", "confidence", "with_markov"), GRID)
def test_every_combination_of_heads_trains_a_step_and_decodes_or_is_refused(target, rank, confidence, with_markov, tmp_path):
    options = dict(markov_rank=rank, enable_confidence_head=confidence, confidence_head_with_markov=with_markov)
    if confidence and with_markov and rank == 0:
        with pytest.raises(ValueError, match=r"confidence_head_with_markov=True.*markov_rank is 0"):
            tiny_draft(target, **options)
        return
    target.requires_grad_(False)
    draft = random_draft(target, **options).bind(target)
    assert (draft.markov_head is not None, draft.confidence_head is not None) == (rank > 0, confidence)
    before = {name: parameter.detach().clone() for name, parameter in draft.named_parameters()}
    optimizer = torch.optim.SGD(draft.parameters(), lr=0.1)
    loss_of(draft, target).backward()
    optimizer.step()
    assert [name for name, parameter in draft.named_parameters() if torch.equal(parameter, before[name])] == []
    draft.save_pretrained(tmp_path)
    draft = DSparkDraftModel.from_pretrained(tmp_path)
    if confidence:
        draft.generation_config.assistant_confidence_threshold = 0.3
    expected = target.generate(PROMPT, max_new_tokens=16, do_sample=False)
    assert torch.equal(target.generate(PROMPT, assistant_model=draft, max_new_tokens=16, do_sample=False), expected)


@pytest.mark.parametrize(
    "options", [dict(), dict(markov_head_type="gated"), dict(markov_head_type="rnn", draft_vocab_size=20), dict(attention_bias=True)]
)
def test_no_memory_is_left_uninitialised(target, options, tmp_path, poisoned_memory):
    """Not on construction, nor on loading, nor in buffers that are not saved."""
    fresh = tiny_draft(target, initializer_range=0.02, **options)
    fresh.save_pretrained(tmp_path)
    loaded = DSparkDraftModel.from_pretrained(tmp_path)
    for draft in (fresh, loaded):
        tensors = dict(itertools.chain(draft.named_parameters(), draft.named_buffers()))
        assert [name for name, tensor in tensors.items() if not tensor.isfinite().all()] == []
        dim = draft.config.head_dim
        expected = draft.config.rope_parameters["rope_theta"] ** -(torch.arange(0, dim, 2) / dim)
        torch.testing.assert_close(draft.rotary_emb.inv_freq, expected)
    if fresh.config.draft_vocab_size:
        assert fresh.d2t.tolist() == loaded.d2t.tolist() == [0] * 20


def test_attention_implementation_is_a_choice_at_loading(target, tmp_path):
    tiny_draft(target).save_pretrained(tmp_path)
    for implementation in ("eager", "sdpa"):
        draft = DSparkDraftModel.from_pretrained(tmp_path, attn_implementation=implementation)
        assert draft.config._attn_implementation == implementation
        draft.save_pretrained(tmp_path)
        assert not [key for key in json.loads((tmp_path / "config.json").read_text()) if "attn_implementation" in key]
    flags = ("_supports_sdpa", "_supports_flash_attn", "_supports_flex_attn", "_supports_attention_backend")
    assert all(getattr(DSparkDraftModel, flag) for flag in flags)


def test_reduced_vocabulary_maps_by_offsets(target):
    draft = tiny_draft(target, draft_vocab_size=4).bind(target)
    draft.d2t.copy_(torch.tensor([3, 3, 10, 60]))
    assert draft.target_ids(torch.arange(4)).tolist() == [3, 4, 12, 63]
    assert tiny_draft(target).target_ids(torch.tensor([5])).tolist() == [5]
    hidden = torch.randn(2, 3, 32)
    assert torch.equal(draft.base_logits(hidden), draft.lm_head(hidden))


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_gradient_checkpointing_changes_no_gradient(target, use_reentrant):
    target.requires_grad_(False)
    draft = random_draft(target).bind(target).train()

    def gradients():
        draft.zero_grad()
        loss_of(draft, target).backward()
        return {name: parameter.grad.clone() for name, parameter in draft.named_parameters()}

    without = gradients()
    draft.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
    assert all(layer.gradient_checkpointing for layer in draft.layers)
    torch.testing.assert_close(gradients(), without)


def test_gradient_checkpointing_does_not_disturb_drafting(target):
    draft = random_draft(target).train()
    draft.gradient_checkpointing_enable()
    expected = target.generate(PROMPT, max_new_tokens=16, do_sample=False)
    with record_generation() as report:
        assert torch.equal(target.generate(PROMPT, assistant_model=draft, max_new_tokens=16, do_sample=False), expected)
    assert report.requests[0].draft_failure is None


def test_the_config_alone_decides_the_tensors():
    """Names and shapes of a DSpark checkpoint of DeepSpec for Qwen3, its tables left out."""
    config = DSparkConfig(
        vocab_size=20, hidden_size=8, intermediate_size=12, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, head_dim=6,
        num_target_layers=6, target_layer_ids=[0, 2, 4], markov_rank=3, mask_token_id=1, eos_token_id=None,
    )  # fmt: skip
    shapes = {name: tuple(value.shape) for name, value in DSparkDraftModel(config).state_dict().items()}
    assert shapes == {
        "fc.weight": (8, 24),
        "hidden_norm.weight": (8,),
        "norm.weight": (8,),
        "layers.0.self_attn.q_proj.weight": (24, 8),
        "layers.0.self_attn.k_proj.weight": (12, 8),
        "layers.0.self_attn.v_proj.weight": (12, 8),
        "layers.0.self_attn.o_proj.weight": (8, 24),
        "layers.0.self_attn.q_norm.weight": (6,),
        "layers.0.self_attn.k_norm.weight": (6,),
        "layers.0.mlp.gate_proj.weight": (12, 8),
        "layers.0.mlp.up_proj.weight": (12, 8),
        "layers.0.mlp.down_proj.weight": (8, 12),
        "layers.0.input_layernorm.weight": (8,),
        "layers.0.post_attention_layernorm.weight": (8,),
        "markov_head.markov_w1.weight": (20, 3),
        "markov_head.markov_w2.weight": (20, 3),
        "confidence_head.proj.weight": (1, 11),
        "confidence_head.proj.bias": (1,),
    }
