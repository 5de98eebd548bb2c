"""A Hub in memory behind huggingface_hub's client, and every call made to it."""

from pathlib import Path

import huggingface_hub
from huggingface_hub import CommitOperationAdd, HfApi, ModelCard


class FakeHub:
    """`files[repo_id]`: contents by name. `calls`: (method, options). `commits`: (repo_id, options, added names, deleted names)."""

    def __init__(self):
        self.files: dict[str, dict[str, bytes]] = {}
        self.private: dict[str, bool] = {}
        self.calls, self.commits = [], []

    def install(self, monkeypatch) -> "FakeHub":
        for name in ("create_repo", "model_info", "create_branch", "list_repo_files", "create_commit"):
            method = getattr(self, name)
            monkeypatch.setattr(HfApi, name, lambda _, *args, method=method, **options: method(*args, **options))
        for name in ("upload_folder", "upload_file"):
            monkeypatch.setattr(HfApi, name, self._unexpected)
        monkeypatch.setattr(ModelCard, "load", classmethod(self._load_card(ModelCard.load)))
        return self

    def create_repo(self, repo_id, private=None, token=None, exist_ok=False):
        self.calls.append(("create_repo", {"private": private, "token": token}))
        repo_id = repo_id if "/" in repo_id else f"me/{repo_id}"
        assert exist_ok or repo_id not in self.files
        if repo_id not in self.files:
            self.files[repo_id], self.private[repo_id] = {".gitattributes": b""}, bool(private)
        return huggingface_hub.RepoUrl(f"https://huggingface.co/{repo_id}")

    def model_info(self, repo_id, token=None):
        return huggingface_hub.hf_api.ModelInfo(id=repo_id, private=self.private[repo_id])

    def create_branch(self, repo_id, *, branch, token=None, exist_ok=False):
        self.calls.append(("create_branch", {"branch": branch, "exist_ok": exist_ok}))

    def list_repo_files(self, repo_id, revision=None, token=None):
        return list(self.files[repo_id])

    def create_commit(self, repo_id, operations, **options):
        added, deleted = [], []
        for operation in operations:
            name = operation.path_in_repo
            if isinstance(operation, CommitOperationAdd):
                source = operation.path_or_fileobj
                self.files[repo_id][name] = source if isinstance(source, bytes) else Path(source).read_bytes()
                added.append(name)
            else:
                del self.files[repo_id][name]
                deleted.append(name)
        self.commits.append((repo_id, options, set(added), set(deleted)))
        return f"commit {len(self.commits)}"

    def readme(self, repo_id: str) -> str:
        return self.files[repo_id]["README.md"].decode()

    def _load_card(self, original):
        def load(cls, name, **options):
            return ModelCard(self.readme(name)) if name in self.files else original(name, **options)

        return load

    def _unexpected(self, *args, **options):
        raise AssertionError("a folder is uploaded as it lies, not by its list of files")
