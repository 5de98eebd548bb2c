"""Opening a pair (target, draft, tokenizer) and the prompts that a measurement uses."""

import json
import sysconfig
import warnings
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import PeftConfig, PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging
from transformers.utils.peft_utils import find_adapter_config_file

import hf_dspark.pair
from hf_dspark.modeling import DSparkDraftModel

__all__ = ["DEFAULT_PROMPTS", "Pair", "bundled_pair", "encode", "errors_named", "held_out_texts", "load_pair", "read_prompts", "usable_device"]

DTYPES = ("auto", "float32", "bfloat16", "float16")
# For checks of pairs of any kind when the user brings no prompts.
DEFAULT_PROMPTS = [
    "def fibonacci(n):\n",
    "The three largest cities of Japan are",
    "Q: A shop sells 12 apples for 3 dollars. How much are 20 apples?\nA:",
    "import os\n\n\nclass Cache:\n    def __init__(self, size):\n        self.size = size\n",
]


@dataclass(slots=True)
class Pair:
    """A target with a draft that fits it, the target's tokenizer, and the names both were loaded by."""

    target: PreTrainedModel
    draft: DSparkDraftModel
    tokenizer: PreTrainedTokenizerBase
    target_name: str
    draft_name: str

    @property
    def description(self) -> str:
        """One line for a report: names, class, dtype, device, block size."""
        target = f"{self.target_name} ({type(self.target).__name__}, {str(self.target.dtype).removeprefix('torch.')}, {self.target.device})"
        return f"target {target}, draft {self.draft_name} (block {self.draft.config.block_size})"


def bundled_pair() -> Path:
    """The folder of the pair that comes with the package; it holds `target` and `draft`."""
    return Path(hf_dspark.pair.__file__).parent


def load_pair(draft: str | None = None, target: str | None = None, dtype: str = "auto", device: str | None = None) -> Pair:
    """Loads a draft and its target, both from a folder or a hub id.

    Args:
        draft: a draft, or a PEFT adapter of one, which is merged. None: the bundled pair's.
        target: None: the one that the draft's config names (`base_model_name_or_path`); the bundled one for the bundled draft.
        dtype: of both models, one of `DTYPES`; "auto": as each was saved.
        device: None: the first GPU where there is one, else the CPU.

    Raises:
        ValueError: the target is named nowhere, or the draft does not fit it.
        OSError: there is no such folder or repository.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    for name, value in (("--draft", draft), ("--target", target)):
        if value == "":
            raise ValueError(f"{name} '' names nothing; give a folder or a hub id")
    if draft is None and target is not None:
        raise ValueError(f"a draft is needed for the target {target!r}; name it with --draft (the bundled draft fits the bundled target alone)")
    bundled = bundled_pair()
    if draft is None:
        draft, target = str(bundled / "draft"), str(bundled / "target")
        if not (bundled / "draft" / "config.json").exists():
            raise ValueError(f"the bundled pair is missing from {bundled}; install the package again, or name a pair with --draft and --target")
    for name, value in (("--draft", draft), ("--target", target)):
        if value is not None and (Path(value).is_absolute() or value.startswith(".")) and not Path(value).is_dir():
            raise FileNotFoundError(f"{name} {value}: there is no such folder")
    device = usable_device(device)
    with _without_loading_bars():
        draft_model, named_target = _load_draft(draft, dtype, target)
        option = "--target" if target else f"the target that {draft} names (base_model_name_or_path; --target replaces it)"
        target = target or named_target
        with errors_named(option, target):
            target_model = AutoModelForCausalLM.from_pretrained(target, dtype=dtype)
            tokenizer = AutoTokenizer.from_pretrained(target)
    target_model.to(device).eval()
    draft_model.to(device).eval().bind(target_model)
    return Pair(target_model, draft_model, tokenizer, str(target), str(draft))


def _load_draft(name: str, dtype: str, target: str | None) -> tuple[DSparkDraftModel, str | None]:
    """A draft, or that which an adapter was trained over with the adapter merged into it; and the target that its config names.

    Raises:
        ValueError: the target is neither given nor named, or an adapter's.
    """
    if find_adapter_config_file(name) is None:
        with errors_named("--draft", name):
            draft = DSparkDraftModel.from_pretrained(name, dtype=dtype)
        named = draft.config.base_model_name_or_path
        if not target and not named:
            raise ValueError(f"{name} does not name the target it was trained for (base_model_name_or_path of its config); name it with --target")
        return draft, named
    base = PeftConfig.from_pretrained(name).base_model_name_or_path
    if not base:
        raise ValueError(f"{name} holds an adapter that does not name the draft it was trained over (base_model_name_or_path)")
    with errors_named(f"the draft that the adapter {name} was trained over (base_model_name_or_path in its adapter_config.json)", base):
        draft = DSparkDraftModel.from_pretrained(base, dtype="float32")
    if not target:
        # The draft's own target need not be the adapter's.
        own = draft.config.base_model_name_or_path
        of_draft = f", which may be a fine-tune of {own}, the one of its draft {base}" if own else ""
        raise ValueError(f"{name} holds an adapter that does not name the target it was trained for{of_draft}; name it with --target")
    with warnings.catch_warnings():
        # PEFT asks by the name that transformers is about to drop.
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing", category=FutureWarning)
        adapted = PeftModel.from_pretrained(draft, name)
    return adapted.merge_and_unload().to(torch.float32 if dtype == "auto" else getattr(torch, dtype)), None


@contextmanager
def errors_named(option: str, name: str):
    """What transformers says of a model that isn't there gets the `option` that asked for it and the `name` that was looked for.

    Raises:
        FileNotFoundError: in place of transformers' OSError, unless `name` is a folder here, of which transformers says what it lacks.
    """
    try:
        yield
    except OSError as error:
        if Path(name).is_dir():
            raise
        cause = str(error).strip().splitlines()[0]
        raise FileNotFoundError(f"{option}: {name!r} is no folder here, and the Hub does not give it ({cause})") from error


def encode(pair: Pair, text: str, raw: bool = False) -> torch.Tensor:
    """`text` as ids (1, tokens) on the target's device, through the chat template where the tokenizer has one and `raw` is False.

    Raises:
        ValueError: there is no token, or no room for an answer in the target's context.
    """
    if not text:
        raise ValueError("the prompt is empty ''; give it some text")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"the prompt is not valid UTF-8 (at character {error.start}); give it as text") from error
    if pair.tokenizer.chat_template and not raw:
        messages = [{"role": "user", "content": text}]
        ids = pair.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    else:
        ids = pair.tokenizer(text)["input_ids"]
    if not ids:
        raise ValueError(f"the tokenizer of {pair.target_name} makes no token of the prompt {text!r}")
    context = pair.target.config.get_text_config().max_position_embeddings
    if len(ids) >= context:
        raise ValueError(f"the prompt has {len(ids)} tokens, but the context of {pair.target_name} ends at {context}; shorten it")
    return torch.tensor([ids], device=pair.target.device)


def read_prompts(path: str) -> list[str]:
    """The prompts of a JSONL file, each line with `turns` (a list, whose first is taken) or `prompt`.

    Raises:
        ValueError: a line is not such an object, or there is none; names the line.
        OSError: the file can't be read.
    """
    prompts = []
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            prompt = entry["turns"][0] if "turns" in entry else entry["prompt"]
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise ValueError(f'{path}, line {number}: expected {{"turns": ["..."]}} or {{"prompt": "..."}}, got {line[:80]!r}') from error
        if not isinstance(prompt, str):
            raise ValueError(f"{path}, line {number}: the prompt must be a text, got {prompt!r}")
        prompts.append(prompt)
    if not prompts:
        raise ValueError(f"{path} holds no prompt")
    return prompts


def held_out_texts(target_folder: str, num_texts: int) -> list[str]:
    """The first `num_texts` modules of Python's standard library that training left out, as far as this machine has them.

    `pretraining.json` beside a target that `hf-dspark pretrain` made names them; for any other target the split is made anew.

    Raises:
        ValueError: there are fewer of them.
    """
    report = Path(target_folder) / "pretraining.json"
    if report.exists():
        root = Path(sysconfig.get_paths()["stdlib"])
        names = json.loads(report.read_text(encoding="utf-8"))["held_out_modules"]
        texts = [(root / name).read_text(encoding="utf-8") for name in names if (root / name).exists()]
    else:
        from hf_dspark.distillation.corpus import held_out_split, stdlib_modules

        texts = list(held_out_split(stdlib_modules(), 96)[1].values())
    if not 0 < num_texts <= len(texts):
        raise ValueError(f"the number of held-out modules must lie between 1 and {len(texts)}, got {num_texts}")
    return texts[:num_texts]


def usable_device(device: str | None) -> torch.device:
    """The device of that name; None: the first GPU where there is one, else the CPU.

    Raises:
        ValueError: it can't be used here.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"the device {device!r} can't be used here: {str(error).splitlines()[0]}") from error


@contextmanager
def _without_loading_bars():
    enabled = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            transformers_logging.enable_progress_bar()
