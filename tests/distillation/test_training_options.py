"""Options of the Trainer that a draft can't have, and those that train nothing."""

import pytest
import torch
from test_arguments import arguments


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_steps": 0}, r"max_steps=0 and num_train_epochs=3.0 train no step; set one of them above 0"),
        ({"num_train_epochs": 0}, r"max_steps=-1 and num_train_epochs=0 train no step"),
        ({"ce_weight": 0, "l1_weight": 0, "confidence_weight": 0}, "ce_weight=0, l1_weight=0, confidence_weight=0 .* leave nothing to learn"),
        ({"ce_weight": 0, "l1_weight": 0, "enable_confidence_head": False}, r"enable_confidence_head=False. leave nothing to learn"),
        ({"use_liger_kernel": True}, "use_liger_kernel=True: Liger's kernels .*leave it out"),
        ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha=5.0: .*an embedding of the model's own.*leave it out"),
        ({"muon": True, "optim": "sgd"}, "muon=True stands beside AdamW .*got optim='sgd'; leave optim out"),
        ({"muon": True, "init_draft": "draft", "lora_rank": 2}, "muon=True trains whole matrices, which lora_rank=2 leaves it none of"),
    ],
    ids=str,
)
def test_what_trains_nothing_or_not_a_draft_is_refused(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        arguments(tmp_path, **options)


def test_what_trains_something_is_taken(tmp_path):
    for options in ({"max_steps": 5, "num_train_epochs": 0}, {"num_train_epochs": 0.1}, {"ce_weight": 0, "l1_weight": 0}):
        arguments(tmp_path, **options)
    # A draft at hand may have a confidence head, whatever the options for new ones say.
    arguments(tmp_path, ce_weight=0, l1_weight=0, enable_confidence_head=False, init_draft="draft")


def test_reports_go_to_what_is_installed(tmp_path, monkeypatch):
    monkeypatch.setattr("hf_dspark.distillation.training_options.get_available_reporting_integrations", lambda: ["tensorboard"])
    for report_to in ("none", "all", [], "tensorboard", ["tensorboard", "flyte"], None):
        arguments(tmp_path, report_to=report_to)
    for report_to in ("wandb", ["tensorboard", "wandb"]):
        with pytest.raises(
            ValueError, match=r"'wandb' is not installed, or unknown to transformers; usable here: tensorboard; install it, or set report_to"
        ):
            arguments(tmp_path, report_to=report_to)


def test_muon_needs_a_torch_that_has_it(tmp_path, monkeypatch):
    monkeypatch.delattr(torch.optim, "Muon")
    with pytest.raises(ValueError, match=r"muon=True needs torch 2\.9 or later, this is "):
        arguments(tmp_path, muon=True)
