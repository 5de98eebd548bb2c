"""Looking into checkpoints on disk, and changing them."""

import json

import torch
from safetensors.torch import load_file, save_file

TABLES = {"embed_tokens.weight", "lm_head.weight"}


def read_config(folder) -> dict:
    return json.loads((folder / "config.json").read_text())


def change_config(folder, remove=(), **changes) -> None:
    values = {name: value for name, value in (read_config(folder) | changes).items() if name not in remove}
    (folder / "config.json").write_text(json.dumps(values))


def change_tensors(folder, change) -> None:
    """Applies `change(tensors)` to the dictionary of the folder's weights."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def assert_same_draft(loaded, draft) -> None:
    """Weights and buffers bit for bit, config and knobs."""
    ours, theirs = loaded.state_dict(), draft.state_dict()
    assert set(ours) == set(theirs)
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype and torch.equal(ours[name], tensor), name
    assert loaded.generation_config.to_dict() == draft.generation_config.to_dict()
    ours, theirs = loaded.config.to_dict(), draft.config.to_dict()
    of_loading = {"dtype", "_name_or_path"}
    assert {name: ours[name] for name in set(ours) - of_loading} == {name: theirs[name] for name in set(theirs) - of_loading}
