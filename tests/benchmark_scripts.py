"""The scripts in benchmarks/ as modules, which no package holds."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks"


def load_script(name: str) -> ModuleType:
    """benchmarks/`name`.py, executed anew."""
    specification = importlib.util.spec_from_file_location(f"{name}_benchmark", FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(specification)
    sys.modules[specification.name] = module  # its dataclasses look themselves up
    specification.loader.exec_module(module)
    return module
