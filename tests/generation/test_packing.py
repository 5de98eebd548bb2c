"""Many requests in one forward: the same as separate forwards on every kind of target that can, and the reason for those that can't."""

import random

import pytest
import torch
from oracle import VOCAB, build, spy, tiny_target
from test_steps import COMMON, target_of_kind
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    MistralConfig,
    MistralForCausalLM,
    Qwen3ForCausalLM,
)

from hf_dspark.generation.key_values import KeyValuePool, KeyValues, KeyValueStore
from hf_dspark.generation.packing import Segment, packed_forward, packing_failure

# The windows of the sliding ones are 6 tokens, smaller than most texts here.
PACKABLE = [
    "qwen3", "qwen3-tied", "llama", "llama-tied", "gemma3", "gemma3-all-sliding", "mistral-sliding", "mixtral", "qwen3-moe", "gpt2", "gpt2-untied",
    "gpt-neox", "granite", "cohere",
]  # fmt: skip


def new_places(count: int) -> list[KeyValues]:
    """Places in one pool."""
    pool = KeyValuePool()
    return [pool.add() for _ in range(count)]


def new_place() -> KeyValues:
    return KeyValuePool().add()


def random_ids(count: int, seed: int) -> torch.Tensor:
    return torch.randint(0, VOCAB - 1, (count,), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def alone(target, ids: torch.Tensor, hidden_layers=()):
    """(logits (tokens, vocab), hidden states (tokens, hidden) of the layers) of an ordinary forward over the whole text (tokens,)."""
    outputs = target(input_ids=ids[None], use_cache=False, output_hidden_states=True)
    return outputs.logits[0], {layer: outputs.hidden_states[layer][0] for layer in hidden_layers}


def assert_close(ours: torch.Tensor, expected: torch.Tensor):
    """To 1e-5 of the largest value."""
    assert ours.shape == expected.shape and ours.dtype == expected.dtype
    assert (ours - expected).abs().max() <= 1e-5 * max(1.0, expected.abs().max().item())


@torch.no_grad()
@pytest.mark.parametrize("window, expected", [(None, ([3, 4, 6, 8], [5, 8, 6], [7.5, 4, 3])), (2, ([3, 4, 7.5, 8], [6, 11, 6], [11, 2, 0]))])
def test_attention_by_hand(window, expected):
    """A layer whose values are the token ids and whose queries are 0: every row gets the mean of what it sees."""
    target = build(MistralForCausalLM, MistralConfig(**{**COMMON, "num_hidden_layers": 1}, head_dim=8, sliding_window=window))
    attention, seen, means = target.model.layers[0].self_attn, [], []
    target.get_input_embeddings().register_forward_pre_hook(lambda _, args: seen.append(args[0].float()))
    attention.q_proj.register_forward_hook(lambda _, args, output: torch.zeros_like(output))
    attention.v_proj.register_forward_hook(lambda _, args, output: seen[-1][..., None].expand_as(output))
    attention.o_proj.register_forward_pre_hook(lambda _, args: means.append(args[0][0, :, 0].tolist()))

    def forward(*texts):
        packed_forward(target, [Segment(place, torch.tensor(text), 1) for place, text in zip(places, texts)], [])
        return pytest.approx(means[-1])

    places = new_places(2)
    assert forward([3, 5, 10], [8]) == expected[0]
    assert forward([2, 20], [4]) == expected[1]
    places[0].length -= 2
    assert forward([12], [0, 0]) == expected[2]
    assert [place.get_seq_length() for place in places] == [4, 4]


class Schedule:
    """Requests of random texts that come, go on by random widths or wait, are taken back by random lengths to other texts, and go."""

    def __init__(self, seed: int, most: int = 5):
        self.random, self.most, self.counter = random.Random(seed), most, 100 * seed
        self.store = KeyValueStore()
        self.waiting: list[tuple[KeyValues, torch.Tensor]] = []
        self.running: list[tuple[KeyValues, torch.Tensor]] = []

    def new_ids(self, count: int) -> torch.Tensor:
        self.counter += 1
        return random_ids(count, self.counter)

    def next_texts(self) -> list[tuple[KeyValues, torch.Tensor]]:
        """Some requests with their whole texts, their new rows included: a prompt, or an anchor with up to four drafts."""
        everyone = self.running + self.waiting
        self.random.shuffle(everyone)
        if len(everyone) >= self.most:
            everyone.pop()[0].release()
        self.waiting = [everyone.pop()] if len(everyone) > 2 else []
        grown = [(place, torch.cat([text, self.new_ids(self.random.randint(1, 5))])) for place, text in everyone]
        new = self.store.add(self.random.choice([40, 40, 1000]))
        self.running = [*grown, (new, self.new_ids(self.random.choice([1, 2, 5, 9, 16])))]
        self.random.shuffle(self.running)
        return self.running

    def roll_back(self) -> None:
        for i, (place, text) in enumerate(self.running):
            place.length -= self.random.randint(0, min(4, place.length - 1))
            self.running[i] = place, text[: place.length]


@torch.no_grad()
@pytest.mark.parametrize("kind", PACKABLE)
def test_packed_equals_separate(kind):
    target = target_of_kind(kind)
    schedule = Schedule(seed=PACKABLE.index(kind))
    widths, longest = set(), 0
    for _ in range(12):
        requests = schedule.next_texts()
        segments = [Segment(place, text[place.length :], len(text) - place.length) for place, text in requests]
        widths.add(len({segment.num_kept for segment in segments}))
        results = packed_forward(target, segments, [1, 3])
        for (place, text), segment, result in zip(requests, segments, results):
            rows = segment.num_kept
            logits, hidden = alone(target, text, (1, 3))
            assert_close(result.logits, logits[None, -rows:])
            for layer in (1, 3):
                assert_close(result.hidden_states[layer], hidden[layer][None, -rows:])
            assert [index for index, state in enumerate(result.hidden_states) if state is not None] == [1, 3]
            assert place.length == place.get_seq_length() == len(text)
            longest = max(longest, len(text))
        schedule.roll_back()
    assert max(widths) >= 3 and longest > 8  # prompts and steps of several widths in one forward, beyond the window


@torch.no_grad()
def test_what_one_request_computes_reaches_no_other():
    """Not even as the 0 times NaN of a place that another one had before."""
    target = tiny_target()
    target.get_input_embeddings().weight[VOCAB - 2] = torch.nan
    texts = [torch.minimum(random_ids(16, seed), torch.tensor(VOCAB - 3)) for seed in range(3)]
    spoilt, *places = new_places(3)
    bad = torch.full((20,), VOCAB - 2)
    prompts = [Segment(place, text[:count], 1) for place, text, count in zip(places, texts, (12, 3))]
    packed_forward(target, [Segment(spoilt, bad, 1), *prompts], [])
    spoilt.release()  # the last one, a short text, moves into its place
    places.append(places[0].pool.add())
    for _ in range(2):
        segments = [Segment(place, text[place.length : place.length + 2], 2) for place, text in zip(places, texts)]
        for place, text, result in zip(places, texts, packed_forward(target, segments, [])):
            assert_close(result.logits[0], alone(target, text[: place.length])[0][-2:])


@torch.no_grad()
@pytest.mark.parametrize("kind", ["gemma3", "mistral-sliding"])
def test_around_the_edge_of_a_sliding_window(kind):
    """Every length from 1 to twice the window, by steps of one width each."""
    target = target_of_kind(kind)
    text = random_ids(14, seed=3)
    expected = alone(target, text)[0]
    for prompt in range(1, 10):
        places = new_places(4)
        packed_forward(target, [Segment(place, text[:prompt], 1) for place in places], [])
        while segments := [
            Segment(place, text[place.length : place.length + width], min(width, 14 - place.length))
            for place, width in zip(places, (1, 2, 3, 5))
            if place.length < 14
        ]:
            for segment, result in zip(segments, packed_forward(target, segments, [])):
                length = segment.place.length
                assert_close(result.logits[0], expected[length - segment.num_kept : length])


class ReturningAllLogits(Qwen3ForCausalLM):
    """A class that takes no `logits_to_keep`."""

    def forward(self, input_ids=None, position_ids=None, cache=None, use_cache=None, return_dict=None, output_hidden_states=None):
        return super().forward(
            input_ids=input_ids, position_ids=position_ids, cache=cache, use_cache=use_cache, output_hidden_states=output_hidden_states
        )


@torch.no_grad()
@pytest.mark.parametrize("selects", [True, False], ids=["selects-logits", "returns-all-logits"])
def test_logits_are_kept_of_the_last_rows(monkeypatch, selects):
    target = tiny_target()
    if not selects:
        target.__class__ = ReturningAllLogits
    texts, seen = [random_ids(count, count) for count in (6, 4, 9)], []
    spy(monkeypatch, target.lm_head, "forward", lambda hidden: seen.append(tuple(hidden.shape[:2])))
    results = packed_forward(target, [Segment(new_place(), text, kept) for text, kept in zip(texts, (1, 4, 3))], [])
    assert seen == [(1, 8 if selects else 19)]  # a prompt's logits are large, and only the last are wanted
    for text, kept, result in zip(texts, (1, 4, 3), results):
        assert_close(result.logits[0], alone(target, text)[0][-kept:])
        assert result.hidden_states is None
    assert packing_failure(target) is None


@torch.no_grad()
def test_one_forward_as_wide_as_the_sum_of_rows(monkeypatch):
    target = tiny_target()
    places, widths = new_places(4), []
    spy(monkeypatch, target.get_input_embeddings(), "forward", lambda ids: widths.append(tuple(ids.shape)))
    for rows in ((20, 1, 3, 7), (1, 5, 2, 1), (3, 1)):
        packed_forward(target, [Segment(place, random_ids(count, count), count) for place, count in zip(places, rows)], [])
    assert widths == [(1, 31), (1, 9), (1, 4)]
    assert [place.length for place in places] == [24, 7, 5, 8]


@torch.no_grad()
def test_a_target_of_text_and_images():
    """Its text model has a config of its own."""
    text = LlamaConfig(**COMMON)
    vision = CLIPVisionConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=4)
    target = build(LlavaForConditionalGeneration, LlavaConfig(text_config=text, vision_config=vision, image_token_index=VOCAB - 1))
    assert packing_failure(target) is None
    texts = [random_ids(count, count) for count in (8, 3)]
    for text, result in zip(texts, packed_forward(target, [Segment(new_place(), text, len(text)) for text in texts], [])):
        assert_close(result.logits[0], alone(target, text)[0])
    assert {config._attn_implementation for config in (target.config, target.config.text_config, target.config.vision_config)} == {"sdpa"}


@torch.no_grad()
def test_bfloat16():
    target = tiny_target().bfloat16()
    assert packing_failure(target) is None
    text, place = random_ids(12, 0), new_place()
    (first,) = packed_forward(target, [Segment(place, text[:8], 8)], [])
    second, _ = packed_forward(target, [Segment(place, text[8:], 4), Segment(new_place(), text, 1)], [])
    logits = torch.cat([first.logits[0], second.logits[0]])
    expected = alone(target, text)[0]
    assert logits.dtype == torch.bfloat16
    assert (logits - expected).abs().max() <= 0.05 * expected.abs().max()
