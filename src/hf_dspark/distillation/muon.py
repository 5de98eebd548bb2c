"""Muon for the matrices of a draft's fc and layers, another optimizer for its tables, heads and norms."""

import torch
from torch import nn

__all__ = ["MuonAndOther", "is_muon_matrix"]


def is_muon_matrix(name: str, parameter: nn.Parameter) -> bool:
    """Whether a draft's parameter maps hidden states to hidden states. Embeddings, heads and vectors are none of Muon's
    (https://kellerjordan.github.io/posts/muon)."""
    return parameter.ndim == 2 and name.startswith(("fc.", "layers."))


class MuonAndOther(torch.optim.Optimizer):
    """Two optimizers that look like one: `torch.optim.Muon` over the first group of parameters, `other` over the rest.

    Muon's steps are scaled to the size of AdamW's ("match_rms_adamw", Liu et al., 2025, arXiv:2502.16982), so one learning rate serves
    both. The state has the form of any optimizer's: one `state` and one list of groups, of which the parts hold their share.
    """

    def __init__(self, matrices: list[nn.Parameter], lr: float, weight_decay: float, other: torch.optim.Optimizer):
        muon = torch.optim.Muon(matrices, lr=lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw")
        self.parts = (muon, other)
        # Some schedules read the learning rate among the defaults.
        super().__init__([group for part in self.parts for group in part.param_groups], {"lr": lr})
        self._share()

    def step(self, closure=None):
        """Both steps. Returns what `closure` does, if there is one."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self.parts:
            part.step()
        return loss

    def load_state_dict(self, state_dict: dict) -> None:
        """As of any optimizer. Raises ValueError where groups or parameters are other than these."""
        super().load_state_dict(state_dict)
        self._share()

    def _share(self) -> None:
        muon, other = self.parts
        muon.state = other.state = self.state
        muon.param_groups, other.param_groups = self.param_groups[:1], self.param_groups[1:]
