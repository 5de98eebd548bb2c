"""Checkpoints that a kill during saving leaves torn are never gone on from."""

import json
import logging
from pathlib import Path

__all__ = ["checkpoint_to_resume", "forget_whole", "is_whole"]

logger = logging.getLogger(__name__)

# The Trainer writes it last.
_STATE_FILE = "trainer_state.json"


def checkpoint_to_resume(resume_from_checkpoint: str | bool | None, output_dir: str) -> str | None:
    """The folder that `resume_from_checkpoint` means; True: the newest whole checkpoint of `output_dir`, torn ones are passed over with a warning.

    Raises:
        ValueError: the folder named is torn, or True and there is no whole one.
    """
    word = str(resume_from_checkpoint).lower()  # transformers' option is a text, also where a flag says True
    if not resume_from_checkpoint or word == "false":
        return None
    if word != "true":
        if not is_whole(resume_from_checkpoint):
            raise ValueError(
                f"resume_from_checkpoint={str(resume_from_checkpoint)!r} is no whole checkpoint: its {_STATE_FILE}, which is written last, is "
                "missing or cut off; go on from an earlier one"
            )
        return str(resume_from_checkpoint)
    folders = sorted((path for path in Path(output_dir).glob("checkpoint-*") if path.name[11:].isdigit()), key=lambda path: -int(path.name[11:]))
    for folder in folders:
        if is_whole(folder):
            return str(folder)
        logger.warning("%s is torn (its saving was interrupted), the one before it is taken", folder)
    raise ValueError(f"resume_from_checkpoint=True finds no whole checkpoint in {output_dir!r}; leave it out to start anew")


def is_whole(folder: str | Path) -> bool:
    """Whether the saving of the Trainer's checkpoint in `folder` came to its end."""
    try:
        return isinstance(json.loads((Path(folder) / _STATE_FILE).read_text(encoding="utf-8"))["global_step"], int)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def forget_whole(folder: str | Path) -> None:
    """Marks the checkpoint in `folder`, if there is one, as torn: it is about to be written anew."""
    (Path(folder) / _STATE_FILE).unlink(missing_ok=True)
