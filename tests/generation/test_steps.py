"""How a step runs the target: kinds of targets and of caches, each equal to plain generate()."""

import logging
from concurrent.futures import ThreadPoolExecutor
from functools import partial, wraps

import pytest
import torch
from oracle import (
    ALL_KINDS,
    VOCAB,
    ScriptedDraft,
    build,
    compare_greedy,
    kinds_of_acceptance,
    right_for,
    right_with_probability,
    tiny_draft,
    tiny_target,
)
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    CohereConfig,
    CohereForCausalLM,
    DynamicCache,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OpenAIGPTConfig,
    OpenAIGPTLMHeadModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    StaticCache,
)

from hf_dspark import record_generation
from hf_dspark.generation import steps

PROMPT = torch.tensor([[5, 9, 3, 17, 22, 8, 40, 2, 11, 6, 31]])

COMMON = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    initializer_range=0.4,
    eos_token_id=None,
    pad_token_id=None,
    bos_token_id=None,
)
MIXED_LAYERS = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
GPT2 = dict(vocab_size=VOCAB, n_embd=32, n_layer=4, n_head=4, n_positions=256, initializer_range=0.3, eos_token_id=None, bos_token_id=None)

# Name -> (class, config): one tiny target of each kind.
TARGETS = {
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**COMMON, head_dim=8, tie_word_embeddings=False)),
    "qwen3-tied": (Qwen3ForCausalLM, Qwen3Config(**COMMON, head_dim=8, tie_word_embeddings=True)),
    "llama": (LlamaForCausalLM, LlamaConfig(**COMMON, tie_word_embeddings=False)),
    "llama-tied": (LlamaForCausalLM, LlamaConfig(**COMMON, tie_word_embeddings=True)),
    # The window is smaller than the prompt, and the text goes far past it.
    "gemma3": (
        Gemma3ForCausalLM,
        Gemma3TextConfig(**COMMON, head_dim=8, sliding_window=6, layer_types=MIXED_LAYERS, query_pre_attn_scalar=8, tie_word_embeddings=False),
    ),
    "gemma3-all-sliding": (
        Gemma3ForCausalLM,
        Gemma3TextConfig(**COMMON, head_dim=8, sliding_window=6, layer_types=["sliding_attention"] * 4, query_pre_attn_scalar=8),
    ),
    "gemma2-soft-cap": (
        Gemma2ForCausalLM,
        Gemma2Config(**COMMON, head_dim=8, sliding_window=6, query_pre_attn_scalar=8, final_logit_softcapping=2.0),
    ),
    "mistral-sliding": (MistralForCausalLM, MistralConfig(**COMMON, head_dim=8, sliding_window=6, tie_word_embeddings=False)),
    "qwen3-moe": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig(**COMMON, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, tie_word_embeddings=False),
    ),
    "mixtral": (MixtralForCausalLM, MixtralConfig(**COMMON, num_local_experts=4, num_experts_per_tok=2, tie_word_embeddings=False)),
    "gpt2": (GPT2LMHeadModel, GPT2Config(**GPT2)),
    "gpt2-untied": (GPT2LMHeadModel, GPT2Config(**GPT2, tie_word_embeddings=False)),
    "gpt-neox": (
        GPTNeoXForCausalLM,
        GPTNeoXConfig(**{key: value for key, value in COMMON.items() if key != "num_key_value_heads"}, tie_word_embeddings=False),
    ),
    "granite": (
        GraniteForCausalLM,
        GraniteConfig(**COMMON, logits_scaling=8.0, embedding_multiplier=12.0, residual_multiplier=0.5, tie_word_embeddings=True),
    ),
    "lfm2": (Lfm2ForCausalLM, Lfm2Config(**COMMON, layer_types=["conv", "full_attention"] * 2, block_multiple_of=8, tie_word_embeddings=False)),
    "gpt-oss": (
        GptOssForCausalLM,
        GptOssConfig(**COMMON, head_dim=8, num_local_experts=4, num_experts_per_tok=2, sliding_window=6, tie_word_embeddings=False),
    ),
    "bloom": (
        BloomForCausalLM,
        BloomConfig(
            vocab_size=VOCAB, hidden_size=32, n_layer=4, n_head=4, initializer_range=0.3, eos_token_id=None, bos_token_id=None, pad_token_id=None
        ),
    ),
    "cohere": (CohereForCausalLM, CohereConfig(**COMMON, logit_scale=0.0625, tie_word_embeddings=True)),
}


# Where tied or scaled embeddings drown the layers, the text would repeat one token: their weights are scaled down.
SMALL_EMBEDDINGS = ("gemma3", "gemma3-all-sliding", "gemma2-soft-cap", "granite", "cohere")


def target_of_kind(name: str):
    """The target `name` of TARGETS."""
    target = build(*TARGETS[name])
    if name in SMALL_EMBEDDINGS:
        with torch.no_grad():
            target.get_input_embeddings().weight.mul_(0.05)
    return target


@pytest.mark.parametrize("name", TARGETS)
def test_every_kind_of_target(name):
    target = target_of_kind(name)
    draft = tiny_draft(target, ScriptedDraft)
    result = compare_greedy(target, draft, input_ids=PROMPT, max_new_tokens=60)
    assert kinds_of_acceptance(result.report) == ALL_KINDS
    assert len(set(result.new_tokens)) > 8  # a constant text would prove little
    compare_greedy(target, tiny_draft(target), input_ids=PROMPT, max_new_tokens=12)


@pytest.mark.parametrize("name", ["gemma3", "gemma3-all-sliding", "mistral-sliding"])
@pytest.mark.parametrize("num_right", range(5))
def test_sliding_windows_with_every_length_of_acceptance(name, num_right):
    target = target_of_kind(name)
    draft = tiny_draft(target, ScriptedDraft)
    script = partial(right_for, num_right=num_right)
    for prompt in (PROMPT, PROMPT[:, :3]):  # longer than the window, and reaching it inside a block
        compare_greedy(target, draft, input_ids=prompt, max_new_tokens=20, make_script=script)


@pytest.mark.parametrize("name", ["gemma3", "gpt2", "mixtral", "granite"])
def test_left_padding_of_other_targets(name):
    target = target_of_kind(name)
    padded = torch.cat([torch.zeros(1, 4, dtype=torch.long), PROMPT], dim=1)
    mask = torch.tensor([[0] * 4 + [1] * PROMPT.shape[1]])
    result = compare_greedy(target, tiny_draft(target, ScriptedDraft), input_ids=padded, attention_mask=mask, max_new_tokens=40)
    assert kinds_of_acceptance(result.report) == ALL_KINDS


@pytest.mark.parametrize("name", ["qwen3", "llama", "gpt2", "qwen3-moe"])
def test_static_cache_at_every_budget(name):
    target = target_of_kind(name)
    draft = tiny_draft(target, ScriptedDraft)
    kinds = set()
    for budget in range(1, 13):
        script = partial(right_with_probability, seed=budget)
        result = compare_greedy(target, draft, input_ids=PROMPT, max_new_tokens=budget, cache_implementation="static", make_script=script)
        kinds |= kinds_of_acceptance(result.report)
    assert kinds == ALL_KINDS
    assert isinstance(result.drafted.cache, StaticCache)


def test_static_cache_with_left_padding():
    target = tiny_target()
    padded = torch.cat([torch.zeros(1, 4, dtype=torch.long), PROMPT], dim=1)
    mask = torch.tensor([[0] * 4 + [1] * PROMPT.shape[1]])
    inputs = dict(input_ids=padded, attention_mask=mask, max_new_tokens=30, cache_implementation="static")
    assert kinds_of_acceptance(compare_greedy(target, tiny_draft(target, ScriptedDraft), **inputs).report) == ALL_KINDS


def test_static_cache_with_sliding_layers_is_refused():
    target = target_of_kind("gemma3")
    with pytest.raises(ValueError, match="static cache with sliding-window layers"):
        target.generate(PROMPT, do_sample=False, max_new_tokens=8, cache_implementation="static", assistant_model=tiny_draft(target))


def test_static_cache_object_past_its_window_is_refused():
    target = target_of_kind("gemma3")
    cache = StaticCache(config=target.config, max_cache_len=64)
    with pytest.raises(ValueError, match="static cache"):
        target.generate(PROMPT, do_sample=False, max_new_tokens=8, cache=cache, assistant_model=tiny_draft(target))


def test_cache_object_given_by_the_user():
    for name in ("qwen3", "gemma3"):
        target = target_of_kind(name)
        draft = tiny_draft(target, ScriptedDraft)
        for make_cache in (partial(DynamicCache, config=target.config), DynamicCache):
            compare_greedy(target, draft, lambda make_cache=make_cache: dict(cache=make_cache()), input_ids=PROMPT, max_new_tokens=30)


def test_sliding_layers_record_their_past_only_while_decoding():
    target = target_of_kind("gemma3")
    result = compare_greedy(target, tiny_draft(target, ScriptedDraft), input_ids=PROMPT, max_new_tokens=12)
    assert [layer.record_past for layer in result.drafted.cache.layers if hasattr(layer, "record_past")] == [False, False]


def test_verify_runs_the_anchor_and_the_drafts():
    target = tiny_target()
    cache = DynamicCache(config=target.config)
    target(PROMPT, cache=cache)
    text = torch.cat([PROMPT, torch.tensor([[7]])], dim=1)
    model_kwargs = dict(cache=cache, use_cache=True, attention_mask=None, position_ids=torch.arange(12)[None], logits_to_keep=1)
    outputs = steps.verify(target, text, [4, 9], model_kwargs, {"output_hidden_states": [1]})
    expected = target(torch.cat([text, torch.tensor([[4, 9]])], dim=1)).logits[:, -3:]
    assert outputs.logits.shape == (1, 3, VOCAB)
    assert torch.allclose(outputs.logits, expected, atol=1e-4)
    assert outputs.hidden_states[1].shape[1] == 3 and outputs.hidden_states[2] is None
    assert model_kwargs["position_ids"].shape[1] == 12  # what the caller holds stays as it was
    steps.rollback(cache, 2)
    assert cache.get_seq_length() == 12


def test_a_target_without_a_cache_is_refused():
    target = build(OpenAIGPTLMHeadModel, OpenAIGPTConfig(vocab_size=VOCAB, n_embd=32, n_layer=4, n_head=4))
    with pytest.raises(ValueError, match="needs a cache"):
        target.generate(PROMPT, do_sample=False, max_new_tokens=8, assistant_model=tiny_draft(target))


def test_learned_positions_are_not_overrun():
    """The last position has a row in the table, and drafts behind it would have none."""
    target = build(GPT2LMHeadModel, GPT2Config(**{**GPT2, "n_positions": 24}))
    draft = tiny_draft(target, ScriptedDraft)
    for length in range(19, 25):
        for num_right in (0, 2, 4):
            script = partial(right_for, num_right=num_right)
            result = compare_greedy(target, draft, input_ids=PROMPT, max_length=length, make_script=script)
            assert result.drafted.sequences.shape[1] == length


def test_token_types_and_positions_given_by_the_user():
    target = target_of_kind("gpt2")
    draft = tiny_draft(target, ScriptedDraft)
    types = torch.tensor([[1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 4]])
    for inputs in (
        dict(token_type_ids=types),
        dict(position_ids=torch.arange(11)[None] + 7),
        dict(token_type_ids=types, position_ids=torch.arange(11)[None]),
    ):
        result = compare_greedy(target, draft, input_ids=PROMPT, max_new_tokens=40, **inputs)
        assert kinds_of_acceptance(result.report) == ALL_KINDS


class Opaque(torch.nn.Module):
    """A quantised module, as seen from outside: it computes, and has no weight to read."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    @property
    def weight(self):
        raise RuntimeError("packed in four bits")

    def forward(self, *args):
        return self.module(*args)


def test_tables_that_can_only_be_called():
    target = tiny_target()
    target.lm_head = Opaque(target.lm_head)
    target.model.embed_tokens = Opaque(target.model.embed_tokens)
    result = compare_greedy(target, tiny_draft(target, ScriptedDraft), input_ids=PROMPT, max_new_tokens=40)
    assert kinds_of_acceptance(result.report) == ALL_KINDS
    assert result.report.requests[-1].draft_failure is None


@pytest.mark.parametrize(
    "target_dtype, draft_dtype", [(torch.float32, torch.bfloat16), (torch.float64, torch.float32), (torch.float32, torch.float64)], ids=str
)
def test_a_draft_of_another_dtype(target_dtype, draft_dtype):
    target = tiny_target().to(target_dtype)
    draft = tiny_draft(target, ScriptedDraft).to(draft_dtype)
    result = compare_greedy(target, draft, input_ids=PROMPT, max_new_tokens=40)
    assert kinds_of_acceptance(result.report) == ALL_KINDS and result.report.requests[-1].draft_failure is None
    torch.manual_seed(0)
    target.generate(PROMPT, do_sample=True, max_new_tokens=20, assistant_model=draft)


def test_threads_share_one_target_and_one_draft():
    target = tiny_target()
    draft = tiny_draft(target)
    torch.nn.init.normal_(draft.markov_head.markov_w2.weight)
    prompts = [PROMPT[:, :length] for length in range(2, 8)]
    options = dict(do_sample=False, max_new_tokens=25)
    expected = [target.generate(prompt, **options).tolist() for prompt in prompts]

    def drafted(prompt):
        with record_generation() as report:
            return target.generate(prompt, assistant_model=draft, **options).tolist(), [(r.drafted, r.accepted) for r in report.rounds]

    alone = [drafted(prompt) for prompt in prompts]
    with ThreadPoolExecutor(max_workers=3) as pool:
        together = list(pool.map(drafted, prompts))
    assert together == alone and [ids for ids, _ in together] == expected


def test_a_target_of_which_the_hidden_states_are_missing_is_named(monkeypatch, caplog):
    target = tiny_target()
    forward = target.forward

    @wraps(forward)
    def without_hidden_states(*args, **kwargs):
        return forward(*args, **{**kwargs, "output_hidden_states": False})

    monkeypatch.setattr(target, "forward", without_hidden_states)
    with caplog.at_level(logging.WARNING), pytest.raises(ValueError, match="returned no hidden states of its layers"):
        target.generate(PROMPT, do_sample=False, max_new_tokens=8, assistant_model=tiny_draft(target))
