"""What a draft borrows of its target: the input embedding and the output head, as modules that are called and never read."""

import weakref

import torch
from transformers import PreTrainedModel

from .configuration_dspark import DSparkConfig

__all__ = ["TargetTables", "check_fit"]


class TargetTables:
    """The target's embedding and head behind a weak reference: nothing is moved, saved, trained or kept alive.

    Modules are called as they are, so tied, scaled, quantised and hooked ones work. `stored` holds copies that came with a
    checkpoint, by tensor name; one that computes the same as the target's module is dropped, another one is used in its place.

    Raises:
        ValueError: the target has no output head, or its hidden size, vocabulary or number of layers is not the draft's.
    """

    def __init__(self, config: DSparkConfig, target: PreTrainedModel, stored: dict[str, torch.Tensor]):
        check_fit(config, target)
        text_config = target.config.get_text_config()
        self._target = weakref.ref(target)
        self._mask_token_id = config.mask_token_id
        # Granite divides by its scaling, Cohere multiplies by its scale, Gemma caps softly; each before the Markov bias.
        self._divisor = getattr(text_config, "logits_scaling", None)
        self._factor = getattr(text_config, "logit_scale", None)
        self._soft_cap = getattr(text_config, "final_logit_softcapping", None)
        # A scaled embedding (Gemma) multiplies the rows that it stores, so a copy of them is multiplied too.
        self._embed_scale = getattr(target.get_input_embeddings(), "embed_scale", 1.0)
        self.own_embedding = self._if_different(stored.get("embed_tokens.weight"), self._embedding_difference)
        self.own_head = self._if_different(stored.get("lm_head.weight"), self._head_difference)

    @property
    def target(self) -> PreTrainedModel:
        """The bound target. Raises ValueError when it is gone."""
        target = self._target()
        if target is None:
            raise ValueError("the target that this draft was bound to no longer exists; call draft.bind(target) with a living one")
        return target

    @torch.no_grad()
    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """`ids` (rows...) long -> (rows..., hidden) in the target's dtype, without a gradient."""
        target = self.target
        if self.own_embedding is not None:
            return torch.nn.functional.embedding(ids.to(self.own_embedding.device), self.own_embedding) * self._embed_scale
        return target.get_input_embeddings()(ids.to(target.device))

    def logits(self, hidden: torch.Tensor, head: torch.nn.Module | None = None) -> torch.Tensor:
        """`hidden` (rows..., hidden) after the final norm -> logits (rows..., vocab), the target's scaling and soft cap included.

        `head`: the draft's own head (reduced vocabulary), used in place of the target's.
        """
        if head is not None:
            return self.transformed(head(hidden))
        if self.own_head is not None:
            return self.transformed(torch.nn.functional.linear(hidden.to(self.own_head), self.own_head))
        return self.target_logits(hidden)

    @property
    def plain_head(self) -> torch.nn.Linear | None:
        """The target's head where it is an ordinary linear layer at hand, parts of whose weight compute parts of the logits; None: call it."""
        head = self.target.get_output_embeddings()
        is_hooked = hasattr(head, "_hf_hook") or head._forward_hooks or head._forward_pre_hooks
        return head if type(head) is torch.nn.Linear and not is_hooked and not head.weight.is_meta else None

    def target_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """`hidden` (rows..., hidden) -> (rows..., vocab) through the target's own head, whatever the draft came with."""
        target = self.target
        return self.transformed(target.get_output_embeddings()(hidden.to(target.device, target.dtype)))

    def transformed(self, logits: torch.Tensor) -> torch.Tensor:
        """The target's scaling and soft cap, on what its head gives for any of its tokens."""
        if self._divisor is not None:
            logits = logits / self._divisor
        if self._factor is not None:
            logits = logits * self._factor
        if self._soft_cap is not None:
            logits = torch.tanh(logits / self._soft_cap) * self._soft_cap
        return logits

    def check_head(self, last_hidden: torch.Tensor, target_logits: torch.Tensor) -> None:
        """The target's head on its own last hidden state (rows, hidden) must give the target's own logits (rows, vocab).

        Raises:
            ValueError: it does not, so the draft would be trained or run on other logits than the target's; names the difference.
        """
        with torch.no_grad():
            logits = self.target_logits(last_hidden).float()
        expected = target_logits.to(logits.device).float()
        difference, scale = (logits - expected).abs().max().item(), expected.abs().max().item()
        if not difference <= _tolerance(target_logits.dtype) * max(1.0, scale):
            raise ValueError(
                f"{type(self.target).__name__} computes its logits in a way this library does not know: its head applied to its last hidden "
                f"state differs from its own logits by {difference:.3g} (largest logit {scale:.3g}); the draft can't be used with it"
            )

    def _if_different(self, table: torch.Tensor | None, difference) -> torch.Tensor | None:
        if table is None:
            return None
        target = self.target
        table = table.to(target.device)
        with torch.no_grad():
            return table if difference(table) > _tolerance(min(table.dtype, target.dtype, key=lambda dtype: dtype.itemsize)) else None

    def _embedding_difference(self, table: torch.Tensor) -> float:
        """Largest relative difference over sampled rows and the mask token's, which every block reads."""
        ids = torch.linspace(0, table.shape[0] - 1, min(256, table.shape[0]), device=table.device).long()
        ids = torch.cat([ids, ids.new_tensor([self._mask_token_id])])
        called, stored = self.target.get_input_embeddings()(ids).float(), table[ids].float() * self._embed_scale
        return ((called - stored).abs().max() / called.abs().max().clamp(min=1e-30)).item()

    def _head_difference(self, table: torch.Tensor) -> float:
        target = self.target
        rows = torch.randn(4, table.shape[1], generator=torch.Generator().manual_seed(0), device="cpu").to(target.device)
        called = target.get_output_embeddings()(rows.to(target.dtype)).float()
        stored = torch.nn.functional.linear(rows.to(table.dtype), table).float()
        return ((called - stored).abs().max() / called.abs().max().clamp(min=1e-30)).item()


def check_fit(config: DSparkConfig, target: PreTrainedModel) -> None:
    """Raises ValueError, with both values, where `target` is not what a draft of this config was made for."""
    text_config = target.config.get_text_config()
    for name, ours, theirs in (
        ("hidden_size", config.hidden_size, text_config.hidden_size),
        ("vocab_size", config.vocab_size, text_config.vocab_size),
        ("num_target_layers", config.num_target_layers, text_config.num_hidden_layers),
    ):
        if ours != theirs:
            raise ValueError(
                f"this draft does not fit its target {type(target).__name__}: the draft's {name} is {ours}, the target has {theirs}"
                + (f" (was it resized? mask_token_id {config.mask_token_id} must stay inside its embedding)" if name == "vocab_size" else "")
            )
    if target.get_output_embeddings() is None:
        raise ValueError(f"the target {type(target).__name__} has no output head (get_output_embeddings() is None); load it with a causal LM head")


def _tolerance(dtype: torch.dtype) -> float:
    """Relative rounding of a matrix product of two kernels in this dtype."""
    return 1e-4 if dtype.itemsize >= 4 else 3e-2
