"""Products with the Jacobian of softmax attention in closed form, from what one forward pass leaves."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from regard._verb import Verb
from regard.attention import Attention
from regard.compute.engines.sdpa import FusedPlan
from regard.compute.kernel.aten import pull_kernel, run_kernel
from regard.compute.kernel.call import Arguments, Call
from regard.compute.kernel.flash import push_through
from regard.compute.kernel.products import Products
from regard.compute.kernel.tiles import PAIRS
from regard.derive.graph import Graph
from regard.lookups import Identity, Linear, Lookup
from regard.normalizers import Softmax
from regard.potentials import Bilinear, Dot, Potential

Tangents = list[Tensor | None]


class FusedProducts:
    """J t and Jᵀu for attention in its fused form: through the tokens, then through the softmax in closed
    form.

    Small problems hold their weights; large ones compute them again from the log-sum-exps, block by block, in
    O(n) memory.
    """

    def __init__(self, point: Tensor, plan: FusedPlan, attention: Attention, self_attention: bool) -> None:
        present = [t for t in plan.arguments if t is not None]
        q, k, v, bias = plan.arguments
        arguments = (q.detach(), k.detach(), v.detach(), None if bias is None else bias.detach())
        self._call, self._queries = plan.call, arguments[0]
        with torch.no_grad():
            out, lse = run_kernel(plan.call, *arguments)
        self.value = plan.call.restore(out)
        affine = _affine_tokens(point, attention, plan) if self_attention else None
        self._tokens: _Tokens = Graph(point, present) if affine is None else affine
        pairs = q.shape[:-2].numel() * q.shape[-2] * k.shape[-2]
        self._affine = affine
        core = _HeldWeights if pairs <= PAIRS else _StreamedWeights
        self._core: _Core = core(plan.call, arguments, out, lse)

    def cheaper_form(self) -> FusedProducts | AbsorbedProducts:
        """The cheaper form, where there is one."""
        weights = None if self._affine is None else self._affine.narrow()
        if weights is None or not isinstance(self._core, _HeldWeights):
            return self
        return AbsorbedProducts(self._core, *weights, self.value)

    def push(self, tangent: Tensor) -> Tensor:
        """J t."""
        found = self._tokens.push(tangent)
        if all(change is None for change in found):
            return torch.zeros_like(self.value)
        return self._call.restore(self._core.push([*found, *(None,) * (4 - len(found))]))

    def pull(self, cotangent: Tensor) -> Tensor:
        """Jᵀu."""
        return self._tokens.pull(
            self._core.pull(self._call.lay_out_like(cotangent.to(self.value.dtype), self._queries))
        )


class AbsorbedProducts:
    """The same for one head of plain dot products on narrow tokens: scores are x_iᵀ A x_j + β·x_j, so the
    tokens need no projections.

    With k̃_j = A x_j + ..., q̃_i = Aᵀ x_i + β the slopes of a score in its query and in its key, s' = t k̃ᵀ +
    q̃ tᵀ.
    """

    def __init__(
        self, held: _HeldWeights, w_q: Tensor | None, w_k: Tensor | None, w_v: Tensor | None, value: Tensor
    ) -> None:
        self.value, self._held, self._w_v = value, held, w_v
        self._k = held.keys if w_q is None else held.keys @ w_q.mT
        self._q = held.queries if w_k is None else held.queries @ w_k.mT

    def push(self, tangent: Tensor) -> Tensor:
        """J t."""
        change = torch.addmm(tangent @ self._k.mT, self._q, tangent.mT)
        mixed = self._held.weights @ tangent
        moved = self._held.covariance(change)
        return moved.add_(mixed) if self._w_v is None else moved.addmm_(mixed, self._w_v)

    def pull(self, cotangent: Tensor) -> Tensor:
        """Jᵀu."""
        by_scores = self._held.by_scores(cotangent)
        mixed = self._held.weights.mT @ cotangent
        found = torch.addmm(by_scores @ self._k, by_scores.mT, self._q)
        return found.add_(mixed) if self._w_v is None else found.addmm_(mixed, self._w_v.mT)


class _Tokens(Protocol):
    """From points to queries, keys, values and biases."""

    def push(self, tangent: Tensor) -> Tangents: ...

    def pull(self, cotangents: list[Tensor]) -> Tensor: ...


class _Core(Protocol):
    """From queries, keys, values and biases to outputs."""

    def push(self, tangents: Tangents) -> Tensor: ...

    def pull(self, by_out: Tensor) -> list[Tensor]: ...


class _StreamedWeights:
    """Weights that are computed again block by block: the kernel backward, closed forms forward,
    O(n) memory.
    """

    def __init__(self, call: Call, arguments: Arguments, out: Tensor, lse: Tensor) -> None:
        self._call, self._arguments, self._out, self._lse = call, arguments, out, lse

    def push(self, tangents: Tangents) -> Tensor:
        return push_through(self._call, self._arguments, self._out, self._lse, tangents)[0]

    def pull(self, by_out: Tensor) -> list[Tensor]:
        biased = self._arguments[3] is not None
        return list(pull_kernel(self._call, biased, *self._arguments, self._out, self._lse, by_out, None))


class _HeldWeights:
    """The weights of all pairs, held, so that a product is a few small matrix products."""

    def __init__(self, call: Call, arguments: Arguments, out: Tensor, lse: Tensor) -> None:
        q, k, v, bias = arguments
        tiling = call.blocks(q, k)
        whole = tiling.replace(rows=q.shape[-2], in_order=False, batch=None)
        tensors = (q, k, v) if bias is None else (q, k, v, bias.mT)
        weights = Products(call.scale, bias is not None).weights(
            tensors, lse.unsqueeze(-1), whole, next(iter(whole))
        )
        # Large scores are rounded, so rows sum to one only roughly, and a common part of the keys or values
        # would not drop out.
        total = weights.sum(-1, keepdim=True)
        weights = weights / torch.where(total > 0, total, torch.ones_like(total))
        center = v.mean(-2, keepdim=True)
        self._shape, self._bias = weights.shape, bias
        self.queries, self.keys = (
            self._flat(call.scale * q),
            self._flat(call.scale * (k - k.mean(-2, keepdim=True))),
        )
        self._v, self._out, self.weights = (
            self._flat(v - center),
            self._flat(out - center),
            self._flat(weights),
        )
        self._add = torch.addmm if self.weights.ndim == 2 else torch.baddbmm

    def _flat(self, t: Tensor) -> Tensor:
        """(B, H, a, b) as (B·H, a, b), or (a, b) where there is one head."""
        return t.reshape(t.shape[-2:]) if t.shape[:2].numel() == 1 else t.flatten(0, 1)

    def push(self, tangents: Tangents) -> Tensor:
        by_q, by_k, by_v, by_bias = tangents
        change: Tensor | None = None
        if by_q is not None:
            change = self._flat(by_q) @ self.keys.mT
        if by_k is not None:
            other = self._flat(by_k).mT
            change = self.queries @ other if change is None else self._add(change, self.queries, other)
        if by_bias is not None:
            bias = self._flat(by_bias.expand(self._shape))
            change = bias.clone() if change is None else change.add_(bias)
        if change is None:
            assert by_v is not None
            return (self.weights @ self._flat(by_v)).reshape(*self._shape[:-1], -1)
        result = self.covariance(change)
        result = result if by_v is None else self._add(result, self.weights, self._flat(by_v))
        return result.reshape(*self._shape[:-1], -1)

    def covariance(self, change: Tensor) -> Tensor:
        """Cov(v, s') of each row, from the change of scores, which is overwritten."""
        moved = change.mul_(self.weights)
        return moved.addcmul_(self.weights, moved.sum(-1, keepdim=True), value=-1) @ self._v

    def by_scores(self, by_out: Tensor) -> Tensor:
        """The gradient of the scores."""
        return (by_out @ self._v.mT).sub_((by_out * self._out).sum(-1, keepdim=True)).mul_(self.weights)

    def pull(self, by_out: Tensor) -> list[Tensor]:
        pulled = self._flat(by_out)
        by_scores = self.by_scores(pulled)
        gradients = [by_scores @ self.keys, by_scores.mT @ self.queries, self.weights.mT @ pulled]
        gradients = [g.reshape(*self._shape[:2], *g.shape[-2:]) for g in gradients]
        if self._bias is not None:
            by_bias = by_scores.reshape(self._shape).sum(-2, keepdim=True)
            gradients.append(by_bias.sum_to_size(self._bias.shape))
        return gradients


class _Affine:
    """Queries, keys and values that are affine in the tokens: one matrix product for the three.

    None stands for the identity.
    """

    def __init__(self, point: Tensor, weights: tuple[Tensor | None, Tensor | None, Tensor | None]) -> None:
        self._weights = weights
        self._whole = all(w is not None for w in weights)
        self._wide = torch.cat([w for w in weights if w is not None], -1) if self._whole else None
        self._widths = [w.shape[-1] for w in weights if w is not None]
        self._shape = point.shape

    def narrow(self) -> tuple[Tensor | None, Tensor | None, Tensor | None] | None:
        """The projections, if there is one head and products of tokens are cheaper than projecting them."""
        shapes = [w.shape for w in self._weights if w is not None]
        one = len(self._shape) == 2 and all(len(shape) == 2 for shape in shapes)
        return self._weights if one and all(shape[0] <= 2 * shape[1] for shape in shapes) else None

    def push(self, tangent: Tensor) -> Tangents:
        if self._wide is None:
            return [_four(tangent if w is None else tangent @ w) for w in self._weights]
        return [_four(t) for t in (tangent @ self._wide).split(self._widths, -1)]

    def pull(self, cotangents: list[Tensor]) -> Tensor:
        lead = max(len(self._shape), max((w.ndim for w in self._weights if w is not None), default=0)) - 2
        three = [c.reshape(c.shape[2 - lead :]) for c in cotangents[:3]]
        if self._wide is not None:
            return (torch.cat(three, -1) @ self._wide.mT).sum_to_size(self._shape)
        parts = [c if w is None else c @ w.mT for c, w in zip(three, self._weights, strict=True)]
        return (parts[0] + parts[1] + parts[2]).sum_to_size(self._shape)


def _four(t: Tensor) -> Tensor:
    return t.reshape((1,) * (4 - t.ndim) + t.shape)


def _affine_tokens(point: Tensor, attention: Attention, plan: FusedPlan) -> _Affine | None:
    """For plain dot products of one width, where queries,
    keys and values are what their projections say and nothing else.
    """
    projections = affine.one(attention.potential)
    value = affine.one(attention.lookup)
    if projections is None or value is None or not isinstance(attention.normalizer, Softmax):
        return None
    width = point.shape[-1] if projections[0] is None else projections[0].shape[-1]
    if factor_of(attention, width) != plan.call.scale:
        return None
    weights = tuple(None if w is None else w.detach() for w in (*projections, value[0]))
    shapes = {() if w is None else tuple(w.shape[:-2]) for w in weights}
    if len(shapes) > 1:
        return None
    widths = {point.shape[-1] if w is None else w.shape[-1] for w in weights}
    lead = tuple(torch.broadcast_shapes(point.shape[:-2], *shapes))
    q, _, v, bias = plan.arguments
    fits = len(lead) <= 2 and widths == {q.shape[-1]} and plan.call.width == v.shape[-1]
    same = all(w is None or w.dtype == point.dtype for w in weights) and q.dtype == point.dtype
    if not fits or not same or (bias is not None and bias.requires_grad) or plan.call.batch != lead:
        return None
    return _Affine(point, weights)  # type: ignore[arg-type]


def factor_of(attention: Attention, width: int) -> float | None:
    """The factor of the scores, where it is a positive number:
    only then are the kernel's queries the projected ones.
    """
    scale = attention.potential.factor(width) if isinstance(attention.potential, Dot) else 1.0
    temperature = attention.normalizer.temperature if isinstance(attention.normalizer, Softmax) else 1.0
    return None if isinstance(scale, Tensor) or isinstance(temperature, Tensor) else scale / temperature


affine = Verb("affine")
"""affine.one(potential) -> (w_q, w_k) and affine.one(lookup) -> (w_v,), None for an identity;
None where a map is not affine.
"""


@affine.rule(Dot)
def _dot(potential: Dot) -> tuple[Tensor | None, Tensor | None]:
    return potential.w_q, potential.w_k


@affine.rule(Bilinear)
def _bilinear(potential: Bilinear) -> tuple[Tensor | None, Tensor | None]:
    return potential.a, None


@affine.rule(Identity)
def _identity(lookup: Identity) -> tuple[None]:
    return (None,)


@affine.rule(Linear)
def _linear(lookup: Linear) -> tuple[Tensor]:
    return (lookup.w_v,)


@affine.rule(Potential)
def _curved(potential: Potential) -> None:
    return None


@affine.rule(Lookup)
def _other(lookup: Lookup) -> None:
    return None
