"""Recipes: options of a training run in a YAML file, checked, with flags of the same names that override them."""

import argparse
from dataclasses import MISSING, fields
from difflib import get_close_matches
from pathlib import Path
from types import NoneType, UnionType
from typing import Union, get_args, get_origin, get_type_hints

import yaml
from transformers import HfArgumentParser
from transformers.hf_argparser import string_to_bool

import hf_dspark.recipes

__all__ = ["read_recipe"]


# Options annotated as texts of which transformers, or this package, takes other values too.
_MORE_KINDS = {"fsdp": (bool, list), "resume_from_checkpoint": (bool,), "cache_budget": (int,), "trackio_static_space_id": (bool,)}


class _FlagParser(HfArgumentParser):
    def error(self, message):
        raise ValueError(f"{message}; RECIPE.yaml --help lists all options")


def read_recipe(argument_class: type, path: str, overrides: list[str] = (), command: str = "hf-dspark"):
    """An `argument_class` (a dataclass of options) from the YAML file at `path`, or the recipe of that name in the package.

    Args:
        overrides: `--option value` flags, which replace the file's options. none or null takes back an option that need not be set; a list
            is written as in the file, `[a, b]`, or as several words. --help prints all options with their defaults.
        command: what a person runs a recipe with, for --help.

    Raises:
        ValueError: an unknown option (named, with the closest real ones), one that the file has twice, or a value of the wrong type.
        OSError: there is no such file.
    """
    usage = f"{command} {path} [--option value ...]"
    parser = _FlagParser(argument_class, allow_abbrev=False, prog=command, usage=usage, formatter_class=argparse.HelpFormatter)
    # What transformers makes of a list of several kinds, or a default, is not what the class says.
    hints = {name: _kinds(hint) for name, hint in get_type_hints(argument_class).items()}
    names = [field.name for field in fields(argument_class) if field.init]
    # "none" is a value of some options.
    clearable = {field.name for field in fields(argument_class) if NoneType in hints[field.name] and field.default != "none"}
    actions, types = {}, {}
    for action in parser._actions:
        if action.default is not None and action.dest in names:
            action.help = f"{action.help or ''} (default: {str(action.default).replace('%', '%%')})"
        # What is absent from the command line must not hide what the file says. A bool has two flags, of which the first takes a value.
        action.default, action.required = argparse.SUPPRESS, False
        types.setdefault(action.dest, action.type)
        actions.setdefault(action.dest, action)
        if action.dest in clearable and action.type is not None:
            action.type = _or_none(action.type)
    flags, unknown = parser.parse_known_args(_words(overrides, {name for name, action in actions.items() if action.nargs == "+"}))
    if unknown:
        raise ValueError(_unknown(unknown[0], "on the command line", names))
    values = _read_yaml(path)
    for name, value in values.items():
        if name not in names:
            raise ValueError(_unknown(str(name), f"in {path}", names))
        if value is None and NoneType not in hints[name]:
            raise ValueError(f"{path}: {name} must have a value; leave the line out for its default")
        if actions[name].nargs != "+" or value is None:
            values[name] = _typed(name, value, types[name], hints[name], path)
        else:
            entries = value if isinstance(value, list) else [value]  # one, written without brackets
            values[name] = [_typed(name, entry, types[name], {types[name]}, path) for entry in entries]
    for name, value in vars(flags).items():
        is_list = isinstance(value, str) and list in hints[name] and _entries(value)
        values[name] = _entries(value) if is_list else None if value == [None] else value
    required = [field.name for field in fields(argument_class) if field.init and field.default is MISSING and field.default_factory is MISSING]
    if missing := [name for name in required if name not in values]:
        raise ValueError(f"{path} lacks {', '.join(missing)}, which the run needs")
    return parser.parse_dict(values)[0]


def _words(overrides: list[str], lists: set[str]) -> list[str]:
    """`overrides` with `[a, b]` behind the flag of a list as the words a and b."""
    words = []
    for word in overrides:
        is_list = words and words[-1].removeprefix("--").replace("-", "_") in lists
        words += (_entries(word) if is_list else []) or [word]
    return words


def _entries(word: str) -> list[str]:
    """a and b of `[a, b]`; of another word, none."""
    is_list = word.startswith("[") and word.endswith("]")
    return [entry.strip(" '\"") for entry in word[1:-1].split(",") if entry.strip()] if is_list else []


def _read_yaml(path: str) -> dict:
    bundled = Path(hf_dspark.recipes.__file__).parent
    # A mistyped folder of the user's own must not run the package's recipe of the same name.
    named_alone = Path(path).parent in (Path("."), Path("recipes"))
    file = bundled / Path(path).name if named_alone and not Path(path).exists() else Path(path)
    if not file.is_file():
        brought = ", ".join(sorted(recipe.name for recipe in bundled.glob("*.yaml")))
        raise FileNotFoundError(f"there is no recipe {path}; the package brings {brought}")
    try:
        values = yaml.load(file.read_text(encoding="utf-8"), _Loader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} is not valid YAML: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{file} must hold lines of the form 'option: value', got {type(values).__name__} {str(values)[:60]!r}")
    return values


class _Loader(yaml.SafeLoader):
    """YAML's own, of two lines of one key, silently takes the last."""

    def construct_mapping(self, node, deep=False):
        seen = set()
        for key in [key for key, _ in node.value if isinstance(key, yaml.ScalarNode)]:
            if key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key.value} is set twice", key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def _kinds(hint) -> set:
    """The types that an option's annotation names: of `list[str] | None`, list and NoneType."""
    parts = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    return {get_origin(part) or part for part in parts}


def _or_none(kind):
    def parse(word: str):
        return None if word.lower() in ("none", "null") else kind(word)

    parse.__name__ = getattr(kind, "__name__", str(kind))  # argparse names it in errors
    return parse


def _typed(name: str, value, kind, kinds: set, path: str):
    """`value` for an option of the annotation `kinds`, of the type `kind` on the command line. YAML reads 6e-4 and "false" as text, and a
    dataclass would keep them as text."""
    if value is None or (isinstance(value, str) and str in kinds):
        return value
    if kind not in (int, float, string_to_bool):
        if str not in kinds or type(value) in {*kinds, *_MORE_KINDS.get(name, ())}:
            return value
        hint = "; YAML reads yes, no, on and off as true and false" if isinstance(value, bool) else ""
        raise ValueError(f'{path}: {name} must be a text, got {value!r} (quotes make a text of it: "..."{hint})')
    if kind is string_to_bool:
        if isinstance(value, bool):
            return value
        try:
            return string_to_bool(value)
        except (argparse.ArgumentTypeError, AttributeError):
            raise ValueError(f"{path}: {name} must be true or false, got {value!r}") from None
    lossy = isinstance(value, bool) or (kind is int and isinstance(value, float) and not value.is_integer())
    try:
        if lossy or not isinstance(value, str | int | float):
            raise ValueError
        return kind(value) if isinstance(value, str) or kind is int else value
    except ValueError:
        raise ValueError(f"{path}: {name} must be a number ({kind.__name__}), got {value!r}") from None


def _unknown(name: str, where: str, names: list[str]) -> str:
    close = get_close_matches(name.lstrip("-").split("=")[0].replace("-", "_"), names, n=3, cutoff=0.6)
    return f"unknown option {name!r} {where}" + (f"; did you mean {' or '.join(close)}?" if close else "; --help after the recipe lists all options")
