"""Every recipe in its smoke form: through the command line, on a CPU, with a tiny target and a handful of rows in place of its own."""

import json
import shutil
from pathlib import Path

import pytest
import yaml
from evaluation.tiny_pair import save_pair

from hf_dspark import DSparkDraftModel
from hf_dspark.cli import main

RECIPES = Path(__file__).resolve().parents[1] / "recipes"
DISTILL = sorted(path.name for path in RECIPES.glob("*.yaml") if f"hf-dspark distill recipes/{path.name}" in path.read_text())
NUM_STEPS = 10
SMALL = dict(
    num_held_out=2, max_eval_rows=2, max_length=32, num_draft_layers=1, intermediate_size=48, num_attention_heads=2, num_key_value_heads=1,
    head_dim=16, markov_rank=8, num_anchors=4, mask_token_id=3,
)  # fmt: skip
SHORT = dict(
    max_steps=NUM_STEPS, per_device_train_batch_size=2, gradient_accumulation_steps=1, logging_steps=5, save_steps=NUM_STEPS, eval_steps=NUM_STEPS,
    warmup_steps=2, bf16="false", use_cpu="true", disable_tqdm="true", report_to="none",
)  # fmt: skip


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder, with a pair of 280 tokens whose target stands for every recipe's, and answers to train on."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.chdir(tmp_path)
    save_pair(tmp_path)
    shutil.rmtree(tmp_path / "runs", ignore_errors=True)
    rows = [{"text": f"def add{i}(a, b):\n    return a + b + {i}\n"} for i in range(20)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def flags(**options) -> list[str]:
    return [part for name, value in options.items() for part in (f"--{name}", str(value))]


@pytest.mark.parametrize("name", DISTILL)
def test_distilling(name, folder):
    recipe = yaml.safe_load((RECIPES / name).read_text())
    own = dict(target=folder / "target", dataset=folder / "rows.jsonl")
    if "init_draft" in recipe:
        own["init_draft"] = folder / "draft"
    if "extra_rows" in recipe:
        own["extra_rows"] = folder / "rows.jsonl"
    if "draft_vocab_size" in recipe:
        own["draft_vocab_size"] = 40
    if recipe.get("fsdp"):
        own["fsdp"] = ""  # asks for several processes: see tests/distillation/test_sharding.py
    before = (folder / "draft" / "model.safetensors").read_bytes()
    assert main(["distill", f"recipes/{name}", *flags(**SMALL, **SHORT, **own)]) == 0
    output = folder / recipe["output_dir"]
    assert json.loads((output / "distillation.json").read_text())["steps"] == NUM_STEPS and (output / "README.md").exists()
    if "lora_rank" in recipe:
        assert (output / "adapter_model.safetensors").exists() and not (output / "model.safetensors").exists()
    else:
        assert DSparkDraftModel.from_pretrained(output).config.block_size == (recipe.get("block_size") or 4)
    assert (folder / "draft" / "model.safetensors").read_bytes() == before


def test_the_large_recipes_are_the_references_settings():
    """DSpark (2026): 5 layers, block 7, rank 256, 512 anchors, AdamW 6e-4 with 4 % warm-up and no weight decay, a global
    batch of 512, 10 epochs."""
    expected = dict(
        num_draft_layers=5, block_size=7, markov_rank=256, num_anchors=512, learning_rate=6e-4, warmup_steps=0.04, weight_decay=0.0,
        num_train_epochs=10,
    )  # fmt: skip
    for name, processes in (("qwen3_4b", 1), ("qwen3_8b", 1), ("qwen3_14b", 1), ("llama3_8b", 1), ("qwen3_14b_fsdp", 8)):
        recipe = yaml.safe_load((RECIPES / f"{name}.yaml").read_text())
        assert {option: recipe[option] for option in expected} == expected
        assert recipe["per_device_train_batch_size"] * recipe["gradient_accumulation_steps"] * processes == 512
