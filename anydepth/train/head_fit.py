"""Where heads begin: the best linear map from an exit's states to full depth's, in closed form.

The model's own unembedding reads an inner state badly (SmolLM2-135M after layer 10 of 30: 15.3 nats from full depth),
a ridge regression onto what it expects much better (2.8; with the best map of rank 16, 4.3; as "tuned lens", Belrose et
al. 2023, learns one by gradient).

x is the exit's normalised state, y full depth's: y - x by the best a b of a rank (Izenman 1975). A shortlist's "any
other" begins as the log of the summed exponentials of the rest.
Shape suffixes: as in `distil.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from anydepth.models.decoder import rms_norm
from anydepth.models.llama import Llama
from anydepth.train.trained_head import TrainedHead

_RIDGE = 1e-3  # of each number's own power


@torch.no_grad()
def expected(model: Llama, last_Ad: Tensor, ids: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Of states after the last layer: what an exit's state should be mapped to [A, d], and the log of the summed
    exponentials of all tokens but the shortlist `ids` [A], None without one; in float64."""
    y_Ad = model.final_norm(last_Ad).double()
    if ids is None:
        return y_Ad, None
    rest = model.readout(model.shape.segments, last_Ad).index_fill_(1, ids, float("-inf"))
    return y_Ad, torch.logsumexp(rest, 1).double()


class Fit:
    """Sums over states for one head, in float64."""

    def __init__(self, head: TrainedHead, model: Llama) -> None:
        self.head, self.model, d = head, model, model.shape.hidden
        self._count, self._power = 0, torch.zeros(d, dtype=torch.float64, device=model.device)
        self._sum = self._power.clone()
        self._xx, self._xy = (self._power.new_zeros(d, d) for _ in range(2))
        self._xo, self._yy = self._power.clone(), self._power.clone()

    @torch.no_grad()
    def add(self, h_Ad: Tensor, y_Ad: Tensor, rest_A: Tensor | None) -> None:
        """States after the exit, and full depth's `expected`."""
        raw = h_Ad.double()
        self._count, self._sum, self._power = (
            self._count + len(raw),
            self._sum + raw.sum(0),
            self._power + (raw**2).sum(0),
        )
        x = rms_norm(h_Ad.to(y_Ad), self.head.tensors["norm"].double(), self.model.eps)
        self._xx += x.t() @ x
        self._xy += x.t() @ (y_Ad - x)
        self._yy += (y_Ad**2).sum(0)
        if rest_A is not None:
            self._xo += x.t() @ rest_A

    @torch.no_grad()
    def apply(self, *, head: bool) -> None:
        """Give the probe its mean and scale and, with `head`, the head its beginning."""
        mean = self._sum / self._count
        deviation = (self._power / self._count - mean**2).clamp(min=0).sqrt()
        self.head.mean.copy_(mean)
        self.head.scale.copy_(deviation.clamp(min=1e-6 * float(deviation.max()) + 1e-30))
        x_d, y_d = ((power / self._count).sqrt() for power in (self._xx.diagonal(), self._yy))
        x_d, y_d = (rms.clamp(min=1e-3 * float(rms.mean()) + 1e-30) for rms in (x_d, y_d))
        if not head or self.head.kind == "norm":
            self.head.begin(x_d, y_d)
            return
        change = torch.linalg.solve(_ridged(self._xx), self._xy)
        # The map's own output, x change, is best kept by its largest principal directions.
        directions = torch.linalg.eigh(change.t() @ self._xx @ change)[1][:, -self.head.tensors["a"].shape[1] :]
        whole = torch.eye(len(change)).to(change) + change @ directions @ directions.t()
        other = torch.linalg.solve(_ridged(whole.t() @ self._xx @ whole), whole.t() @ self._xo)
        self.head.begin(x_d, y_d, a=change @ directions, b=directions.t(), other=other)


def _ridged(powers_dd: Tensor) -> Tensor:
    return powers_dd + _RIDGE * powers_dd.diagonal().diag()
