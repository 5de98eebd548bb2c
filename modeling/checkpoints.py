"""Reading and writing draft checkpoints: which format a folder holds, whether its tensors are all there, saving without half states."""

import json
import os
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from transformers import GenerationConfig, PreTrainedConfig
from transformers.utils import cached_file

__all__ = ["Checkpoint", "read_checkpoint", "save_folder"]

_WEIGHT_FILES = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json")
TABLE_NAMES = ("embed_tokens.weight", "lm_head.weight")
_HUB_OPTIONS = ("cache_dir", "force_download", "proxies", "token", "revision", "local_files_only", "subfolder")
_FLOAT_TYPES = ("F64", "F32", "F16", "BF16")
# Guessing one of these gives a draft that loads, runs and is never accepted.
_REQUIRED_KEYS = ("block_size", "mask_token_id", "num_target_layers", "target_layer_ids", "markov_rank", "enable_confidence_head")


@dataclass(slots=True)
class Checkpoint:
    """What `DSparkDraftModel.from_pretrained` needs to know before the weights are loaded."""

    config: PreTrainedConfig
    stored_tables: dict[str, torch.Tensor]
    generation_config: GenerationConfig | None


def read_checkpoint(model_class, name_or_path, options: dict) -> Checkpoint:
    """Checks the format, the config and every tensor's name and shape; reads copies of the target's tables.

    Raises:
        ValueError: see `DSparkDraftModel.from_pretrained`.
        OSError: there is no such folder, repository or file.
    """
    hub_options = {key: options[key] for key in _HUB_OPTIONS if key in options}
    folder = Path(name_or_path)
    if folder.is_absolute() and not folder.is_dir():
        raise OSError(f"{folder} is no folder; give the folder of a draft, or the id of a repository on the Hub")
    if (folder / "adapter_config.json").exists() and not (folder / "config.json").exists():
        loading = f"PeftModel.from_pretrained(DSparkDraftModel.from_pretrained(base), {str(name_or_path)!r})"
        raise ValueError(f"{name_or_path} holds a PEFT adapter alone; load it with {loading}")
    config_file = cached_file(name_or_path, "config.json", **hub_options)
    if config_file is None:  # the one file that transformers does not miss loudly
        raise OSError(f"{name_or_path} has no config.json, so no draft can be loaded from it")
    values = _read_json(config_file)
    if (problem := unsupported_format(values)) is not None:
        raise ValueError(f"{name_or_path} can't be loaded as a DSpark draft: {problem}")
    missing = [key for key in _REQUIRED_KEYS if values.get(key) is None]
    if values.get("rope_theta") is None and (values.get("rope_parameters") or {}).get("rope_theta") is None:
        missing.append("rope_parameters with a rope_theta")
    if missing:
        raise ValueError(f"{name_or_path}/config.json lacks {', '.join(missing)}; a DSpark draft's config states them, they can't be guessed")
    config = options.get("config")
    if config is None:
        # As in transformers, an argument that is an option of the config replaces the file's value.
        names = set(model_class.config_class.__dataclass_fields__) - {"dtype"}
        config = model_class.config_class.from_dict(values | {key: options.pop(key) for key in sorted(names & set(options))})
    if not isinstance(config, model_class.config_class):
        raise ValueError(f"config must be a {model_class.config_class.__name__}, got {type(config).__name__}")
    files = _weight_files(name_or_path, hub_options)
    check_tensors(model_class, config, files, str(name_or_path))
    generation_file = _optional_file(name_or_path, "generation_config.json", hub_options)
    return Checkpoint(
        config=config,
        stored_tables=_read_tables(config, files),
        generation_config=None if generation_file is None else GenerationConfig.from_dict(_read_json(generation_file)),
    )


def unsupported_format(values: dict) -> str | None:
    """Why a `config.json` is no DeepSpec-layout draft on the Qwen3 backbone, in a sentence that names its format; None if it is one."""
    architectures, dflash = values.get("architectures") or [], values.get("dflash_config") or {}
    if not isinstance(architectures, list) or not all(isinstance(name, str) for name in architectures) or not isinstance(dflash, dict):
        return f"its config.json is malformed (architectures {architectures!r}, dflash_config {dflash!r})"
    projector = dflash.get("projector_type")
    if "speculators_model_type" in values:
        return f"it is in vLLM's speculators format (speculators_model_type {values['speculators_model_type']!r}), whose layer ids are shifted by one"
    if "dspark_block_size" in values or "dspark_target_layer_ids" in values:
        return "it is a base model with its draft inside (dspark_* keys, as DeepSeek-V4 has), not a draft of its own"
    if "ttt_length" in values or any("Eagle3" in name for name in architectures):
        return f"it is an Eagle3 draft (architectures {architectures})"
    if other_backbones := [name for name in architectures if name.endswith("DSparkModel") and name != "Qwen3DSparkModel"]:
        return f"it is a DSpark draft on another backbone ({other_backbones[0]}), which is not implemented"
    if architectures == ["Qwen3DSparkModel"] and values.get("model_type") == "qwen3":
        return None
    if projector == "dspark":
        maker = "NVIDIA Model-Optimizer" if "DFlashDraftModel" in architectures else "SpecForge"
        return f"it is in {maker}'s DSpark format (heads described in dflash_config, other tensor names)"
    if projector is not None:
        return f"it is a DFlash-like draft with projector_type {projector!r}"
    if "DFlash2DraftModel" in architectures:
        return "it is a DFlash2 draft, another architecture"
    if "DFlashDraftModel" in architectures or dflash:
        return "it is z-lab's DFlash format, whose anchor row predicts nothing (block_size - 1 drafts a round)"
    if values.get("model_type") == "muse_glimmer_assistant":
        return "it is transformers' own DFlash assistant; use it with speculation_type='dflash'"
    return f"its architectures are {architectures} and its model_type is {values.get('model_type')!r}, not ['Qwen3DSparkModel'] and 'qwen3'"


def check_tensors(model_class, config, files: list[str], name: str) -> None:
    """Accounts for every tensor both ways. Raises ValueError that names the missing, extra and misshapen ones."""
    with torch.device("meta"):
        expected = {key: tuple(value.shape) for key, value in model_class(config).state_dict().items()}
    found, problems = {}, []
    for file in files:
        try:
            with safe_open(file, framework="pt") as tensors:
                for key in tensors.keys():  # noqa: SIM118 (an open file is no dict)
                    stored = tensors.get_slice(key)
                    found[key] = tuple(stored.get_shape())
                    if (stored.get_dtype() in _FLOAT_TYPES) == (key == "d2t"):
                        problems.append(f"{key} is stored as {stored.get_dtype()}")
        except SafetensorError as error:
            raise ValueError(f"{file} is damaged or truncated and can't be read ({error}); download or save it again") from error
    table_shape = (config.vocab_size, config.hidden_size)
    optional = {key: table_shape for key in TABLE_NAMES if key not in expected and key in found}
    problems += [f"missing {key} {expected[key]}" for key in expected if key not in found]
    problems += [f"unexpected {key} {found[key]}" for key in found if key not in expected and key not in optional]
    problems += [
        f"{key} has shape {found[key]}, the config asks for {shape}"
        for key, shape in {**expected, **optional}.items()
        if found.get(key, shape) != shape
    ]
    if problems:
        raise ValueError(f"the tensors of {name} are not those its config.json describes: " + "; ".join(problems))


def save_folder(model, folder, extra: dict[str, torch.Tensor], save_pretrained, options: dict) -> None:
    """Writes into a temporary folder inside `folder`, then moves the files up; config.json leaves first and arrives last."""
    folder = Path(folder)
    if options.get("variant") is not None:
        raise ValueError(f"variant={options['variant']!r} is not supported: a draft's weights are in model.safetensors; save to a folder of its own")
    if folder.is_file():
        raise ValueError(f"save_pretrained needs a folder, but {folder} is a file")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".saving-") as scratch:
        scratch = Path(scratch)
        save_pretrained(scratch, **options)
        if not (scratch / "config.json").exists():
            return  # one of several processes, another of which writes
        model.generation_config.save_pretrained(scratch)
        if extra:
            _add_tensors(scratch, extra)
        _replace_checkpoint(folder, scratch)


def _replace_checkpoint(folder: Path, scratch: Path) -> None:
    (folder / "config.json").unlink(missing_ok=True)
    # A stale shard or index of an earlier save would be read in place of the new weights.
    for stale in folder.iterdir():
        if _WEIGHT_FILES.fullmatch(stale.name):
            stale.unlink()
    written = sorted(path for path in scratch.rglob("*") if path.is_file())
    for path in sorted(written, key=lambda path: path.name == "config.json"):
        destination = folder / path.relative_to(scratch)
        destination.parent.mkdir(parents=True, exist_ok=True)
        os.replace(path, destination)


def _add_tensors(folder: Path, extra: dict[str, torch.Tensor]) -> None:
    single = folder / "model.safetensors"
    if not single.exists():
        raise ValueError("a draft that carries the target's tables is written as one file; leave max_shard_size at its default")
    tensors = load_file(single) | {name: table.detach().cpu().contiguous() for name, table in extra.items()}
    save_file(tensors, single, metadata={"format": "pt"})


def _weight_files(name_or_path, hub_options: dict) -> list[str]:
    """The files that transformers loads: a single one where there is one, else the shards of the index."""
    if (single := _optional_file(name_or_path, "model.safetensors", hub_options)) is not None:
        return [single]
    index_file = _optional_file(name_or_path, "model.safetensors.index.json", hub_options)
    if index_file is None:
        return [cached_file(name_or_path, "model.safetensors", **hub_options)]  # raises what transformers raises
    index = _read_json(index_file)
    if not isinstance(index.get("weight_map"), dict) or "metadata" not in index:
        raise ValueError(f"{index_file} is no index of a sharded checkpoint: it lacks weight_map or metadata")
    return [cached_file(name_or_path, shard, **hub_options) for shard in sorted(set(index["weight_map"].values()))]


def _optional_file(name_or_path, name: str, hub_options: dict) -> str | None:
    # Offline, a file that was never there can't be told from one that was never downloaded.
    flags = dict(_raise_exceptions_for_missing_entries=False, _raise_exceptions_for_connection_errors=False)
    return cached_file(name_or_path, name, **flags, **hub_options)


def _read_tables(config, files: list[str]) -> dict[str, torch.Tensor]:
    tables = {}
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            names = set(tensors.keys())
            for key in TABLE_NAMES:
                # With a reduced vocabulary the output head is the draft's own parameter.
                if key in names and not (key == "lm_head.weight" and config.draft_vocab_size is not None):
                    tables[key] = tensors.get_tensor(key)
    return tables


def _read_json(path: str) -> dict:
    try:
        values = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(values).__name__}")
    return values
