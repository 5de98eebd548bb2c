"""Places for keys and values: they grow, move and are freed, and what they hold stays."""

import random
from itertools import pairwise

import torch
from oracle import tiny_target
from test_packing import alone, assert_close, new_place, random_ids

from hf_dspark.generation.key_values import KeyValuePool, KeyValueStore
from hf_dspark.generation.packing import Segment, packed_forward


@torch.no_grad()
def test_places_come_and_go_with_their_contents():
    """Growth in length and in number, removal and rollback, far beyond what is made room for at first."""
    shape = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=4)
    target, chance, pool, texts = tiny_target(**shape), random.Random(0), KeyValuePool(), {}
    capacities, slots = set(), set()
    for step in range(160):
        if not texts or chance.random() < (0.25 if step < 100 else 0.02):
            place = pool.add()
            texts[place] = torch.zeros(0, dtype=torch.long)
        elif chance.random() < (0.05 if step < 100 else 0.15):
            place = chance.choice(list(texts))
            del texts[place]
            place.release()
            place.release()  # may come again
        going = chance.sample(list(texts), min(len(texts), 4))
        new = [random_ids(chance.choice([1, 2, 5, 30]), 10 * step + i) for i in range(len(going))]
        if not going:
            continue
        for place, ids, result in zip(going, new, packed_forward(target, [Segment(place, ids, len(ids)) for place, ids in zip(going, new)], [])):
            texts[place] = torch.cat([texts[place], ids])
            assert_close(result.logits[0], alone(target, texts[place])[0][-len(ids) :])
            place.length -= chance.choice([0, 0, len(ids) - 1])
            texts[place] = texts[place][: place.length]
        # The slots in use are the first ones; empty ones are at most about as many.
        assert sorted(place.slot for place in texts) == list(range(len(texts))) and set(pool.held) == set(texts)
        keys, values = pool.layers[0]
        slots.add(len(keys))
        capacities.add(keys.numel() // len(keys))
        assert len(texts) <= len(keys) == len(values) <= 2 * len(texts)
    assert max(slots) > 8 and min(slots) < 4 and len(capacities) > 3
    for place in list(texts):
        place.release()
    assert pool.layers == {} and pool.held == []  # nothing is kept for nobody


@torch.no_grad()
def test_growing_copies_seldom_and_a_rollback_never():
    shape = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=4)
    target, place, addresses = tiny_target(**shape), new_place(), []
    for step in range(300):
        packed_forward(target, [Segment(place, random_ids(3, step), 1)], [])
        addresses.append(place.pool.layers[0][0].data_ptr())
        place.length -= 1
    assert sum(one != other for one, other in pairwise(addresses)) <= 12
    assert place.pool.layers[0][0].numel() <= 1.5 * 4 * place.length


def test_requests_are_pooled_by_how_long_they_may_get():
    store = KeyValueStore()
    places = [store.add(max_length) for max_length in (40, 90, 70, 1000, 900, 3000)]
    assert places[0].pool is places[1].pool is places[2].pool
    assert places[3].pool is places[4].pool
    assert len({id(place.pool) for place in places}) == 3
