"""The card of a pair: every figure comes from the files, and no field is left empty."""

import hashlib
import json
from importlib.resources import files

import pytest
from oracle import tiny_draft, tiny_target

from hf_dspark.evaluation.card import pair_card

SUMMARY = {
    "completions": 64,
    "tokens_per_round": 3.21,
    "repeated_8gram_share": 0.125,
    "completions_below_30_percent_repeated": 50,
    "tokens_per_round_below_30_percent_repeated": 2.98,
    "conditional_acceptance": [0.81, 0.72],
}
OPTIONS = {"command": "hf-dspark evaluate --json FILE", "max_new_tokens": 128, "prompt_tokens": 64, "temperature": 1.0}


@pytest.fixture
def folders(tmp_path):
    target = tiny_target()
    target.save_pretrained(tmp_path / "target")
    tiny_draft(target).save_pretrained(tmp_path / "draft")
    report = {"num_train_modules": 400, "held_out_modules": ["a.py"] * 96, "train_tokens_seen": 1_234_567, "held_out_bits_per_byte": 1.2631}
    (tmp_path / "target" / "pretraining.json").write_text(json.dumps(report))
    (tmp_path / "evaluation.json").write_text(json.dumps({"greedy": SUMMARY, "sampled": {**SUMMARY, "tokens_per_round": 2.55}, "options": OPTIONS}))
    return tmp_path


def card(folders) -> str:
    return pair_card(folders / "target", folders / "draft", folders / "evaluation.json", "two cores")


def test_every_figure_is_there(folders):
    text = card(folders)
    for expected in (
        "1.263 bits a byte",
        "1,234,567",
        "| greedy | 3.21 | 12.5 % | 2.98 (50 of 64 completions) | 0.81, 0.72 |",
        "| temperature 1 | 2.55 |",
    ):
        assert expected in text
    assert "mean over 64 held-out" in text.replace("\n", " ") and "Measured with `hf-dspark evaluate --json FILE` on two cores" in text
    digest = hashlib.sha256(files("hf_dspark.recipes").joinpath("stdlib_draft.yaml").read_bytes()).hexdigest()
    assert f"| `recipes/stdlib_draft.yaml` | `{digest}` |" in text
    assert "{{" not in text and "()" not in text and "``" not in text.replace("```", "")


def test_another_file_is_refused(folders):
    (folders / "evaluation.json").write_text(json.dumps({"greedy": SUMMARY}))
    with pytest.raises(ValueError, match="sampled"):
        card(folders)
