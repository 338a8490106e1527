"""Products with the Jacobian of softmax attention in closed form, from what one forward pass leaves."""

from __future__ import annotations

import torch
from torch import Tensor

from regard.compute.flash import LaidOut, lay_out
from regard.compute.fused import fused_form
from regard.compute.problem import Problem
from regard.compute.products import Products, covariance
from regard.compute.tiles import PAIRS
from regard.derive.graph import Graph


class FusedProducts:
    """J t and Jᵀu for attention in its fused form: through the tokens by a retained graph, through the softmax in closed form.

    Small problems hold their weights; large ones compute them again from the log-sum-exps, block by block, in O(n) memory.
    """

    def __init__(self, point: Tensor, problem: Problem) -> None:
        with torch.enable_grad():
            form = fused_form(problem)
            laid = lay_out(form.queries, form.keys, form.values, form.bias, form.tiling, form.causal, form.scale)
            present = [t for t in laid.arguments if t is not None]
        self._tokens = Graph(point, present)
        q, k, v, bias = (None if t is None else t.detach() for t in laid.arguments)
        assert q is not None
        assert k is not None
        assert v is not None
        self._laid: LaidOut = laid.replace(arguments=(q, k, v, bias))
        with torch.no_grad():
            self._out, self._lse = self._laid.value()
        self.value = self._laid.unfold(self._out)
        self._dtype = problem.dtype
        pairs = q.shape[:-2].numel() * q.shape[-2] * k.shape[-2]
        self._weights = self._held(q, k, v, bias) if pairs <= PAIRS else None

    def _held(self, *arguments: Tensor | None) -> Tensor:
        """All weights, (B, H, m, n)."""
        tiling = self._laid.call.blocks(*arguments[:2])  # type: ignore[arg-type]
        whole = tiling.replace(rows=max(1, tiling.query_marks.shape[-1]), in_order=False, batch=None)
        tensors = tuple(t.mT if index == 3 else t for index, t in enumerate(arguments) if t is not None)
        products = Products(self._laid.call.scale, arguments[3] is not None)
        return products.weights(tensors, self._lse.unsqueeze(-1), whole, next(iter(whole)))

    def push(self, tangent: Tensor) -> Tensor:
        """J t."""
        found = self._tokens.push(tangent)
        changes = [*found, *(None,) * (4 - len(found))]
        if self._weights is None:
            if all(c is None for c in changes):
                return torch.zeros_like(self.value)
            return self._laid.unfold(self._laid.push(self._out, self._lse, changes))
        q, k, v, _ = self._laid.arguments
        dq, dk, dv, bias = changes
        scale, change = self._laid.call.scale, None
        if dq is not None:
            change = (scale * dq) @ k.mT
        if dk is not None:
            by_keys = (scale * q) @ dk.mT
            change = by_keys if change is None else change.add_(by_keys)
        if bias is not None:
            change = bias.expand(self._weights.shape) if change is None else change + bias
        if change is None:
            return torch.zeros_like(self.value) if dv is None else self._laid.unfold(self._weights @ dv)
        return self._laid.unfold(covariance(self._weights, change, v, dv)[0])

    def pull(self, cotangent: Tensor) -> Tensor:
        """Jᵀu."""
        by_out = self._laid.fold(cotangent.to(self._out.dtype))
        if self._weights is None:
            return self._tokens.pull(list(self._laid.pull(self._out, self._lse, by_out)))
        q, k, v, bias = self._laid.arguments
        level = (by_out * self._out).sum(-1, keepdim=True)
        by_scores = self._weights * (by_out @ v.mT - level)
        scaled = self._laid.call.scale * by_scores
        gradients = [scaled @ k, scaled.mT @ q, self._weights.mT @ by_out]
        if bias is not None:
            gradients.append(by_scores.sum(-2, keepdim=True).sum_to_size(bias.shape))
        return self._tokens.pull(gradients)
