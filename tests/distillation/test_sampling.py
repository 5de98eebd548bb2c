"""The law that rows are written by: the target's own, or what the options say."""

import pytest
from transformers import GenerationConfig

from hf_dspark.distillation.regeneration_arguments import RegenerationArguments
from hf_dspark.distillation.sampling import Sampling

QWEN = GenerationConfig(do_sample=True, temperature=0.6, top_k=20, top_p=0.95, repetition_penalty=1.05)


def sampling(config=QWEN, dataset="chats.jsonl", **options) -> Sampling:
    return Sampling.of_run(config, RegenerationArguments(target="t", output_file="o", dataset=dataset, **options))


def test_the_targets_own_law_and_what_replaces_it():
    own = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.05}
    assert sampling().options == own
    assert sampling(temperature=1.0, top_k=0).options == {**own, "temperature": 1.0, "top_k": 0}
    assert sampling(temperature=0.0).options == {"do_sample": False, "repetition_penalty": 1.05}
    # What a generation config doesn't state is off, at a server as in process.
    assert sampling(GenerationConfig(do_sample=True)).options == {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    assert sampling(GenerationConfig()).options == {"do_sample": False}
    assert sampling(GenerationConfig(), temperature=0.5).options == {"do_sample": True, "temperature": 0.5, "top_k": 0, "top_p": 1.0}
    assert sampling(dataset="stdlib").options == {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}


def test_an_option_without_effect_is_refused():
    with pytest.raises(ValueError, match=r"top_p=0\.9 has no effect on greedy decoding; set a temperature above 0"):
        sampling(GenerationConfig(), top_p=0.9)
    with pytest.raises(ValueError, match=r"greedy_share=0\.5: this target writes all rows greedily; set a temperature above 0"):
        sampling(GenerationConfig(), greedy_share=0.5)
    assert sampling(GenerationConfig(), greedy_share=1.0).is_greedy(0)


def test_which_rows_are_greedy():
    first = sampling(dataset="stdlib", num_rows=10, greedy_share=0.3)
    assert [i for i in range(10) if first.is_greedy(i)] == [0, 1, 2]
    spread = sampling(greedy_share=0.25)
    assert [i for i in range(12) if spread.is_greedy(i)] == [3, 7, 11]
    assert not any(map(sampling().is_greedy, range(9))) and all(map(sampling(temperature=0.0).is_greedy, range(9)))


def test_every_answer_has_a_seed_of_its_own():
    seeds = {sampling(seed=s).row_seed(row, turn) for s in (0, 1) for row in range(50) for turn in range(3)}
    assert len(seeds) == 300 and all(0 <= seed < 2**63 for seed in seeds)
    assert sampling().row_seed(4, 1) == sampling(num_rows=9).row_seed(4, 1)


def test_what_generate_is_told_of_each_row():
    """Options of sampling beside greedy decoding would make transformers warn of them."""
    law = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.05}
    mixed = sampling(greedy_share=0.5)
    assert mixed.row_options(0, 2) == {**law, "seed": mixed.row_seed(0, 2)}
    assert mixed.row_options(1, 2) == {"do_sample": False, "repetition_penalty": 1.05}
    assert sampling(temperature=0.0).row_options(0, 0) == {"do_sample": False, "repetition_penalty": 1.05}
    assert sampling(GenerationConfig(do_sample=True, min_p=0.1), greedy_share=1.0).row_options(0, 0) == {"do_sample": False}


def test_what_a_server_is_told():
    options = sampling(seed=3).server_options(0, 0)
    assert 0 <= options.pop("seed") < 2**31
    assert options == {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.05}
    assert sampling(top_k=0).server_options(0, 0)["top_k"] == -1
    assert sampling(temperature=0.0).server_options(0, 0) == {"temperature": 0.0, "repetition_penalty": 1.05}
