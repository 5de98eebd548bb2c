"""The standard library as a corpus."""

import pytest

from hf_dspark.distillation.corpus import held_out_split, stdlib_modules, train_tokenizer


@pytest.fixture(scope="module")
def modules():
    return stdlib_modules()


def lines_in_fives(text: str) -> set[tuple[str, ...]]:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return {tuple(lines[i : i + 5]) for i in range(len(lines) - 4)}


def test_tests_and_tables_are_left_out(modules):
    assert {"argparse.py", "json/decoder.py"} <= set(modules)
    assert not [name for name in modules if {"test", "tests", "encodings", "site-packages"} & set(name.split("/"))]


def test_held_out_modules_share_little_with_training(modules):
    train, held_out = held_out_split(modules, 96)
    assert len(held_out) == 96 and not set(train) & set(held_out) and set(train) | set(held_out) == set(modules)
    seen = set().union(*map(lines_in_fives, train.values()))
    shares = [len(lines_in_fives(text) & seen) / len(lines_in_fives(text)) for text in held_out.values()]
    # A module is dropped when a fifth of its runs occurred before it in path order; later ones can only add what was kept below that.
    assert max(shares) < 0.4 and sum(shares) / len(shares) < 0.05


def test_the_split_depends_on_names_alone(modules):
    assert list(held_out_split(modules, 10)[1]) == list(held_out_split(dict(reversed(modules.items())), 10)[1])
    assert set(held_out_split(modules, 10)[1]) < set(held_out_split(modules, 20)[1])


@pytest.mark.parametrize("number", [0, -1, 100_000])
def test_an_impossible_split_is_refused(modules, number):
    with pytest.raises(ValueError, match=str(number)):
        held_out_split(modules, number)


def test_the_tokenizer_gives_every_text_back():
    tokenizer = train_tokenizer(["def f(x):\n    return x\n" * 20], vocab_size=300)
    text = "class Ü:\n\tpass  # € \n"
    bos, *ids = tokenizer(text)["input_ids"]
    assert bos == tokenizer.bos_token_id and tokenizer.decode(ids) == text and max(ids) < 300
    assert [tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.mask_token_id] == [0, 1, 2, 3]
