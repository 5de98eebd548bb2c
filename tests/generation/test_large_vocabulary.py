"""Largest, best and drawn tokens of a large row, against torch and against the law of the processors over the whole row."""

from itertools import permutations

import pytest
import torch
from oracle import chain_law, largest_difference, tiny_draft, tiny_target, walk_every_outcome
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from hf_dspark import generate_many, record_generation
from hf_dspark.generation import acceptance, decoding, large_vocabulary
from hf_dspark.generation.large_vocabulary import LARGE_VOCABULARY, best_tokens, draw, largest_token

DTYPES = [torch.float32, torch.bfloat16]
LARGE = LARGE_VOCABULARY + 612  # a multiple of neither 32 nor 512
INF = float("inf")


def random_row(vocab: int, seed: int = 0, scale: float = 3.0, dtype=torch.float32) -> torch.Tensor:
    return (scale * torch.randn(vocab, generator=torch.Generator().manual_seed(seed))).to(dtype)


def row_with_ties(vocab: int, seed: int = 0, kinds: int = 7, dtype=torch.float32) -> torch.Tensor:
    """Whole numbers below `kinds`, the larger the rarer."""
    shares = torch.tensor([4.0**-kind for kind in range(kinds)])
    return torch.multinomial(shares, vocab, replacement=True, generator=torch.Generator().manual_seed(seed)).to(dtype)


# largest_token


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [1, 100, LARGE_VOCABULARY, LARGE_VOCABULARY + 1, LARGE, 32_768])
def test_largest_token(vocab, dtype):
    for seed in range(5):
        row = random_row(vocab, seed, dtype=dtype)
        assert largest_token(row) == row.argmax().item()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [100, LARGE, 32_768])
def test_largest_token_is_the_first_of_equal_ones(vocab, dtype):
    for seed in range(5):
        row = row_with_ties(vocab, seed, dtype=dtype)
        assert largest_token(row) == (row == row.max()).nonzero()[0].item()


@pytest.mark.parametrize("place", [0, 511, 512, LARGE - 2, LARGE - 1])
def test_largest_token_at_the_edges_of_blocks(place):
    row = torch.full((LARGE,), -INF)
    row[place] = -1e30
    assert largest_token(row) == place
    row[:] = -5.0
    row[place:] = 2.0
    assert largest_token(row) == place


@pytest.mark.parametrize("vocab", [100, LARGE])
def test_largest_token_of_infinities_and_nan(vocab):
    assert largest_token(torch.full((vocab,), -INF)) == 0
    row = random_row(vocab)
    row[70], row[90] = INF, INF
    assert largest_token(row) == 70
    # As torch.argmax: the first NaN is the largest.
    row[80], row[95] = float("nan"), float("nan")
    assert largest_token(row) == row.argmax().item() == 80


def test_largest_token_leaves_the_row_as_it_is():
    row = random_row(LARGE)
    before = row.clone()
    largest_token(row)
    assert torch.equal(row, before)


# best_tokens


def assert_best(rows: torch.Tensor, count: int):
    values, ids = best_tokens(rows, count)
    assert values.shape == ids.shape == (rows.shape[0], count)
    assert torch.equal(values, rows.topk(count, dim=-1).values)
    assert torch.equal(values, rows.gather(1, ids))
    for row in ids:
        assert len(row.unique()) == count


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [1, 2, 31, 64, 255, 512, 1024])
@pytest.mark.parametrize("vocab", [131_072, 131_072 - 32, 131_072 + 7], ids=["enough groups", "a group less", "no whole groups"])
def test_best_tokens(vocab, count, dtype):
    assert_best(torch.stack([random_row(vocab, seed, dtype=dtype) for seed in range(2)]), count)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [1, 5, 64, 512])
@pytest.mark.parametrize("vocab", [65_536, 65_535])
def test_best_tokens_of_many_ties(vocab, count, dtype):
    assert_best(torch.stack([row_with_ties(vocab, seed, dtype=dtype) for seed in range(3)]), count)
    assert_best(torch.zeros(2, vocab, dtype=dtype), count)


@pytest.mark.parametrize("stride", [1, 32, 64, 2048], ids=lambda stride: f"every {stride}th")
def test_best_tokens_wherever_they_lie(stride):
    """In one group or spread over many."""
    rows = torch.full((2, 65_536), -1.0)
    places = torch.arange(30) * stride
    rows[0, places], rows[1, 65_535 - places] = torch.arange(30.0), torch.arange(30.0)
    assert_best(rows, 40)
    assert best_tokens(rows, 30)[1].tolist() == [places.flip(0).tolist(), (65_535 - places).flip(0).tolist()]


def test_best_tokens_of_infinities():
    rows = torch.full((2, 65_536), -INF)
    rows[0, 17], rows[1, 40_000], rows[1, 3] = 1.0, INF, 2.0
    assert_best(rows, 6)


def test_best_tokens_of_rows_that_are_no_block_of_memory():
    rows = random_row(2 * 65_536).view(65_536, 2).T
    assert_best(rows, 20)
    assert_best(random_row(65_536)[None].expand(3, -1), 20)


def test_best_tokens_takes_nan_for_the_largest():
    rows = random_row(65_536)[None].clone()
    rows[0, 123] = float("nan")
    values, ids = best_tokens(rows, 4)
    assert ids[0, 0] == 123 and torch.equal(values[0, 1:], rows.topk(4).values[0, 1:])


# draw


def processors_of(**options) -> LogitsProcessorList:
    """What generate() makes of its options, in its order."""
    shape = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1)

    def prepared(target, input_ids, logits_processor, **_):
        return logits_processor

    options = dict(top_k=0) | options
    return tiny_target(**shape).generate(torch.tensor([[1]]), do_sample=True, custom_generate=prepared, **options)


def law_of_draw(monkeypatch, row: torch.Tensor, processors) -> dict[tuple, float]:
    """Exact, over every outcome; {(None,): 1.0} where the draw is left to the whole way."""
    monkeypatch.setattr(large_vocabulary, "choose", lambda weights, generator=None: acceptance.choose(weights, generator))
    return walk_every_outcome(monkeypatch, lambda: (draw(row, processors),))


def law_of_the_whole_way(row: torch.Tensor, processors) -> dict[tuple, float]:
    """The processors over the whole row in fp32, as generate() without a fast path applies them."""
    scores = LogitsProcessorList(processors)(torch.tensor([[0]]), row[None].float().clone())
    law = scores[0].double().softmax(-1)
    return {(token,): law[token].item() for token in law.nonzero()[:, 0].tolist()}


LEFT = {(None,): 1.0}


def assert_exact(monkeypatch, row: torch.Tensor, processors):
    law = law_of_draw(monkeypatch, row, processors)
    assert law != LEFT, "left to the whole way"
    assert sum(law.values()) == pytest.approx(1.0, abs=1e-6)
    assert largest_difference(law, law_of_the_whole_way(row, processors)) < 1e-6


def assert_exact_or_left(monkeypatch, row: torch.Tensor, processors):
    if law_of_draw(monkeypatch, row, processors) != LEFT:
        assert_exact(monkeypatch, row, processors)


@pytest.fixture
def small_sizes(monkeypatch):
    """Rows of 100 columns are large, and read in more than one group, block and size of nucleus."""
    for name, value in (("LARGE_VOCABULARY", 64), ("_NUCLEUS_SIZES", (12, 40)), ("_GROUP", 2), ("_BLOCK", 8)):
        assert hasattr(large_vocabulary, name)
        monkeypatch.setattr(large_vocabulary, name, value)


LAWS = {
    "none": dict(),
    "temperature": dict(temperature=0.6),
    "hot": dict(temperature=3.0),
    "top-k": dict(top_k=5),
    "top-1": dict(top_k=1),
    "top-p": dict(top_p=0.7),
    "top-p of one": dict(top_p=0.01),
    "temperature, top-k": dict(temperature=0.7, top_k=9),
    "temperature, top-p": dict(temperature=1.6, top_p=0.8),
    "cold top-p": dict(temperature=0.3, top_p=0.9),
    "top-k, top-p": dict(top_k=10, top_p=0.8),
    "top-k, min-p": dict(top_k=10, min_p=0.2),
    "top-p, min-p": dict(top_p=0.8, min_p=0.1),
    "hot top-p, min-p": dict(temperature=2.0, top_p=0.6, min_p=0.25),
    "top-k, min-p of 0": dict(top_k=10, min_p=0.0),
    "all": dict(temperature=1.5, top_k=12, top_p=0.9, min_p=0.08),
    "all, cold": dict(temperature=0.5, top_k=12, top_p=0.95, min_p=0.01),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [100, 101])
@pytest.mark.parametrize("name", LAWS)
def test_law(monkeypatch, small_sizes, name, vocab, dtype):
    processors = processors_of(**LAWS[name])
    # bf16 rows whose values are all different, so that it is open nowhere which token is kept.
    row = (torch.randperm(vocab, generator=torch.Generator().manual_seed(3)) * 0.125 - 4.0).to(dtype)
    assert len(row.unique()) == vocab
    assert_exact(monkeypatch, row, processors)
    if dtype == torch.float32:
        for seed in range(3):
            assert_exact(monkeypatch, random_row(vocab, seed), processors)


@pytest.mark.parametrize(
    "options, forgotten",
    [(dict(top_k=12, top_p=0.8), kind) for kind in (TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper)]
    + [(dict(top_k=12, min_p=0.5), kind) for kind in (TemperatureLogitsWarper, MinPLogitsWarper)]
    + [(dict(top_p=0.4, min_p=0.5), kind) for kind in (TemperatureLogitsWarper, MinPLogitsWarper)],
)
def test_law_depends_on_every_processor(monkeypatch, small_sizes, options, forgotten):
    """What these tests would see of one that is forgotten, or of a temperature that comes last."""
    row, processors = random_row(100, scale=1.0), processors_of(temperature=1.5, **options)
    assert_exact(monkeypatch, row, processors)
    law = law_of_draw(monkeypatch, row, processors)
    others = [processor for processor in processors if type(processor) is not forgotten]
    assert len(others) == 2
    assert largest_difference(law, law_of_the_whole_way(row, others)) > 1e-3
    if forgotten is TemperatureLogitsWarper:
        assert largest_difference(law, law_of_the_whole_way(row, [*others, processors[0]])) > 1e-3


@pytest.mark.parametrize("name", ["temperature, top-k", "temperature, top-p", "top-k, top-p", "all"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_law_at_the_true_sizes(monkeypatch, name, dtype):
    processors = processors_of(**LAWS[name])
    for vocab in (LARGE, 32_768):
        row = random_row(vocab, vocab, 0.1)
        row[::700] = torch.linspace(11.0, 15.0, len(row[::700]))  # a nucleus of few tokens
        row = row.to(dtype)
        assert_exact(monkeypatch, row, processors)


def test_law_of_temperature_at_the_true_sizes(monkeypatch):
    row = torch.full((LARGE,), -INF)
    row[[0, 511, 512, 5000, LARGE - 1]] = torch.tensor([1.0, 2.0, 0.5, 3.0, 2.5])
    for processors in ([], [TemperatureLogitsWarper(0.7)]):
        assert_exact(monkeypatch, row, processors)


@pytest.mark.parametrize("options", [dict(), dict(temperature=0.5), dict(top_k=3), dict(top_k=8), dict(top_p=0.9), dict(top_k=8, top_p=0.9)])
def test_tokens_without_a_chance(monkeypatch, small_sizes, options):
    """Fewer tokens are possible than are looked for."""
    row = torch.full((100,), -INF)
    row[[3, 50, 99, 7]] = torch.tensor([1.0, 2.0, 0.0, 3.5])
    assert_exact_or_left(monkeypatch, row, processors_of(**options))


@pytest.mark.parametrize("options", [dict(), dict(temperature=0.5), dict(top_k=3), dict(top_p=0.5), dict(top_k=8, top_p=0.9, min_p=0.1)])
@pytest.mark.parametrize("value", [float("nan"), INF])
def test_rows_without_a_law_raise_as_the_whole_way_does(small_sizes, options, value):
    row = random_row(100)
    row[17] = value
    processors = processors_of(**options)
    with pytest.raises(RuntimeError, match=r"inf.*nan"):
        acceptance.choose(torch.softmax(processors(torch.tensor([[0]]), row[None].clone()), dim=-1))
    try:
        token = draw(row, processors)
    except RuntimeError:
        return
    assert token is None


@pytest.mark.parametrize("top_k", [1, 6, 12, 49, 50, 51, 99, 100, 101, 1000])
def test_any_top_k(monkeypatch, small_sizes, top_k):
    for dtype in DTYPES:
        assert_exact_or_left(monkeypatch, random_row(100, dtype=dtype), processors_of(top_k=top_k))


@pytest.mark.parametrize("top_k", [1023, 1024, 9000, LARGE, 10**6])
def test_any_top_k_at_the_true_sizes(top_k):
    token = draw(random_row(LARGE), processors_of(top_k=top_k))
    assert token is None or 0 <= token < LARGE


# draw: equal logits


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [dict(), dict(temperature=0.7)] + [dict(top_k=top_k) for top_k in range(1, 13)], ids=str)
def test_ties_at_the_edge_of_top_k(monkeypatch, small_sizes, options, dtype):
    """All tokens as good as the k-th are kept."""
    for seed in range(4):
        assert_exact_or_left(monkeypatch, row_with_ties(100, seed, dtype=dtype), processors_of(**options))


def test_ties_at_the_edge_of_top_k_are_drawn_fast(monkeypatch, small_sizes):
    row = torch.zeros(100)
    row[[4, 90]], row[17] = 2.0, 3.0
    for top_k in (2, 3):
        assert_exact(monkeypatch, row, [TopKLogitsWarper(top_k)])
    # 97 tokens are as good as the fourth.
    assert law_of_draw(monkeypatch, row, [TopKLogitsWarper(4)]) == LEFT


TIED = [
    dict(top_p=0.3),
    dict(top_p=0.5),
    dict(top_p=0.8),
    dict(temperature=0.4, top_p=0.7),
    dict(top_k=6, top_p=0.6),
    dict(top_k=20, top_p=0.8),
    dict(top_k=20, min_p=0.1),
    dict(top_p=0.5, min_p=0.3),
    dict(temperature=0.7, top_k=20, top_p=0.8, min_p=0.05),
]


def rows_of_ties():
    for seed in range(6):
        yield row_with_ties(100, seed)
        yield (2 * row_with_ties(100, seed)).bfloat16()
        # Logits as a bf16 model has them: some are equal.
        yield random_row(100, seed, 1.0).mul(4).round().div(4).bfloat16()
        yield random_row(100, seed, 2.0, torch.bfloat16)


@pytest.mark.parametrize("options", TIED, ids=str)
def test_ties_at_the_edge_of_top_p(monkeypatch, small_sizes, options):
    """Which of equal tokens the whole way keeps depends on how torch.sort orders the whole row."""
    processors = processors_of(**options)
    for row in rows_of_ties():
        assert_exact_or_left(monkeypatch, row, processors)


def test_ties_at_the_edge_are_not_always_left_to_the_whole_way(monkeypatch, small_sizes):
    for options in TIED:
        processors = processors_of(**options)
        assert any(law_of_draw(monkeypatch, row, processors) != LEFT for row in rows_of_ties())


@pytest.mark.parametrize("options", [dict(top_k=20, top_p=0.7), dict(temperature=0.8, top_k=50, top_p=0.9, min_p=0.02), dict(top_p=0.3)], ids=str)
def test_ties_at_the_true_sizes(monkeypatch, options):
    processors = processors_of(**options)
    for seed in range(4):
        row = random_row(LARGE, seed, 2.0)
        row[::500] += 7.0
        row = row.mul(4).round().div(4).bfloat16()
        assert_exact_or_left(monkeypatch, row, processors)


def test_logits_that_temperature_makes_equal(monkeypatch, small_sizes):
    """Neighbouring floats can become one another when they are divided; the whole way then keeps both."""
    one = torch.tensor(1.0)
    row = torch.linspace(-9.0, -3.0, 100)
    row[10], row[20], row[30] = one, torch.nextafter(one, 2 * one), torch.nextafter(one, 0 * one)
    temperature = next(t for t in (1.0 + 0.01 * k for k in range(1, 100)) if len((row[[10, 20, 30]] / t).unique()) == 2)
    for top_k in (1, 2):
        assert_exact_or_left(monkeypatch, row, [TemperatureLogitsWarper(temperature), TopKLogitsWarper(top_k)])


# draw: what is left to the whole way


class Twice(TopKLogitsWarper):
    """Not the processor it descends from."""

    def __call__(self, input_ids, scores):
        return super().__call__(input_ids, 2 * scores)


UNKNOWN = {
    "unknown": [RepetitionPenaltyLogitsProcessor(1.2)],
    "unknown first": [RepetitionPenaltyLogitsProcessor(1.2), TemperatureLogitsWarper(0.7), TopKLogitsWarper(5)],
    "unknown last": [TemperatureLogitsWarper(0.7), TopKLogitsWarper(5), TypicalLogitsWarper(0.9)],
    "unknown between": [TopKLogitsWarper(5), TypicalLogitsWarper(0.9), TopPLogitsWarper(0.9)],
    "a function": [lambda input_ids, scores: scores],
    "a descendant": [Twice(5)],
    "a descendant last": [TopKLogitsWarper(5), type("Own", (TopPLogitsWarper,), {})(0.9)],
    "a descendant of temperature": [type("Own", (TemperatureLogitsWarper,), {})(0.9), TopKLogitsWarper(5)],
    "temperature last": [TopKLogitsWarper(5), TemperatureLogitsWarper(0.7)],
    "temperature between": [TopKLogitsWarper(5), TemperatureLogitsWarper(0.7), TopPLogitsWarper(0.9)],
    "two temperatures": [TemperatureLogitsWarper(0.7), TemperatureLogitsWarper(0.7)],
    "two top-k": [TopKLogitsWarper(9), TopKLogitsWarper(5)],
    "two top-p": [TopPLogitsWarper(0.9), TopPLogitsWarper(0.9)],
    "two min-p": [TopKLogitsWarper(9), MinPLogitsWarper(0.1), MinPLogitsWarper(0.1)],
    "top-p, top-k": [TopPLogitsWarper(0.9), TopKLogitsWarper(5)],
    "min-p, top-k": [MinPLogitsWarper(0.1), TopKLogitsWarper(5)],
    "top-k, min-p, top-p": [TopKLogitsWarper(9), MinPLogitsWarper(0.1), TopPLogitsWarper(0.9)],
    "min-p alone": [MinPLogitsWarper(0.1)],
    "top-k fills in a value": [TopKLogitsWarper(5, filter_value=-1e4)],
    "top-p fills in a value": [TopPLogitsWarper(0.5, filter_value=-1.0)],
    "min-p fills in a value": [TopKLogitsWarper(5), MinPLogitsWarper(0.1, filter_value=-9.0)],
    "top-p keeps two": [TopPLogitsWarper(0.01, min_tokens_to_keep=2)],
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_lists_that_are_left_to_the_whole_way(small_sizes, name):
    assert draw(random_row(100), LogitsProcessorList(UNKNOWN[name])) is None


def test_every_order_is_exact_or_left_to_the_whole_way(monkeypatch, small_sizes):
    processors = [TemperatureLogitsWarper(1.7), TopKLogitsWarper(9), TopPLogitsWarper(0.8), MinPLogitsWarper(0.15)]
    row = random_row(100, 5)
    for count in range(5):
        for order in permutations(processors, count):
            assert_exact_or_left(monkeypatch, row, list(order))


@pytest.mark.parametrize(
    "processors",
    [
        [TopKLogitsWarper(2, min_tokens_to_keep=4)],
        [TopKLogitsWarper(9), TopPLogitsWarper(0.01, min_tokens_to_keep=3)],
        [TopKLogitsWarper(9), MinPLogitsWarper(0.9, min_tokens_to_keep=4)],
        [TopKLogitsWarper(3), MinPLogitsWarper(0.9, min_tokens_to_keep=7)],
        [TopPLogitsWarper(0.6), MinPLogitsWarper(0.9, min_tokens_to_keep=3)],
        [TopPLogitsWarper(0.0)],
        [TopPLogitsWarper(1.0)],
    ],
)
def test_bounds_of_processors_are_exact_or_left_to_the_whole_way(monkeypatch, small_sizes, processors):
    for seed in range(3):
        assert_exact_or_left(monkeypatch, random_row(100, seed), processors)


def test_a_row_of_ordinary_size_is_left_to_the_whole_way():
    for processors in ([], [TemperatureLogitsWarper(0.5)], [TopKLogitsWarper(5)]):
        assert draw(random_row(LARGE_VOCABULARY), LogitsProcessorList(processors)) is None
        assert draw(random_row(LARGE_VOCABULARY + 1), LogitsProcessorList(processors)) is not None


def test_a_nucleus_larger_than_what_is_looked_at_is_left_to_the_whole_way(monkeypatch, small_sizes):
    flat = 0.01 * torch.randperm(100, generator=torch.Generator().manual_seed(0)).float()
    for top_p in (0.2, 0.4):  # beyond the first size, and beyond the last
        assert_exact_or_left(monkeypatch, flat, [TopPLogitsWarper(top_p)])
    assert law_of_draw(monkeypatch, flat, [TopPLogitsWarper(0.2)]) != LEFT
    assert law_of_draw(monkeypatch, flat, [TopPLogitsWarper(0.8)]) == LEFT
    assert law_of_draw(monkeypatch, flat, [TopPLogitsWarper(0.99999)]) == LEFT
    # Everything is equal: a nucleus that would fit can't be told from the rest.
    assert law_of_draw(monkeypatch, torch.zeros(100), [TopPLogitsWarper(0.055)]) == LEFT


@pytest.mark.parametrize("scale", [1.0, 1 + 3e-6, 1 - 3e-6])
def test_a_mass_too_close_to_top_p_is_left_to_the_whole_way(monkeypatch, small_sizes, scale):
    """Which side of it a mass lies on depends on the order of summation."""
    row = torch.full((100,), -INF)
    row[[5, 60, 61, 99]] = torch.tensor([0.5, 0.25, 0.15, 0.1]).log()
    for top_p in (0.5, 0.75, 0.9):
        assert law_of_draw(monkeypatch, row, [TopPLogitsWarper(top_p * scale)]) == LEFT
    for top_p in (0.45, 0.55, 0.7, 0.8, 0.85):
        assert_exact(monkeypatch, row, [TopPLogitsWarper(top_p)])


@pytest.mark.parametrize("scale", [1.0, 1 + 3e-6, 1 - 3e-6])
def test_a_chance_too_close_to_min_p_is_left_to_the_whole_way(monkeypatch, small_sizes, scale):
    row = torch.full((100,), -9.0)
    row[[5, 60, 61, 99]] = torch.tensor([0.5, 0.25, 0.15, 0.1]).log()
    for min_p in (0.5, 0.3, 0.2):
        assert law_of_draw(monkeypatch, row, [TopKLogitsWarper(4), MinPLogitsWarper(min_p * scale)]) == LEFT
    for min_p in (0.7, 0.4, 0.25, 0.1):
        assert_exact(monkeypatch, row, [TopKLogitsWarper(4), MinPLogitsWarper(min_p)])


@pytest.mark.parametrize("options", [dict(), dict(temperature=0.7), dict(top_k=8), dict(top_p=0.8)])
def test_draws_of_an_own_generator(small_sizes, options):
    row, processors = random_row(100, scale=1.5), processors_of(**options)

    def drawn(seed: int) -> list[int]:
        generator = torch.Generator().manual_seed(seed)
        return [draw(row, processors, generator) for _ in range(30)]

    before = torch.get_rng_state()
    assert drawn(1) == drawn(1) != drawn(2)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(4)
    draw(row, processors)
    assert not torch.equal(torch.get_rng_state(), before)


def test_draw_leaves_the_row_and_the_processors_as_they_are(small_sizes):
    row, processors = random_row(100), processors_of(temperature=0.7, top_k=5)
    before = row.clone()
    draw(row, processors)
    assert torch.equal(row, before) and len(processors) == 2


# The fast path inside decoding


def large_pair(monkeypatch, vocab: int = 10):
    """A target whose vocabulary counts as large, and a draft of the one-hot law; how often the fast path drew, and how often it left it."""
    for name, value in (("LARGE_VOCABULARY", vocab - 2), ("_NUCLEUS_SIZES", (4, 8)), ("_GROUP", 2), ("_BLOCK", 4)):
        monkeypatch.setattr(large_vocabulary, name, value)
    monkeypatch.setattr(large_vocabulary, "choose", lambda weights, generator=None: acceptance.choose(weights, generator))
    drawn = []

    def noting(*args):
        token = draw(*args)
        drawn.append(token is not None)
        return token

    monkeypatch.setattr(decoding, "draw", noting)
    shape = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=1, num_key_value_heads=1, head_dim=8)
    target = tiny_target(1, vocab_size=vocab, initializer_range=0.9, **shape)
    shape = dict(num_hidden_layers=1, num_attention_heads=1, intermediate_size=8, target_layer_ids=[0], markov_rank=2, block_size=2)
    draft = tiny_draft(target, seed=8, **shape)
    draft.generation_config.draft_sampling = "argmax"
    return target, draft, drawn


PROMPT = torch.tensor([[1, 0]])

DECODED = {
    "temperature": dict(temperature=0.2, top_k=0),
    "top-k": dict(temperature=0.7, top_k=3),
    "top-p": dict(temperature=0.4, top_k=0, top_p=0.6),
    "top-k, min-p": dict(temperature=1.5, top_k=4, min_p=0.4),
    "all": dict(temperature=0.8, top_k=4, top_p=0.9, min_p=0.1),
}


@pytest.mark.parametrize("name", DECODED)
def test_law_of_generate_with_a_draft(monkeypatch, name):
    target, draft, drawn = large_pair(monkeypatch)
    expected = chain_law(target, PROMPT, 3, **DECODED[name])
    expected = {outcome: share for outcome, share in expected.items() if share > 1e-9}
    with record_generation() as report:

        def run() -> tuple:
            output = target.generate(PROMPT, do_sample=True, max_new_tokens=3, assistant_model=draft, **DECODED[name])
            return tuple(output[0, 2:].tolist())

        law = walk_every_outcome(monkeypatch, run)
    assert largest_difference(law, expected) < 1e-5
    assert sum(drawn) > 0.5 * len(drawn) > 0
    accepted = sum(round_.accepted for round_ in report.rounds)
    assert 0 < accepted < sum(round_.verified for round_ in report.rounds)
    assert all(request.draft_failure is None for request in report.requests)


@pytest.mark.parametrize("name", DECODED)
def test_law_of_generate_many_without_a_draft(monkeypatch, name):
    target, _, drawn = large_pair(monkeypatch)
    prompts = [[1, 0], [4]]
    laws = [chain_law(target, torch.tensor([prompts[0]]), 2, **DECODED[name]), chain_law(target, torch.tensor([prompts[1]]), 1, **DECODED[name])]
    expected = {(*first, *second): p * q for first, p in laws[0].items() for second, q in laws[1].items() if p * q > 1e-9}

    def run() -> tuple:
        requests = [{"input_ids": prompts[0], "max_new_tokens": 2}, {"input_ids": prompts[1], "max_new_tokens": 1}]
        completions = generate_many(target, None, requests, do_sample=True, show_progress=False, **DECODED[name])
        return tuple(token for completion in completions for token in completion.new_ids.tolist())

    law = walk_every_outcome(monkeypatch, run)
    assert largest_difference(law, expected) < 1e-5
    assert sum(drawn) > 0.5 * len(drawn) > 0


def test_scores_are_those_of_the_whole_way(monkeypatch):
    """Who asks for scores gets them, so that the fast path has nothing to do."""
    target, draft, drawn = large_pair(monkeypatch)
    options = dict(do_sample=True, max_new_tokens=5, top_k=3, return_dict_in_generate=True, output_scores=True)
    output = target.generate(PROMPT, assistant_model=draft, **options)
    assert len(output.scores) == 5 and drawn == []
    assert all(torch.isneginf(scores).sum() == 7 for scores in output.scores)


def test_greedy_decoding_of_a_large_vocabulary(monkeypatch):
    target, draft, drawn = large_pair(monkeypatch)
    expected = target.generate(PROMPT, do_sample=False, max_new_tokens=12)
    assert target.generate(PROMPT, do_sample=False, max_new_tokens=12, assistant_model=draft).tolist() == expected.tolist()
    (completion,) = generate_many(target, None, [PROMPT], do_sample=False, max_new_tokens=12, show_progress=False)
    assert completion.output.tolist() == expected.tolist()
    assert drawn == []
