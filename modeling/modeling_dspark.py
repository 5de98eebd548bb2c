"""The DSpark draft model: a small backbone with injected context, and the heads of the sequential stage.

Source: "DSpark: Confidence-Scheduled Speculative Decoding with Semi-Autoregressive Generation" (Cheng et al., 2026), section 3.1.
Axis words: `batch`; `context` tokens the target has processed; `rows` block positions; `hidden`; `vocab`.
"""

import shutil
import tempfile
import weakref
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedModel
from transformers import initialization as init
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP, Qwen3RMSNorm, Qwen3RotaryEmbedding, eager_attention_forward, rotate_half

from .checkpoints import read_checkpoint, save_folder
from .configuration_dspark import DSparkConfig
from .context_cache import ContextCache, PackedContext
from .heads import ConfidenceHead, MarkovHead
from .target_tables import TargetTables, check_fit
from .uploading import COMPANIONS, upload_draft

__all__ = ["DSparkDraftModel"]

_PUSH_OPTIONS = ("repo_id", "commit_message", "commit_description", "private", "token", "revision", "create_pr", "tags")


class DSparkAttention(nn.Module):
    """Queries from the block; keys and values from context features (KV injection, eq. 3) and block, at true positions."""

    def __init__(self, config: DSparkConfig, layer_idx: int):
        super().__init__()
        self.config, self.layer_idx = config, layer_idx
        self.head_dim = config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = self.head_dim**-0.5
        self.attention_dropout = config.attention_dropout
        self.is_causal = False
        hidden, heads, kv_heads = config.hidden_size, config.num_attention_heads, config.num_key_value_heads
        self.q_proj = nn.Linear(hidden, heads * self.head_dim, bias=config.attention_bias)
        self.k_proj = nn.Linear(hidden, kv_heads * self.head_dim, bias=config.attention_bias)
        self.v_proj = nn.Linear(hidden, kv_heads * self.head_dim, bias=config.attention_bias)
        self.o_proj = nn.Linear(heads * self.head_dim, hidden, bias=config.attention_bias)
        self.q_norm = Qwen3RMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.k_norm = Qwen3RMSNorm(self.head_dim, eps=config.rms_norm_eps)

    def forward(
        self,
        rows: torch.Tensor,
        context_features: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None,
        cache: ContextCache | PackedContext | None,
    ) -> torch.Tensor:
        """`rows` (batch, rows, hidden) normed, `context_features` (batch, new, hidden) -> (batch, rows, hidden)."""
        batch, num_rows, _ = rows.shape
        sources = torch.cat([context_features, rows], dim=1)  # (batch, new + rows, hidden)
        queries = self.q_norm(self.q_proj(rows).view(batch, num_rows, -1, self.head_dim)).transpose(1, 2)
        keys = self.k_norm(self.k_proj(sources).view(batch, sources.shape[1], -1, self.head_dim)).transpose(1, 2)
        values = self.v_proj(sources).view(batch, sources.shape[1], -1, self.head_dim).transpose(1, 2)
        cos, sin = (table.unsqueeze(1) for table in position_embeddings)
        keys = keys * cos + rotate_half(keys) * sin
        cos, sin = cos[:, :, -num_rows:], sin[:, :, -num_rows:]
        queries = queries * cos + rotate_half(queries) * sin
        segments = [(slice(None), keys, values)] if cache is None else cache.segments(self.layer_idx, keys, values)
        attention = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        # A draft that decodes between two training steps must not drop anything.
        dropout = self.attention_dropout if self.training and cache is None else 0.0
        outputs = [
            attention(self, queries[:, :, own], keys, values, attention_mask, dropout=dropout, scaling=self.scaling)[0]
            for own, keys, values in segments
        ]
        output = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)  # (batch, rows, heads, head_dim)
        return self.o_proj(output.reshape(batch, num_rows, -1))


class DSparkLayer(GradientCheckpointingLayer):
    """Pre-norm attention and feed-forward over the block; the context stream passes through unnormed and unchanged."""

    def __init__(self, config: DSparkConfig, layer_idx: int):
        super().__init__()
        self.self_attn = DSparkAttention(config, layer_idx)
        self.mlp = Qwen3MLP(config)
        self.input_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, rows, context_features, position_embeddings, attention_mask, cache):
        rows = rows + self.self_attn(self.input_layernorm(rows), context_features, position_embeddings, attention_mask, cache)
        return rows + self.mlp(self.post_attention_layernorm(rows))


class DSparkDraftModel(PreTrainedModel):
    """Drafts a block of tokens for a target model whose hidden states, embedding and output head it borrows.

    `DSparkDraftModel.from_pretrained(folder or hub id)` is the only door; pass the result as
    `target.generate(..., assistant_model=draft)`. The knobs of decoding are in `draft.generation_config`.
    """

    config: DSparkConfig
    config_class = DSparkConfig
    base_model_prefix = ""
    main_input_name = "block_ids"
    supports_gradient_checkpointing = True
    _no_split_modules = ["DSparkLayer"]
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    # Copies of the target's tables are read apart from the parameters (see `bind`).
    _keys_to_ignore_on_load_unexpected = [r"^embed_tokens\.weight$", r"^lm_head\.weight$"]

    def __init__(self, config: DSparkConfig):
        super().__init__(config)
        self.fc = nn.Linear(len(config.target_layer_ids) * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList([DSparkLayer(config, layer_idx) for layer_idx in range(config.num_hidden_layers)])
        self.norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = Qwen3RotaryEmbedding(config)
        self.markov_head = MarkovHead(config) if config.markov_rank > 0 else None
        self.confidence_head = ConfidenceHead(config) if config.enable_confidence_head else None
        if config.draft_vocab_size is not None:
            self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
            # Offsets: draft token i is the target's token i + d2t[i].
            self.d2t = nn.Buffer(torch.zeros(config.draft_vocab_size, dtype=torch.long))
        self.generation_config = default_generation_config()
        self.stored_tables: dict[str, torch.Tensor] = {}
        # Where the draft was loaded from or last saved to, if that is a folder here: its card lies there.
        self.folder: Path | None = None
        self._tables: TargetTables | None = None
        # Targets whose head has been compared with their own logits (once each, at their first generate()).
        self.checked_targets: weakref.WeakSet = weakref.WeakSet()
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module):
        super()._init_weights(module)
        if module is self and self.config.draft_vocab_size is not None:
            init.zeros_(self.d2t)

    def bind(self, target: PreTrainedModel) -> "DSparkDraftModel":
        """Borrows `target`'s embedding and output head (weakly); generate() and the trainer call this.

        Raises:
            ValueError: the draft does not fit the target; the message has both values.
        """
        check_fit(self.config, target)  # also of a bound target, which may have been resized since
        if self._tables is None or self._tables._target() is not target:
            self._tables = TargetTables(self.config, target, self.stored_tables)
            kept = {"embed_tokens.weight": self._tables.own_embedding, "lm_head.weight": self._tables.own_head}
            self.stored_tables = {name: table for name, table in self.stored_tables.items() if kept[name] is not None}
        return self

    @property
    def tables(self) -> TargetTables:
        """The borrowed tables. Raises ValueError before `bind`."""
        if self._tables is None:
            raise ValueError(
                "this draft is not bound to a target, whose embedding and output head it borrows; call draft.bind(target), or pass it as "
                "target.generate(..., assistant_model=draft)"
            )
        return self._tables

    def context_features(self, hidden_states: list[torch.Tensor]) -> torch.Tensor:
        """Eq. 2: outputs of the chosen target layers, each (batch, tokens, hidden), -> features (batch, tokens, hidden)."""
        weight = self.fc.weight
        hidden = torch.cat([layer.to(weight.device, weight.dtype) for layer in hidden_states], dim=-1)
        return self.hidden_norm(self.fc(hidden))

    def forward(
        self,
        block_ids: torch.Tensor | None = None,
        context_features: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        cache: ContextCache | PackedContext | None = None,
        within: Callable[["DSparkDraftModel"], Any] | None = None,
    ) -> torch.Tensor:
        """The parallel stage over `rows` block positions.

        Args:
            block_ids: (batch, rows) long, anchors and mask tokens.
            context_features: (batch, new, hidden), of the tokens that `cache` does not hold yet.
            position_ids: (batch, new + rows) long, true positions of the context features, then of the block.
            attention_mask: what the attention implementation takes, over (rows, context + rows); None: everything is seen.
            cache: the draft's keys and values; new ones are written behind it, `cache.advance(new)` keeps the context's. A
                [`PackedContext`] holds those of several requests, whose blocks (and contexts) follow one another in one row.
            within: called with this draft, in place of all that; its result is returned. Training computes a whole loss so: where parameters
                are sharded, they are whole inside a forward alone.

        Returns:
            h (batch, rows, hidden) after the final norm, which feeds the output head and the heads of the sequential stage.

        Raises:
            ValueError: the draft is not bound to a target.
        """
        if within is not None:
            return within(self)
        rows = self.tables.embed(block_ids).to(context_features.device, context_features.dtype)
        position_embeddings = self.rotary_emb(rows, position_ids)
        for layer in self.layers:
            rows = layer(rows, context_features, position_embeddings, attention_mask, cache)
        return self.norm(rows)

    def get_input_embeddings(self) -> None:
        """None: the embedding is the target's. What shards or resizes models asks for it."""

    def get_output_embeddings(self) -> None:
        """None: the head is the target's, or one of the draft's own, which is called once for each piece of a loss."""

    def base_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """U_k: `hidden` (rows..., hidden) -> (rows..., vocab), through the target's head or the draft's own (reduced vocabulary)."""
        head = self.lm_head if self.config.draft_vocab_size is not None else None
        return self.tables.logits(hidden, head).to(hidden.device)

    def target_ids(self, draft_ids: torch.Tensor) -> torch.Tensor:
        """Ids of the draft's vocabulary as ids of the target's; the same ones unless `draft_vocab_size` is set."""
        return draft_ids if self.config.draft_vocab_size is None else draft_ids + self.d2t[draft_ids]

    def check_vocabulary_map(self) -> None:
        """Raises ValueError unless d2t names increasing ids of the target's vocabulary."""
        if self.config.draft_vocab_size is None:
            return
        ids = self.target_ids(torch.arange(self.config.draft_vocab_size, device=self.d2t.device))
        if ids[0] < 0 or ids[-1] >= self.config.vocab_size or (ids.diff() < 1).any():
            raise ValueError(
                f"d2t must hold offsets, draft token i being the target's token i + d2t[i], and name increasing ids below {self.config.vocab_size}; "
                f"got ids from {ids.min().item()} to {ids.max().item()}"
            )

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *args, output_loading_info: bool = False, **kwargs):
        """Reads DeepSpec's layout, with or without copies of the target's tables; arguments as in transformers.

        Raises:
            ValueError: another format (named), a damaged file, a missing, extra or misshapen tensor, a d2t that names no increasing ids
                of the target's vocabulary, a config that can't work.
            OSError: there is no such folder, repository or file.
        """
        checkpoint = read_checkpoint(cls, pretrained_model_name_or_path, kwargs)
        kwargs.setdefault("config", checkpoint.config)
        draft, info = super().from_pretrained(pretrained_model_name_or_path, *args, output_loading_info=True, **kwargs)
        draft.check_vocabulary_map()
        draft.stored_tables = checkpoint.stored_tables
        folder = Path(pretrained_model_name_or_path, kwargs.get("subfolder") or "").absolute()
        draft.folder = folder if folder.is_dir() else None
        draft.generation_config = checkpoint.generation_config or default_generation_config()
        return (draft, info) if output_loading_info else draft

    def save_pretrained(self, save_directory, slim: bool = True, push_to_hub: bool = False, **kwargs):
        """Writes the canonical layout: config, weights, generation config; never a folder that loads as if whole while half-written.

        Args:
            slim: leave out the target's embedding and head. False: write them too (for DeepSpec and engines that need them).
                Copies that came with the checkpoint are kept while no target has been seen that computes the same.
            push_to_hub: upload the folder's draft too, as `push_to_hub` does and with its options; `repo_id` is the folder's name by default.

        Raises:
            ValueError: slim=False and a table of the target can't be read (unbound, quantised, or no plain weight), or push_to_hub=True
                with slim=False.
        """
        hub_options = {name: kwargs.pop(name) for name in _PUSH_OPTIONS if name in kwargs}
        if push_to_hub and not slim:
            raise ValueError("push_to_hub=True uploads the slim layout, got slim=False; save with slim=False, then upload the folder")
        extra = dict(self.stored_tables) if slim else self._all_tables()
        save_folder(self, save_directory, extra, super().save_pretrained, kwargs)
        if not kwargs.get("is_main_process", True):
            return
        self.folder = Path(save_directory).absolute()
        if push_to_hub:
            repo_id = hub_options.pop("repo_id", self.folder.name)
            upload_draft(self.folder, repo_id, tags=self._tags(hub_options.pop("tags", None)), **hub_options)

    def push_to_hub(self, repo_id: str, *, max_shard_size: int | str = "50GB", tags: list[str] | str | None = None, **hub_options):
        """Uploads the draft, slim: weights, config, generation config; with the README.md and training_args.json of the folder that it
        was loaded from or last saved to. Without a README.md there the repository keeps its own, or gets a few lines; never transformers'
        template.

        Args:
            hub_options: `private`, `token`, `revision`, `create_pr`, `commit_message`, `commit_description`, as in transformers.

        Raises:
            ValueError: a PEFT adapter lies over the draft; or private=True, and the repository exists and is public.
        """
        if unknown := sorted(set(hub_options) - set(_PUSH_OPTIONS)):
            raise TypeError(f"push_to_hub takes no {', '.join(unknown)}; its options are {', '.join(_PUSH_OPTIONS)} and max_shard_size")
        if hasattr(self, "peft_config"):
            raise ValueError(
                "push_to_hub can't upload a draft under a PEFT adapter, whose weights have other names; merge it first (merge_and_unload()), "
                "or save the adapter and upload its folder with hf_dspark.hub.upload_draft"
            )
        with tempfile.TemporaryDirectory() as scratch:
            save_folder(self, scratch, dict(self.stored_tables), super().save_pretrained, {"max_shard_size": max_shard_size})
            for name in COMPANIONS if self.folder is not None else ():
                if (self.folder / name).is_file():
                    shutil.copy(self.folder / name, scratch)
            return upload_draft(scratch, repo_id, tags=self._tags(tags), **hub_options)

    def _tags(self, tags: list[str] | str | None) -> list[str]:
        return [*(self.model_tags or []), *([tags] if isinstance(tags, str) else tags or [])]

    def _all_tables(self) -> dict[str, torch.Tensor]:
        """The copies that came with the checkpoint, and the target's own tables in place of those that did not."""
        tables = dict(self.stored_tables)
        if "embed_tokens.weight" not in tables:
            tables["embed_tokens.weight"] = self._read_table("embed_tokens.weight", self.tables.target.get_input_embeddings())
        if "lm_head.weight" not in tables and self.config.draft_vocab_size is None:
            tables["lm_head.weight"] = self._read_table("lm_head.weight", self.tables.target.get_output_embeddings())
        return tables

    def _read_table(self, name: str, module: nn.Module) -> torch.Tensor:
        kind, shape = type(module).__name__, (self.config.vocab_size, self.config.hidden_size)
        try:
            table = module.weight.detach()
        except Exception as error:
            raise ValueError(f"slim=False needs {name}, but {kind} of the target can't be read: {error}") from error
        if getattr(module, "bias", None) is not None:
            raise ValueError(f"slim=False needs {name}, but {kind} of the target also has a bias, for which the layout has no place")
        if table.shape != shape or not table.is_floating_point():
            raise ValueError(f"slim=False needs {name} of shape {shape}, the target's is {table.dtype} {tuple(table.shape)}")
        return table.to(self.dtype, copy=True)  # tables of a tied target would share memory, which safetensors refuses

    def __getstate__(self):
        # Weak references can't be pickled; a copy is bound anew at its first generate().
        return {**self.__dict__, "_tables": None, "checked_targets": None}

    def __setstate__(self, state):
        super().__setstate__({**state, "checked_targets": weakref.WeakSet()})

    def __deepcopy__(self, memo):
        copy = self.__class__.__new__(self.__class__)
        memo[id(self)] = copy
        copy.__setstate__(deepcopy(self.__getstate__(), memo))
        return copy


def default_generation_config() -> GenerationConfig:
    """The knobs of decoding with a draft, at their defaults.

    `num_assistant_tokens` drafts a round, None: the whole block. `assistant_confidence_threshold` cuts where the prefix survival
    a_k falls below it, `conditional_confidence_threshold` where c_k does; 0: no cut. `draft_sampling` "chain" or "argmax",
    None: chain when sampling with a Markov head, else argmax. `raise_on_draft_failure`: raise instead of finishing alone.
    """
    return GenerationConfig(
        num_assistant_tokens=None,
        assistant_confidence_threshold=0.0,
        conditional_confidence_threshold=0.0,
        draft_sampling=None,
        raise_on_draft_failure=False,
    )
