"""Recipes: options of a training run in a YAML file, checked, with flags of the same names that override them."""

import argparse
from dataclasses import MISSING, fields
from difflib import get_close_matches
from pathlib import Path

import yaml
from transformers import HfArgumentParser
from transformers.hf_argparser import string_to_bool

import hf_dspark.recipes

__all__ = ["read_recipe"]


class _FlagParser(HfArgumentParser):
    def error(self, message):
        raise ValueError(f"{message}; RECIPE.yaml --help lists all options")


def read_recipe(argument_class: type, path: str, overrides: list[str] = ()):
    """An `argument_class` (a dataclass of options) from the YAML file at `path`, or the recipe of that name in the package.

    Args:
        overrides: `--option value` flags, which replace the file's options.

    Raises:
        ValueError: an unknown option (named, with the closest real ones), or a value of the wrong type.
        OSError: there is no such file.
    """
    parser = _FlagParser(argument_class, allow_abbrev=False, prog="RECIPE.yaml", usage="RECIPE.yaml [--option value ...]")
    actions = {}
    for action in parser._actions:
        # What is absent from the command line must not hide what the file says. A bool has two flags, of which the first takes a value.
        action.default, action.required = argparse.SUPPRESS, False
        actions.setdefault(action.dest, action)
    names = [field.name for field in fields(argument_class) if field.init]
    flags, unknown = parser.parse_known_args(list(overrides))
    if unknown:
        raise ValueError(_unknown(unknown[0], "on the command line", names))
    values = _read_yaml(path)
    for name, value in values.items():
        if name not in names:
            raise ValueError(_unknown(str(name), f"in {path}", names))
        kind, is_list = actions[name].type, actions[name].nargs in ("+", "*") and isinstance(value, list)
        values[name] = [_typed(name, entry, kind, path) for entry in value] if is_list else _typed(name, value, kind, path)
    values |= vars(flags)
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
        values = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} is not valid YAML: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{file} must hold lines of the form 'option: value', got {type(values).__name__} {str(values)[:60]!r}")
    return values


def _typed(name: str, value, kind, path: str):
    """`value` for an option of the type `kind`. YAML reads 6e-4 and "false" as text, and a dataclass would keep them as text."""
    if value is None or kind not in (int, float, string_to_bool):
        return value
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
