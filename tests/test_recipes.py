"""Every recipe in its smoke form: through the command line, on a CPU, with a tiny target and a handful of rows in place of its own."""

import json
import shutil
from pathlib import Path

import pytest
import yaml
from evaluation.tiny_pair import save_pair
from fake_chat_server import FakeChatServer
from transformers import AutoTokenizer

from hf_dspark import DSparkDraftModel
from hf_dspark.cli import main

RECIPES = Path(__file__).resolve().parents[1] / "recipes"
CHAT_TEMPLATE = (
    "{% for m in messages %}<|bos|>{{ m.role }}\n{{ m.content }}<|eos|>{% endfor %}{% if add_generation_prompt %}<|bos|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking %}(think){% endif %}{% endif %}"
)
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


def chats(folder: Path) -> Path:
    """Four conversations of two turns; the target's tokenizer learns to render them."""
    tokenizer = AutoTokenizer.from_pretrained(folder / "target")
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder / "target")
    turn = [{"role": "user", "content": "add"}, {"role": "assistant", "content": "a + b"}]
    (folder / "chats.jsonl").write_text("".join(json.dumps({"messages": turn + turn}) + "\n" for _ in range(4)))
    return folder / "chats.jsonl"


def written(folder: Path, name: str, *more: str, rows: int, **small) -> Path:
    """The file that the recipe's command writes, with `more` behind it; `rows` rows, which a draft is then trained on."""
    assert main(["regenerate", f"recipes/{name}", *more, *flags(target=folder / "target", **small)]) == 0
    options = yaml.safe_load((RECIPES / name).read_text()) | dict(zip((flag[2:] for flag in more[::2]), more[1::2]))
    output = folder / options["output_file"]
    assert len(output.read_text().splitlines()) == rows
    own = dict(target=folder / "target", dataset=output, output_dir=folder / f"taught_{output.stem}", eval_prompts=0)
    assert main(["distill", "recipes/stdlib_draft.yaml", *flags(**SMALL, **SHORT | dict(max_steps=1), **own), "--extra_rows", "none"]) == 0
    return output


def test_answers_of_a_server(folder):
    """recipes/qwen3_4b_regenerate.yaml: every turn of each conversation is asked for, sampled as the recipe says."""
    dataset = chats(folder)
    with FakeChatServer(lambda body, number: f"sum {number}", models=[str(folder / "target")]) as fake:
        more = dict(dataset=dataset, dataset_split="train", num_rows=4, new_tokens=8, concurrency=2, server=fake.url)
        output = written(folder, "qwen3_4b_regenerate.yaml", rows=4, **more)
    bodies = [body for _, _, body in fake.requests]
    assert len(bodies) == 8 and {(body["temperature"], body["top_p"], body["top_k"]) for body in bodies} == {(0.7, 0.8, 20)}
    answers = [message["content"] for line in output.read_text().splitlines() for message in json.loads(line)["messages"][1::2]]
    assert sorted(answers) == [f"sum {i}" for i in range(8)]


def test_answers_of_a_target_here(folder):
    """recipes/llama3_8b_regenerate.yaml: each answer is a row of the very tokens written, which alone are supervised."""
    dataset = chats(folder)
    output = written(
        folder, "llama3_8b_regenerate.yaml", rows=8, dataset=dataset, dataset_split="train", num_rows=4, new_tokens=4, drop_degenerate="false"
    )
    for row in map(json.loads, output.read_text().splitlines()):
        assert 1 <= sum(row["loss_mask"]) <= 5 < len(row["input_ids"]) == len(row["loss_mask"])


@pytest.mark.parametrize("name", ["stdlib_regenerate.yaml", "gemma3_270m_regenerate.yaml"])
def test_text_of_a_target_here(name, folder):
    """Both commands of the recipe's header: the second has its options in the line after the last `with`."""
    small = dict(dataset=folder / "rows.jsonl", num_rows=4, prompt_tokens=6, new_tokens=4, batch_size=2, dtype="float32")
    lines = [line.lstrip("# ") for line in (RECIPES / name).read_text().splitlines() if line.startswith("#")]
    second = next(line for line in lines if line.startswith("--")).split()
    first = written(folder, name, rows=4, **small)
    again = written(folder, name, *second, rows=4, **small)
    assert first != again and first.read_text() != again.read_text()
    for row in map(json.loads, first.read_text().splitlines()):
        assert len(row["input_ids"]) == 10


def test_every_recipe_runs_in_a_test():
    """Those of drafts and of text here; the bundled target's in tests/test_cli.py, with the whole way from it to a measured draft."""
    text = {"qwen3_4b_regenerate.yaml", "llama3_8b_regenerate.yaml", "stdlib_regenerate.yaml", "gemma3_270m_regenerate.yaml"}
    assert {path.name for path in RECIPES.glob("*.yaml")} == {*DISTILL, *text, "stdlib_target.yaml"}


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
