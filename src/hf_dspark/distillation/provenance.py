"""How training rows came about: written beside each regenerated row, gathered when a draft is trained, kept in its config and card."""

import hashlib
import json
import logging
from collections import defaultdict
from importlib.metadata import version

from datasets import Dataset, IterableDataset
from transformers import PreTrainedTokenizerBase

from hf_dspark.distillation.arguments import DistillationArguments
from hf_dspark.modeling.uploading import public_name

__all__ = [
    "NUMBER_COLUMN",
    "PROVENANCE_COLUMN",
    "chat_template_sha256",
    "conversation",
    "conversations",
    "row_provenance",
    "sampling_in_words",
    "take_provenance",
    "training_data",
]

logger = logging.getLogger(__name__)

# A column of JSON text, the same in all rows of a run: it stays with the rows through copying, merging and uploading a dataset.
PROVENANCE_COLUMN = "provenance"
# The number of the conversation or prompt that a row was written for.
NUMBER_COLUMN = "row"


def row_provenance(target: str, revision: str | None, mode: str, **facts) -> str:
    """JSON text of what is known of regenerated rows. A local folder is named without its path; what is None is left out.

    Args:
        mode: "in process" or "server".
    """
    facts = {"target": public_name(target), "target_revision": revision, "mode": mode, **facts, "hf_dspark_version": version("hf-dspark")}
    return json.dumps({name: value for name, value in facts.items() if value is not None})


def chat_template_sha256(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Of the text of the chat template; None: there is none."""
    return None if tokenizer.chat_template is None else hashlib.sha256(tokenizer.get_chat_template().encode()).hexdigest()


def conversation(provenance, number) -> tuple[str, int] | None:
    """Which conversation of which run a row is of, from its columns; None: it does not say. One conversation may have several rows."""
    return (provenance, number) if isinstance(provenance, str) and provenance and isinstance(number, int) else None


def conversations(rows: Dataset) -> list[tuple[str, int] | None]:
    """`conversation` of each row."""
    if not {NUMBER_COLUMN, PROVENANCE_COLUMN} <= set(rows.column_names):
        return [None] * len(rows)
    runs, found = {}, []  # a run's long text is held once
    for batch in rows.select_columns([PROVENANCE_COLUMN, NUMBER_COLUMN]).with_format("arrow").iter(10_000):
        texts, numbers = (batch[name].to_pylist() for name in (PROVENANCE_COLUMN, NUMBER_COLUMN))
        found += [conversation(text, number) and (runs.setdefault(text, text), number) for text, number in zip(texts, numbers)]
    return found


def take_provenance(rows: Dataset | IterableDataset) -> tuple[Dataset | IterableDataset, list[dict]]:
    """(rows without their provenance, its distinct values), each value with its `share` of the rows and `token_share`, the largest
    first. Of rows without provenance the value has only the shares. Of a stream, no shares are known and the first row speaks for all."""
    if PROVENANCE_COLUMN not in (rows.column_names or []):
        return rows, []
    if not isinstance(rows, Dataset):
        first = next(iter(rows))[PROVENANCE_COLUMN]
        return rows.remove_columns(PROVENANCE_COLUMN), [_parsed(first)]
    counts, num_tokens = defaultdict(int), defaultdict(int)
    for batch in rows.select_columns([PROVENANCE_COLUMN, "input_ids"]).with_format("arrow").iter(10_000):
        lengths = batch["input_ids"].combine_chunks().value_lengths().to_pylist()
        for text, length in zip(batch[PROVENANCE_COLUMN].to_pylist(), lengths):
            counts[text] += 1
            num_tokens[text] += length
    total, all_tokens = sum(counts.values()), sum(num_tokens.values())
    ranked = sorted(counts, key=lambda text: (-counts[text], text))
    sources = [{**_parsed(text), "share": round(counts[text] / total, 4), "token_share": round(num_tokens[text] / all_tokens, 4)} for text in ranked]
    return rows.remove_columns(PROVENANCE_COLUMN), sources


def training_data(
    sources: list[dict], args: DistillationArguments, tokenizer: PreTrainedTokenizerBase, revision: str | None, weights: str | None = None
) -> dict:
    """What a draft's config keeps of its training rows: `regenerated_share` (of the rows, 0 to 1) and `regenerated_token_share` that the
    target itself wrote, its `sampling` in words, `chat_template_sha256`, and the `sources` of all regenerated rows. Warns of rows that
    another target or template wrote.

    Args:
        sources: from `take_provenance`.
        revision: the target's. weights: the fingerprint of its weights (`weights_fingerprint`, rounded), by which local folders are told apart.
    """
    regenerated = [source for source in sources if "target" in source]
    for source in regenerated:
        for problem in _disagreements(source, args, tokenizer, revision, weights):
            logger.warning("regenerated training rows: %s", problem)
    own = [source for source in regenerated if _is_own(source, public_name(args.target), weights)]
    facts = {
        "regenerated_share": _total(own, "share"),
        "regenerated_token_share": _total(own, "token_share"),
        "sampling": "; ".join(dict.fromkeys(map(sampling_in_words, own))) or None,
        "chat_template_sha256": ", ".join(dict.fromkeys(s["chat_template_sha256"] for s in sources if s.get("chat_template_sha256"))) or None,
        "sources": regenerated or None,
    }
    return {name: value for name, value in facts.items() if value is not None}


def sampling_in_words(source: dict) -> str:
    """The sampling of one source, such as "temperature 0.7, top-k 20, top-p 0.8"."""
    sampling = source.get("sampling", {})
    if not sampling.get("do_sample", True):
        return "greedy"
    plain = {"temperature": None, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
    shown = [f"{name.replace('_', '-')} {sampling[name]:g}" for name, off in plain.items() if sampling.get(name, off) != off]
    words = ", ".join(shown).replace("repetition-penalty", "repetition penalty")
    share = source.get("greedy_share")
    return words + (f", {share:.0%} of the rows greedy" if share else "")


def _is_own(source: dict, target: str, weights: str | None) -> bool:
    """Whether `target` itself wrote the rows of `source`: by the weights, where both are local folders that have them, else by the name."""
    is_local = str(source["target"]).startswith("./") and target.startswith("./")
    if is_local and weights and source.get("target_weights"):
        return source["target_weights"] == weights
    return source["target"] == target


def _disagreements(
    source: dict, args: DistillationArguments, tokenizer: PreTrainedTokenizerBase, revision: str | None, weights: str | None
) -> list[str]:
    target, theirs, problems = public_name(args.target), source.get("target_revision"), []
    is_own = _is_own(source, target, weights)
    if not is_own and source["target"] == target:
        problems.append(f"another {target} wrote them, whose weights are not those of the target at hand; it would write other text")
    elif not is_own:
        problems.append(f"{source['target']} wrote them, but the draft is trained for {target}, which would write other text")
    elif theirs and revision and theirs != revision:
        problems.append(f"revision {theirs} of {target} wrote them, the draft is trained for revision {revision}")
    template, own = source.get("chat_template_sha256"), chat_template_sha256(tokenizer)
    if template and template != own:
        problems.append(f"their chat template has the SHA-256 {template}, that of {target} is {own}")
    if source["mode"] == "server" and source.get("enable_thinking") != args.enable_thinking:
        problems.append(f"they were written with enable_thinking={source.get('enable_thinking')}, and are rendered with {args.enable_thinking}")
    return problems


def _total(sources: list[dict], name: str) -> float | None:
    shares = [source[name] for source in sources if name in source]
    return round(min(1.0, sum(shares)), 4) if shares else None


def _parsed(text: str | None) -> dict:
    """Facts of a column that others may have filled."""
    try:
        facts = json.loads(text or "{}")
    except ValueError:
        return {}
    return facts if isinstance(facts, dict) else {}
