"""A tiny target and a checkpoint of a tiny draft for it."""

import pytest
from oracle import tiny_draft, tiny_target


@pytest.fixture(scope="package")
def target():
    """A target that tests only read and generate with."""
    return tiny_target()


@pytest.fixture
def folder(target, tmp_path):
    """A slim checkpoint of a tiny draft with every head."""
    tiny_draft(target).save_pretrained(tmp_path / "draft")
    return tmp_path / "draft"
