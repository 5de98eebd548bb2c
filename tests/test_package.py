"""The package as a whole: its public names, an inert import, the wheel, the recipes, and the rules of style that a program can check."""

import ast
import importlib.util
import json
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import hf_dspark

ROOT = Path(__file__).resolve().parents[1]
ROOTS = {"hf_dspark": "src/hf_dspark", "hf_dspark/modeling": "modeling", "hf_dspark/recipes": "recipes", "hf_dspark/model_cards": "model_cards"}
SOURCES = sorted([*(ROOT / "src").rglob("*.py"), *(ROOT / "modeling").rglob("*.py")])
# Modules whose behaviour another module's tests cover, with the file that does.
TESTED_ELSEWHERE = {}


def short(path):
    return str(path.relative_to(ROOT))


def test_the_public_names():
    assert hf_dspark.__all__ == ["Completion", "DSparkConfig", "DSparkDraftModel", "GenerationReport", "generate_many", "record_generation"]
    assert all(hasattr(hf_dspark, name) for name in hf_dspark.__all__)


# A fresh interpreter, in which the libraries are there already: what is seen afterwards is the doing of `import hf_dspark`.
FRESH_IMPORT = """
import json, os, random, sys
import torch, transformers, transformers.generation.utils, transformers.generation.candidate_generator, transformers.models.qwen3.modeling_qwen3
import safetensors.torch, huggingface_hub.dataclasses

def watch(event, arguments):
    if event.startswith(("socket.", "subprocess.", "os.system", "os.exec", "os.fork")):
        seen.append([event, str(arguments)])
    if event == "open":
        path, mode, flags = arguments
        writing = bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
        if writing or not str(path).endswith((".py", ".pyc", ".so")):
            seen.append(["write" if writing else "read", str(path)])

def state():
    return dict(os.environ), torch.random.get_rng_state().tolist(), random.getstate(), torch.get_num_threads(), torch.get_default_dtype(), sys.path[:]

seen = []
sys.addaudithook(watch)
before, modules = state(), set(sys.modules)
import hf_dspark
report = dict(
    seen=list(seen), unchanged=before == state(), cuda=torch.cuda.is_initialized(),
    new=sorted({name.split(".")[0] for name in set(sys.modules) - modules}),
)
print(json.dumps(report))
"""


def test_the_import_is_inert(tmp_path):
    """No network, no process, no GPU, no file but modules; no environment, seed or thread changed; no heavy library brought along."""
    result = subprocess.run([sys.executable, "-B", "-c", FRESH_IMPORT], capture_output=True, text=True, cwd=tmp_path, timeout=240)
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout.splitlines()[-1])
    assert [entry for entry in report["seen"] if entry[0] != "read" or str(ROOT) in entry[1]] == []
    assert report["unchanged"] and not report["cuda"]
    assert not {"matplotlib", "datasets", "evaluate", "accelerate", "peft"} & set(report["new"])
    assert list(tmp_path.iterdir()) == []


# The wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """(contents by name of the wheel of a copy of the tree, the copy), with one more file deep in the bundled pair."""
    pytest.importorskip("setuptools", minversion="77", reason="pyproject.toml asks for it, and the network is not used")
    copy, built = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("wheel")
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy / name)
    for folder in ROOTS.values():
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__", "*.pyc"))
    probe = copy / "src/hf_dspark/pair/probe/deep/weights.bin"
    probe.parent.mkdir(parents=True)
    probe.write_text("x")
    command = [sys.executable, "-m", "pip", "wheel", ".", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(built)]
    result = subprocess.run(command, cwd=copy, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    [path] = built.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist() if not name.endswith("/")}, copy


def test_the_wheel_holds_the_tree_and_nothing_else(wheel):
    contents, copy = wheel
    expected = set()
    for package, folder in ROOTS.items():
        expected |= {f"{package}/{path.relative_to(copy / folder).as_posix()}" for path in (copy / folder).rglob("*") if path.is_file()}
    assert {name for name in contents if ".dist-info/" not in name} == expected
    assert "hf_dspark/pair/probe/deep/weights.bin" in expected and "hf_dspark/py.typed" in expected


def test_the_wheels_metadata(wheel):
    contents, _ = wheel
    [metadata] = [content.decode() for name, content in contents.items() if name.endswith(".dist-info/METADATA")]
    assert "Name: hf-dspark" in metadata and "Apache-2.0" in metadata
    assert re.search(r"Requires-Dist: transformers.*>=5\.24", metadata)
    [entry_points] = [content.decode() for name, content in contents.items() if name.endswith("entry_points.txt")]
    assert "hf-dspark = hf_dspark.cli:main" in entry_points
    assert any(name.endswith("LICENSE") for name in contents)


# The recipes

RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_opens_with_its_command_and_parses_into_typed_options(path):
    import yaml

    from hf_dspark.distillation.arguments import DistillationArguments
    from hf_dspark.distillation.pretraining import PretrainArguments
    from hf_dspark.distillation.regeneration import RegenerationArguments
    from hf_dspark.recipe import read_recipe

    commands = {"pretrain": PretrainArguments, "distill": DistillationArguments, "regenerate": RegenerationArguments}

    text = path.read_text()
    header = [line for line in text.splitlines() if line.startswith("#")]
    assert text.startswith("#") and len(text.splitlines()) <= 40
    [command] = re.findall(rf"hf-dspark (\w+) recipes/{path.name}", "\n".join(header))
    # transformers refuses bf16 where there is no GPU, unless the CPU is asked for.
    options = read_recipe(commands[command], str(path), [] if command == "regenerate" else ["--use_cpu", "true"])
    for name, value in yaml.safe_load(text).items():
        read = getattr(options, name)
        if isinstance(value, int | float | bool):
            # YAML reads 6e-4 as text, and a dataclass would keep it as text.
            assert read == value and type(read) in (type(value), float), f"{name}: {value!r} was read as {read!r}"
        elif name not in ("output_dir", "fsdp_config"):
            assert str(getattr(read, "value", read)) == str(value), f"{name}: {value!r} was read as {read!r}"


# Tests and style


def test_every_module_has_a_test_file_that_mirrors_it():
    missing = []
    for path in SOURCES:
        relative = path.relative_to(ROOT / "src/hf_dspark" if "src" in path.parts else ROOT)
        mirror = relative.with_name(f"test_{relative.name}")
        if path.name != "__init__.py" and str(relative) not in TESTED_ELSEWHERE and not (ROOT / "tests" / mirror).exists():
            missing.append(f"tests/{mirror}")
    assert missing == []
    assert all((ROOT / "tests" / file).exists() for file in TESTED_ELSEWHERE.values())


@pytest.fixture(params=SOURCES, ids=short)
def source(request):
    """(path, text, tree) of one module."""
    text = request.param.read_text()
    return request.param, text, ast.parse(text)


def test_user_errors_are_no_asserts(source):
    path, _, tree = source
    assert [f"{short(path)}:{node.lineno}" for node in ast.walk(tree) if isinstance(node, ast.Assert)] == []


def raises_of_value_error(tree):
    """Every `raise ValueError`, but those that the same function catches."""
    caught = set()
    for block in ast.walk(tree):
        if isinstance(block, ast.Try) and any("ValueError" in ast.dump(handler.type) for handler in block.handlers if handler.type is not None):
            caught |= {id(node) for statement in block.body for node in ast.walk(statement)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and id(node) not in caught and node.exc is not None and "ValueError" in ast.dump(node.exc):
            yield node


def test_value_errors_quote_a_value_or_name_the_option(source):
    path, _, tree = source
    vague = []
    for node in raises_of_value_error(tree):
        arguments = node.exc.args if isinstance(node.exc, ast.Call) else []
        quotes = any(isinstance(part, ast.FormattedValue | ast.Call | ast.Name) for argument in arguments for part in ast.walk(argument))
        words = " ".join(
            part.value for argument in arguments for part in ast.walk(argument) if isinstance(part, ast.Constant) and isinstance(part.value, str)
        )
        if not quotes and not re.search(r"\w_\w|\w=\w|\w\.\w+\(|''", words):
            vague.append(f"{short(path)}:{node.lineno}: {words}")
    assert vague == []


def test_files_and_functions_are_short(source):
    path, text, tree = source
    assert len(text.splitlines()) <= 400
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    assert [f"{short(path)}:{node.lineno} {node.name}" for node in functions if node.end_lineno - node.lineno + 1 > 60] == []


def test_public_things_are_listed_and_documented(source):
    path, _, tree = source
    assert ast.get_docstring(tree), f"{short(path)} needs a docstring"
    definitions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    [names] = [ast.literal_eval(node.value) for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"] or [
        []
    ]
    if path.name != "__init__.py":
        assert names, f"{short(path)} needs an __all__"
    undocumented = [name for name in names if name in definitions and not ast.get_docstring(definitions[name])]
    assert undocumented == []


def test_comments_are_no_banners_and_no_notes_to_self(source):
    path, text, _ = source
    bad = [line for line in text.splitlines() if re.search(r"#\s*([-=#*]{4,}|TODO(?!.*http)|FIXME|XXX)", line)]
    assert bad == [], short(path)


def imports_of(tree):
    """(module, level) of every import."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, 0) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or "", node.level


@pytest.mark.parametrize("path", sorted((ROOT / "modeling").glob("*.py")), ids=short)
def test_the_architecture_imports_its_siblings_and_libraries_only(path):
    """So the folder can travel as remote code; transformers copies siblings that it finds as `from .name import`."""
    siblings = {sibling.stem for sibling in path.parent.glob("*.py")}
    for module, level in imports_of(ast.parse(path.read_text())):
        if level:
            assert level == 1 and module in siblings, f"{short(path)} imports {'.' * level}{module}"
        else:
            allowed = {"torch", "transformers", "safetensors", "huggingface_hub", *sys.stdlib_module_names}
            assert module.split(".")[0] in allowed, f"{short(path)} imports {module}"


def test_nobody_imports_the_folder_modeling_by_its_own_name():
    paths = [*SOURCES, *(ROOT / "tests").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]
    offenders = [
        short(path) for path in paths for module, level in imports_of(ast.parse(path.read_text())) if not level and module.split(".")[0] == "modeling"
    ]
    assert offenders == []
    # From the repository root the import would work, and make classes that are not hf_dspark's.
    assert "modeling" not in sys.modules


def test_the_architecture_works_alone(tmp_path):
    """A copy of the folder under another name, as remote code has it, builds, saves and loads a draft of its own classes."""
    shutil.copytree(ROOT / "modeling", tmp_path / "travelling", ignore=shutil.ignore_patterns("__pycache__"))
    specification = importlib.util.spec_from_file_location("travelling", tmp_path / "travelling" / "__init__.py")
    module = importlib.util.module_from_spec(specification)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "travelling", module)
        specification.loader.exec_module(module)
        shape = dict(vocab_size=16, hidden_size=8, intermediate_size=8, num_attention_heads=2, num_key_value_heads=1, head_dim=4, eos_token_id=None)
        config = module.DSparkConfig(**shape, num_target_layers=4, markov_rank=2, mask_token_id=0)
        module.DSparkDraftModel(config).save_pretrained(tmp_path / "draft")
        assert type(module.DSparkDraftModel.from_pretrained(tmp_path / "draft")).__module__ == "travelling.modeling_dspark"
        assert module.DSparkDraftModel is not hf_dspark.DSparkDraftModel
