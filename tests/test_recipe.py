"""Recipes: types, unknown options, flags that override, files that are not there."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest

import hf_dspark.recipes
from hf_dspark.recipe import read_recipe


@dataclass
class Options:
    target: str = field(metadata={"help": "Required."})
    learning_rate: float = field(default=1e-3, metadata={"help": "A float."})
    gamma: float | None = field(default=4.0, metadata={"help": "A float or None."})
    max_steps: int = field(default=10, metadata={"help": "An int."})
    bf16: bool = field(default=False, metadata={"help": "A bool."})
    use_cache: bool = field(default=True, metadata={"help": "A bool that is on."})
    layers: list[int] | None = field(default=None, metadata={"help": "A list."})
    thinking: bool | None = field(default=None, metadata={"help": "A bool or None."})
    folder: str | None = field(default=None, metadata={"help": "A text or None."})
    report: None | str | list[str] = field(default="none", metadata={"help": "As transformers annotates it."})  # noqa: RUF036
    files: list[str] | None = field(default=None, metadata={"help": "A list of texts."})
    extras: dict | str | None = field(default=None, metadata={"help": "A dictionary, or a file with one."})
    kind: str = field(default="vanilla", metadata={"help": "A text."})
    mode: Literal["a", "b"] = field(default="a", metadata={"help": "One of two."})
    metrics: list[str] = field(default_factory=lambda: ["loss"], metadata={"help": "A list that has a default."})
    backend: str | None = field(default=None, metadata={"help": "One of two or None.", "choices": ["x", "y"]})


@pytest.fixture
def recipe(tmp_path):
    def write(text: str) -> str:
        (tmp_path / "run.yaml").write_text(text)
        return str(tmp_path / "run.yaml")

    return write


def test_a_file_gives_values_and_the_class_the_rest(recipe):
    options = read_recipe(Options, recipe("target: t\nmax_steps: 3\nbf16: true\nlayers: [1, 3]\ngamma: null\n"))
    assert options == Options("t", max_steps=3, bf16=True, layers=[1, 3], gamma=None)


def test_numbers_that_yaml_reads_as_text_are_numbers(recipe):
    # YAML 1.1 wants a point in 6e-4.
    options = read_recipe(Options, recipe('target: t\nlearning_rate: 6e-4\nmax_steps: "7"\n'))
    assert options.learning_rate == 6e-4 and options.max_steps == 7 and isinstance(options.max_steps, int)
    assert read_recipe(Options, recipe("target: t\nlearning_rate: 1\n")).learning_rate == 1


@pytest.mark.parametrize("default", ["bf16", "use_cache"])
@pytest.mark.parametrize("value", [True, False])
@pytest.mark.parametrize("words", ["{option}: {value}", '{option}: "{value}"'])
def test_a_bool_is_what_the_file_or_the_flag_says_whatever_its_default(recipe, default, value, words):
    path = recipe("target: t\n" + words.format(option=default, value=str(value).lower()) + "\n")
    assert getattr(read_recipe(Options, path), default) is value
    assert getattr(read_recipe(Options, path, [f"--{default}", str(not value).lower()]), default) is not value
    assert getattr(read_recipe(Options, recipe("target: t\n"), [f"--{default}={value}"]), default) is value
    for wrong in ("maybe", "3", "[true]"):
        with pytest.raises(ValueError, match=f"{default} must be true or false, got"):
            read_recipe(Options, recipe(f"target: t\n{default}: {wrong}\n"))


def test_flags_replace_what_the_file_says_and_nothing_else(recipe):
    path = recipe("target: t\nmax_steps: 3\nlearning_rate: 0.5\nuse_cache: true\n")
    flags = ["--max_steps", "5", "--learning-rate=6e-4", "--bf16", "--layers", "0", "2", "--no_use_cache"]
    assert read_recipe(Options, path, flags) == Options("t", 6e-4, max_steps=5, bf16=True, layers=[0, 2], use_cache=False)
    assert read_recipe(Options, path).max_steps == 3
    assert read_recipe(Options, recipe("max_steps: 3\n"), ["--target", "u"]).target == "u"


def test_a_list_is_written_as_in_the_file_or_as_words(recipe):
    path = recipe("target: t\nlayers: [1]\nreport: [a]\n")
    for flags in (["--layers", "[0, 2]", "--report", "[tensorboard, 'wandb']"], ["--layers", "0", "2", "--report=[tensorboard,wandb]"]):
        options = read_recipe(Options, path, flags)
        assert (options.layers, options.report) == ([0, 2], ["tensorboard", "wandb"])
    assert read_recipe(Options, path, ["--report", "all"]).report == "all"
    assert read_recipe(Options, path, ["--folder", "[a]"]).folder == "[a]"  # a text, whatever it looks like
    options = read_recipe(Options, path, ["--layers=[0, 2]", "--files", '["a, b", c]', "--report", "[]"])
    assert (options.layers, options.files, options.report) == ([0, 2], ["a, b", "c"], [])
    assert read_recipe(Options, path, ["--layers", "[]"]).layers == []


def test_help_has_the_command_and_the_defaults(recipe, capsys):
    path = recipe("target: t\nmax_steps: 3\n")
    with pytest.raises(SystemExit):
        read_recipe(Options, path, ["--help"], "hf-dspark distill")
    text = " ".join(capsys.readouterr().out.split())
    assert f"usage: hf-dspark distill {path} [--option value ...]" in text
    assert "An int. (default: 10)" in text and "A bool that is on. (default: True)" in text and "Required. --" in text
    assert "(default: False)" not in text.split("--no_use_cache")[1].split("--layers")[0]


@pytest.mark.parametrize(
    ("text", "flags", "message"),
    [
        ("target: t\nlerning_rate: 0.1\n", [], r"unknown option 'lerning_rate' in .*run.yaml; did you mean learning_rate\?"),
        ("target: t\nzzzzz: 0.1\n", [], r"unknown option 'zzzzz' in .*--help"),
        ("target: t\n", ["--max-stps", "3"], r"unknown option '--max-stps' on the command line; did you mean max_steps\?"),
        ("target: t\n", ["--max_steps", "many"], r"invalid int value: 'many'"),
        ("target: t\n", ["--max_steps"], r"expected one argument"),
        ("target: t\nlearning_rate: fast\n", [], r"learning_rate must be a number \(float\), got 'fast'"),
        ("target: t\nmax_steps: 2.5\n", [], r"max_steps must be a number \(int\), got 2.5"),
        ("target: t\nmax_steps: true\n", [], r"max_steps must be a number \(int\), got True"),
        ("target: t\nlearning_rate: [1]\n", [], r"learning_rate must be a number \(float\), got \[1\]"),
        ("target: t\nlayers: [1, two]\n", [], r"layers must be a number \(int\), got 'two'"),
        ("max_steps: 3\n", [], r"run.yaml lacks target"),
        ("- a\n- b\n", [], r"must hold lines of the form 'option: value', got list"),
        ("", [], r"must hold lines of the form"),
        ("target: [\n", [], r"run.yaml is not valid YAML"),
        ("target: t\nmax_steps: 3\ntarget: u\n", [], r"(?s)run.yaml is not valid YAML: target is set twice.*line 3"),
        ("target: t\nextras: {a: 1, a: 2}\n", [], r"a is set twice"),
        ("target: 5\n", [], r"run.yaml: target must be a text, got 5 \(quotes make a text of it"),
        ("target: [t]\n", [], r"target must be a text, got \['t'\]"),
        ("target: {t: 1}\n", [], r"target must be a text, got \{'t': 1\}"),
        ("target: t\nfolder: no\n", [], r"folder must be a text, got False .*YAML reads yes, no"),
        ("target: t\nfiles: [a, 5]\n", [], r"files must be a text, got 5"),
        ("target: t\nextras: 5\n", [], r"extras must be a text, got 5"),
        ("target: t\nmax_steps: null\n", [], r"max_steps must have a value; leave the line out"),
        ("target: t\n", ["--max_steps", "none"], r"--max_steps.*: it must have a value, got 'none'; its default is 10"),
        ("target: t\n", ["--learning_rate", "null"], r"--learning_rate.*: it must have a value, got 'null'; its default is 0.001"),
        ("target: t\n", ["--bf16", "none"], r"--bf16: it must have a value, got 'none'; its default is False"),
        ("target: t\n", ["--use_cache", "None"], r"--use_cache.*: it must have a value, got 'None'; its default is True"),
        ("target: t\n", ["--kind", "none"], r"--kind: it must have a value, got 'none'; its default is 'vanilla'"),
        ("target: t\n", ["--mode", "none"], r"--mode: it must have a value, got 'none'; its default is 'a'"),
        ("target: t\n", ["--metrics", "none"], r"--metrics: it must have a value, got 'none'; its default is \['loss'\]"),
        ("target: t\n", ["--layers", "[0"], r"--layers: expected a list such as '\[a, b\]', got '\[0'"),
        ("target: t\n", ["--layers", "[1, two]"], r"the command line: layers must be a number \(int\), got 'two'"),
        ("target: t\n", ["--gamma", "nothing"], r"invalid float value: 'nothing'"),
    ],
)
def test_what_is_wrong_is_named(recipe, text, flags, message):
    with pytest.raises(ValueError, match=message):
        read_recipe(Options, recipe(text), flags)


def test_a_single_value_of_a_list_needs_no_brackets(recipe):
    options = read_recipe(Options, recipe("target: t\nfiles: a.jsonl\nlayers: 3\n"))
    assert options.files == ["a.jsonl"] and options.layers == [3]


def test_a_value_of_any_kind_that_an_option_names_is_taken(recipe):
    options = read_recipe(Options, recipe("target: t\nreport: [a, b]\nextras: {a: {b: 1}}\nfiles: [a, b]\n"))
    assert (options.report, options.extras, options.files) == (["a", "b"], {"a": {"b": 1}}, ["a", "b"])
    options = read_recipe(Options, recipe("target: t\nreport: a\nextras: a.json\n"))
    assert (options.report, options.extras) == ("a", "a.json")


@pytest.mark.parametrize("word", ["none", "null", "None"])
def test_none_on_the_command_line_takes_an_option_back(recipe, word):
    path = recipe("target: t\ngamma: 2\nlayers: [1]\nthinking: false\nfolder: f\nreport: a\nfiles: [a]\nextras: {a: 1}\nbackend: x\n")
    names = ("gamma", "layers", "thinking", "folder", "files", "extras", "backend")
    options = read_recipe(Options, path, [part for name in names for part in (f"--{name}", word)])
    assert [getattr(options, name) for name in names] == [None] * 7 and options.report == "a"
    assert read_recipe(Options, path, ["--report", "none"]).report == "none"  # a value of its own
    assert read_recipe(Options, path, ["--target", "none"]).target == "none"


def test_a_missing_file_is_named_and_the_packages_recipes_are_found(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"there is no recipe nowhere.yaml; the package brings .*stdlib_target.yaml"):
        read_recipe(Options, "nowhere.yaml")
    with pytest.raises(ValueError, match="unknown option"):
        read_recipe(Options, "recipes/stdlib_target.yaml")


def classes() -> dict[str, type]:
    from hf_dspark.distillation.arguments import DistillationArguments
    from hf_dspark.distillation.pretraining import PretrainArguments
    from hf_dspark.distillation.regeneration import RegenerationArguments

    return {"pretrain": PretrainArguments, "distill": DistillationArguments, "regenerate": RegenerationArguments}


def test_options_of_transformers_keep_the_kinds_that_they_take(recipe, tmp_path):
    """Among them some whose annotation is a text alone."""
    lines = ["target: t", f"output_dir: {tmp_path}", "use_cpu: true", "fsdp: true", "fsdp_config: {version: 2}", "report_to: [tensorboard]"]
    lines += ["resume_from_checkpoint: true", 'save_strategy: "no"', "lr_scheduler_kwargs: {num_cycles: 1}", "extra_rows: [a.jsonl, b.jsonl]"]
    lines += ["features: cached", "features_dir: f", "cache_budget: 1000000", "accelerator_config: {split_batches: false}"]
    options = read_recipe(classes()["distill"], recipe("\n".join(lines).replace("report_to: [tensorboard]", "report_to: []")))
    assert options.fsdp is True and options.fsdp_config["version"] == 2 and options.resume_from_checkpoint is True
    assert options.save_strategy == "no" and options.extra_rows == ["a.jsonl", "b.jsonl"] and options.cache_budget == 1000000
    for line, name in (("save_strategy: no", "save_strategy"), ("dataset: [a.jsonl]", "dataset"), ("features_dir: 5", "features_dir")):
        with pytest.raises(ValueError, match=f"{name} must be a text, got "):
            read_recipe(classes()["distill"], recipe(f"target: t\n{line}\n"))
    adapter = f"target: t\noutput_dir: {tmp_path}\nuse_cpu: true\nlora_rank: 2\ninit_draft: d\nlora_target_modules: q_proj\ndecay_gamma: 2\n"
    options = read_recipe(classes()["distill"], recipe(adapter), ["--decay_gamma", "none"])
    assert options.lora_target_modules == ["q_proj"] and options.decay_gamma is None


@pytest.mark.parametrize("path", sorted(Path(hf_dspark.recipes.__file__).parent.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_recipe_of_the_package_parses_and_opens_with_its_command(path, tmp_path):
    command = re.search(rf"^#.* hf-dspark (\w+) recipes/{path.name}", path.read_text(), flags=re.M)[1]
    # What a machine's own capabilities decide (a GPU, bf16) is not the recipe's matter.
    flags = ["--output_dir", str(tmp_path), "--use_cpu", "true"] if command != "regenerate" else []
    options = read_recipe(classes()[command], str(path), flags)
    for name, value in vars(options).items():
        assert not (isinstance(value, str) and name in ("learning_rate", "weight_decay", "max_steps")), name
