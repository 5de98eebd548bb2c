"""Uploading: which files, whose README.md, which options; with huggingface_hub's client replaced by a Hub in memory."""

import json

import pytest
import torch
from checkpoint_files import TABLES, assert_same_draft
from fake_hub import FakeHub
from huggingface_hub import ModelCard
from oracle import tiny_draft
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file

from hf_dspark import DSparkDraftModel
from hf_dspark.modeling.uploading import is_hub_id, public_name, upload_draft, without_paths

SLIM = {"config.json", "generation_config.json", "model.safetensors"}
MINE = "---\nlicense: mit # mine\ntags: [law]\n---\nMy own words.\r\n"


@pytest.fixture
def hub(monkeypatch):
    return FakeHub().install(monkeypatch)


def downloaded(hub, repo_id, folder):
    folder.mkdir()
    for name, content in hub.files[repo_id].items():
        (folder / name).write_bytes(content)
    return DSparkDraftModel.from_pretrained(folder)


@pytest.mark.parametrize("how", ["push_to_hub", "save_pretrained"])
def test_pushing_uploads_the_slim_layout_in_one_commit(target, how, tmp_path, hub):
    draft = tiny_draft(target).bind(target)
    draft.generation_config.num_assistant_tokens = 2
    options = dict(private=True, token="secret", commit_message="first", commit_description="of many")
    if how == "push_to_hub":
        assert draft.push_to_hub("me/my-draft", **options) == "commit 1"
    else:
        draft.save_pretrained(tmp_path / "local", push_to_hub=True, repo_id="me/my-draft", **options)
    assert hub.calls == [("create_repo", {"private": True, "token": "secret"})] and hub.private == {"me/my-draft": True}
    [(repo_id, used, added, deleted)] = hub.commits
    assert (repo_id, added, deleted) == ("me/my-draft", SLIM | {"README.md"}, set())
    assert (used["commit_message"], used["commit_description"], used["token"]) == ("first", "of many", "secret")
    assert_same_draft(downloaded(hub, repo_id, tmp_path / "downloaded"), draft)
    assert not TABLES & set(load_file(tmp_path / "downloaded" / "model.safetensors"))


def test_pushing_while_saving_names_the_repository_after_the_folder(target, tmp_path, hub):
    tiny_draft(target).save_pretrained(str(tmp_path / "my-draft") + "/", push_to_hub=True)
    assert hub.commits[0][0] == "me/my-draft" and hub.private == {"me/my-draft": False}
    with pytest.raises(ValueError, match=r"push_to_hub=True uploads the slim layout, got slim=False"):
        tiny_draft(target).bind(target).save_pretrained(tmp_path / "full", slim=False, push_to_hub=True)


def test_nothing_is_uploaded_unless_asked_for(target, tmp_path, hub):
    tiny_draft(target).save_pretrained(tmp_path / "a", repo_id="me/a", private=False)
    tiny_draft(target).save_pretrained(tmp_path / "b", push_to_hub=True, is_main_process=False)  # another process does
    # A commit in the background would look for files that are gone by then.
    for options in (dict(privat=True), dict(run_as_future=True)):
        with pytest.raises(TypeError, match=f"push_to_hub takes no {next(iter(options))}"):
            tiny_draft(target).push_to_hub("me/c", **options)
    assert hub.calls == [] and hub.commits == []


def test_the_readme_beside_the_draft_goes_with_it_as_it_is(folder, tmp_path, hub):
    (folder / "README.md").write_bytes(MINE.encode())
    (folder / "training_args.json").write_text("{}")
    for foreign in ("notes.txt", "training_args.bin", "optimizer.pt", "distillation.json", "model_backup.safetensors"):
        (folder / foreign).write_text("mine alone")
    (folder / "checkpoint-10").mkdir()
    draft = DSparkDraftModel.from_pretrained(folder)
    draft.push_to_hub("me/loaded")
    draft.save_pretrained(folder, push_to_hub=True, repo_id="me/saved")
    for repo_id, _, added, _ in hub.commits:
        assert added == SLIM | {"README.md", "training_args.json"}, repo_id
        assert hub.files[repo_id]["README.md"] == MINE.encode()
    # A card describes what lies beside it: a draft that has since been saved elsewhere is another one.
    draft.save_pretrained(tmp_path / "elsewhere")
    draft.push_to_hub("me/elsewhere")
    assert hub.commits[-1][2] == SLIM | {"README.md"} and "My own words" not in hub.readme("me/elsewhere")


def test_a_draft_without_a_card_gets_a_few_lines_and_never_the_template_of_transformers(target, hub):
    draft = tiny_draft(target, base_model_name_or_path="Qwen/Qwen3-4B")
    draft.push_to_hub("me/draft")
    card = ModelCard(hub.readme("me/draft"))
    assert card.data.library_name == "hf-dspark" and card.data.base_model == "Qwen/Qwen3-4B" and card.data.pipeline_tag == "text-generation"
    assert 'DSparkDraftModel.from_pretrained("me/draft"' in card.text and "automatically generated" not in card.text
    # A folder here is nothing that the Hub could link to.
    draft.config.base_model_name_or_path = "/somewhere/here"
    draft.push_to_hub("me/local")
    assert "base_model" not in hub.readme("me/local") and "somewhere" not in hub.readme("me/local")


def test_two_pushes_in_a_row(target, hub, tmp_path):
    """The second one leaves what was written on the Hub in between alone, and no weights that would be read in place of its own."""
    first, second = tiny_draft(target, seed=1), tiny_draft(target, seed=2)
    first.push_to_hub("me/draft", max_shard_size=2000)
    stale = {name for name in hub.files["me/draft"] if name.startswith("model")}
    assert "model.safetensors.index.json" in stale and len(stale) > 2 and "model.safetensors" not in stale
    hub.files["me/draft"] |= {"README.md": MINE.encode(), "results.csv": b"", "model_backup.safetensors": b""}
    second.push_to_hub("me/draft")
    _, _, added, deleted = hub.commits[1]
    assert (added, deleted) == (SLIM, stale) and hub.files["me/draft"]["README.md"] == MINE.encode()
    assert set(hub.files["me/draft"]) == SLIM | {".gitattributes", "README.md", "results.csv", "model_backup.safetensors"}
    assert_same_draft(downloaded(hub, "me/draft", tmp_path / "second"), second)
    first.push_to_hub("me/draft", max_shard_size=2000)
    assert hub.commits[2][3] == {"model.safetensors"}
    assert_same_draft(downloaded(hub, "me/draft", tmp_path / "first"), first)


def test_private_is_not_taken_for_granted_where_the_repository_is_public(target, hub):
    draft = tiny_draft(target)
    draft.push_to_hub("me/draft")
    with pytest.raises(ValueError, match=r"private=True, but me/draft exists already and is public"):
        draft.push_to_hub("me/draft", private=True)
    assert len(hub.commits) == 1
    hub.private["me/draft"] = True
    draft.push_to_hub("me/draft", private=True)
    assert len(hub.commits) == 2


def test_branches_and_pull_requests(target, hub):
    draft = tiny_draft(target)
    draft.push_to_hub("me/draft", revision="v2")
    draft.push_to_hub("me/draft", revision="refs/pr/1")
    draft.push_to_hub("me/draft", create_pr=True)
    assert [call for call in hub.calls if call[0] == "create_branch"] == [("create_branch", {"branch": "v2", "exist_ok": True})]
    assert [(options["revision"], options["create_pr"]) for _, options, *_ in hub.commits] == [("v2", False), ("refs/pr/1", False), (None, True)]


@pytest.mark.parametrize("where", ["folder", "hub", "nowhere"])
def test_tags_are_added_to_the_card(where, folder, hub):
    draft = DSparkDraftModel.from_pretrained(folder)
    draft.add_model_tags("german")
    if where == "folder":
        (folder / "README.md").write_bytes(MINE.encode())
    elif where == "hub":
        hub.create_repo("me/draft")
        hub.files["me/draft"]["README.md"] = MINE.encode()
    draft.push_to_hub("me/draft", tags=["law", "fast"])
    card = ModelCard(hub.readme("me/draft"))
    own = ["dspark", "speculative-decoding"] if where == "nowhere" else ["law"]
    assert card.data.tags == list(dict.fromkeys([*own, "german", "law", "fast"]))
    assert where == "nowhere" or (card.data.license == "mit" and "My own words." in card.text)


def test_code_that_transformers_saved_beside_the_draft_travels(folder, hub):
    for name in ("modeling_dspark.py", "uploading.py", "setup.py"):
        (folder / name).write_text("")
    upload_draft(folder, "me/draft")
    assert hub.commits[0][2] == SLIM | {"README.md", "modeling_dspark.py", "uploading.py"}


def test_a_folder_without_a_draft_is_refused(tmp_path, hub):
    (tmp_path / "README.md").write_text("x")
    with pytest.raises(ValueError, match="holds neither the weights of a draft nor those of an adapter"):
        upload_draft(tmp_path, "me/draft")
    assert hub.calls == []


def test_adapters_are_merged_or_uploaded_by_their_folder(target, tmp_path, hub):
    adapted = get_peft_model(tiny_draft(target), LoraConfig(r=2, target_modules=["q_proj"]))
    with pytest.raises(ValueError, match=r"under a PEFT adapter.*merge_and_unload.*upload_draft"):
        adapted.get_base_model().push_to_hub("me/base")
    assert hub.calls == []
    adapted.save_pretrained(tmp_path / "adapter")
    hub.create_repo("me/adapter")
    hub.files["me/adapter"]["model.safetensors"] = b"of someone's draft"
    upload_draft(tmp_path / "adapter", "me/adapter")
    assert hub.commits[0][2:] == ({"README.md", "adapter_config.json", "adapter_model.safetensors"}, set())
    merged = adapted.merge_and_unload()
    merged.push_to_hub("me/merged")
    assert hub.commits[1][2] == SLIM | {"README.md"}
    assert torch.equal(downloaded(hub, "me/merged", tmp_path / "merged").fc.weight, merged.fc.weight)


def test_names_that_the_hub_can_have(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "target").mkdir(parents=True)
    assert is_hub_id("Qwen/Qwen3-4B") and is_hub_id("gpt2")
    assert not any(map(is_hub_id, ["runs/target", "/models/qwen", "./qwen", "a/b/c", "", None]))


@pytest.mark.parametrize(
    ("name", "public"),
    [
        ("Qwen/Qwen3-4B", "Qwen/Qwen3-4B"),
        ("gpt2", "gpt2"),
        ("/home/me/models/target", "./target"),
        ("/home/me/models/target/", "./target"),
        ("~/target", "./target"),
        ("./target", "./target"),
        ("../models/target", "./target"),
        ("C:\\Users\\me\\target", "./target"),
        ("\\\\server\\share\\target", "./target"),
        ("here/target", "./target"),  # exists
        ("not/here", "not/here"),
    ],
)
def test_local_names_are_published_without_their_path(name, public, tmp_path, monkeypatch):
    (tmp_path / "here" / "target").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert public_name(name) == public == public_name(public)


def test_paths_are_cut_wherever_they_stand():
    values = {
        "output_dir": "/home/me/out",
        "extra_rows": ["~/a.jsonl", "runs/b.jsonl"],
        "deeper": {"path": ("../c", 1, None)},
        "seed": 3,
        "bf16": True,
    }
    expected = {"output_dir": "./out", "extra_rows": ["./a.jsonl", "runs/b.jsonl"], "deeper": {"path": ["./c", 1, None]}, "seed": 3, "bf16": True}
    assert without_paths(values) == expected == without_paths(expected)


def test_no_path_of_this_machine_is_uploaded(target, tmp_path, hub):
    """In configs, adapters' configs, training arguments, by whichever door; the files here keep theirs."""
    here = tmp_path / "home" / "me"
    draft = tiny_draft(target, base_model_name_or_path=str(here / "my-target"))
    draft.config.training_data = {"sources": [{"dataset": str(here / "rows.jsonl")}]}
    draft.save_pretrained(here / "draft")
    (here / "draft" / "training_args.json").write_text(json.dumps({"target": str(here / "my-target"), "output_dir": str(here / "draft"), "seed": 3}))
    kept = (here / "draft" / "config.json").read_bytes()
    adapted = get_peft_model(DSparkDraftModel.from_pretrained(here / "draft"), LoraConfig(r=2, target_modules=["q_proj"]))
    adapted.save_pretrained(here / "adapter")
    upload_draft(here / "draft", "me/folder")
    draft.push_to_hub("me/pushed")
    upload_draft(here / "adapter", "me/adapter")
    assert len(hub.commits) == 3 and (here / "draft" / "config.json").read_bytes() == kept
    for files in hub.files.values():
        for name, content in files.items():
            assert str(tmp_path).encode() not in content, name
    for repo_id in ("me/folder", "me/pushed"):
        config = json.loads(hub.files[repo_id]["config.json"])
        assert config["base_model_name_or_path"] == "./my-target" and config["training_data"]["sources"][0]["dataset"] == "./rows.jsonl"
        assert "base_model:" not in hub.readme(repo_id)
    assert json.loads(hub.files["me/folder"]["training_args.json"]) == {"target": "./my-target", "output_dir": "./draft", "seed": 3}
    assert json.loads(hub.files["me/adapter"]["adapter_config.json"])["base_model_name_or_path"] == "./draft"
    assert ModelCard(hub.readme("me/adapter")).data.library_name == "peft"  # PEFT's own card, but for the path
    loaded = downloaded(hub, "me/folder", tmp_path / "downloaded").state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in draft.state_dict().items())
