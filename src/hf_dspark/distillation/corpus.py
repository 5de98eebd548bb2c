"""The source code of Python's own standard library as a small corpus that is present on every machine.

Modules, not lines, are split into training and held-out text, and near-duplicates (modules that share many runs of lines) are
removed first, so that a held-out module is really unseen.
"""

import hashlib
import sysconfig
from pathlib import Path

__all__ = ["held_out_split", "source_modules", "stdlib_modules", "train_tokenizer"]

_EXCLUDED_FOLDERS = {"site-packages", "test", "tests", "idle_test", "pydoc_data", "encodings", "__pycache__"}
_SHINGLE_LINES = 5
SPECIAL_TOKENS = ["<|pad|>", "<|bos|>", "<|eos|>", "<|mask|>"]


def stdlib_modules() -> dict[str, str]:
    """The standard library's modules, see `source_modules`."""
    return source_modules(Path(sysconfig.get_paths()["stdlib"]))


def source_modules(root: Path) -> dict[str, str]:
    """Source text by module path below `root`, without tests, tables (encodings, pydoc_data) and near-duplicates, in path order."""
    modules, seen = {}, set()
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if _EXCLUDED_FOLDERS & set(name.parts) or name.parts[0].startswith("config-"):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        shingles = _shingles(text)
        if not shingles or len(shingles & seen) > 0.2 * len(shingles):
            continue
        seen |= shingles
        modules[name.as_posix()] = text
    return modules


def held_out_split(modules: dict[str, str], num_held_out: int) -> tuple[dict[str, str], dict[str, str]]:
    """(training, held-out) modules: the first `num_held_out` of 2,000 to 20,000 characters in the order of a hash of their path.

    Raises:
        ValueError: there are fewer modules of that length than asked for.
    """
    candidates = [name for name, text in modules.items() if 2_000 <= len(text) <= 20_000]
    order = sorted(candidates, key=lambda name: hashlib.sha256(name.encode()).hexdigest())
    if not 0 < num_held_out < len(order):
        raise ValueError(f"num_held_out must lie between 1 and {len(order) - 1} (there are {len(order)} modules to choose from), got {num_held_out}")
    held_out = set(order[:num_held_out])
    return {n: t for n, t in modules.items() if n not in held_out}, {n: modules[n] for n in sorted(held_out)}


def train_tokenizer(texts: list[str], vocab_size: int):
    """A byte-level BPE tokenizer (`PreTrainedTokenizerFast`) of at most `vocab_size` entries, special tokens first."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=SPECIAL_TOKENS, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    pad, bos, eos, mask = SPECIAL_TOKENS
    # A prompt starts as a training text does.
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=pad, bos_token=bos, eos_token=eos, mask_token=mask)


def _shingles(text: str) -> set[int]:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return {hash(tuple(lines[i : i + _SHINGLE_LINES])) for i in range(len(lines) - _SHINGLE_LINES + 1)}
