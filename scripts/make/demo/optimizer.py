"""Muon for the matrices inside the layers, AdamW for embeddings, routers and norms.

Muon replaces the momentum of a matrix by the nearest orthogonal matrix before applying it. All directions move by an
equal amount, and so do all experts, however rarely they are chosen.
"""

import torch
from transformers import OlmoeForCausalLM

MATRIX_RATE, OTHER_RATE = 0.02, 0.003
MATRIX_DECAY, OTHER_DECAY = 0.05, 0.1

# An odd polynomial that moves singular values towards 1. Four rounds bring most of them to between 0.7 and 1.2, which
# is sufficient; a fifth would cost 3 % of the speed.
POLYNOMIAL, ROUNDS = (3.4445, -4.7750, 2.0315), 4


def orthogonal(x: torch.Tensor) -> torch.Tensor:
    """The approximate orthogonal factor of each matrix of `x`: [matrices, rows, columns]."""
    if x.shape[-2] > x.shape[-1]:
        return orthogonal(x.mT).mT
    a, b, c = POLYNOMIAL
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-12)
    for _ in range(ROUNDS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


class Muon(torch.optim.Optimizer):
    """Each parameter of a group is a stack of matrices with the group's number of `rows`."""

    def __init__(self, groups: list[dict], momentum: float = 0.95):
        super().__init__(groups, {"lr": 0.0, "weight_decay": 0.0, "momentum": momentum})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                self._update(parameter, group)

    def _update(self, parameter: torch.Tensor, group: dict) -> None:
        momentum = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
        momentum.lerp_(parameter.grad, 1 - group["momentum"])
        ahead = parameter.grad.lerp(momentum, group["momentum"])
        rows, columns = group["rows"], parameter.shape[-1]
        direction = orthogonal(ahead.view(-1, rows, columns)).reshape(parameter.shape)
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(direction, alpha=-group["lr"] * max(1.0, rows / columns) ** 0.5)


def optimizers(model: OlmoeForCausalLM) -> list[torch.optim.Optimizer]:
    """Both optimisers; `rate` of a group is its learning rate before the schedule."""
    matrices: dict[int, list] = {}
    decayed, others = [], []
    for name, parameter in model.named_parameters():
        if "_proj" in name:
            # Gate and up projection are stored as one tensor; Muon treats them as two matrices.
            rows = parameter.shape[-2] // (2 if "gate_up" in name else 1)
            matrices.setdefault(rows, []).append(parameter)
        else:
            (decayed if parameter.ndim > 1 else others).append(parameter)
    muon = Muon([
        {"params": p, "rows": rows, "rate": MATRIX_RATE, "weight_decay": MATRIX_DECAY} for rows, p in matrices.items()
    ])
    adam = torch.optim.AdamW(
        [
            {"params": decayed, "rate": OTHER_RATE, "weight_decay": OTHER_DECAY},
            {"params": others, "rate": OTHER_RATE, "weight_decay": 0.0},
        ],
        betas=(0.9, 0.95),
    )
    return [muon, adam]
