"""A draft under PEFT: training, serving as assistant, saving, loading and merging an adapter."""

import pytest
import torch
from drafts import PROMPT, inputs_of, loss_of, random_draft
from peft import LoraConfig, PeftModel, get_peft_model

from hf_dspark import DSparkDraftModel, record_generation

LORA = LoraConfig(r=2, target_modules=r".*layers\.\d+\.(self_attn|mlp)\..*_proj", modules_to_save=["confidence_head"])


@pytest.fixture
def adapted(target):
    """A draft with a random LoRA adapter over it."""
    model = get_peft_model(random_draft(target), LORA)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.2)
    return model


def drafted_with(target, assistant):
    """(ids, proposals) of a greedy generate() with `assistant`."""
    with record_generation() as report:
        ids = target.generate(PROMPT, assistant_model=assistant, max_new_tokens=16, do_sample=False)
    assert report.requests[0].draft_failure is None and report.rounds
    return ids


def test_peft_wraps_trains_and_serves_as_assistant(target, adapted):
    assert torch.equal(drafted_with(target, adapted), target.generate(PROMPT, max_new_tokens=16, do_sample=False))
    trainable = {name for name, parameter in adapted.named_parameters() if parameter.requires_grad}
    assert trainable and all("lora_" in name or "confidence_head" in name for name in trainable)
    target.requires_grad_(False)
    loss_of(adapted.get_base_model(), target).backward()
    assert all((parameter.grad is not None) == parameter.requires_grad for parameter in adapted.parameters())


@torch.no_grad()
def test_peft_adapters_are_saved_loaded_and_merged(target, adapted, tmp_path):
    base = random_draft(target)
    base.save_pretrained(tmp_path / "base")
    adapted.save_pretrained(tmp_path / "adapter")
    assert not (tmp_path / "adapter" / "config.json").exists()
    expected = adapted.get_base_model().bind(target)(*inputs_of(base))
    loaded = PeftModel.from_pretrained(DSparkDraftModel.from_pretrained(tmp_path / "base"), tmp_path / "adapter").eval()
    torch.testing.assert_close(loaded.get_base_model().bind(target)(*inputs_of(base)), expected)
    assert torch.equal(drafted_with(target, loaded), target.generate(PROMPT, max_new_tokens=16, do_sample=False))
    merged = loaded.merge_and_unload()
    assert type(merged) is DSparkDraftModel
    assert set(merged.state_dict()) == set(base.state_dict())
    torch.testing.assert_close(merged.bind(target)(*inputs_of(base)), expected, rtol=1e-4, atol=1e-4)
    merged.save_pretrained(tmp_path / "merged")
    again = DSparkDraftModel.from_pretrained(tmp_path / "merged").bind(target)
    torch.testing.assert_close(again(*inputs_of(base)), expected, rtol=1e-4, atol=1e-4)
