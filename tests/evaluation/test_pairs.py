"""Opening pairs, encoding prompts, reading prompt files."""

import json
import shutil
import warnings

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers.utils import logging

from evaluation.tiny_pair import HELD_OUT
from hf_dspark import DSparkDraftModel
from hf_dspark.evaluation.pairs import bundled_pair, encode, errors_named, held_out_texts, load_pair, read_prompts


@pytest.fixture(scope="module")
def pair(pair_folder):
    return load_pair(str(pair_folder / "draft"), device="cpu")


def test_the_target_is_the_one_the_draft_names(pair, pair_folder):
    assert pair.target_name == str(pair_folder / "target") and pair.draft.tables.target is pair.target
    assert not pair.target.training and not pair.draft.training
    assert "Qwen3ForCausalLM, float32, cpu" in pair.description and "(block 4)" in pair.description


def test_a_target_given_by_the_user_wins_and_dtype_is_of_both(pair_folder):
    pair = load_pair(str(pair_folder / "draft"), str(pair_folder / "target"), dtype="bfloat16", device="cpu")
    assert pair.target.dtype == pair.draft.dtype == torch.bfloat16


@torch.no_grad()
def test_an_adapter_is_merged_into_its_draft(pair_folder, tmp_path):
    adapted = get_peft_model(DSparkDraftModel.from_pretrained(pair_folder / "draft", dtype=torch.float32), LoraConfig(r=2, target_modules=["o_proj"]))
    adapted.base_model.model.layers[0].self_attn.o_proj.lora_B["default"].weight.normal_()
    adapted.save_pretrained(tmp_path / "adapter")
    names = str(tmp_path / "adapter"), str(pair_folder / "target")
    with pytest.raises(ValueError, match=rf"adapter that does not name the target .* fine-tune of {names[1]}, the one of its draft .*--target"):
        load_pair(names[0])
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)  # of PEFT's, which the user can do nothing about
        merged = load_pair(*names, device="cpu").draft
    assert type(merged) is DSparkDraftModel and merged.dtype == torch.float32
    expected = adapted.merge_and_unload().state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in merged.state_dict().items())
    assert load_pair(*names, dtype="bfloat16", device="cpu").draft.dtype == torch.bfloat16


def test_progress_bars_are_as_before(pair_folder):
    before = logging.is_progress_bar_enabled()
    load_pair(str(pair_folder / "draft"), device="cpu")
    assert logging.is_progress_bar_enabled() == before


def test_what_is_missing_is_named(pair_folder, tmp_path):
    with pytest.raises(ValueError, match="dtype must be one of auto, float32, bfloat16, float16, got 'int8'"):
        load_pair(dtype="int8")
    with pytest.raises(ValueError, match="a draft is needed for the target 'x'"):
        load_pair(target="x")
    with pytest.raises(FileNotFoundError, match=r"--draft .*nowhere: there is no such folder"):
        load_pair(str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match="the device 'cuda:99' can't be used here"):
        load_pair(str(pair_folder / "draft"), device="cuda:99")
    folder = tmp_path / "draft"
    folder.mkdir()
    for file in (pair_folder / "draft").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    del config["base_model_name_or_path"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"does not name the target .*base_model_name_or_path.*--target"):
        load_pair(str(folder))


def copy_with(folder, into, file: str, **changes) -> str:
    """A copy of the folder, with `changes` to its JSON `file`."""
    shutil.copytree(folder, into)
    values = json.loads((into / file).read_text())
    (into / file).write_text(json.dumps({**values, **changes}))
    return str(into)


def test_a_model_that_is_not_there_is_named_with_what_asked_for_it(pair_folder, tmp_path, monkeypatch):
    """Names that could be of the Hub, which is not reached; drafts and adapters keep relative paths."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"^--draft: 'out/draft' is no folder here, and the Hub does not give it \("):
        load_pair("out/draft", device="cpu")
    with pytest.raises(FileNotFoundError, match=r"^--target: 'out/target' is no folder here"):
        load_pair(str(pair_folder / "draft"), "out/target", device="cpu")
    moved = copy_with(pair_folder / "draft", tmp_path / "moved", "config.json", base_model_name_or_path="trained/target")
    with pytest.raises(FileNotFoundError, match=rf"^the target that {moved} names \(.*--target replaces it\): 'trained/target' is no folder here"):
        load_pair(moved, device="cpu")
    get_peft_model(DSparkDraftModel.from_pretrained(pair_folder / "draft"), LoraConfig(r=2, target_modules=["o_proj"])).save_pretrained("first")
    adapter = copy_with(tmp_path / "first", tmp_path / "adapter", "adapter_config.json", base_model_name_or_path="out/draft")
    with pytest.raises(FileNotFoundError, match=rf"^the draft that the adapter {adapter} was trained over \(.*\): 'out/draft' is no folder here"):
        load_pair(adapter, str(pair_folder / "target"), device="cpu")


def test_a_folder_that_lacks_something_is_not_said_to_be_missing(tmp_path):
    with pytest.raises(OSError, match=r"^no file model\.safetensors$"), errors_named("--target", str(tmp_path)):
        raise OSError("no file model.safetensors")


def test_the_bundled_pair_is_missed_clearly(tmp_path, monkeypatch):
    assert bundled_pair().name == "pair"
    monkeypatch.setattr("hf_dspark.evaluation.pairs.bundled_pair", lambda: tmp_path)
    with pytest.raises(ValueError, match="the bundled pair is missing from"):
        load_pair()


def test_prompts_go_through_the_chat_template_unless_raw(pair, monkeypatch):
    plain = encode(pair, "def f():")
    assert plain.shape[0] == 1 and pair.tokenizer.decode(plain[0], skip_special_tokens=True) == "def f():"
    monkeypatch.setattr(
        pair.tokenizer, "chat_template", "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}!{% endif %}"
    )
    assert pair.tokenizer.decode(encode(pair, "def f():")[0]) == "<user>def f():!"
    assert encode(pair, "def f():", raw=True).tolist() == plain.tolist()


def test_empty_and_overlong_prompts_are_refused(pair):
    with pytest.raises(ValueError, match="the prompt is empty"):
        encode(pair, "")
    with pytest.raises(ValueError, match=r"the prompt has \d+ tokens, but the context of .* ends at 1024"):
        encode(pair, "x = 1\n" * 1000)


def test_prompt_files_hold_turns_or_a_prompt(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"turns": ["first", "second"]}\n\n{"prompt": "third"}\n')
    assert read_prompts(str(file)) == ["first", "third"]


@pytest.mark.parametrize("line", ["no json", '{"text": "x"}', '{"turns": []}', '["x"]', '{"prompt": 3}', "3"])
def test_a_bad_line_is_named(tmp_path, line):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "x"}\n' + line + "\n")
    with pytest.raises(ValueError, match="line 2"):
        read_prompts(str(file))


def test_a_file_without_prompts_is_refused(tmp_path):
    (tmp_path / "prompts.jsonl").write_text("\n")
    with pytest.raises(ValueError, match="holds no prompt"):
        read_prompts(str(tmp_path / "prompts.jsonl"))


def test_held_out_modules_are_those_training_left_out(pair_folder):
    texts = held_out_texts(str(pair_folder / "target"), 3)
    assert len(texts) == 3 and "bisect" in texts[0] and "heap" in texts[1]
    with pytest.raises(ValueError, match=f"must lie between 1 and {len(HELD_OUT)}, got 9"):
        held_out_texts(str(pair_folder / "target"), 9)
