"""Sums of maps: constants and deviations add, and what is linear or a head adds with its directions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from regard._upper import Upper, exact, relative_error, sizes, total
from regard.attention import Attention
from regard.certificate import Certificate, Hypothesis
from regard.domains import Domain, Near, TokenSet
from regard.lookups import Linear
from regard.maps import Added, Affine, Compose, Heads, Mapping, Normalize, Residual
from regard.moments import Moment
from regard.normalizers import Normalizer
from regard.norms import Frobenius, Norm, SequenceNorm, TokenMax, Wasserstein
from regard.potentials import Dot
from regard.proofs.certification import certify, deviation
from regard.proofs.locating import summands
from regard.proofs.subject import single_heads, subject_of
from regard.proofs.theorem import OUT_OF_RANGE, Bound, Refusal, Theorem, checked, finite
from regard.proofs.theorems import taylor_model
from regard.proofs.theorems.mean_value import radius_in
from regard.proofs.theorems.residual import smallest_for_couplings
from regard.supports import Support

THEOREM = Theorem(
    name="addition",
    title="sum of maps",
    statement=r"""
$x \mapsto \sum_kf_k(x)$ has the constant $\sum_kL_k$ in every norm of sequences, and moves by at most the sum
of what its parts move. As a map of measures, $\mu \mapsto (\sum_kT_{k,\mu})_\#\mu$, it needs constants $L_k$
that hold for every coupling, atom by atom. Parts that are linear add with their directions: affine parts are
one affine map with $\|\sum_kW_k\|_2 \le \sum_k\|W_k\|_2$, also with the $I$ of a residual connection; heads
with mixers $W_{O,k}$ are one attention with all these heads (`heads`); derivatives at a given input are one
derivative (`taylor_model`). After a norm layer $N$ the sum is $\sum_kf_k\circ N$, and $N$ is folded into each
part (`composition`).
""",
    hypotheses=(
        "a bound of every part",
        "every part gives as many tokens as it takes",
        "in Wasserstein norms: constants that hold coupling by coupling",
    ),
    proof=r"""
The triangle inequality. For measures take the optimal coupling of $\mu$ and $\nu$: $\|\sum_k(T_{k,\mu}(X) -
T_{k,\nu}(Y))\|_{L^p} \le \sum_k\|T_{k,\mu}(X) - T_{k,\nu}(Y)\|_{L^p}$, and each term is at most $L_k\,\|X -
Y\|_{L^p}$ for this coupling. The other claims rewrite the map, and the values are equal. The rounding of
$\sum_kW_k$ is at most $\gamma_K\sum_k|W_k|$ entry by entry; the sum of all these is added.
""",
)


@THEOREM.constant(Added, Domain, Norm)
def sum_bound(map: Added, domain: Domain, norm: Norm) -> list[Bound]:
    """Σ_k L_k: affine parts as one, and heads as one where they can be."""
    return _valid([partial(_constants, parts, domain, norm, note) for note, parts in _forms(map)])


@THEOREM.constant(Added, Near, TokenMax)
@THEOREM.constant(Added, Near, Frobenius)
def taylor_bound(map: Added, domain: Near, norm: SequenceNorm) -> Bound:
    """The Taylor model: derivatives of the parts at the given input add with their directions."""
    return replace(taylor_model.constant(map, domain, norm), note=taylor_model.THEOREM.title)


def _has_other_forms(map: Residual | Compose, domain: Domain, norm: Norm) -> bool:
    return bool(_rewritings(map))


@THEOREM.constant(Residual, Domain, Norm, about=_has_other_forms)
@THEOREM.constant(Compose, TokenSet, Norm, about=_has_other_forms)
def rewritten_bound(map: Residual | Compose, domain: Domain, norm: Norm) -> list[Bound]:
    """The constant of the same map, written as a sum or with heads as one;
    near an input the Taylor model sees compositions better.
    """
    return _valid([partial(_adopt, other, domain, norm, note) for note, other in _rewritings(map)])


@THEOREM.deviation(Added, Near, SequenceNorm)
def move_bound(map: Added, domain: Near, norm: SequenceNorm) -> list[Bound]:
    """The sum of the deviations of the parts."""
    return _valid([partial(_deviations, parts, domain, norm, note) for note, parts in _forms(map)])


@THEOREM.deviation(Added, Near, SequenceNorm)
def joint_move_bound(map: Added, domain: Near, norm: SequenceNorm) -> Bound:
    """The Taylor model of the sum."""
    found = taylor_model.taylor_model(map, domain, norm)
    return replace(found, note=": ".join(filter(None, (taylor_model.THEOREM.title, found.note))))


# Sums of bounds


def _valid(forms: list[Callable[[], Bound]]) -> list[Bound]:
    """The bounds of the forms of a sum that do not refuse; the first refusal where all do."""
    found, refused = [], []
    for form in forms:
        try:
            found.append(form())
        except Refusal as refusal:
            refused.append(refusal)
    if not found:
        raise refused[0]
    return found


def _constants(parts: Sequence[Mapping], domain: Domain, norm: Norm, note: str) -> Bound:
    parts, rounding = _unite(parts)
    found = [certify(part, domain, norm) for part in parts]
    hypotheses: tuple[Hypothesis, ...] = (checked("every part gives as many tokens as it takes"),)
    if isinstance(norm, Wasserstein):
        found = [smallest_for_couplings(part, bound, norm) for part, bound in zip(parts, found, strict=True)]
        hypotheses += (checked("the constants hold coupling by coupling"),)
    return Bound(_total(found) + rounding, hypotheses, tuple(found), note)


def _deviations(parts: Sequence[Mapping], domain: Near, norm: Norm, note: str) -> Bound:
    parts, rounding = _unite(parts)
    found = [deviation(part, domain, norm) for part in parts]
    value = _total(found) + rounding * radius_in(domain, norm)
    return Bound(value, (checked("every part gives as many tokens as it takes"),), tuple(found), note)


def _total(found: Sequence[Certificate]) -> Upper:
    return total([Upper(finite(part, "a part").value) for part in found])


def _adopt(other: Mapping, domain: Domain, norm: Norm, note: str) -> Bound:
    part = certify(other, domain, norm)
    return Bound(_total([part]), parts=(part,), note=note)


# The same map in other words


def _forms(map: Added) -> list[tuple[str, Sequence[Mapping]]]:
    """The parts as given, and with all heads in one attention."""
    parts = summands(map)
    heads = [part for part in parts if _is_attention(part)]
    rest = [part for part in parts if not _is_attention(part)]
    found: list[tuple[str, Sequence[Mapping]]] = [("", parts)]
    try:
        return [*found, ("heads as one attention", [stack(heads), *rest])]
    except Refusal:
        return found


def _rewritings(map: Residual | Compose) -> list[tuple[str, Mapping]]:
    return _around(map.map) if isinstance(map, Residual) else _after_norms(map.maps)


def _around(inner: Mapping) -> list[tuple[str, Mapping]]:
    """x + Σ_k f_k(x), with x among the affine parts or the heads as one."""
    if not isinstance(inner, Added):
        return []
    parts = summands(inner)
    square = [part for part in parts if isinstance(part, Affine) and part.w.shape[0] == part.w.shape[1]]
    if square:
        return [
            (
                "the residual connection as one more part",
                Added((Affine(torch.eye(len(square[0].w), dtype=torch.float64)), *parts)),
            )
        ]
    return [("heads as one attention", Residual(one)) for one in _stack_all(parts)]


def _after_norms(steps: tuple[Mapping, ...]) -> list[tuple[str, Mapping]]:
    """Σ_k f_k∘N in place of (Σ_k f_k)∘N, and N before the heads as one,
    wherever a norm layer stands before a sum.
    """
    pairs = [
        k
        for k, step in enumerate(steps)
        if k and isinstance(step, Added) and isinstance(steps[k - 1], Normalize)
    ]
    if not pairs:
        return []
    k, layer = pairs[0], steps[pairs[0] - 1]
    parts = summands(steps[k])  # type: ignore[arg-type]
    spread = Added(
        tuple(Compose((layer, *(part.maps if isinstance(part, Compose) else (part,)))) for part in parts)
    )
    stacks = (
        _stack_all(parts) if k + 1 == len(steps) else []
    )  # it is the sum up to a constant, which maps after it would see
    joined = [(f"norm layer before {what}", (*steps[: k - 1], *new, *steps[k + 1 :])) for what, new in (
        ("each part", (spread,)), *(("heads as one attention", (layer, one)) for one in stacks)
    )]  # fmt: skip
    return [(note, maps[0] if len(maps) == 1 else Compose(maps)) for note, maps in joined]


# Heads of several maps as heads of one


def _is_attention(part: Mapping) -> bool:
    """Attention, mixed or not: what `_heads_of` knows."""
    if isinstance(part, Compose) and len(part.maps) == 2:
        return isinstance(part.maps[0], Attention) and isinstance(part.maps[1], Affine)
    return isinstance(part, (Attention, Heads))


def _stack_all(parts: Sequence[Mapping]) -> list[Heads]:
    """All parts as one attention, where they can be."""
    try:
        return [stack(parts)] if all(_is_attention(part) for part in parts) else []
    except Refusal:
        return []


def stack(parts: Sequence[Mapping]) -> Heads:
    """Σ_k f_k as one attention with all heads, up to a constant:
    dot products of one width under one normalizer and one support.
    """
    if len(parts) < 2:
        raise Refusal("one attention is its own stack")
    heads, outputs = zip(*(pair for part in parts for pair in _heads_of(part)), strict=True)
    potentials, lookups = [_dot(head) for head in heads], [_linear(head) for head in heads]
    if any(not _same(_rows(heads[0]), _rows(head)) for head in heads[1:]):
        raise Refusal("heads with different normalizers or supports do not stack")
    joined = Attention(
        Dot(
            _stack([dot.w_q for dot in potentials]),
            _stack([dot.w_k for dot in potentials]),
            torch.stack([torch.as_tensor(dot.scale, dtype=torch.float64) for dot in potentials]),
            _stack([dot.b_q for dot in potentials]),
            _stack([dot.b_k for dot in potentials]),
        ),
        Linear(_stack([lookup.w_v for lookup in lookups]), _stack([lookup.b_v for lookup in lookups])),
        *_rows(heads[0]),
    )
    return Heads(joined, _stack(list(outputs)))


def _heads_of(part: Mapping) -> list[tuple[Attention, Tensor]]:
    """The heads of a part, each with what mixes it."""
    if isinstance(part, Heads):
        subject = subject_of(part)
        assert subject.w_o is not None
        return [(head.attention, w_o) for head, w_o in zip(subject.separate, subject.w_o, strict=True)]
    if isinstance(part, Compose):
        attention, affine = part.maps
        assert isinstance(attention, Attention)
        assert isinstance(affine, Affine)
        return [(head, affine.w.detach().double()) for head in single_heads(attention)]
    assert isinstance(part, Attention)
    return [
        (head, torch.eye(_linear(head).w_v.shape[-1], dtype=torch.float64)) for head in single_heads(part)
    ]


def _rows(head: Attention) -> tuple[Normalizer, Support, Moment]:
    return head.normalizer, head.support, head.moment


def _same(one: object, other: object) -> bool:
    """Whether two declarations say the same."""
    (leaves, form), (others, shape) = pytree.tree_flatten(one), pytree.tree_flatten(other)
    return form == shape and all(torch.equal(a, b) for a, b in zip(leaves, others, strict=True))


def _dot(head: Attention) -> Dot:
    """The potential with everything written out."""
    dot = head.potential
    if not isinstance(dot, Dot) or dot.w_q is None or dot.w_k is None:
        raise Refusal("only dot products with projections stack")
    width = dot.w_q.shape[-1]
    zeros = torch.zeros(width, dtype=torch.float64)
    b_q, b_k = (zeros if b is None else b.expand(width) for b in (dot.b_q, dot.b_k))
    return Dot(dot.w_q, dot.w_k, float(dot.factor(width)), b_q, b_k)


def _linear(head: Attention) -> Linear:
    """The lookup with everything written out."""
    lookup = head.lookup
    if not isinstance(lookup, Linear):
        raise Refusal("only heads with Linear lookups stack")
    width = lookup.w_v.shape[-1]
    return Linear(
        lookup.w_v,
        torch.zeros(width, dtype=torch.float64) if lookup.b_v is None else lookup.b_v.expand(width),
    )


def _stack(tensors: Sequence[Tensor | None]) -> Tensor:
    known = [tensor for tensor in tensors if tensor is not None]
    if len({tensor.shape for tensor in known}) > 1:
        raise Refusal("heads of different widths do not stack")
    return torch.stack(known)


# Affine parts


def _unite(parts: Sequence[Mapping]) -> tuple[list[Mapping], Upper]:
    """The parts with all affine ones as one, up to a constant,
    and at least the norm of the rounding of its matrix.
    """
    affine = [part.w.detach().double() for part in parts if isinstance(part, Affine)]
    if len(affine) < 2:
        return list(parts), exact(0.0)
    if len({w.shape for w in affine}) > 1:
        raise Refusal("the affine parts of the sum have different shapes; give them one")
    matrices = torch.stack(affine)
    if not bool(torch.isfinite(matrices.sum(0)).all()):
        raise Refusal(OUT_OF_RANGE)
    rounding = relative_error(len(affine)) * sizes(matrices.flatten()).sum()
    return [*(part for part in parts if not isinstance(part, Affine)), Affine(matrices.sum(0))], rounding
