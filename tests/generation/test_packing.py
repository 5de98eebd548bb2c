"""Many requests in one forward: the same as separate forwards on every kind of target that can, and the reason for those that can't."""

import copy
import gc
import random
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from oracle import VOCAB, build, spy, tiny_target
from test_steps import COMMON, MIXED_LAYERS, target_of_kind
from transformers import (
    CLIPVisionConfig,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPTNeoConfig,
    GPTNeoForCausalLM,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    MistralConfig,
    MistralForCausalLM,
)

from hf_dspark.generation.packing import KeyValues, Segment, packed_forward, packing_failure

# The windows of the sliding ones are 6 tokens, smaller than most texts here.
PACKABLE = [
    "qwen3", "qwen3-tied", "llama", "llama-tied", "gemma3", "gemma3-all-sliding", "mistral-sliding", "mixtral", "qwen3-moe", "gpt2", "gpt2-untied",
    "gpt-neox", "granite", "cohere",
]  # fmt: skip
WAIT = 20  # seconds until a thread that never comes is a failure


def random_ids(count: int, seed: int) -> torch.Tensor:
    return torch.randint(0, VOCAB - 1, (count,), generator=torch.Generator().manual_seed(seed))


def column(*values: float) -> torch.Tensor:
    """(1, rows, 1)."""
    return torch.tensor(values)[None, :, None]


@torch.no_grad()
def alone(target, ids: torch.Tensor, hidden_layers=()):
    """(logits (tokens, vocab), hidden states (tokens, hidden) of the layers) of an ordinary forward over the whole text (tokens,)."""
    outputs = target(input_ids=ids[None], use_cache=False, output_hidden_states=True)
    return outputs.logits[0], {layer: outputs.hidden_states[layer][0] for layer in hidden_layers}


def assert_close(ours: torch.Tensor, expected: torch.Tensor):
    """To 1e-5 of the largest value."""
    assert ours.shape == expected.shape and ours.dtype == expected.dtype
    assert (ours - expected).abs().max() <= 1e-5 * max(1.0, expected.abs().max().item())


def test_keys_and_values_by_hand():
    store = KeyValues()
    assert store.get_seq_length() == store.length == 0
    keys, values = store.write(0, column(1, 2, 3), torch.tensor([[[10.0, 11], [20, 21], [30, 31]]]))  # heads may differ in size
    assert keys.tolist() == column(1, 2, 3).tolist() and values.tolist() == [[[10, 11], [20, 21], [30, 31]]]
    store.write(1, column(7, 8, 9), column(70, 80, 90))
    # Rows count when the whole forward has gone through, for all layers at once.
    assert store.length == 0
    store.length += 3
    keys, _ = store.write(0, column(4, 5), torch.tensor([[[40.0, 41], [50, 51]]]))
    store.length += 2
    assert keys.tolist() == column(1, 2, 3, 4, 5).tolist()
    # A rollback by three; what was there is written over.
    store.length -= 3
    keys, values = store.write(0, column(6), torch.tensor([[[60.0, 61]]]))
    assert keys.tolist() == column(1, 2, 6).tolist() and values.tolist() == [[[10, 11], [20, 21], [60, 61]]]
    keys, values = store.write(1, column(-6), column(-60))
    assert keys.tolist() == column(7, 8, -6).tolist() and values.tolist() == column(70, 80, -60).tolist()
    assert store.get_seq_length() == 2


@pytest.mark.parametrize("rows", [1, 5, 70])
def test_growth_keeps_contents(rows):
    store, pieces, places = KeyValues(), ([], []), []
    for step in range(300 // rows):
        torch.manual_seed(step)
        keys, values = torch.randn(2, rows, 3), torch.randn(2, rows, 3)
        held = store.write(4, keys, values)
        store.length += rows
        for before, new, got in zip(pieces, (keys, values), held):
            before.append(new)
            assert torch.equal(got, torch.cat(before, dim=1))
        places.append(held[0].data_ptr())
        assert held[0].untyped_storage().nbytes() % (64 * 2 * 3 * 4) == 0  # whole blocks of 64 rows
        if step % 3 == 2:  # and back by one row
            store.length -= 1
            pieces = tuple([torch.cat(before, dim=1)[:, :-1]] for before in pieces)
    assert len(set(places)) <= 6


def test_a_rollback_copies_nothing():
    store = KeyValues()
    first, _ = store.write(0, torch.randn(1, 40, 2), torch.randn(1, 40, 2))
    store.length += 40
    store.length -= 30
    second, _ = store.write(0, torch.randn(1, 50, 2), torch.randn(1, 50, 2))
    assert second.shape == (1, 60, 2) and second.data_ptr() == first.data_ptr()


class Schedule:
    """Requests of random texts that come, go on by random widths, and are taken back by random lengths to other texts."""

    def __init__(self, seed: int, most: int = 4):
        self.random, self.most, self.counter = random.Random(seed), most, 100 * seed
        self.running: list[tuple[KeyValues, torch.Tensor]] = []

    def new_ids(self, count: int) -> torch.Tensor:
        self.counter += 1
        return random_ids(count, self.counter)

    def next_texts(self) -> list[tuple[KeyValues, torch.Tensor]]:
        """Each request with its whole text, its new rows included: a prompt, or an anchor with up to four drafts."""
        if len(self.running) == self.most:
            self.running.pop(0)
        grown = [(store, torch.cat([text, self.new_ids(self.random.randint(1, 5))])) for store, text in self.running]
        self.running = [*grown, (KeyValues(), self.new_ids(self.random.choice([1, 2, 5, 9, 16])))]
        self.random.shuffle(self.running)
        return self.running

    def roll_back(self) -> None:
        for i, (store, text) in enumerate(self.running):
            store.length -= self.random.randint(0, min(4, store.length - 1))
            self.running[i] = store, text[: store.length]


@torch.no_grad()
@pytest.mark.parametrize("kind", PACKABLE)
def test_packed_equals_separate(kind):
    target = target_of_kind(kind)
    schedule = Schedule(seed=PACKABLE.index(kind))
    widths, longest = set(), 0
    for _ in range(9):
        requests = schedule.next_texts()
        segments = [Segment(store, text[store.length :], len(text) - store.length) for store, text in requests]
        widths.add(len({segment.num_kept for segment in segments}))
        results = packed_forward(target, segments, [1, 3])
        for (store, text), segment, result in zip(requests, segments, results):
            rows = segment.num_kept
            logits, hidden = alone(target, text, (1, 3))
            assert_close(result.logits, logits[None, -rows:])
            for layer in (1, 3):
                assert_close(result.hidden_states[layer], hidden[layer][None, -rows:])
            assert [index for index, state in enumerate(result.hidden_states) if state is not None] == [1, 3]
            assert store.length == store.get_seq_length() == len(text)
            longest = max(longest, len(text))
        schedule.roll_back()
    assert max(widths) >= 3 and longest > 12  # prompts and steps of several widths in one forward, beyond the window


@torch.no_grad()
@pytest.mark.parametrize("kind", ["gemma3", "mistral-sliding"])
def test_around_the_edge_of_a_sliding_window(kind):
    """Every length from 1 to twice the window, by steps of one width each."""
    target = target_of_kind(kind)
    text = random_ids(14, seed=3)
    expected = alone(target, text)[0]
    for prompt in range(1, 10):
        stores = [KeyValues() for _ in range(4)]
        packed_forward(target, [Segment(store, text[:prompt], 1) for store in stores], [])
        while segments := [
            Segment(store, text[store.length : store.length + width], min(width, 14 - store.length))
            for store, width in zip(stores, (1, 2, 3, 5))
            if store.length < 14
        ]:
            for segment, result in zip(segments, packed_forward(target, segments, [])):
                length = segment.store.length
                assert_close(result.logits[0], expected[length - segment.num_kept : length])


@torch.no_grad()
@pytest.mark.parametrize("selects", [True, False], ids=["selects-logits", "returns-all-logits"])
def test_logits_are_kept_of_the_last_rows(monkeypatch, selects):
    target = tiny_target()
    texts = [random_ids(count, count) for count in (6, 4, 9)]
    if not selects:
        forward = target.forward
        monkeypatch.setattr(target, "_supports_logits_to_keep", lambda: False)

        def without_selection(input_ids, position_ids, cache, use_cache, return_dict):
            return forward(input_ids=input_ids, position_ids=position_ids, cache=cache, use_cache=use_cache, return_dict=return_dict)

        monkeypatch.setattr(target, "forward", without_selection)
    seen = []
    spy(monkeypatch, target.lm_head, "forward", lambda hidden: seen.append(tuple(hidden.shape[:2])))
    results = packed_forward(target, [Segment(KeyValues(), text, kept) for text, kept in zip(texts, (1, 4, 3))], [])
    monkeypatch.undo()
    for text, kept, result in zip(texts, (1, 4, 3), results):
        assert_close(result.logits[0], alone(target, text)[0][-kept:])
        assert result.hidden_states is None
    # A prompt's logits are large, and only the last are wanted.
    assert seen == [(1, 8 if selects else 19)]


@torch.no_grad()
def test_one_forward_as_wide_as_the_sum_of_rows(monkeypatch):
    target = tiny_target()
    stores, widths = [KeyValues() for _ in range(4)], []
    spy(monkeypatch, target.get_input_embeddings(), "forward", lambda ids: widths.append(tuple(ids.shape)))
    for rows in ((20, 1, 3, 7), (1, 5, 2, 1), (3, 1)):
        packed_forward(target, [Segment(store, random_ids(count, count), count) for store, count in zip(stores, rows)], [])
    assert widths == [(1, 31), (1, 9), (1, 4)]
    assert [store.length for store in stores] == [24, 7, 5, 8]


@torch.no_grad()
def test_a_target_of_text_and_images():
    """Its text model has a config of its own."""
    text = LlamaConfig(**COMMON)
    vision = CLIPVisionConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=4)
    target = build(LlavaForConditionalGeneration, LlavaConfig(text_config=text, vision_config=vision, image_token_index=VOCAB - 1))
    assert packing_failure(target) is None
    texts = [random_ids(count, count) for count in (8, 3)]
    for text, result in zip(texts, packed_forward(target, [Segment(KeyValues(), text, len(text)) for text in texts], [])):
        assert_close(result.logits[0], alone(target, text)[0])
    assert {config._attn_implementation for config in (target.config, target.config.text_config, target.config.vision_config)} == {"sdpa"}


@torch.no_grad()
def test_bfloat16():
    target = tiny_target().bfloat16()
    assert packing_failure(target) is None
    text, store = random_ids(12, 0), KeyValues()
    (first,) = packed_forward(target, [Segment(store, text[:8], 8)], [])
    second, _ = packed_forward(target, [Segment(store, text[8:], 4), Segment(KeyValues(), text, 1)], [])
    logits = torch.cat([first.logits[0], second.logits[0]])
    expected = alone(target, text)[0]
    assert logits.dtype == torch.bfloat16
    assert (logits - expected).abs().max() <= 0.05 * expected.abs().max()


# The switch.


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
    (result,) = packed_forward(target, [Segment(KeyValues(), text, 8)], [])
    assert implementations(target) == [implementation] * 2 and target.config.to_dict() == before
    assert during[0] not in ("sdpa", "eager")
    assert_close(result.logits[0], alone(target, text)[0])


class Interrupted(BaseException):
    """As a KeyboardInterrupt: no Exception."""


@torch.no_grad()
@pytest.mark.parametrize("error", [RuntimeError, Interrupted])
def test_a_forward_that_fails_half_way_leaves_nothing(error):
    target = tiny_target()
    texts, stores = [random_ids(count, count) for count in (10, 6)], [KeyValues(), KeyValues()]
    packed_forward(target, [Segment(store, text[:-2], 1) for store, text in zip(stores, texts)], [])

    def fail(*_):
        raise error("out of memory")

    handle = target.model.layers[2].register_forward_pre_hook(fail)
    with pytest.raises(error, match="out of memory"):
        packed_forward(target, [Segment(store, random_ids(3, 9), 3) for store in stores], [])
    handle.remove()
    assert implementations(target) == ["sdpa"] * 2
    assert [store.length for store in stores] == [8, 4]
    # What the first layers had written behind the lengths is not seen.
    for text, result in zip(texts, packed_forward(target, [Segment(store, text[-2:], 2) for store, text in zip(stores, texts)], [])):
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
    work = {"packed": lambda: packed_forward(target, [Segment(KeyValues(), text, 9)], [])[0], "ordinary": lambda: target(**inputs)}
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
        own, stores, logits = texts[first : first + 3], [KeyValues() for _ in range(3)], []
        for start in range(0, 16, 2):
            segments = [Segment(store, text[start : start + 2], 2) for store, text in zip(stores, own)]
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
    store = KeyValues()
    with pytest.raises(ValueError, match=named):
        packed_forward(target, [Segment(store, random_ids(4, 0), 1)], [])
    assert store.length == 0 and implementations(target) == ["sdpa"] * 2
    assert named in packing_failure(target)


@torch.no_grad()
def test_arguments_that_are_none_or_follow_from_the_segments_are_fine():
    target = tiny_target()
    given_to_attention(target, softcap=None, s_aux=None, output_attentions=False)
    text = random_ids(6, 0)
    (result,) = packed_forward(target, [Segment(KeyValues(), text, 6)], [])
    assert_close(result.logits[0], alone(target, text)[0])


@torch.no_grad()
def test_dropout_is_refused():
    target = tiny_target(attention_dropout=0.2).train()
    with pytest.raises(ValueError, match="dropout"):
        packed_forward(target, [Segment(KeyValues(), random_ids(4, 0), 1)], [])
    assert "dropout" in packing_failure(target)
    target.eval()
    assert packing_failure(target) is None


@torch.no_grad()
@pytest.mark.parametrize("kind, named", [("gemma2-soft-cap", "softcap"), ("gpt-oss", "s_aux")])
def test_attention_of_other_targets_is_refused(kind, named):
    target = target_of_kind(kind)
    before = implementations(target)
    with pytest.raises(ValueError, match=f"{type(target).__name__[:5]}.*{named}"):
        packed_forward(target, [Segment(KeyValues(), random_ids(4, 0), 1)], [])
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
