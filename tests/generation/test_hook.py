"""The hook into generate(): what it knows of transformers, what passes through it untouched, what it refuses and by which name."""

import inspect
import logging

import pytest
import torch
import transformers
from oracle import build, tiny_draft, tiny_target
from peft import LoraConfig, get_peft_model
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GenerationMixin,
    MambaConfig,
    MambaForCausalLM,
    MuseGlimmerAssistantConfig,
    MuseGlimmerAssistantModel,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    StaticCache,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.generation import candidate_generator as stock

from hf_dspark import record_generation
from hf_dspark.generation import hook
from hf_dspark.generation.candidates import DSparkCandidateGenerator
from hf_dspark.generation.hook import as_draft, install, moved_names

PROMPT = torch.tensor([[3, 14, 15, 9, 26]])
HOOKED = ("_validate_generation_mode", "_assisted_decoding", "_get_candidate_generator")


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.fixture
def draft(target):
    return tiny_draft(target)


def parameters_of(name):
    return list(inspect.signature(inspect.unwrap(getattr(GenerationMixin, name))).parameters)


def test_the_signatures_it_knows_are_those_of_the_installed_transformers():
    assert parameters_of("_validate_generation_mode") == ["self", "generation_mode", "generation_config", "generation_mode_kwargs"]
    assert parameters_of("_assisted_decoding") == [
        "self", "input_ids", "logits_processor", "stopping_criteria", "generation_config", "synced_gpus", "streamer", "inputs_tensor",
        "assistant_model", "assistant_tokenizer", "tokenizer", "model_kwargs",
    ]  # fmt: skip
    assert parameters_of("_get_candidate_generator") == [
        "self", "generation_config", "input_ids", "inputs_tensor", "logits_processor", "model_kwargs", "assistant_model", "target_tokenizer",
        "assistant_tokenizer",
    ]  # fmt: skip
    assert moved_names() == []


def test_exactly_three_methods_are_wrapped_and_once():
    ours, theirs = inspect.getsourcefile(hook), inspect.getsourcefile(transformers.generation.utils)
    methods = {name: method for name, method in vars(GenerationMixin).items() if inspect.isfunction(method)}
    assert {name for name, method in methods.items() if method.__code__.co_filename == ours} == set(HOOKED)
    assert all(methods[name].__wrapped__.__code__.co_filename == theirs for name in HOOKED)
    install()
    assert {name: method for name, method in vars(GenerationMixin).items() if inspect.isfunction(method)} == methods


def test_a_draft_is_recognised_bare_and_wrapped_by_peft(target, draft):
    assert as_draft(draft) is draft
    assert as_draft(get_peft_model(draft, LoraConfig(target_modules=["q_proj"]))) is draft
    assert as_draft(get_peft_model(tiny_target(), LoraConfig(target_modules=["q_proj"]))) is None
    for other in (None, target, object(), "folder"):
        assert as_draft(other) is None


# Other assistants


@pytest.fixture
def without_the_hook(monkeypatch):
    """A function that runs another one with transformers' own three methods."""

    def run(function):
        with monkeypatch.context() as patch:
            for name in HOOKED:
                patch.setattr(GenerationMixin, name, vars(GenerationMixin)[name].__wrapped__)
            torch.manual_seed(0)
            return function()

    return run


def ordinary_assistant(target):
    return dict(assistant_model=tiny_target(seed=3))


def same_model_as_assistant(target):
    return dict(assistant_model=tiny_target())


def prompt_lookup(target):
    return dict(prompt_lookup_num_tokens=3)


def early_exit(target):
    return dict(assistant_early_exit=2)


def stock_dflash(target):
    config = MuseGlimmerAssistantConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=8, sliding_window=64,
        block_size=4, mask_token_id=63, target_layer_ids=[0, 2], eos_token_id=None, bos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    return dict(assistant_model=build(MuseGlimmerAssistantModel, config), speculation_type="dflash")


OTHERS = {
    "ordinary": (ordinary_assistant, stock.AssistedCandidateGenerator),
    "perfect": (same_model_as_assistant, stock.AssistedCandidateGenerator),
    "prompt lookup": (prompt_lookup, stock.PromptLookupCandidateGenerator),
    "stock DFlash": (stock_dflash, stock.DFlashTokenCandidateGenerator),
}


@pytest.mark.parametrize(("options", "generator"), OTHERS.values(), ids=OTHERS.keys())
@pytest.mark.parametrize("do_sample", [False, True])
def test_other_assistants_reach_transformers_own_code(target, options, generator, do_sample, without_the_hook, monkeypatch, caplog):
    arguments = dict(max_new_tokens=16, do_sample=do_sample, return_dict_in_generate=True, output_scores=True)
    prompt = torch.tensor([[3, 14, 15, 3, 14, 15, 3]])
    expected = without_the_hook(lambda: target.generate(prompt, **arguments, **options(target)))
    calls, original = [], generator.get_candidates

    def counted(self, *args, **kwargs):
        calls.append(type(self))
        return original(self, *args, **kwargs)

    monkeypatch.setattr(generator, "get_candidates", counted)
    torch.manual_seed(0)
    with record_generation() as report, caplog.at_level(logging.WARNING, logger="hf_dspark"):
        outputs = target.generate(prompt, **arguments, **options(target))
    assert calls and set(calls) == {generator} and report.requests == []
    assert torch.equal(outputs.sequences, expected.sequences)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(outputs.scores, expected.scores, strict=True))
    assert not [record for record in caplog.records if record.name.startswith("hf_dspark")]


@pytest.mark.parametrize("arguments", [dict(), dict(do_sample=True), dict(num_beams=2), dict(max_new_tokens=1)])
def test_plain_generation_is_untouched(target, arguments, without_the_hook):
    arguments = dict(max_new_tokens=12) | arguments
    expected = without_the_hook(lambda: target.generate(PROMPT, **arguments))
    torch.manual_seed(0)
    assert torch.equal(target.generate(PROMPT, **arguments), expected)


def test_errors_of_transformers_for_other_assistants_are_its_own(target, without_the_hook):
    other_vocabulary = tiny_target(vocab_size=50)

    def generate():
        target.generate(PROMPT, assistant_model=other_vocabulary, max_new_tokens=4)

    with pytest.raises(ValueError) as hooked:
        generate()
    with pytest.raises(ValueError) as plain:
        without_the_hook(generate)
    assert str(hooked.value) == str(plain.value) and "different tokenizers" in str(plain.value)


def test_beam_search_with_a_draft_is_transformers_beam_search(target, draft, caplog):
    expected = target.generate(PROMPT, num_beams=2, max_new_tokens=12)
    with record_generation() as report, caplog.at_level(logging.WARNING, logger="hf_dspark"):
        assert torch.equal(target.generate(PROMPT, num_beams=2, max_new_tokens=12, assistant_model=draft), expected)
    assert report.requests == []
    assert not [record for record in caplog.records if record.name.startswith("hf_dspark")], "a draft is no wrong door"


def test_transformers_own_loop_gets_our_generator(target, draft):
    generator = target._get_candidate_generator(
        generation_config=target.generation_config,
        input_ids=PROMPT,
        inputs_tensor=PROMPT,
        logits_processor=None,
        model_kwargs={},
        assistant_model=draft,
    )
    assert type(generator) is DSparkCandidateGenerator


# What a draft cannot do

REFUSED = {
    "assistant_ensemble_weight": (dict(assistant_ensemble_weight=0.5), r"assistant_ensemble_weight=0\.5.*changes the output"),
    "prompt_lookup_num_tokens": (dict(prompt_lookup_num_tokens=3), r"prompt_lookup_num_tokens=3"),
    "use_mtp": (dict(use_mtp=True), r"use_mtp=True"),
    "assistant_early_exit": (dict(assistant_early_exit=2), r"assistant_early_exit=2"),
    "speculation_type": (dict(speculation_type="dflash"), r"speculation_type='dflash'"),
    "use_cache": (dict(use_cache=False), r"use_cache=False"),
    "num_assistant_tokens": (dict(num_assistant_tokens=5), r"num_assistant_tokens=5.*draft\.generation_config\.num_assistant_tokens"),
    "schedule": (dict(num_assistant_tokens_schedule="heuristic"), r"schedule='heuristic'.*draft\.generation_config\.num_assistant_tokens_schedule"),
    "threshold": (dict(assistant_confidence_threshold=0.9), r"threshold=0\.9.*draft\.generation_config\.assistant_confidence_threshold"),
    "threshold 0": (dict(assistant_confidence_threshold=0.0), r"threshold=0\.0.*draft\.generation_config"),
    "synced_gpus": (dict(synced_gpus=True), r"synced_gpus=True"),
    "output_hidden_states": (dict(return_dict_in_generate=True, output_hidden_states=True), r"output_hidden_states=True"),
    "output_attentions": (dict(return_dict_in_generate=True, output_attentions=True), r"output_attentions=True"),
    "dola_layers": (dict(dola_layers="high"), r"dola_layers='high'"),
    "mask is the stop token": (dict(eos_token_id=63), r"mask_token_id 63 is a stop token"),
    "mask is a stop token": (dict(eos_token_id=[5, 63]), r"mask_token_id 63 is a stop token.*\[5, 63\]"),
}


@pytest.mark.parametrize(("arguments", "message"), REFUSED.values(), ids=REFUSED.keys())
@pytest.mark.parametrize("where", ["arguments", "generation_config", "target"])
def test_what_a_draft_cannot_do_is_refused_by_name(draft, arguments, message, where):
    target = tiny_target()
    call = {name: arguments[name] for name in arguments if name == "synced_gpus"}
    knobs = {name: value for name, value in arguments.items() if name not in call}
    if where == "arguments":
        call |= knobs
    elif where == "generation_config":
        call["generation_config"] = transformers.GenerationConfig(max_new_tokens=4, **knobs)
    else:
        for name, value in knobs.items():
            setattr(target.generation_config, name, value)
    if "generation_config" not in call:
        call["max_new_tokens"] = 4
    with pytest.raises(ValueError, match=message):
        target.generate(PROMPT, assistant_model=draft, **call)


def test_values_that_transformers_fills_in_are_no_request(target, draft):
    filled_in = dict(num_assistant_tokens=20, num_assistant_tokens_schedule="constant", assistant_confidence_threshold=0.4)
    expected = target.generate(PROMPT, max_new_tokens=8)
    for arguments in (filled_in, dict.fromkeys(filled_in)):
        assert torch.equal(target.generate(PROMPT, assistant_model=draft, max_new_tokens=8, **arguments), expected)


@pytest.mark.parametrize(
    "rows", [dict(inputs=PROMPT.repeat(2, 1)), dict(inputs=PROMPT, num_return_sequences=2, do_sample=True)], ids=["batch", "copies"]
)
def test_a_streamer_for_a_batch_is_refused(target, draft, rows):
    with pytest.raises(ValueError, match=r"a streamer takes one text, got a batch of 2"):
        target.generate(**rows, assistant_model=draft, max_new_tokens=4, streamer=Listener())


class Listener(transformers.generation.streamers.BaseStreamer):
    """Takes whatever it is given, where a TextStreamer refuses a batch by itself."""

    def put(self, value): ...

    def end(self): ...


@pytest.mark.parametrize("where", ["arguments", "generation_config", "target"])
def test_several_sequences_of_one_prompt_reach_the_library(draft, where):
    """transformers refuses them beside any assistant, before it would decode."""
    target, knobs, call = tiny_target(), dict(num_return_sequences=2, do_sample=True, top_k=0), dict(max_new_tokens=12)
    with pytest.raises(ValueError, match="num_return_sequences"):
        target.generate(PROMPT, assistant_model=tiny_target(seed=3), **call, **knobs)
    if where == "arguments":
        call |= knobs
    elif where == "generation_config":
        call = dict(generation_config=transformers.GenerationConfig(**call, **knobs))
    else:
        for name, value in knobs.items():
            setattr(target.generation_config, name, value)
    torch.manual_seed(0)
    with record_generation() as report:
        ids = target.generate(PROMPT, assistant_model=draft, **call)
    assert ids.shape == (2, PROMPT.shape[1] + 12) and torch.equal(ids[:, : PROMPT.shape[1]], PROMPT.repeat(2, 1))
    assert ids[0].tolist() != ids[1].tolist()
    assert [request.new_tokens for request in report.requests] == [12, 12] and all(request.rounds for request in report.requests)


class Vocabulary:
    def __init__(self, *tokens: str):
        self.tokens = tokens

    def get_vocab(self):
        return {token: index for index, token in enumerate(self.tokens)}


def test_an_assistant_tokenizer_of_another_vocabulary_is_refused(target, draft):
    for tokenizers in (dict(assistant_tokenizer=Vocabulary("a")), dict(tokenizer=Vocabulary("a", "b"), assistant_tokenizer=Vocabulary("a"))):
        with pytest.raises(ValueError, match=r"assistant_tokenizer must be the target's own"):
            target.generate(PROMPT, assistant_model=draft, max_new_tokens=4, **tokenizers)
    same = dict(tokenizer=Vocabulary("a", "b"), assistant_tokenizer=Vocabulary("a", "b"))
    assert torch.equal(target.generate(PROMPT, assistant_model=draft, max_new_tokens=4, **same), target.generate(PROMPT, max_new_tokens=4))


def test_an_encoder_decoder_is_refused(draft):
    config = T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=32, num_layers=2, num_heads=2, decoder_start_token_id=0)
    with pytest.raises(ValueError, match=r"T5ForConditionalGeneration is an encoder-decoder"):
        build(T5ForConditionalGeneration, config).generate(PROMPT, assistant_model=draft, max_new_tokens=4)


def mamba():
    return build(MambaForCausalLM, MambaConfig(vocab_size=64, hidden_size=32, state_size=4, num_hidden_layers=4, eos_token_id=None))


def qwen3_next():
    config = Qwen3NextConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=1, head_dim=16,
        linear_num_value_heads=2, linear_num_key_heads=2, linear_key_head_dim=8, linear_value_head_dim=8, num_experts=2, num_experts_per_tok=1,
        moe_intermediate_size=16, shared_expert_intermediate_size=16, eos_token_id=None, pad_token_id=None, bos_token_id=None,
    )  # fmt: skip
    return build(Qwen3NextForCausalLM, config)


@pytest.mark.parametrize(
    ("make_target", "message"), [(mamba, r"MambaForCausalLM is recurrent"), (qwen3_next, r"Qwen3NextForCausalLM.*can't be rolled back")]
)
def test_recurrent_targets_are_refused(make_target, message):
    target = make_target()
    with pytest.raises(ValueError, match=message):
        target.generate(PROMPT, assistant_model=tiny_draft(target), max_new_tokens=4)


@pytest.fixture(scope="module")
def sliding_target():
    config = Gemma3TextConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        sliding_window=4, layer_types=["sliding_attention", "full_attention"] * 2, initializer_range=0.5, eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    return build(Gemma3ForCausalLM, config)


@pytest.mark.parametrize("cache_implementation", ["static", "offloaded_static", "cache object"])
def test_a_static_cache_with_sliding_windows_is_refused(sliding_target, cache_implementation):
    arguments = dict(cache_implementation=cache_implementation)
    if cache_implementation == "cache object":
        arguments = dict(cache=StaticCache(config=sliding_target.config, max_cache_len=32))
    with pytest.raises(ValueError, match=r"static cache (past its sliding window|with sliding-window layers)"):
        sliding_target.generate(PROMPT, assistant_model=tiny_draft(sliding_target), max_new_tokens=8, **arguments)


def test_a_quantised_cache_is_refused(target, draft):
    class Uncroppable(transformers.DynamicCache):
        is_croppable = False

    with pytest.raises(ValueError, match=r"can't be rolled back"):
        target.generate(PROMPT, assistant_model=draft, max_new_tokens=8, cache=Uncroppable(config=target.config))


# A transformers whose names have moved


class FakeMixin:
    """The methods the hook knows, as a small class of their own."""

    def generate(self, *args, assistant_model=None, **kwargs):
        return "generated", args, assistant_model, kwargs

    def _validate_generation_mode(self, generation_mode, generation_config, generation_mode_kwargs): ...

    def _assisted_decoding(self, input_ids, logits_processor, stopping_criteria, generation_config, synced_gpus, streamer, assistant_model): ...

    def _get_candidate_generator(self, generation_config, input_ids, logits_processor, model_kwargs, assistant_model): ...

    def _prefill(self, input_ids, generation_config, model_kwargs): ...

    def _update_model_kwargs_for_generation(self, outputs, model_kwargs, num_new_tokens=1): ...


def moved_mixin(name, replacement=None):
    methods = {key: value for key, value in vars(FakeMixin).items() if callable(value) and key != name}
    return type("MovedMixin", (), methods | ({name: replacement} if replacement else {}))


def test_the_fake_is_what_the_hook_expects():
    assert moved_names(type("Mixin", (FakeMixin,), {})) == []


@pytest.mark.parametrize("name", ["_validate_generation_mode", "_assisted_decoding", "_get_candidate_generator", "_prefill"])
@pytest.mark.parametrize("replacement", [None, lambda self, something_else: None], ids=["gone", "other arguments"])
def test_moved_names_are_one_sentence_at_the_first_use(draft, name, replacement):
    mixin = moved_mixin(name, replacement)
    install(mixin)
    before = {key: value for key, value in vars(mixin).items() if key.startswith("_") and not key.startswith("__")}
    install(mixin)
    assert {key: value for key, value in vars(mixin).items() if key.startswith("_") and not key.startswith("__")} == before
    for assistant in (draft, get_peft_model(draft, LoraConfig(target_modules=["q_proj"]))):
        with pytest.raises(RuntimeError, match=rf"does not know transformers {transformers.__version__}: {name} of GenerationMixin moved or changed"):
            mixin().generate(1, assistant_model=assistant)
    other = object()
    assert mixin().generate(1, assistant_model=other, max_new_tokens=2) == ("generated", (1,), other, {"max_new_tokens": 2})
    assert mixin().generate(1) == ("generated", (1,), None, {})
