"""Training a LoRA adapter of a draft: what is trained, saved, resumed and merged; a target that is itself adapted."""

import json
import warnings

import pytest
import torch
from oracle import tiny_target
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from test_distill import SPECIAL, arguments, folder  # noqa: F401
from transformers import AutoModelForCausalLM

from hf_dspark import DSparkDraftModel, record_generation
from hf_dspark.distillation.adapter import add_adapter, save_adapter
from hf_dspark.distillation.distill import distill

IDS = torch.tensor([[1, 40, 50]])


@pytest.fixture
def base(folder):  # noqa: F811
    """A folder with a draft to adapt."""
    return distill(arguments(folder, output_dir=str(folder / "base"), save_dtype="float32"))


def adapter(folder, base, **options):  # noqa: F811
    """Trains an adapter of rank 2 over the draft in `base`; the folder it is written to."""
    defaults = dict(init_draft=str(base), lora_rank=2, output_dir=str(folder / "adapter"), save_dtype="float32", learning_rate=1e-2)
    return distill(arguments(folder, **{**defaults, **options}))


def test_the_adapter_alone_is_trained_and_saved(folder, base):  # noqa: F811
    before = load_file(base / "model.safetensors")
    output = adapter(folder, base)
    assert not list(output.glob("model*")) and not (output / "config.json").exists()
    weights = load_file(output / "adapter_model.safetensors")
    assert weights and all("lora_" in name for name in weights)
    # A fresh adapter's B is zero, so what isn't was trained.
    trained = {name for name, tensor in weights.items() if "lora_B" in name and tensor.any()}
    assert {part for name in trained for part in ("self_attn", "mlp", ".fc.", "markov_head") if part in name} == {
        "self_attn", "mlp", ".fc.", "markov_head",
    }  # fmt: skip
    assert load_file(base / "model.safetensors").keys() == before.keys()
    assert all(torch.equal(tensor, before[name]) for name, tensor in load_file(base / "model.safetensors").items())
    config = json.loads((output / "adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["r"], config["lora_alpha"]) == (str(base), 2, 4)
    assert "Adapter of a DSpark draft" in (output / "README.md").read_text()
    assert json.loads((output / "distillation.json").read_text())["steps"] == 3


def test_the_saved_adapter_loads_merges_and_decodes(folder, base):  # noqa: F811
    output = adapter(folder, base)
    target = AutoModelForCausalLM.from_pretrained(folder / "target", dtype=torch.float32)
    plain = target.generate(IDS, max_new_tokens=12, do_sample=False)
    loaded = PeftModel.from_pretrained(DSparkDraftModel.from_pretrained(base), output).eval()
    rounds = []
    for draft in (loaded, loaded.merge_and_unload()):
        with record_generation() as report:
            assert torch.equal(target.generate(IDS, assistant_model=draft, max_new_tokens=12, do_sample=False), plain)
        assert report.requests[0].draft_failure is None
        rounds.append([(round_.drafted, round_.accepted) for round_ in report.rounds])
    assert rounds[0] == rounds[1]


def test_named_modules_and_scale(folder, base):  # noqa: F811
    output = adapter(folder, base, lora_target_modules=["o_proj", "markov_w1"], lora_alpha=3)
    names = {name.rsplit(".lora_", 1)[0].rsplit(".", 1)[1] for name in load_file(output / "adapter_model.safetensors")}
    assert names == {"o_proj", "markov_w1"} and json.loads((output / "adapter_config.json").read_text())["lora_alpha"] == 3
    draft = DSparkDraftModel.from_pretrained(base)
    for unknown in (["nothing"], ["q_proj", "nothing"], ["roj", "q_proj", "nothing"]):
        with pytest.raises(ValueError, match=r"lora_target_modules=\[.*'nothing'\]: .*nothing not found in the draft, which has .*q_proj"):
            add_adapter(draft, arguments(folder, init_draft=str(base), lora_rank=2, lora_target_modules=unknown))
    with pytest.raises(ValueError, match=r"lora_target_modules=\['hidden_norm'\]"):  # there is one, and it can't be adapted
        add_adapter(draft, arguments(folder, init_draft=str(base), lora_rank=2, lora_target_modules=["hidden_norm"]))


def test_pefts_use_of_an_old_name_is_no_warning_of_ours(folder, base):  # noqa: F811
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        add_adapter(DSparkDraftModel.from_pretrained(base), arguments(folder, init_draft=str(base), lora_rank=2))


def test_training_an_adapter_resumes_exactly(folder, base):  # noqa: F811
    steps = dict(save_strategy="steps", save_steps=2, max_steps=4)
    whole = load_file(adapter(folder, base, output_dir=str(folder / "whole"), **steps) / "adapter_model.safetensors")
    checkpoint = str(folder / "whole" / "checkpoint-2")
    resumed = load_file(
        adapter(folder, base, output_dir=str(folder / "resumed"), resume_from_checkpoint=checkpoint, **steps) / "adapter_model.safetensors"
    )
    assert whole.keys() == resumed.keys() and all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_a_target_with_an_active_adapter_is_the_teacher(folder, base):  # noqa: F811
    """The folder of an adapter is a target's name like any other, and what the draft is taught is the adapted model's law."""
    target = tiny_target(vocab_size=280, **SPECIAL).from_pretrained(folder / "target", dtype=torch.float32)
    tuned = get_peft_model(target, LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False))
    tuned.save_pretrained(folder / "tuned")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (folder / "tuned" / file).write_bytes((folder / "target" / file).read_bytes())
    reports = [
        json.loads((adapter(folder, base, target=str(folder / name), max_steps=1, learning_rate=1e-9) / "distillation.json").read_text())
        for name in ("target", "tuned")
    ]
    assert abs(reports[0]["eval_l1"] - reports[1]["eval_l1"]) > 1e-2
    merged = tuned.merge_and_unload()
    merged.save_pretrained(folder / "merged")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (folder / "merged" / file).write_bytes((folder / "target" / file).read_bytes())
    report = json.loads((adapter(folder, base, target=str(folder / "merged"), max_steps=1, learning_rate=1e-9) / "distillation.json").read_text())
    assert report["eval_l1"] == pytest.approx(reports[1]["eval_l1"], abs=1e-3)  # bf16


def test_options_that_contradict_each_other(folder, base):  # noqa: F811
    with pytest.raises(ValueError, match="lora_rank=2 adapts an existing draft; name it with init_draft"):
        arguments(folder, lora_rank=2)
    with pytest.raises(ValueError, match="lora_alpha and lora_target_modules describe an adapter; ask for one with lora_rank"):
        arguments(folder, lora_alpha=2)
    with pytest.raises(ValueError, match="lora_rank must be at least 1, got 0"):
        arguments(folder, lora_rank=0, init_draft=str(base))
    with pytest.raises(ValueError, match="holds a PEFT adapter alone; load it with"):
        adapter(folder, adapter(folder, base), output_dir=str(folder / "second"))


def test_an_interrupted_save_keeps_the_adapter_before(folder, base, monkeypatch):  # noqa: F811
    output = adapter(folder, base)
    before = {file.name: file.read_bytes() for file in output.iterdir() if file.is_file()}
    loaded = PeftModel.from_pretrained(DSparkDraftModel.from_pretrained(base), output)

    def torn(model, path, **options):
        (path if hasattr(path, "joinpath") else output.__class__(path)).joinpath("adapter_config.json").write_text("{")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(PeftModel, "save_pretrained", torn)
    with pytest.raises(OSError, match="No space left"):
        save_adapter(loaded, output)
    assert {file.name: file.read_bytes() for file in output.iterdir()} == before
