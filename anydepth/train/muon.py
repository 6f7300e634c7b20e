"""Muon (Keller Jordan, 2024): momentum, then the nearest orthogonal matrix as the step. In float32 throughout.

`torch.optim.Muon` orthogonalises in bfloat16, which CPUs without bfloat16 units emulate: it halves training speed
there. Every matrix is cut into square blocks of the smaller side (a fused q, k, v into its three), so that all of a
model's blocks go through one batched product. P blocks of n x n.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def orthogonalise(matrices_Pnn: Tensor, *, steps: int = 5) -> Tensor:
    """Five Newton-Schulz steps of degree five: singular values end between about 0.7 and 1.2. [P, n, n] -> the same."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrices_Pnn / (matrices_Pnn.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        square = x @ x.transpose(-1, -2)
        x = a * x + (b * square + c * square @ square) @ x
    return x


def blocks(matrix: Tensor) -> Tensor:
    """View [n, m n] or [m n, n] as [m, n, n]. ValueError where no side is a multiple of the other."""
    rows, columns = matrix.shape
    if columns % rows == 0:
        return matrix.view(rows, columns // rows, rows).transpose(0, 1)
    if rows % columns == 0:
        return matrix.view(rows // columns, columns, columns)
    raise ValueError(
        f"a matrix of {rows} x {columns} cannot be cut into square blocks; Muon needs one side to be a "
        "multiple of the other, so choose intermediate_size a multiple of hidden_size"
    )


class Muon:
    """Nesterov momentum, orthogonalised steps of size `lr`, decoupled weight decay. Set `lr` before `step`."""

    def __init__(
        self, matrices: Sequence[Tensor], *, lr: float, momentum: float = 0.95, weight_decay: float = 0.05
    ) -> None:
        self.lr, self.momentum, self.weight_decay = lr, momentum, weight_decay
        self._matrices = list(matrices)
        self._counts = [len(blocks(matrix)) for matrix in self._matrices]
        sizes = {blocks(matrix).shape[1] for matrix in self._matrices}
        if len(sizes) != 1:
            raise ValueError(f"blocks of sizes {sorted(sizes)}; all matrices must share their smaller side")
        self._velocity = torch.zeros(sum(self._counts), *blocks(self._matrices[0]).shape[1:])

    @torch.no_grad()
    def step(self) -> None:
        """One step from the matrices' `.grad`, in place."""
        grads = torch.cat([blocks(matrix.grad) for matrix in self._matrices if matrix.grad is not None])
        self._velocity.lerp_(grads, 1 - self.momentum)
        steps = orthogonalise(grads.lerp(self._velocity, self.momentum))
        for matrix, step in zip(self._matrices, steps.split(self._counts), strict=True):
            blocks(matrix).mul_(1 - self.lr * self.weight_decay).sub_(step, alpha=self.lr)

    def state_dict(self) -> dict[str, Any]:
        return {"velocity": self._velocity}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._velocity.copy_(state["velocity"])
