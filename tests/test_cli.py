"""The command line, in process: what it prints, what it writes, what it returns."""

import io
import json
import re

import pytest
from evaluation.tiny_pair import VOCAB, save_pair

from hf_dspark.cli import main

FIGURES = ["identical", "tokens_per_round", "speedup", "speedup_over_own_plain", "conditional_acceptance", "draft_time_share"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_pair(tmp_path_factory.mktemp("cli"))


@pytest.fixture
def draft(folder) -> list[str]:
    return ["--draft", str(folder / "draft"), "--device", "cpu"]


def test_help_names_every_command(capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["--help"])
    assert exit_.value.code == 0
    printed = capsys.readouterr().out
    for command in ("quickstart", "generate", "verify", "evaluate", "pretrain", "regenerate", "distill", "card"):
        assert f"    {command}" in printed


@pytest.mark.parametrize("recipe", [[], ["recipes/stdlib_regenerate.yaml"]], ids=["alone", "recipe"])
def test_help_of_a_recipe_lists_its_options(recipe, capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["regenerate", *recipe, "--help"])
    printed = " ".join(capsys.readouterr().out.split())
    assert exit_.value.code == 0 and f"usage: hf-dspark regenerate {(recipe or ['RECIPE.yaml'])[0]} [--option value ...]" in printed
    assert "Rows written at a time, in process. (default: 128)" in printed


def test_quickstart(folder, tmp_path, capsys):
    flags = ["--pair", str(folder), "--output", str(tmp_path), "--json", str(tmp_path / "figures.json")]
    assert main(["quickstart", *flags, "--max-new-tokens", "6", "--completions", "2", "--runs", "1"]) == 0
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert list(figures) == FIGURES and figures["identical"] is True and 1 <= figures["tokens_per_round"] <= 5
    assert sorted(path.name for path in tmp_path.iterdir()) == ["figures.json", "quickstart.png"]
    assert "identical token for token" in capsys.readouterr().out


def test_quickstart_fails_when_texts_differ(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("hf_dspark.evaluation.quickstart.Demonstration.identical", False)
    flags = ["--pair", str(folder), "--output", str(tmp_path), "--max-new-tokens", "4", "--completions", "1", "--runs", "1"]
    assert main(["quickstart", *flags]) == 1


def test_evaluate(draft, tmp_path, capsys):
    file = tmp_path / "figures.json"
    flags = ["--held-out-modules", "2", "--prompt-tokens", "8", "--max-new-tokens", "8", "--json", str(file)]
    assert main(["evaluate", *draft, *flags]) == 0
    figures = json.loads(file.read_text())
    assert figures["options"] == {
        "command": " ".join(["hf-dspark", "evaluate", *draft, *flags]),
        "held_out_modules": 2,
        "prompt_tokens": 8,
        "max_new_tokens": 8,
        "temperature": 1.0,
        "seed": 0,
    }
    assert figures["block_size"] == 4 and figures["greedy"]["completions"] == figures["sampled"]["completions"] == 2
    assert re.search(r"^greedy +\d\.\d\d", capsys.readouterr().out, flags=re.M)


def test_evaluate_on_prompts_of_a_file(draft, tmp_path, capsys):
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "def f("}\n{"turns": ["import os", "more"]}\n{"prompt": "class A"}\n')
    flags = ["--prompts", str(tmp_path / "prompts.jsonl"), "--max-new-tokens", "8", "--json", str(tmp_path / "figures.json")]
    assert main(["evaluate", *draft, *flags]) == 0
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["greedy"]["completions"] == figures["sampled"]["completions"] == 3
    assert figures["options"]["prompts"] == flags[1] and "held_out_modules" not in figures["options"]
    assert "3 prompts of" in capsys.readouterr().out


def test_generate_streams_the_text_and_prints_numbers_apart(draft, capsys):
    assert main(["generate", *draft, "--prompt", "def add1(a", "--max-new-tokens", "12"]) == 0
    streams = capsys.readouterr()
    assert streams.out.strip() and "tokens/s" not in streams.out
    assert re.search(r"12 tokens in \d+\.\d\d s \(\d+\.\d tokens/s, the first after \d\.\d\d s\); \d\.\d\d tokens a round", streams.err)


def test_generate_reads_stdin_and_repeats_a_sampled_text(draft, capsys, monkeypatch):
    texts = []
    for _ in range(2):
        monkeypatch.setattr("sys.stdin", io.StringIO("def add1(a"))
        assert main(["generate", *draft, "--max-new-tokens", "12", "--do-sample", "--temperature", "0.9", "--top-k", "50", "--seed", "3"]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]


def test_generate_writes_what_plain_generate_writes(draft, folder, capsys):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer, target = AutoTokenizer.from_pretrained(folder / "target"), AutoModelForCausalLM.from_pretrained(folder / "target")
    inputs = tokenizer("def add1(a", return_tensors="pt", return_token_type_ids=False)
    expected = target.generate(**inputs, max_new_tokens=12, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert main(["generate", *draft, "--prompt", "def add1(a", "--max-new-tokens", "12"]) == 0
    assert capsys.readouterr().out == tokenizer.decode(expected, skip_special_tokens=True) + "\n"


def test_verify_reads_prompts_from_a_file(draft, tmp_path, capsys):
    (tmp_path / "prompts.jsonl").write_text('{"turns": ["def add1(a", "and then?"]}\n{"prompt": "return a"}\n')
    flags = ["--prompts", str(tmp_path / "prompts.jsonl"), "--prompt", "x = 1", "--max-new-tokens", "8", "--samples", "3"]
    assert main(["verify", *draft, *flags]) == 0
    printed = capsys.readouterr().out
    assert "3 prompts of " in printed and "ok    greedy: 3 of 3 texts identical" in printed and "\nlossless on these prompts:" in printed


def test_verify_in_half_precision_says_what_it_allows(draft, capsys):
    assert main(["verify", *draft, "--dtype", "bfloat16", "--prompt", "def add1(a", "--max-new-tokens", "6", "--samples", "0"]) == 0
    assert "up to near ties of 4 units in the last place" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "--prompt", "x", "--draft", "/nowhere"], "--draft /nowhere: there is no such folder"),
        (["generate", "--prompt", "x", "--target", "/nowhere"], "a draft is needed for the target '/nowhere'"),
        (["generate", "--prompt", "x", "--temperature", "0.5"], "temperature=0.5 has no effect on greedy decoding; add --do-sample"),
        (["verify", "--prompts", "/nowhere.jsonl"], "/nowhere.jsonl"),
        (["verify", "--threads", "0"], "threads must lie between 1 and"),
        (["verify", "--threads", "99999999"], "on this machine, got 99999999"),
        (["generate", "--prompt", "x", "--draft", ""], "--draft '' names nothing"),
        (["generate", "--prompt", "x", "--do-sample", "--top-p", "7"], "top-p must lie in (0, 1], got 7"),
        (["pretrain", "nowhere.yaml"], "there is no recipe nowhere.yaml"),
        (["pretrain", "typo/stdlib_target.yaml"], "there is no recipe typo/stdlib_target.yaml"),
        (["evaluate", "--json", "/nowhere/x.json"], "there is no folder /nowhere"),
        (["evaluate", "--prompt-tokens", "2000"], "a prompt of 2001 tokens and max_new_tokens=128 do not fit into the target's context of 1024"),
        (["pretrain", "recipes/stdlib_target.yaml", "--hiden-size", "3"], "did you mean hidden_size"),
        (["quickstart", "--pair", "/nowhere"], "/nowhere/draft: there is no such folder"),
        (["evaluate", "--raw"], "--raw is about the texts of --prompts=FILE"),
        (["evaluate", "--prompts", "p.jsonl", "--held-out-modules", "4"], "--held-out-modules 4 is about held-out modules, in whose place"),
        (["evaluate", "--prompts", "p.jsonl", "--prompt-tokens", "64"], "--prompt-tokens 64 is about held-out modules"),
        (["distill", "recipes/qwen3_14b_fsdp.yaml", "--use_cpu", "true", "--bf16", "false"], "`torchrun --nproc_per_node 8 --no-python hf-dspark "),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_errors_are_one_line_without_a_traceback(arguments, message, capsys):
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("hf-dspark: ") and message in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("prompt", "message"),
    [("", "the prompt is empty ''"), ("x = 1\n" * 1000, "the context of"), ("x\udcff", "not valid UTF-8 (at character 1)")],
    ids=["empty", "too long", "bytes"],
)
def test_impossible_prompts_are_refused(draft, capsys, prompt, message):
    assert main(["generate", *draft, "--prompt", prompt]) == 2
    assert message in capsys.readouterr().err


def test_an_unknown_option_is_refused_by_argparse(capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["verify", "--temprature", "1"])
    assert exit_.value.code == 2


def test_an_interrupted_training_says_how_to_go_on(tmp_path, monkeypatch, capsys):
    def interrupted(args):
        raise KeyboardInterrupt

    monkeypatch.setattr("hf_dspark.distillation.distill.distill", interrupted)
    command = ["distill", "recipes/stdlib_draft.yaml", "--output_dir", str(tmp_path), "--bf16", "false"]
    assert main(command) == 130
    assert f"interrupted; there is no checkpoint in {tmp_path}, so the same command begins anew" in capsys.readouterr().err
    for step in (9, 10, 11):  # the last of which is torn
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}" / "trainer_state.json").write_text('{"global_step": 1}' if step < 11 else "{")
    assert main(command) == 130
    assert f"the same command with --resume_from_checkpoint true goes on from {tmp_path / 'checkpoint-10'}" in capsys.readouterr().err


def test_a_closed_pipe_is_no_error(monkeypatch):
    def closed(*_):
        raise BrokenPipeError

    monkeypatch.setattr("hf_dspark.evaluation.pairs.load_pair", closed)
    monkeypatch.setattr("sys.stdout", io.StringIO())
    assert main(["generate", "--prompt", "x"]) == 0


SMOKE = ["--max_steps", "10", "--save_strategy", "no", "--eval_strategy", "no", "--disable_tqdm", "true", "--report_to", "none"]


def test_pretrain_distill_generate_in_smoke_form(tmp_path, monkeypatch, capsys):
    """The recipes' own path, shrunk by flags: a target, its draft, a text."""
    modules = {f"module{i}.py": f"def add{i}(a, b):\n    return a + b + {i}\n" * 60 for i in range(40)}
    for name in ("pretraining", "data", "regeneration"):
        monkeypatch.setattr(f"hf_dspark.distillation.{name}.stdlib_modules", lambda: modules, raising=False)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.chdir(tmp_path)
    shape = ["--vocab_size", str(VOCAB), "--hidden_size", "32", "--intermediate_size", "48", "--num_hidden_layers", "4"]
    heads = ["--num_attention_heads", "2", "--num_key_value_heads", "1", "--head_dim", "16"]
    small = ["--per_device_train_batch_size", "2", "--bf16", "false", "--num_held_out", "4"]
    assert main(["pretrain", "recipes/stdlib_target.yaml", *shape, *heads, *small, *SMOKE, "--sequence_length", "32"]) == 0
    written = ["--num_rows", "4", "--prompt_tokens", "8", "--new_tokens", "8", "--batch_size", "4", "--num_held_out", "4"]
    assert main(["regenerate", "recipes/stdlib_regenerate.yaml", *written]) == 0
    again = ["--seed", "5", "--output_file", "runs/stdlib_sampled.jsonl"]
    assert main(["regenerate", "recipes/stdlib_regenerate.yaml", *written, *again]) == 0
    draft_shape = ["--num_draft_layers", "1", "--markov_rank", "8", "--num_anchors", "4", "--block_size", "4", "--max_length", "32"]
    assert main(["distill", "recipes/stdlib_draft.yaml", *draft_shape, *heads, *small, *SMOKE]) == 0
    capsys.readouterr()
    assert (
        main(["generate", "--draft", "runs/stdlib_draft", "--prompt", "def add", "--max-new-tokens", "8", "--dtype", "float32", "--device", "cpu"])
        == 0
    )
    assert "8 tokens in" in capsys.readouterr().err

    monkeypatch.setattr("hf_dspark.evaluation.acceptance.held_out_texts", lambda *_: list(modules.values())[:2])
    pair = ["--target", "runs/stdlib_target", "--draft", "runs/stdlib_draft"]
    measured = ["--held-out-modules", "2", "--prompt-tokens", "8", "--max-new-tokens", "12", "--device", "cpu", "--json", "figures.json"]
    assert main(["evaluate", *pair, *measured]) == 0
    assert main(["card", *pair, "--evaluation", "figures.json", "--machine", "two cores", "--output", "card.md"]) == 0
    assert "hf-dspark evaluate --target runs/stdlib_target" in (tmp_path / "card.md").read_text()
