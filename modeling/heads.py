"""The sequential stage of DSpark: three Markov heads (paper section 3.1, eq. 4 to 6) and the confidence head (eq. 7).

Axis words: `rows` any leading axes, `hidden` width of the backbone, `rank` Markov rank, `vocab` draft vocabulary.
"""

import torch
from torch import nn

from .configuration_dspark import DSparkConfig

__all__ = ["ConfidenceHead", "MarkovHead"]


class MarkovHead(nn.Module):
    """Bias on the base logits from the previous token: W2 f(W1[x_prev], ...), f by `config.markov_head_type`."""

    def __init__(self, config: DSparkConfig):
        super().__init__()
        self.head_type = config.markov_head_type
        rank, hidden = config.markov_rank, config.hidden_size
        self.markov_w1 = nn.Embedding(config.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, config.draft_vocab_size or config.vocab_size, bias=False)
        if self.head_type == "gated":
            self.gate_proj = nn.Linear(hidden + rank, rank)
        elif self.head_type == "rnn":
            self.joint_proj = nn.Linear(2 * rank + hidden, 3 * rank)

    def features(self, embedding: torch.Tensor, hidden: torch.Tensor, state: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """One step. `embedding` W1[x_prev] (rows, rank), `hidden` h_k (rows, hidden), `state` (rows, rank) or None at a block's start.

        Returns what W2 multiplies, (rows, rank), and the next state (None but for the rnn head).
        """
        if self.head_type == "vanilla":
            return embedding, None
        if self.head_type == "gated":
            return torch.sigmoid(self.gate_proj(torch.cat([hidden, embedding], dim=-1))) * embedding, None
        state = torch.zeros_like(embedding) if state is None else state
        gate, candidate, output = self.joint_proj(torch.cat([state, embedding, hidden], dim=-1)).chunk(3, dim=-1)
        gate = torch.sigmoid(gate)
        return torch.tanh(output), gate * state + (1 - gate) * torch.tanh(candidate)

    def block_features(self, previous_ids: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Teacher-forced features of whole blocks: `previous_ids` (rows, block) long, `hidden` (rows, block, hidden) -> (rows, block, rank)."""
        embedding = self.markov_w1(previous_ids)
        if self.head_type != "rnn":
            return self.features(embedding, hidden, None)[0]
        outputs, state = [], None
        for k in range(previous_ids.shape[-1]):
            step, state = self.features(embedding[..., k, :], hidden[..., k, :], state)
            outputs.append(step)
        return torch.stack(outputs, dim=-2)

    def bias(self, features: torch.Tensor, columns: torch.Tensor | None = None) -> torch.Tensor:
        """W2 features: (rows, rank) -> (rows, vocab), or only the rows `columns` (rows, m) of W2 -> (rows, m)."""
        if columns is None:
            return self.markov_w2(features)
        return (nn.functional.embedding(columns, self.markov_w2.weight) @ features[..., None])[..., 0]


class ConfidenceHead(nn.Module):
    """Logit of c_k = sigmoid(w [h_k ; W1[x_{k-1}]] + b): the chance that draft token k is accepted if all before it were."""

    def __init__(self, config: DSparkConfig):
        super().__init__()
        self.with_markov = config.confidence_head_with_markov
        self.proj = nn.Linear(config.hidden_size + (config.markov_rank if self.with_markov else 0), 1)

    def forward(self, hidden: torch.Tensor, previous_embedding: torch.Tensor | None) -> torch.Tensor:
        """`hidden` (rows, hidden), `previous_embedding` (rows, rank), unread without Markov features -> logits (rows,)."""
        inputs = torch.cat([hidden, previous_embedding], dim=-1) if self.with_markov else hidden
        return self.proj(inputs).squeeze(-1)
