"""Uploading a draft: the files of a folder that belong to it, in one commit, and a short card where there is none.

What is published names local folders and files without their path, which says nothing elsewhere and may say too much.
"""

import json
import os
import re
from pathlib import Path, PureWindowsPath

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, ModelCard, ModelCardData
from huggingface_hub.utils import HFValidationError, validate_repo_id

__all__ = ["COMPANIONS", "TAGS", "is_hub_id", "public_name", "upload_draft", "without_paths"]

TAGS = ["dspark", "speculative-decoding"]
# What lies beside the weights and describes how they came about.
COMPANIONS = ("README.md", "training_args.json")
_WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json")
_WITH_NAMES = ("config.json", "adapter_config.json", "training_args.json")
_OTHERS = {"config.json", "generation_config.json", "adapter_config.json", "adapter_model.safetensors", *COMPANIONS}
# These files themselves, which transformers saves beside a draft that is to travel with its code.
_CODE = {path.name for path in Path(__file__).parent.glob("*.py") if path.name != "__init__.py"}


def upload_draft(
    folder,
    repo_id: str,
    *,
    private: bool | None = None,
    token: bool | str | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    commit_message: str | None = None,
    commit_description: str | None = None,
    tags: list[str] | None = None,
    run_as_future: bool = False,
):
    """Uploads a draft, or a PEFT adapter of one, that was saved in `folder`: weights, configs, training arguments and README.md, and
    nothing else that lies there. Weights that the repository has under other names are removed in the same commit. Paths of this machine
    in the configs and the training arguments are cut down to the last name.

    The README.md in the folder becomes the repository's. Where there is none the repository keeps its own, or gets a few lines.

    Args:
        private: of a repository that is made anew; None: the account's default.
        revision: branch, made where it is missing. tags: added to those of the card.
        run_as_future: return at once a Future of the commit.

    Raises:
        ValueError: the folder holds no draft, or private=True and the repository exists and is public; nothing has been uploaded then.
    """
    folder = Path(folder)
    names = sorted(path.name for path in folder.iterdir() if path.is_file() and _belongs(path.name))
    if not any(_WEIGHTS.fullmatch(name) or name == "adapter_model.safetensors" for name in names):
        raise ValueError(f"{folder} holds neither the weights of a draft nor those of an adapter; save the draft there first")
    api = HfApi(library_name="hf-dspark")
    repo_id = api.create_repo(repo_id, private=private, token=token, exist_ok=True).repo_id
    if private and not api.model_info(repo_id, token=token).private:
        raise ValueError(f"private=True, but {repo_id} exists already and is public; make it private on the Hub, or choose another name")
    if revision is not None and not revision.startswith("refs/"):
        api.create_branch(repo_id, branch=revision, token=token, exist_ok=True)
    present = api.list_repo_files(repo_id, revision=revision, token=token)
    operations = [CommitOperationAdd(name, _public_content(folder / name)) for name in names if name != "README.md"]
    card = _card(folder, repo_id, token, tags or [], on_hub="README.md" in present)
    if card is not None:
        operations.append(CommitOperationAdd("README.md", card))
    if "config.json" in names:
        # A stale shard, index or single file would be read in place of the new weights.
        operations += [CommitOperationDelete(name) for name in present if _WEIGHTS.fullmatch(name) and name not in names]
    message = commit_message or "Upload draft"
    commit = dict(commit_message=message, commit_description=commit_description, create_pr=create_pr, run_as_future=run_as_future)
    return api.create_commit(repo_id, operations, token=token, revision=revision, **commit)


def is_hub_id(name: str | None) -> bool:
    """Whether `name` can name a repository on the Hub, and no file or folder here has it."""
    try:
        validate_repo_id(name or "")
    except HFValidationError:
        return False
    return not Path(name).exists()


def public_name(name: str) -> str:
    """`name` of a model or a dataset as it is published: one of the Hub's stays, a local `/data/mine` becomes `./mine`."""
    is_local = _is_path(name) or os.path.exists(name)
    return f"./{PureWindowsPath(os.path.abspath(os.path.expanduser(name))).name}" if is_local else name


def without_paths(value):
    """`value`, of lists, dictionaries and plain values, with each text that is an absolute path, or one from `~`, `.` or `..`, cut down as
    by `public_name`. A word such as "train" or "runs/rows" stays."""
    if isinstance(value, dict):
        return {key: without_paths(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [without_paths(entry) for entry in value]
    return public_name(value) if isinstance(value, str) and _is_path(value) else value


def _is_path(name: str) -> bool:
    return os.path.isabs(name) or PureWindowsPath(name).is_absolute() or name.startswith(("~", "./", "../")) or name in (".", "..")


def _public_content(path: Path) -> Path | bytes:
    """The file, or what it holds without paths of this machine."""
    if path.name not in _WITH_NAMES:
        return path
    values = json.loads(path.read_text(encoding="utf-8"))
    public = without_paths(values)
    if base := public.get("base_model_name_or_path"):
        public["base_model_name_or_path"] = public_name(base)
    return path if public == values else (json.dumps(public, indent=2, ensure_ascii=False) + "\n").encode()


def _without_local_bases(card: bytes) -> bytes:
    """A card without the lines of its metadata that name a local base model, as PEFT writes them; the Hub could not link to it."""
    head = re.match(rb"---\r?\n.*?\n---", card, re.DOTALL)
    if head is None:
        return card
    lines = head[0].decode().splitlines(keepends=True)
    bases = [re.fullmatch(r"(?:- )?base_model(?::\w+)*: *['\"]?(.+?)['\"]?\s*", line) for line in lines]
    kept = [line for line, base in zip(lines, bases) if base is None or not _is_path(base[1])]
    return "".join(kept).encode() + card[head.end() :]


def _belongs(name: str) -> bool:
    return name in _OTHERS or name in _CODE or _WEIGHTS.fullmatch(name) is not None


def _card(folder: Path, repo_id: str, token, tags: list[str], on_hub: bool) -> bytes | None:
    """The README.md to upload; None: the repository's own stays as it is."""
    if (folder / "README.md").exists():
        content = _without_local_bases((folder / "README.md").read_bytes())
    elif not on_hub:
        content = _plain_card(folder, repo_id).encode()
    elif not tags:
        return None
    else:
        content = str(ModelCard.load(repo_id, token=token)).encode()
    if not tags:
        return content
    card = ModelCard(content.decode())
    card.data.tags = list(dict.fromkeys([*(card.data.tags or []), *tags]))
    return str(card).encode()


def _plain_card(folder: Path, repo_id: str) -> str:
    """What the config alone can tell. hf_dspark.hub.write_draft_card writes a card of what is known about training and acceptance."""
    config = folder / "config.json"
    base = json.loads(config.read_text(encoding="utf-8")).get("base_model_name_or_path") if config.exists() else None
    relation = {"base_model": base, "base_model_relation": "adapter"} if is_hub_id(base) else {}
    metadata = ModelCardData(library_name="hf-dspark", pipeline_tag="text-generation", tags=TAGS, **relation)
    title = "DSpark draft" if config.exists() else "Adapter of a DSpark draft"
    lines = [
        f"---\n{metadata.to_yaml()}\n---\n# {title}" + (f" for {base}" if is_hub_id(base) else ""),
        "A draft for speculative decoding, used together with the model it was trained for. How it was trained and how much of what it drafts is "
        "accepted is not recorded here.",
    ]
    if config.exists():
        load = f'draft = DSparkDraftModel.from_pretrained("{repo_id}", dtype="auto")'
        lines.append(f"```python\nfrom hf_dspark import DSparkDraftModel\n\n{load}\ntarget.generate(**inputs, assistant_model=draft)\n```")
    return "\n\n".join(lines) + "\n"
