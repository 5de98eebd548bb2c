"""Fixtures shared by all tests: one thread, no network, poisoned memory, the reference values where they are present."""

import os
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_EVALUATE_OFFLINE", "1")

import torch

torch.set_num_threads(1)

FIXTURES = Path(__file__).resolve().parents[2] / "shared" / "fixtures" / "deepspec"


@pytest.fixture
def deepspec_fixtures() -> Path:
    """Folder of the reference implementation's checkpoints and values; skips where it is absent."""
    if not FIXTURES.is_dir():
        pytest.skip("the reference values are not here")
    return FIXTURES


@pytest.fixture
def poisoned_memory(monkeypatch):
    """torch.empty and its kin return NaN, so that memory nobody wrote is seen."""
    for name in ("empty", "empty_like"):
        original = getattr(torch, name)

        def poisoned(*args, original=original, **kwargs):
            tensor = original(*args, **kwargs)
            return tensor.fill_(float("nan")) if tensor.is_floating_point() and tensor.device.type != "meta" else tensor

        monkeypatch.setattr(torch, name, poisoned)
