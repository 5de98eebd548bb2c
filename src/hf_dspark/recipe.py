"""Recipes: options of a training run in a YAML file, checked, with flags of the same names that override them."""

import argparse
from dataclasses import MISSING, Field, fields
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
        raise ValueError(f"{message}; --help lists all options")


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
    options = {field.name: field for field in fields(argument_class) if field.init}
    names, actions, types = list(options), {}, {}
    for action in parser._actions:
        # --no_OPTION, the second flag of a bool, has no default of its own.
        if action.default is not None and action.dest in names and action.dest not in actions:
            action.help = f"{action.help or ''} (default: {str(action.default).replace('%', '%%')})"
        # What is absent from the command line must not hide what the file says. A bool has two flags, of which the first takes a value.
        action.default, action.required = argparse.SUPPRESS, False
        types.setdefault(action.dest, action.type)
        actions.setdefault(action.dest, action)
        if action.type is not None:
            action.type = _flag_type(options[action.dest], action.type, hints[action.dest])
        if action.choices is not None and NoneType in hints[action.dest]:
            action.choices = [*action.choices, None]
    flags, unknown = parser.parse_known_args(list(overrides))
    if unknown:
        raise ValueError(_unknown(unknown[0], "on the command line", names))
    values = _read_yaml(path)
    for name, value in values.items():
        if name not in names:
            raise ValueError(_unknown(str(name), f"in {path}", names))
        if value is None and NoneType not in hints[name]:
            raise ValueError(f"{path}: {name} must have a value; leave the line out for its default")
        values[name] = _read_value(actions[name], value, types[name], hints[name], path)
    for name, value in vars(flags).items():
        if isinstance(value, list) and len(value) == 1 and (value[0] is None or isinstance(value[0], list)):
            value = value[0]  # none, or [a, b]
        values[name] = _read_value(actions[name], value, types[name], hints[name], "the command line") if isinstance(value, list) else value
    required = [field.name for field in fields(argument_class) if field.init and field.default is MISSING and field.default_factory is MISSING]
    if missing := [name for name in required if name not in values]:
        raise ValueError(f"{path} lacks {', '.join(missing)}, which the run needs")
    return parser.parse_dict(values)[0]


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


def _flag_type(option: Field, kind, kinds: set):
    """`kind`, which makes values of the option's words, with none and lists in brackets as values too."""
    default = option.default if option.default_factory is MISSING else option.default_factory()

    def parse(word: str):
        # "none" is a value of some options, and may be the user's own name for what has no default.
        if word.lower() in ("none", "null") and default not in ("none", MISSING):
            if NoneType in kinds:
                return None
            raise argparse.ArgumentTypeError(f"it must have a value, got {word!r}; its default is {default!r}")
        if list in kinds and word.startswith("["):
            try:
                return yaml.load(word, _Loader)
            except yaml.YAMLError:
                raise argparse.ArgumentTypeError(f"expected a list such as '[a, b]', got {word!r}") from None
        return kind(word)

    parse.__name__ = getattr(kind, "__name__", str(kind))  # argparse names it in errors
    return parse


def _read_value(action: argparse.Action, value, kind, kinds: set, path: str):
    """`value`, of the file at `path`, as the option of `action` takes it, whose words on the command line are of the type `kind`."""
    if action.nargs != "+" or value is None:
        return _typed(action.dest, value, kind, kinds, path)
    entries = value if isinstance(value, list) else [value]  # one, written without brackets
    return [_typed(action.dest, entry, kind, {kind}, path) for entry in entries]


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
