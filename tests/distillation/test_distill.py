"""From a folder with a target to a folder with its draft."""

import json
import re

import pytest
import torch
from fake_hub import FakeHub
from oracle import build, tiny_draft, tiny_target
from transformers import (
    AutoConfig,
    CohereConfig,
    CohereForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GemmaConfig,
    GemmaForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    set_seed,
)

from hf_dspark import DSparkDraftModel, record_generation
from hf_dspark.distillation.arguments import DistillationArguments
from hf_dspark.distillation.corpus import train_tokenizer
from hf_dspark.distillation.distill import copy_last_layers, distill, draft_config

TEXTS = [f"def add{i}(a, b):\n    return a + b + {i}\n" for i in range(30)]
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a target, its tokenizer and a text file."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    tokenizer = train_tokenizer(TEXTS, vocab_size=280)
    tokenizer.save_pretrained(tmp_path / "target")
    tiny_target(vocab_size=280, initializer_range=0.1, **SPECIAL).to(torch.bfloat16).save_pretrained(tmp_path / "target")
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return tmp_path


def arguments(folder, **options) -> DistillationArguments:
    values = {"target": str(folder / "target"), "dataset": str(folder / "texts.jsonl"), "output_dir": str(folder / "draft"), "num_held_out": 4}
    values |= {"max_length": 32, "block_size": 4, "num_draft_layers": 1, "markov_rank": 8, "num_anchors": 8, "max_steps": 3, "num_key_value_heads": 1}
    values |= {
        "per_device_train_batch_size": 4,
        "use_cpu": True,
        "save_strategy": "no",
        "disable_tqdm": True,
        "eval_prompts": 0,
        "logging_steps": 1,
        "learning_rate": 1e-3,
    }
    return DistillationArguments(**{**values, **options})


def generates_as_plain(folder, draft) -> None:
    target = tiny_target(vocab_size=280, **SPECIAL).from_pretrained(folder / "target", dtype=torch.float32)
    ids = torch.tensor([[1, 40, 50]])
    with record_generation() as report:
        drafted = target.generate(ids, assistant_model=draft.float(), max_new_tokens=12, do_sample=False)
    assert torch.equal(drafted, target.generate(ids, max_new_tokens=12, do_sample=False))
    assert report.requests[0].draft_failure is None


def test_the_written_draft_is_slim_names_its_target_and_decodes(folder):
    output = distill(arguments(folder))
    assert output == folder / "draft"
    draft = DSparkDraftModel.from_pretrained(output)
    assert draft.dtype == torch.bfloat16 and not draft.stored_tables
    config = draft.config
    assert config.base_model_name_or_path == str(folder / "target")
    assert (config.vocab_size, config.hidden_size, config.num_target_layers, config.mask_token_id) == (280, 32, 4, 3)
    assert (config.eos_token_id, config.bos_token_id, config.pad_token_id) == (2, 1, 0)
    assert (config.intermediate_size, config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (48, 4, 1, 8)
    report = json.loads((output / "distillation.json").read_text())
    assert report["steps"] == 3 and report["num_train_rows"] >= 26 and 1 <= report["eval_tau"] <= 5
    generates_as_plain(folder, draft)


def test_a_card_is_written_and_nothing_is_uploaded_unasked(folder, monkeypatch):
    hub = FakeHub().install(monkeypatch)
    readme = (distill(arguments(folder)) / "README.md").read_text()
    assert "dspark" in readme and not hub.calls and not hub.commits


def test_the_finished_draft_is_uploaded_once_when_asked(folder, monkeypatch):
    hub = FakeHub().install(monkeypatch)
    output = distill(arguments(folder, push_to_hub=True, hub_model_id="me/draft", hub_private_repo=True, save_strategy="steps", save_steps=1))
    ((repo_id, _, added, _),) = hub.commits
    assert repo_id == "me/draft" and hub.private[repo_id]
    assert added == {"README.md", "config.json", "generation_config.json", "model.safetensors", "training_args.json"}
    assert hub.readme(repo_id) == (output / "README.md").read_text()
    with pytest.raises(ValueError, match="hub_strategy must be 'end', got 'every_save'"):
        arguments(folder, push_to_hub=True, hub_strategy="every_save")


def test_a_stream_of_rows_trains_a_draft(folder):
    assert DSparkDraftModel.from_pretrained(distill(arguments(folder, streaming=True))).config.block_size == 4


def test_the_same_arguments_write_the_same_draft(folder):
    for name in ("one", "two"):
        set_seed(len(name + "x" * (name == "two")))
        distill(arguments(folder, output_dir=str(folder / name)))
    files = [(folder / name / "model.safetensors").read_bytes() for name in ("one", "two")]
    assert files[0] == files[1]


def test_training_goes_on_from_a_draft_at_hand(folder):
    first = distill(arguments(folder, save_dtype="float32", output_dir=str(folder / "first")))
    second = distill(arguments(folder, save_dtype="float32", init_draft=str(first), max_steps=1, learning_rate=1e-9, markov_rank=4))
    before, after = DSparkDraftModel.from_pretrained(first), DSparkDraftModel.from_pretrained(second)
    assert after.dtype == torch.float32
    for name, parameter in after.named_parameters():
        torch.testing.assert_close(parameter, dict(before.named_parameters())[name], rtol=0, atol=1e-7)
    with pytest.raises(ValueError, match="max_length=5 is too short for the block_size 4"):
        distill(arguments(folder, init_draft=str(first), max_length=5, block_size=3))


def test_a_draft_that_goes_to_another_target_names_that_ones_revision(folder):
    first = distill(arguments(folder, output_dir=str(folder / "first")))
    config = json.loads((first / "config.json").read_text())
    (first / "config.json").write_text(json.dumps({**config, "base_model_name_or_path": "org/old", "base_model_revision": "c0ffee"}))
    config = DSparkDraftModel.from_pretrained(distill(arguments(folder, init_draft=str(first)))).config
    assert (config.base_model_name_or_path, config.base_model_revision) == (str(folder / "target"), None)


def test_the_folders_of_other_models_and_earlier_trainings_are_left_as_they_are(folder):
    before = {file.name: file.read_bytes() for file in (folder / "target").iterdir()}
    with pytest.raises(ValueError, match="is the folder of target="):
        distill(arguments(folder, output_dir=str(folder / "target")))
    assert {file.name: file.read_bytes() for file in (folder / "target").iterdir()} == before
    options = dict(save_strategy="steps", save_steps=3)
    output = distill(arguments(folder, **options))
    draft = (output / "model.safetensors").read_bytes()
    with pytest.raises(ValueError, match=r"holds checkpoints of an earlier training .checkpoint-3."):
        distill(arguments(folder, **options, seed=1))
    # It is finished: nothing is left to train, and the same draft is written again.
    distill(arguments(folder, **options, resume_from_checkpoint="true"))
    assert (output / "model.safetensors").read_bytes() == draft and json.loads((output / "distillation.json").read_text())["steps"] == 3


BEFORE_DATA = [
    ({"output_dir": "target"}, "is the folder of target="),
    ({"resume_from_checkpoint": "true"}, "finds no whole checkpoint"),
    ({"eval_strategy": "steps", "num_held_out": 0}, "eval_strategy='steps' needs rows"),
    ({"max_length": 1025}, "max_length=1025 is beyond the context"),
    ({"eval_prompts": 1, "eval_new_tokens": 1024}, "eval_new_tokens=1024 leave no room"),
    ({"mask_token_id": 280}, "mask_token_id 280 lies outside"),
    ({"target_layer_ids": [3]}, "target_layer_ids .3. name the target's last layer"),
    ({"markov_head_type": "tree"}, "markov_head_type must be one of"),
    ({"num_key_value_heads": 3}, "num_attention_heads=4 must be a multiple of num_key_value_heads=3"),
    ({"init_draft": "nothing"}, "init_draft: '.*nothing' is no folder here"),
    ({"init_draft": "other"}, "num_target_layers is 6, the target has 4"),
    ({"init_draft": "mixed"}, "init_draft='.*mixed' holds a draft and an adapter"),
    ({"init_draft": "fitting", "lora_rank": 2, "lora_target_modules": ["q_proj", "nothing"]}, "nothing not found in the draft"),
    ({"resume_from_checkpoint": "fitting"}, "num_draft_layers 2 there, 1 now"),
    ({"features": "cached", "features_dir": "written"}, "features_dir='.*written' holds features of another run: .*max_length is 8 there, 32 here"),
]


@pytest.mark.parametrize(("options", "message"), BEFORE_DATA, ids=lambda value: value if isinstance(value, str) else "")
def test_what_cant_work_is_refused_before_the_data_are_read(folder, monkeypatch, options, message):
    for name, num_layers in (("fitting", 4), ("mixed", 4), ("other", 6)):
        tiny_draft(tiny_target(vocab_size=280, num_hidden_layers=num_layers, **SPECIAL), mask_token_id=3, **SPECIAL).save_pretrained(folder / name)
    (folder / "mixed" / "adapter_config.json").write_text("{}")
    (folder / "fitting" / "trainer_state.json").write_text('{"global_step": 1}')
    (folder / "written").mkdir()
    (folder / "written" / "index.json").write_text('{"fingerprint": {"max_length": 8}}')
    monkeypatch.setattr("hf_dspark.distillation.distill.load_rows", None)
    paths = {name: str(folder / value) for name, value in options.items() if value in ("target", "nothing", "other", "mixed", "fitting", "written")}
    with pytest.raises((ValueError, OSError), match=message):
        distill(arguments(folder, **{**options, **paths}))


def test_a_mask_token_that_occurs_in_the_text_is_warned_of_once(folder, caplog):
    tokenizer = train_tokenizer(TEXTS, vocab_size=280)
    token = tokenizer(" return")["input_ids"][0]
    num_found = tokenizer(TEXTS[0])["input_ids"].count(token)
    distill(arguments(folder, max_steps=1, mask_token_id=token))
    [message] = [message for message in caplog.messages if "mask_token_id" in message]
    # 4 of the 30 texts are held out.
    assert num_found and message.startswith(f"mask_token_id={token} occurs {26 * num_found} times among the ")


def test_prompts_without_room_are_refused_before_the_first_step(folder, monkeypatch):
    monkeypatch.setattr("hf_dspark.distillation.distill.DSparkTrainer", None)
    with pytest.raises(ValueError, match="eval_new_tokens=1020 leave no room for a prompt in the target's context of 1024 tokens"):
        distill(arguments(folder, eval_prompts=2, eval_new_tokens=1020))


@pytest.mark.parametrize("held_out", [0, 4])
def test_a_draft_that_diverged_is_not_written_over_the_one_before(folder, held_out):
    output = distill(arguments(folder))
    before = {file.name: file.read_bytes() for file in output.iterdir() if file.is_file()}
    with pytest.raises(ValueError, match=r"diverged at step 3: .*; lower learning_rate"):
        distill(arguments(folder, learning_rate=1e30, lr_scheduler_type="constant", warmup_steps=0, logging_steps=100, num_held_out=held_out))
    assert {file.name: file.read_bytes() for file in output.iterdir() if file.is_file()} == before


def test_weights_beyond_the_type_they_are_saved_in_are_refused(folder):
    first = distill(arguments(folder, output_dir=str(folder / "first"), save_dtype="float32"))
    draft = DSparkDraftModel.from_pretrained(first)
    draft.fc.weight.data[0, 0] = 1e6
    draft.save_pretrained(first)
    options = dict(init_draft=str(first), max_steps=1, learning_rate=1e-9)
    with pytest.raises(ValueError, match=r"save_dtype='float16' can't hold 1 of the draft's weights; save it as bfloat16 or float32"):
        distill(arguments(folder, **options, save_dtype="float16"))
    distill(arguments(folder, **options))


def test_a_reduced_vocabulary_holds_the_most_frequent_tokens_and_starts_from_the_targets_head(folder):
    output = distill(arguments(folder, draft_vocab_size=20, save_dtype="float32", max_steps=1, learning_rate=1e-9))
    draft = DSparkDraftModel.from_pretrained(output)
    kept = draft.target_ids(torch.arange(20))
    target = tiny_target(vocab_size=280, **SPECIAL).from_pretrained(folder / "target", dtype=torch.float32)
    torch.testing.assert_close(draft.lm_head.weight, target.lm_head.weight[kept], rtol=0, atol=1e-6)
    tokenizer = train_tokenizer(TEXTS, vocab_size=280)
    # Every text has its bos, eos, "def" and "return"; the mask token never occurs.
    assert {1, 2, *tokenizer(" return")["input_ids"]} <= set(kept.tolist()) and 3 not in kept and kept.tolist() == sorted(kept.tolist())
    generates_as_plain(folder, draft)


def test_a_tokenizer_without_a_mask_token_is_named(folder):
    tokenizer = train_tokenizer(TEXTS, vocab_size=280)
    tokenizer.mask_token = None
    target = tiny_target(vocab_size=280, **SPECIAL)
    with pytest.raises(ValueError, match="has no mask token; set mask_token_id to a row of its embedding"):
        draft_config(target, tokenizer, arguments(folder))
    assert draft_config(target, tokenizer, arguments(folder, mask_token_id=9)).mask_token_id == 9
    with pytest.raises(ValueError, match="mask_token_id 2 is also a stop or pad token"):
        draft_config(target, tokenizer, arguments(folder, mask_token_id=2))


def test_a_target_that_does_not_exist_keeps_transformers_error(folder):
    with pytest.raises(OSError):
        distill(arguments(folder, target=str(folder / "nothing")))


SIZES = dict(vocab_size=280, hidden_size=32, intermediate_size=48, num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=2, head_dim=8)
GEMMA_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
FAMILIES = {
    "llama": (lambda: build(LlamaForCausalLM, LlamaConfig(**SIZES, rope_parameters={"rope_type": "default", "rope_theta": 5e5})), ("default", 5e5)),
    "gemma3": (lambda: build(Gemma3ForCausalLM, Gemma3TextConfig(**SIZES, rope_parameters=GEMMA_ROPE)), ("linear", 1e6)),
    "gpt2": (lambda: build(GPT2LMHeadModel, GPT2Config(vocab_size=280, n_embd=32, n_layer=6, n_head=4, **SPECIAL)), ("default", 1e4)),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_the_config_fits_targets_of_other_families(folder, name):
    make, (rope_type, rope_theta) = FAMILIES[name]
    target = make()
    tokenizer = train_tokenizer(TEXTS, vocab_size=280)
    config = draft_config(target, tokenizer, arguments(folder))
    assert (config.rope_parameters["rope_type"], config.rope_parameters["rope_theta"]) == (rope_type, rope_theta)
    assert config.head_dim == 8 and config.num_target_layers == 6
    draft = DSparkDraftModel(config).bind(target)
    draft.save_pretrained(folder / "written")
    assert AutoConfig.from_pretrained(folder / "written").rope_parameters["rope_theta"] == rope_theta


GEMMA_SIZES = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=8)


def of_the_targets_shape(target, **options):
    return tiny_draft(target, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2, **options)


def test_a_warm_start_copies_the_last_layers_and_the_last_feature():
    target = tiny_target()
    draft = of_the_targets_shape(target)
    fresh = draft.fc.weight.detach().clone()
    copied = copy_last_layers(draft, target)
    assert {name for name in draft.state_dict() if name.startswith("layers.")} | {"norm.weight", "hidden_norm.weight"} == set(copied)
    # The target has 4 layers, the draft 2.
    for mine, theirs in zip(draft.layers, target.model.layers[2:]):
        assert torch.equal(mine.self_attn.k_proj.weight, theirs.self_attn.k_proj.weight)
        assert torch.equal(mine.mlp.down_proj.weight, theirs.mlp.down_proj.weight)
    torch.testing.assert_close(draft.fc.weight - fresh, torch.cat([torch.zeros(32, 32), torch.eye(32)], dim=1))
    # Over the context the first layer sees what the target's own layer sees.
    hidden = torch.randn(1, 3, 32)
    with torch.no_grad():
        draft.fc.weight.copy_(torch.cat([torch.zeros(32, 32), torch.eye(32)], dim=1))
        keys = draft.layers[0].self_attn.k_proj(draft.context_features([torch.randn(1, 3, 32), hidden]))
        expected = target.model.layers[2].self_attn.k_proj(target.model.layers[2].input_layernorm(hidden))
    torch.testing.assert_close(keys, expected, atol=1e-4, rtol=1e-4)


def test_a_warm_start_reads_norms_by_what_they_do():
    # Gemma keeps a norm's weights less one.
    target = build(GemmaForCausalLM, GemmaConfig(**GEMMA_SIZES))
    torch.nn.init.normal_(target.model.norm.weight)
    draft = of_the_targets_shape(target)
    copy_last_layers(draft, target)
    torch.testing.assert_close(draft.norm.weight, 1 + target.model.norm.weight)


@pytest.mark.parametrize(
    ("model", "config", "reason"),
    [
        # Gemma 3's post_attention_layernorm stands behind the attention, a draft's before the feed-forward.
        (Gemma3ForCausalLM, Gemma3TextConfig, "post_feedforward_layernorm.weight, pre_feedforward_layernorm.weight"),
        (CohereForCausalLM, CohereConfig, "no post_attention_layernorm"),
        (Phi3ForCausalLM, Phi3Config, "no self_attn.q_proj, self_attn.k_proj, self_attn.v_proj"),
    ],
)
def test_a_warm_start_from_layers_of_another_kind_is_refused(model, config, reason):
    sizes = {name: value for name, value in GEMMA_SIZES.items() if name != "head_dim" or model is Gemma3ForCausalLM}
    target = build(model, config(**sizes, pad_token_id=0))
    with pytest.raises(ValueError, match=rf"layers of {model.__name__} are of another kind than a draft's \({re.escape(reason)}\)"):
        copy_last_layers(of_the_targets_shape(target), target)


def test_a_warm_start_from_another_shape_is_refused():
    target = build(GPT2LMHeadModel, GPT2Config(vocab_size=64, n_embd=32, n_layer=4, n_head=4, n_positions=64))
    with pytest.raises(ValueError, match="GPT2LMHeadModel"):
        copy_last_layers(of_the_targets_shape(target), target)


def test_a_warm_started_draft_decodes(folder):
    same = dict(intermediate_size=48, num_attention_heads=4, num_key_value_heads=2)
    generates_as_plain(folder, DSparkDraftModel.from_pretrained(distill(arguments(folder, warm_start=True, **same))))
