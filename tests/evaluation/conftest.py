"""The pair on disk, made once."""

import pytest

from evaluation.tiny_pair import save_pair


@pytest.fixture(scope="session")
def pair_folder(tmp_path_factory):
    """A folder with `target` and `draft`; read only."""
    return save_pair(tmp_path_factory.mktemp("pair"))
