"""The card of a draft: every line comes from the config, the training's files or the measurement; what is not known has no line."""

import hashlib
import json
import re
from itertools import pairwise

import pytest
import torch
from fake_hub import FakeHub
from huggingface_hub import ModelCard
from oracle import tiny_draft, tiny_target
from peft import LoraConfig, get_peft_model

from hf_dspark.distillation.arguments import DistillationArguments
from hf_dspark.distillation.corpus import train_tokenizer
from hf_dspark.hub import DraftCard, upload_draft, write_draft_card

SUMMARY = {
    "completions": 64,
    "new_tokens_mean": 128,
    "tokens_per_round": 3.214,
    "tokens_per_round_pooled": 2.6,
    "repeated_8gram_share": 0.125,
    "completions_below_30_percent_repeated": 50,
    "tokens_per_round_below_30_percent_repeated": 2.98,
    "conditional_acceptance": [0.81, 0.72, None],
}
COMMAND = "hf-dspark evaluate --draft 'my draft' --json FILE"
OPTIONS = {"command": COMMAND, "held_out_modules": 64, "max_new_tokens": 128, "temperature": 0.7, "seed": 5}
MEASURED = {"target": "t", "draft": "d", "dtype": "float32", "block_size": 4, "options": OPTIONS}
MEASURED |= {"greedy": SUMMARY, "sampled": {**SUMMARY, "tokens_per_round": 2.553}}
REPORT = {"steps": 2800, "num_train_rows": 21566, "eval_tau": 2.3269}
PROVENANCE = {"regenerated_share": 0.75, "sampling": "temperature 1", "chat_template_sha256": "ab12"}


@pytest.fixture(scope="module")
def target():
    return tiny_target()


def arguments(folder, **options) -> dict:
    values = dict(target="Qwen/Qwen3-4B", dataset="HuggingFaceH4/ultrachat_200k", extra_rows=["runs/more.jsonl"], enable_thinking=False)
    values |= dict(output_dir=str(folder), hub_token="hf_SECRET", use_cpu=True, seed=3, max_length=512, init_draft=str(folder / "old"))
    return DistillationArguments(**{**values, **options}).to_dict()


def evaluation(folder, **changes):
    (folder / "evaluation.json").write_text(json.dumps(MEASURED | changes))
    return folder / "evaluation.json"


def written(draft, folder, **facts) -> str:
    text = write_draft_card(draft, folder, DraftCard(**facts)).read_text()
    assert_well_formed(text)
    return text


def assert_well_formed(text: str) -> None:
    """No heading without text, no empty cell or code, nothing left of the template, no two blank lines."""
    outside = re.sub(r"```.*?```", "a block of code", text, flags=re.S)
    for line, following in pairwise([line for line in outside.splitlines() if line.strip()]):
        assert not (line.startswith("#") and following.startswith("#")), line
    assert not outside.rstrip().splitlines()[-1].startswith("#")
    assert not re.search(r"\{\{|\{%|\bNone\b|\bnan\b|(?<!\w)\(\)|\| *\||``|\n\n\n", outside), text
    assert "automatically generated" not in text and text.endswith("\n")


def test_every_known_fact_is_there(target, tmp_path):
    draft = tiny_draft(target, base_model_name_or_path="Qwen/Qwen3-4B", base_model_revision="c0ffee", draft_vocab_size=32, markov_head_type="rnn")
    facts = dict(arguments=arguments(tmp_path), report=REPORT | PROVENANCE, evaluation=evaluation(tmp_path), machine="two cores")
    text = written(draft, tmp_path, **facts, repo_id="me/draft", license="mit", calibration="by temperature, on 10,000 blocks")
    data = ModelCard(text).data
    assert (data.base_model, data.base_model_relation, data.license) == ("Qwen/Qwen3-4B", "adapter", "mit")
    assert (data.library_name, data.pipeline_tag, data.tags) == ("hf-dspark", "text-generation", ["dspark", "speculative-decoding"])
    assert data.datasets == ["HuggingFaceH4/ultrachat_200k"]  # the other one is a file
    for line in (
        "| greedy | 3.21 | 12.5 % | 2.98 (50 of 64) | 0.81, 0.72, - |",
        "| temperature 0.7 | 2.55 | 12.5 % | 2.98 (50 of 64) | 0.81, 0.72, - |",
        f"Measured with\n\n```\n{COMMAND}\n```\n\n(float32, held-out modules 64, max new tokens 128, seed 5, on two cores).",
        "| dataset | `HuggingFaceH4/ultrachat_200k`, `more.jsonl` (local) |",
        "| written by the base model itself | 75 % of the rows |",
        "| how it wrote | temperature 1 |",
        "| chat template (SHA-256) | `ab12` |",
        "| thinking | off |",
        "| steps | 2,800 |",
        "| training rows | 21,566 |",
        "estimated from the overlap of both models' laws | 2.33 |",
        "| `seed` | `3` |",
        "| `init_draft` | `old` |",
        "| block | 4 tokens a round |",
        "| layers of the base model that it reads | 0, 2 of 4 (outputs, from 0) |",
        "| Markov head | rnn, rank 4 |",
        "| confidence head | yes, by temperature, on 10,000 blocks |",
        "| vocabulary | 32 of the base model's 64 tokens |",
        "`Qwen/Qwen3-4B` (revision `c0ffee`)",
        "texts of up to 512 tokens",
    ):
        assert line in text, line
    assert "not calibrated" not in text and "It was not measured" not in text and str(tmp_path) not in text


def test_what_is_not_known_has_no_line(target, tmp_path):
    text = written(tiny_draft(target, markov_rank=0, enable_confidence_head=False), tmp_path)
    assert "It was not measured how much of what this draft proposes is accepted." in text
    for absent in ("## Data", "## Training", "Measured with", "license", "base_model", "datasets", "calibrat", "revision", "training_args.json"):
        assert absent not in text, absent
    assert "`TARGET` stands for" in text and "`DRAFT` stands for" in text
    assert {path.name for path in tmp_path.iterdir()} == {"README.md"}
    assert "are not calibrated" in written(tiny_draft(target), tmp_path)
    assert "holds no copy" in text
    draft = tiny_draft(target)
    draft.stored_tables = {"lm_head.weight": torch.zeros(64, 32)}
    assert "holds no copy" not in written(draft, tmp_path)


@pytest.mark.parametrize("name", ["arguments", "report", "evaluation", "repo_id", "license", *PROVENANCE, "calibration"])
def test_each_fact_alone_makes_a_whole_card(target, name, tmp_path):
    facts = {"arguments": arguments(tmp_path), "report": REPORT, "evaluation": evaluation(tmp_path), "repo_id": "me/draft", "license": "mit"}
    facts |= {**PROVENANCE, "calibration": "by hand"}
    written(tiny_draft(target), tmp_path, **{name: facts[name]})


def test_the_training_arguments_lie_beside_the_card_without_secrets(target, tmp_path):
    text = written(tiny_draft(target), tmp_path, arguments=arguments(tmp_path))
    content = (tmp_path / "training_args.json").read_bytes()
    assert hashlib.sha256(content).hexdigest() in text
    assert json.loads(content)["seed"] == 3 and b"hf_SECRET" not in content and "hf_SECRET" not in text


DECODED = {"eval_tokens_per_round": 3.014, "eval_repeated_8gram_share": 0.215}


def test_what_training_decoded_stands_in_for_a_measurement(target, tmp_path):
    """Held-out prompts are at most as many as rows were held out."""
    sampled = {"eval_sampled_tokens_per_round": 2.5, "eval_sampled_repeated_8gram_share": 0.01}
    options = dict(eval_prompts=16, num_held_out=8, eval_new_tokens=64, eval_temperature=0.7)
    text = written(tiny_draft(target), tmp_path, report=REPORT | DECODED | sampled, arguments=arguments(tmp_path, **options))
    for line in (
        "| decoding | tokens a round | repeated 8-grams |",
        "| greedy | 3.01 | 21.5 % |",
        "| temperature 0.7 | 2.50 | 1.0 % |",
        "Measured at the end of training, on up to 8 held-out prompts, up to 64 new tokens each.",
    ):
        assert line in text, line
    assert "It was not measured" not in text
    alone = written(tiny_draft(target), tmp_path, report=DECODED)
    assert "| greedy | 3.01 | 21.5 % |" in alone and "on held-out prompts." in alone and "temperature" not in alone
    assert "It was not measured" in written(tiny_draft(target), tmp_path, report={"eval_tokens_per_round": float("nan")})
    measured = written(tiny_draft(target), tmp_path, report=DECODED, evaluation=evaluation(tmp_path))
    assert "| greedy | 3.21 |" in measured and "at the end of training" not in measured


def test_features_and_adapters_are_named_as_they_took_effect(target, tmp_path):
    cached = dict(features="cached", features_dir="/somewhere", features_dtype="int8", features_rank=24, cache_budget="1GB", init_draft=None)
    text = written(tiny_draft(target), tmp_path, arguments=arguments(tmp_path, **cached))
    for name, value in {"features": "cached", "features_dtype": "int8", "features_rank": 24, "cache_budget": "1GB"}.items():
        assert f"| `{name}` | `{value}` |" in text, name
    text = written(tiny_draft(target), tmp_path, arguments=arguments(tmp_path, lora_rank=16))
    assert "| `lora_rank` | `16` |" in text and "| `lora_alpha` | `32` |" in text and "| `features" not in text
    assert "| `lora_alpha` | `8` |" in written(tiny_draft(target), tmp_path, arguments=arguments(tmp_path, lora_rank=16, lora_alpha=8))
    assert "| `lora" not in written(tiny_draft(target), tmp_path, arguments=arguments(tmp_path))


def test_a_measurement_is_added_later(target, tmp_path):
    draft = tiny_draft(target)
    (tmp_path / "distillation.json").write_text(json.dumps(REPORT | PROVENANCE))
    before = written(draft, tmp_path, arguments=arguments(tmp_path, hub_model_id="me/draft"), report=REPORT | PROVENANCE)
    write_draft_card(draft, tmp_path, DraftCard.from_folder(tmp_path, evaluation=evaluation(tmp_path)))
    after = (tmp_path / "README.md").read_text()
    assert_well_formed(after)
    assert "| greedy | 3.21 |" in after and 'from_pretrained("me/draft"' in after
    start, end = "## Acceptance", "## Data"
    assert before.split(start)[0] == after.split(start)[0] and before.split(end)[1] == after.split(end)[1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_size": 7}, "about a draft of block_size 7, this one has 4"),
        ({"greedy": {"completions": 1}}, "greedy.tokens_per_round, greedy.conditional_acceptance; write it with `hf-dspark evaluate --json`"),
        ({"options": {}}, "has no options.command"),
    ],
    ids=["block", "figures", "command"],
)
def test_another_measurement_is_refused_and_nothing_written(target, changes, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        write_draft_card(tiny_draft(target), tmp_path / "new", DraftCard(evaluation=evaluation(tmp_path, **changes)))
    assert not (tmp_path / "new" / "README.md").exists()


def test_bad_files_and_shares_are_named(target, tmp_path):
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "distillation.json").write_text("[]")
    with pytest.raises(ValueError, match=r"broken\.json is not valid JSON"):
        write_draft_card(tiny_draft(target), tmp_path, DraftCard(evaluation=tmp_path / "broken.json"))
    with pytest.raises(ValueError, match=r"distillation\.json must hold a JSON object, got list"):
        DraftCard.from_folder(tmp_path)
    with pytest.raises(ValueError, match=r"regenerated_share must lie in \[0, 1\], got 75"):
        DraftCard(regenerated_share=75)


def test_words_of_others_stay_in_their_cell(target, tmp_path):
    text = written(tiny_draft(target), tmp_path, sampling="a | b\n\n# no heading")
    assert "| how it wrote | a \\| b # no heading |" in text


@pytest.fixture
def pair(tmp_path):
    """A pair in two folders, and the draft as it was saved."""
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    train_tokenizer(["def add(a, b):\n    return a + b\n"] * 9, vocab_size=280).save_pretrained(tmp_path / "target")
    target = tiny_target(vocab_size=280, **special)
    target.save_pretrained(tmp_path / "target")
    draft = tiny_draft(target, base_model_name_or_path=str(tmp_path / "target"), **special)
    draft.save_pretrained(tmp_path / "draft")
    return tmp_path, draft


def run_the_code_of(text: str) -> dict:
    names = {}
    exec(re.search(r"```python\n(.*?)```", text, flags=re.S)[1].replace("max_new_tokens=256", "max_new_tokens=12"), names)
    plain = names["target"].generate(**names["inputs"], max_new_tokens=12)
    assert torch.equal(names["output"], plain)
    return names


def test_the_lines_of_code_run(pair, monkeypatch):
    folder, draft = pair
    monkeypatch.chdir(folder)  # a local model is named without its path
    run_the_code_of(written(draft, folder / "draft", repo_id=str(folder / "draft")))


def test_the_lines_of_code_of_an_adapter_run(pair, monkeypatch):
    folder, _ = pair
    monkeypatch.chdir(folder)
    draft = type(pair[1]).from_pretrained(folder / "draft")
    adapted = get_peft_model(draft, LoraConfig(r=2, target_modules=["q_proj"]))
    adapted.save_pretrained(folder / "adapter")
    text = written(adapted, folder / "adapter", repo_id=str(folder / "adapter"))
    assert text.count("# Adapter of a DSpark draft") == 1 and "merge the adapter" in text and "vllm serve" not in text
    assert type(run_the_code_of(text)["draft"]).__name__ == "PeftModel"
    assert "`ADAPTED` stands for" in written(get_peft_model(pair[1], LoraConfig(r=2, target_modules=["q_proj"])), folder / "nameless")


def test_a_local_target_is_named_without_its_path(target, tmp_path):
    """Wherever its name comes from: the config, the arguments, the adapted draft, the command that measured."""
    draft = tiny_draft(target, base_model_name_or_path=str(tmp_path / "my-target"))
    command = f"hf-dspark evaluate --draft {tmp_path}/draft --target={tmp_path}/my-target --json FILE"
    measured = evaluation(tmp_path, options={**OPTIONS, "command": command, "prompts": str(tmp_path / "prompts.jsonl")})
    facts = dict(arguments=arguments(tmp_path, target=str(tmp_path / "my-target"), dataset=str(tmp_path / "a.jsonl")), evaluation=measured)
    text = written(draft, tmp_path / "draft", **facts)
    assert "# DSpark draft for my-target\n" in text and "hidden states of `my-target`" in text and 'from_pretrained("./my-target")' in text
    assert "hf-dspark evaluate --draft ./draft --target=./my-target --json FILE" in text and "vllm serve ./my-target" in text
    draft.save_pretrained(tmp_path / "draft")
    adapted = get_peft_model(type(draft).from_pretrained(tmp_path / "draft"), LoraConfig(r=2, target_modules=["q_proj"]))
    adapter = written(adapted, tmp_path / "adapter", **facts)
    assert 'from_pretrained("./draft"' in adapter
    for content in (text, adapter, *((tmp_path / name / "training_args.json").read_text() for name in ("draft", "adapter"))):
        assert str(tmp_path) not in content
    assert ModelCard(text).data.base_model is None and ModelCard(text).data.datasets is None


def test_the_configs_training_data_speaks_where_the_report_does_not(target, tmp_path):
    draft = tiny_draft(target)
    draft.config.training_data = {"regenerated_share": 0.25, "sampling": "temperature 0.7", "chat_template_sha256": "cd34"}
    text = written(draft, tmp_path)
    for line in (
        "| written by the base model itself | 25 % of the rows |",
        "| how it wrote | temperature 0.7 |",
        "| chat template (SHA-256) | `cd34` |",
    ):
        assert line in text, line
    assert "75 % of the rows" in written(draft, tmp_path, report=PROVENANCE)


def test_the_written_card_is_what_gets_uploaded(pair, monkeypatch):
    hub, (folder, draft) = FakeHub().install(monkeypatch), pair
    text = written(draft, folder / "draft", arguments=arguments(folder))
    for repo_id in ("me/draft", "me/draft", "me/other"):
        draft.push_to_hub(repo_id)
        assert hub.readme(repo_id) == text
    upload_draft(folder / "draft", "me/folder")
    assert hub.readme("me/folder") == text
    files = {"config.json", "generation_config.json", "model.safetensors", "training_args.json", "README.md"}
    assert all(added == files for _, _, added, _ in hub.commits) and len(hub.commits) == 4


def test_what_engines_can_do_is_said_of_the_target_that_is_bound(target, tmp_path):
    draft = tiny_draft(target)
    unbound = written(draft, tmp_path, repo_id="me/draft")
    bound = written(draft.bind(target), tmp_path, repo_id="me/draft")
    assert "as Gemma, Granite and Cohere models do" in unbound and "Gemma" not in bound
    for text in (unbound, bound):
        assert "vllm serve TARGET" in text and "--model-path TARGET" in text and "has not been measured there" in text
    nowhere = written(tiny_draft(target, markov_rank=0, confidence_head_with_markov=False), tmp_path)
    assert "Not for vLLM: it has no Markov head." in nowhere and "Not for SGLang: it has no Markov head." in nowhere
    assert "measured there" not in nowhere
