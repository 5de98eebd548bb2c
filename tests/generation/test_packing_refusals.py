"""The switch of the attention implementation, other threads' forwards meanwhile, and what can't be packed, with the reason."""

import copy
import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from oracle import VOCAB, build, spy, tiny_target
from test_packing import PACKABLE, alone, assert_close, new_place, new_places, random_ids
from test_steps import COMMON, MIXED_LAYERS, target_of_kind
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPTNeoConfig,
    GPTNeoForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from hf_dspark.generation import packing
from hf_dspark.generation.packing import Segment, packed_forward, packing_failure

WAIT = 20  # seconds until a thread that never comes is a failure


def implementations(target) -> list[str]:
    return [target.config._attn_implementation, target.config._attn_implementation_internal]


@torch.no_grad()
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_the_attention_implementation_is_restored(monkeypatch, implementation):
    target = tiny_target()
    target.set_attn_implementation(implementation)
    text = random_ids(8, 0)
    before, during = target.config.to_dict(), []
    spy(monkeypatch, target.get_input_embeddings(), "forward", lambda ids: during.append(target.config._attn_implementation))
    (result,) = packed_forward(target, [Segment(new_place(), text, 8)], [])
    assert implementations(target) == [implementation] * 2 and target.config.to_dict() == before
    assert during[0] not in ("sdpa", "eager")
    assert_close(result.logits[0], alone(target, text)[0])


class Interrupted(BaseException):
    """As a KeyboardInterrupt: no Exception."""


@torch.no_grad()
@pytest.mark.parametrize("error", [RuntimeError, Interrupted])
def test_a_forward_that_fails_half_way_leaves_nothing(error):
    target = tiny_target()
    texts, places = [random_ids(count, count) for count in (10, 6)], new_places(2)
    packed_forward(target, [Segment(place, text[:-2], 1) for place, text in zip(places, texts)], [])

    def fail(*_):
        raise error("out of memory")

    handle = target.model.layers[2].register_forward_pre_hook(fail)
    with pytest.raises(error, match="out of memory"):
        packed_forward(target, [Segment(place, random_ids(3, 9), 3) for place in places], [])
    handle.remove()
    assert implementations(target) == ["sdpa"] * 2
    assert [place.length for place in places] == [8, 4]
    # What the first layers had written behind the lengths is not seen.
    for text, result in zip(texts, packed_forward(target, [Segment(place, text[-2:], 2) for place, text in zip(places, texts)], [])):
        assert_close(result.logits[0], alone(target, text)[0][-2:])


class Gate:
    """Holds the thread that it belongs to in front of a module until it is told to go on."""

    def __init__(self, module):
        self.reached, self.go_on, self.thread = threading.Event(), threading.Event(), None
        self.handle = module.register_forward_pre_hook(self.hold)

    def hold(self, *_):
        if threading.get_ident() == self.thread:
            self.reached.set()
            assert self.go_on.wait(WAIT)

    def run(self, function, *args):
        self.thread = threading.get_ident()
        with torch.no_grad():
            return function(*args)


TIMES = {
    "during a packed forward": ("packed in", "ordinary in", "ordinary out", "packed out"),
    "from before it, into it": ("ordinary in", "packed in", "ordinary out", "packed out"),
    "from within it, till after it": ("packed in", "ordinary in", "packed out", "ordinary out"),
    "around it": ("ordinary in", "packed in", "packed out", "ordinary out"),
}


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("kind", ["qwen3", "gemma3"])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("times", TIMES.values(), ids=TIMES.keys())
def test_an_ordinary_forward_of_another_thread(times, implementation, kind, padded):
    """Masks are made before the first layer, and attention is chosen in each: both may meet the switched implementation or its own."""
    target = target_of_kind(kind)
    target.set_attn_implementation(implementation)
    text = random_ids(9, 4)
    inputs = dict(input_ids=torch.stack([random_ids(10, 1), random_ids(10, 2)]))
    if padded:
        inputs["attention_mask"] = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 1, 1], [1] * 10])
    with torch.no_grad():
        expected, expected_packed = target(**inputs).logits, alone(target, text)[0]
    # A packed forward waits in its midst, an ordinary one after its masks have been made.
    gates = {"packed": Gate(target.model.layers[2]), "ordinary": Gate(target.model.layers[0])}
    work = {"packed": lambda: packed_forward(target, [Segment(new_place(), text, 9)], [])[0], "ordinary": lambda: target(**inputs)}
    results = {}
    with ThreadPoolExecutor(2) as pool:
        try:
            for name, event in map(str.split, times):
                if event == "in":
                    results[name] = pool.submit(gates[name].run, work[name])
                    assert gates[name].reached.wait(WAIT)
                else:
                    gates[name].go_on.set()
                    results[name].result(WAIT)
        finally:
            for gate in gates.values():
                gate.go_on.set()
    assert_close(results["packed"].result().logits[0], expected_packed)
    real = inputs.get("attention_mask", torch.ones(2, 10)).bool()
    assert_close(results["ordinary"].result().logits[real], expected[real])
    assert implementations(target) == [implementation] * 2


def test_packed_forwards_of_several_threads():
    target = tiny_target()
    texts = [random_ids(16, seed) for seed in range(6)]
    with torch.no_grad():
        expected = [alone(target, text)[0] for text in texts]

    @torch.no_grad()
    def in_steps(first: int):
        own, places, logits = texts[first : first + 3], new_places(3), []
        for start in range(0, 16, 2):
            segments = [Segment(place, text[start : start + 2], 2) for place, text in zip(places, own)]
            logits.append(torch.stack([result.logits[0] for result in packed_forward(target, segments, [])]))
        return torch.cat(logits, dim=1)

    with ThreadPoolExecutor(4) as pool:
        for round_ in pool.map(lambda _: [in_steps(0), in_steps(3)], range(6)):
            for logits, wanted in zip(torch.cat(round_), expected):
                assert_close(logits, wanted)
    assert implementations(target) == ["sdpa"] * 2


# What a packed step doesn't do.


def given_to_attention(target, **arguments):
    """Every attention of `target` is called with these arguments as well."""
    for layer in target.model.layers:
        layer.self_attn.register_forward_pre_hook(lambda _, args, kwargs: (args, {**kwargs, **arguments}), with_kwargs=True)


@torch.no_grad()
@pytest.mark.parametrize(
    "arguments, named",
    [
        (dict(softcap=30.0), "softcap"),
        (dict(s_aux=torch.zeros(4)), "s_aux"),
        (dict(position_bias=torch.zeros(1)), "position_bias"),
        (dict(cu_seq_lens_q=torch.tensor([0, 4]), max_length_q=4), "cu_seq_lens_q"),
        (dict(an_argument_of_tomorrow=0.5), "an_argument_of_tomorrow"),
        (dict(attention_mask=torch.zeros(1, 1, 1, 1)), "mask"),
        (dict(is_causal=False), "causal"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_attention_argument_that_is_not_implemented_is_refused(arguments, named):
    target = tiny_target()
    given_to_attention(target, **arguments)
    place = new_place()
    with pytest.raises(ValueError, match=named):
        packed_forward(target, [Segment(place, random_ids(4, 0), 1)], [])
    assert place.length == 0 and implementations(target) == ["sdpa"] * 2
    assert named in packing_failure(target)


@torch.no_grad()
def test_arguments_that_are_none_or_follow_from_the_segments_are_fine():
    target = tiny_target()
    given_to_attention(target, softcap=None, s_aux=None, output_attentions=False)
    text = random_ids(6, 0)
    (result,) = packed_forward(target, [Segment(new_place(), text, 6)], [])
    assert_close(result.logits[0], alone(target, text)[0])


@torch.no_grad()
def test_dropout_is_refused():
    target = tiny_target(attention_dropout=0.2).train()
    with pytest.raises(ValueError, match="dropout"):
        packed_forward(target, [Segment(new_place(), random_ids(4, 0), 1)], [])
    assert "dropout" in packing_failure(target)
    target.eval()
    assert packing_failure(target) is None


@torch.no_grad()
@pytest.mark.parametrize("kind, named", [("gemma2-soft-cap", "softcap"), ("gpt-oss", "s_aux")])
def test_attention_of_other_targets_is_refused(kind, named):
    target = target_of_kind(kind)
    before = implementations(target)
    with pytest.raises(ValueError, match=f"{type(target).__name__[:5]}.*{named}"):
        packed_forward(target, [Segment(new_place(), random_ids(4, 0), 1)], [])
    assert implementations(target) == before


@pytest.mark.parametrize("kind", PACKABLE)
def test_targets_that_can(kind):
    assert packing_failure(target_of_kind(kind)) is None


def gpt_neo():
    """Its attention, full and local, takes no other implementation."""
    shape = dict(vocab_size=VOCAB, hidden_size=32, num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]], window_size=6)
    return build(GPTNeoForCausalLM, GPTNeoConfig(**shape, initializer_range=0.3, bos_token_id=None, eos_token_id=None))


UNPACKABLE = {
    "Bloom, biased by distance": (lambda: target_of_kind("bloom"), "BloomForCausalLM takes no position_ids"),
    "Gemma 2, soft cap": (lambda: target_of_kind("gemma2-soft-cap"), "softcap"),
    "GPT-OSS, sinks": (lambda: target_of_kind("gpt-oss"), "s_aux"),
    "LFM2, convolutions": (lambda: target_of_kind("lfm2"), "conv"),
    "GPT-Neo, attention of its own": (gpt_neo, "GPTNeo"),
}


@pytest.mark.parametrize("make, reason", UNPACKABLE.values(), ids=UNPACKABLE.keys())
def test_targets_that_can_not(monkeypatch, make, reason):
    target = make()
    before = implementations(target)
    failure = packing_failure(target)
    assert reason in failure and "\n" not in failure
    assert implementations(target) == before
    with torch.no_grad():
        assert target(input_ids=random_ids(5, 0)[None]).logits.isfinite().all()


def test_gemma_2_without_its_cap_can():
    assert packing_failure(build(Gemma2ForCausalLM, Gemma2Config(**COMMON, head_dim=8, sliding_window=6, attn_logit_softcapping=None))) is None


class OwnAttention(torch.nn.Module):
    """Calls sdpa as it pleases: rows of all requests see each other."""

    def __init__(self, attention):
        super().__init__()
        self.attention = attention

    def forward(self, hidden_states, **kwargs):
        heads = hidden_states.view(1, -1, 4, 8).transpose(1, 2)
        mixed = torch.nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        return self.attention.o_proj(mixed.transpose(1, 2).reshape(hidden_states.shape)), None


def test_an_attention_that_ignores_the_interface_is_noticed():
    target = tiny_target()
    for layer in target.model.layers:
        layer.self_attn = OwnAttention(layer.self_attn)
    failure = packing_failure(target)
    assert "logits of Qwen3ForCausalLM differ by" in failure


def test_a_failure_is_found_once_a_target(monkeypatch):
    target, other = tiny_target(), target_of_kind("gemma2-soft-cap")
    calls = []
    for model in (target, other):
        spy(monkeypatch, model, "forward", lambda *args, **kwargs: calls.append(1))
    failure = packing_failure(other)
    assert packing_failure(target) is None
    first = len(calls)
    assert 0 < first <= 12
    assert packing_failure(target) is None and packing_failure(other) == failure and len(calls) == first
    # What it was found for is another thing now.
    target.bfloat16()
    assert packing_failure(target) is None and len(calls) > first
    first = len(calls)
    target.set_attn_implementation("eager")
    assert packing_failure(target) is None and len(calls) > first


def test_a_verdict_does_not_keep_a_target_alive():
    target = tiny_target()
    packing_failure(target)
    reference = weakref.ref(target)
    del target
    gc.collect()
    assert reference() is None


def test_configs_that_are_gone_leave_no_name():
    gc.collect()
    before = dict(packing._usual_names)
    for seed in range(3):
        target = tiny_target(seed)
        packing_failure(target)
        assert packing._usual_names[id(target.config)] == "sdpa"
    del target
    gc.collect()
    assert packing._usual_names == before


# Windows of 100 tokens, which no short text reaches.


def wide_gemma3():
    sliding = dict(sliding_window=100, layer_types=MIXED_LAYERS)
    return build(Gemma3ForCausalLM, Gemma3TextConfig(**COMMON, head_dim=8, query_pre_attn_scalar=8, **sliding))


def test_a_window_that_a_layer_drops_is_noticed():
    target = wide_gemma3()
    assert packing_failure(target) is None
    dropping = wide_gemma3()
    dropping.model.layers[2].self_attn.sliding_window = None
    assert packing_failure(dropping) == "layer 2 passes the sliding window None to its attention, its config says 100"
    # And one that it has to itself.
    inventing = wide_gemma3()
    inventing.model.layers[1].self_attn.sliding_window = 50
    assert packing_failure(inventing) == "layer 1 passes the sliding window 50 to its attention, its config says None"


def test_a_window_without_layer_types_is_noticed():
    make = lambda: build(MistralForCausalLM, MistralConfig(**COMMON, head_dim=8, sliding_window=100))  # noqa: E731
    assert packing_failure(make()) is None
    dropping = make()
    for layer in dropping.model.layers:
        forward = layer.self_attn.forward

        def without_window(*args, module=layer.self_attn, config=dropping.config, forward=forward, **kwargs):
            module.config = copy.copy(config)
            module.config.sliding_window = None
            return forward(*args, **kwargs)

        layer.self_attn.forward = without_window
    assert "sliding window None" in packing_failure(dropping)
