"""Configuration of a DSpark draft model."""

from difflib import SequenceMatcher
from functools import wraps

import torch
from huggingface_hub.dataclasses import strict
from huggingface_hub.errors import StrictDataclassError
from transformers import Qwen3Config
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

__all__ = ["DSparkConfig", "spread_target_layers"]

MARKOV_HEAD_TYPES = ("vanilla", "gated", "rnn")
# Words of a misspelt key score above this beside the true ones; `boi` beside `bos`, words of two real keys, scores 0.67.
_TYPO_SIMILARITY = 0.75


def spread_target_layers(num_target_layers: int, num_layers: int = 5) -> list[int]:
    """0-based outputs of `num_layers` target layers, spread evenly from the second to the third last (the published drafts' choice)."""
    if num_target_layers < 2:
        raise ValueError(f"a target needs at least 2 layers, since its last one can't be captured; got num_target_layers={num_target_layers}")
    num_layers = min(num_layers, num_target_layers - 1)
    first, last = (1, num_target_layers - 3) if num_target_layers - 3 >= num_layers else (0, num_target_layers - 2)
    if num_layers == 1:
        return [(first + last) // 2]
    return [round(first + i * (last - first) / (num_layers - 1)) for i in range(num_layers)]


@strict
class DSparkConfig(Qwen3Config):
    """Options of [`DSparkDraftModel`]: a Qwen3 backbone plus the fields below (formats: DeepSpec's flat `config.json`).

    Args:
        block_size (`int`): B, draft tokens of one round; the anchor row predicts too.
        mask_token_id (`int`): row of the target's embedding that fills the block after the anchor.
        num_target_layers (`int`): layers of the target.
        target_layer_ids (`list[int]`): target layers whose outputs are the context features, 0-based, increasing; -1 is the
            embedding output. The last layer can't be named: transformers returns it after the final norm. None: spread evenly.
        sample_from_anchor (`bool`): the anchor row predicts (always True here; drafts trained otherwise are refused).
        markov_rank (`int`): rank of the Markov head; 0: none (DFlash as DeepSpec trains it).
        markov_head_type (`str`): "vanilla" (eq. 5), "gated" or "rnn" (eq. 6).
        enable_confidence_head (`bool`): whether the draft estimates its acceptance (eq. 7).
        confidence_head_with_markov (`bool`): whether that head also reads the embedding W1 of the previous token.
        draft_vocab_size (`int`, *optional*): the draft predicts only this many of the target's tokens and owns its output head;
            None: the target's vocabulary, through the target's head.
        num_anchors (`int`): blocks drawn for each training sequence.
        base_model_name_or_path, base_model_revision (`str`, *optional*): the target that the draft was trained for.

    Raises:
        ValueError: a combination that can't work, or an unknown key that looks like a misspelt one; the message names it.
    """

    num_hidden_layers: int = 5
    block_size: int = 7
    mask_token_id: int = 151669
    num_target_layers: int = 36
    target_layer_ids: list[int] | None = None
    sample_from_anchor: bool = True
    markov_rank: int = 256
    markov_head_type: str = "vanilla"
    enable_confidence_head: bool = True
    confidence_head_with_markov: bool = True
    draft_vocab_size: int | None = None
    num_anchors: int = 512
    base_model_name_or_path: str | None = None
    base_model_revision: str | None = None

    def __post_init__(self, **kwargs):
        for key in kwargs:
            for known in self.__dataclass_fields__:
                if key not in self.__dataclass_fields__ and _looks_misspelt(key, known):
                    raise ValueError(f"unknown option {key!r} (value {kwargs[key]!r}) in a DSparkConfig; did you mean {known!r}?")
        if isinstance(self.dtype, str) and not isinstance(getattr(torch, self.dtype, None), torch.dtype):
            raise ValueError(f"dtype must name a type of torch such as 'bfloat16', got {self.dtype!r}")
        theta, stated = kwargs.get("rope_theta"), (self.rope_parameters or {}).get("rope_theta")
        if theta is not None and stated is not None and theta != stated:
            raise ValueError(f"rope_theta={theta} and rope_parameters['rope_theta']={stated} disagree; a draft has one RoPE base")
        if self.target_layer_ids is None:
            self.target_layer_ids = spread_target_layers(self.num_target_layers)
        super().__post_init__(**kwargs)

    def validate_block(self):
        if self.block_size < 1:
            raise ValueError(f"block_size must be at least 1, got {self.block_size}")
        if not self.sample_from_anchor:
            raise ValueError(
                "sample_from_anchor=False (the anchor row of a block predicts nothing, as in z-lab's DFlash) is another layout than "
                "DSpark's; such drafts can't be used here"
            )
        if self.num_anchors < 1:
            raise ValueError(f"num_anchors must be at least 1, got {self.num_anchors}")

    def validate_vocabulary(self):
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise ValueError(f"mask_token_id {self.mask_token_id} lies outside the embedding of {self.vocab_size} rows (vocab_size)")
        stop_ids = self.eos_token_id if isinstance(self.eos_token_id, list) else [self.eos_token_id]
        if self.mask_token_id in stop_ids or self.mask_token_id == self.pad_token_id:
            raise ValueError(
                f"mask_token_id {self.mask_token_id} is also a stop or pad token (eos_token_id={self.eos_token_id}, "
                f"pad_token_id={self.pad_token_id}); choose a token that never occurs in text"
            )
        if self.draft_vocab_size is not None and not 1 <= self.draft_vocab_size <= self.vocab_size:
            raise ValueError(f"draft_vocab_size must lie between 1 and vocab_size={self.vocab_size}, got {self.draft_vocab_size}")
        if self.tie_word_embeddings:
            raise ValueError("tie_word_embeddings must be False: a draft borrows the target's tables, tied or not")

    def validate_target_layers(self):
        ids = self.target_layer_ids
        if not ids or ids != sorted(set(ids)):
            raise ValueError(f"target_layer_ids must be a non-empty, strictly increasing list, got {ids}")
        if ids[0] < -1 or ids[-1] >= self.num_target_layers:
            raise ValueError(f"target_layer_ids {ids} must lie between -1 (the embedding) and num_target_layers - 2 = {self.num_target_layers - 2}")
        if ids[-1] == self.num_target_layers - 1:
            raise ValueError(
                f"target_layer_ids {ids} name the target's last layer ({ids[-1]} of {self.num_target_layers}), whose output transformers "
                f"returns only after the final norm; use ids up to {self.num_target_layers - 2}"
            )

    def validate_heads(self):
        if self.markov_rank < 0:
            raise ValueError(f"markov_rank must be 0 (no Markov head) or positive, got {self.markov_rank}")
        if self.markov_head_type not in MARKOV_HEAD_TYPES:
            raise ValueError(f"markov_head_type must be one of {MARKOV_HEAD_TYPES}, got {self.markov_head_type!r}")
        if self.enable_confidence_head and self.confidence_head_with_markov and self.markov_rank == 0:
            raise ValueError(
                "confidence_head_with_markov=True reads the Markov head's embedding, but markov_rank is 0; "
                "set confidence_head_with_markov=False or a positive markov_rank"
            )

    def validate_backbone(self):
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.hidden_act not in ACT2FN:
            raise ValueError(f"hidden_act {self.hidden_act!r} is no activation that transformers knows, such as 'silu'")
        rope_type, theta = self.rope_parameters.get("rope_type", "default"), self.rope_parameters.get("rope_theta")
        if rope_type != "default" and rope_type not in ROPE_INIT_FUNCTIONS:
            raise ValueError(f"rope_type must be 'default' or one of {sorted(ROPE_INIT_FUNCTIONS)}, got {rope_type!r}")
        if isinstance(theta, bool) or not isinstance(theta, int | float) or not theta > 0:
            raise ValueError(f"rope_theta must be a positive number, got {theta!r}")
        if sliding := [kind for kind in self.layer_types if kind != "full_attention"]:
            raise ValueError(f"layer_types of a draft must all be 'full_attention', got {sliding[0]!r}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(f"num_attention_heads={self.num_attention_heads} must be a multiple of num_key_value_heads={self.num_key_value_heads}")

    def to_dict(self):
        return self._canonical(super().to_dict())

    def to_diff_dict(self):
        return self._canonical(super().to_diff_dict())

    def _canonical(self, values: dict) -> dict:
        """The layout every serving engine reads: DeepSpec's class name, both spellings of the RoPE base, no key of an absent head."""
        values["architectures"] = ["Qwen3DSparkModel"]
        values["sample_from_anchor"] = self.sample_from_anchor
        if "rope_theta" in self.rope_parameters:
            values["rope_theta"] = self.rope_parameters["rope_theta"]
        if self.markov_rank == 0:
            values.pop("markov_head_type", None)
        if not self.enable_confidence_head:
            values.pop("confidence_head_with_markov", None)
        return {key: value for key, value in values.items() if value is not None or key not in _WRITTEN_IF_SET}


def _looks_misspelt(key: str, known: str) -> bool:
    """Whether `key` resembles the option `known` word by word; a target's own `v_head_dim` or `swa_num_attention_heads` does not."""
    words, known_words = key.split("_"), known.split("_")
    if len(words) != len(known_words):
        return "".join(words) == "".join(known_words)
    return all(SequenceMatcher(None, word, known_word).ratio() >= _TYPO_SIMILARITY for word, known_word in zip(words, known_words))


def _raising_value_errors(init):
    """huggingface_hub's strict dataclasses raise an error class of their own; a bad option is a ValueError here."""

    @wraps(init)
    def __init__(self, *args, **kwargs):
        try:
            init(self, *args, **kwargs)
        except StrictDataclassError as error:
            raise ValueError(f"a DSparkConfig can't have these options: {error}") from error

    return __init__


DSparkConfig.__init__ = _raising_value_errors(DSparkConfig.__init__)

_WRITTEN_IF_SET = ("draft_vocab_size", "base_model_name_or_path", "base_model_revision")
