"""Jacobian: the derivative of a map at a point as an operator.

Nothing here forms the matrix unless it is asked for.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from regard import _check
from regard._round import outward, spectral_norm_bound, up
from regard._verb import Verb
from regard.certificate import Certificate, Hypothesis
from regard.derive.bidiagonal import largest_singular_values, safe_scale
from regard.derive.estimate import Estimate, UpperEstimate
from regard.derive.influence import Influence
from regard.errors import ArgumentError
from regard.norms import Frobenius, Norm, TokenMax, TokenSum

DENSE = 2048
"""Up to this many inputs a certificate comes from the whole matrix."""
NUDGE = 2.0**-46
"""How far inputs are moved, relative to each entry, to see what rounding does.

It is above the rounding of float64, and far below one.
"""
LOGARITHMS = 18_000
"""Roundings, 2e-12 in all, that a root from sums of logarithms may have: assumed, and more than there are."""
TOO_MUCH = 0.02
"""The largest rounding error, as a share of the norm, for which the response to a nudge is trusted."""


class Jacobian(ABC):
    """The derivative J of a map at a point.

    `point` has shape (*batch, n, d) and `value` is the map's value there. Elements of the batch are operators
    of their own, and so norms and singular values come one for each; dimensions of the value that the point
    lacks (heads) belong to the output.

    Examples:
        >>> x = torch.randn(4, 3, dtype=torch.float64)
        >>> j = regard.linearize(regard.Attention(regard.Dot()), x)
        >>> u, v = torch.randn_like(x), torch.randn_like(x)
        >>> torch.allclose((u * j.mv(v)).sum(), (j.rmv(u) * v).sum())  # ⟨u, Jv⟩ = ⟨Jᵀu, v⟩
        True
    """

    point: Tensor
    value: Tensor
    batch_shape: torch.Size
    batch_leads: bool = (
        False  # the batch is the first dimensions of the value, not those that broadcast against the point's
    )

    @abstractmethod
    def mv(self, tangent: Tensor) -> Tensor:
        """J t: how the value moves when the point moves along `tangent`."""

    @abstractmethod
    def rmv(self, cotangent: Tensor) -> Tensor:
        """Jᵀ u: the gradient of ⟨u, value⟩."""

    @abstractmethod
    def second(self, tangent: Tensor) -> Tensor:
        """D²f[t, t]: the second derivative along a straight line."""

    @abstractmethod
    def rows(self) -> Iterator[tuple[slice, Tensor]]:
        """The blocks of some output tokens at a time, (..., tokens, n, d_out, d_in)."""

    @abstractmethod
    def block(self, i: int, j: int) -> Tensor:
        """∂ value_i / ∂ point_j, (..., d_out, d_in)."""

    @abstractmethod
    def in_double(self) -> Jacobian:
        """The same derivative in float64."""

    @abstractmethod
    def nudge(self, relative: float, generator: torch.Generator) -> Jacobian:
        """The derivative where every number that is rounded on the way has moved by at most `relative` of
        its size.
        """

    def trusted(self) -> tuple[Hypothesis, ...]:
        """What a certificate assumes of how derivatives are taken; nothing for closed forms."""
        return ()

    # What an operator is

    @property
    def shape_in(self) -> torch.Size:
        """The shape of a tangent."""
        return self.point.shape

    @property
    def shape_out(self) -> torch.Size:
        """The shape of a cotangent."""
        return self.value.shape

    @property
    def size_in(self) -> int:
        """How many inputs one element of the batch has."""
        return self.point.numel() // max(1, self.batch_shape.numel())

    @property
    def size_out(self) -> int:
        """How many outputs one element of the batch has."""
        return self.value.numel() // max(1, self.batch_shape.numel())

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of tangents."""
        return self.point.dtype

    @property
    def device(self) -> torch.device:
        """Where it lives."""
        return self.point.device

    def dot_in(self, a: Tensor, b: Tensor) -> Tensor:
        """⟨a, b⟩ of tangents, one for each element of the batch."""
        if not self.batch_shape:
            return torch.dot(a.reshape(-1), b.reshape(-1))
        return (a * b).flatten(len(self.batch_shape)).sum(-1)

    def dot_out(self, a: Tensor, b: Tensor) -> Tensor:
        """⟨a, b⟩ of cotangents, one for each element of the batch."""
        if not self.batch_shape:
            return torch.dot(a.reshape(-1), b.reshape(-1))
        if self.batch_leads:
            return (a * b).reshape(*self.batch_shape, -1).sum(-1)
        return (a * b).sum((-2, -1)).sum_to_size(self.batch_shape)

    def over_in(self, scalars: Tensor) -> Tensor:
        """Scalars (*batch) as factors of tangents."""
        return (
            scalars.reshape(*scalars.shape, *(1,) * (self.point.ndim - scalars.ndim))
            if self.batch_shape
            else scalars
        )

    def over_out(self, scalars: Tensor) -> Tensor:
        """Scalars (*batch) as factors of cotangents."""
        if not self.batch_shape:
            return scalars
        return scalars.reshape(
            *scalars.shape, *(1,) * (self.value.ndim - scalars.ndim if self.batch_leads else 2)
        )

    def project_out(self, vectors: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        """w minus its projections on orthonormal tangents (k, *shape),
        and the square of what was taken away.
        """
        if not self.batch_shape:
            flat, own = vectors.reshape(len(vectors), -1), w.reshape(-1)
            shares = torch.mv(flat, own)
            return torch.addmv(own, flat.mT, shares, alpha=-1).reshape(w.shape), torch.dot(shares, shares)
        lead = len(self.batch_shape)
        flat, own = (
            vectors.flatten(lead + 1).movedim(0, -2),
            w.flatten(lead).unsqueeze(-2),
        )  # (*batch, k, N) and (*batch, 1, N)
        shares = own @ flat.mT
        return (own - shares @ flat).reshape(w.shape), shares.square().sum((-2, -1))

    # What people ask for

    def norm(
        self,
        norm: Norm = Frobenius(),
        *,
        tolerance: float = 1e-3,
        max_iterations: int = 200,
        generator: torch.Generator | None = None,
    ) -> Estimate | UpperEstimate:
        """How much the map stretches at this point.

        In Frobenius norm: the largest singular value, an Estimate from below (golub1965, 2). In TokenMax and
        TokenSum: an UpperEstimate from the norms of blocks, max_i Σ_j |J_ij| and max_j Σ_i |J_ij|.
        """
        return measure.one(norm, self, tolerance, max_iterations, generator)

    def singular(
        self,
        count: int,
        *,
        tolerance: float = 1e-3,
        max_iterations: int = 200,
        generator: torch.Generator | None = None,
    ) -> Estimate:
        """The largest singular values (*batch, count), from below; residuals are relative to the largest."""
        size = min(self.size_in, self.size_out)
        if not 1 <= count <= max(1, size):
            raise ArgumentError(
                "count",
                f"is {count}",
                f"this Jacobian has {size} singular values; ask for between 1 and {size}",
            )
        _check.between("tolerance", tolerance, 0.0, 1.0)
        return largest_singular_values(self, count, tolerance, max(max_iterations, count), generator)

    def influence(self) -> Influence:
        """|J_ij|₂, how much output token i moves for a step of input token j: (..., m, n)."""
        if 0 in (self.size_in, self.size_out):
            return Influence.of(self.value.new_zeros(*self.value.shape[:-1], self.point.shape[-2]))
        return Influence.of(torch.cat([spectral_norms(blocks) for _, blocks in self.rows()], -2))

    def dense(self) -> Tensor:
        """The matrix (*batch, outputs, inputs), column by column; for small sizes."""
        if 0 in (self.size_in, self.size_out):
            return self.value.new_zeros(*self.batch_shape, self.size_out, self.size_in)
        columns = []
        for index in range(self.size_in):
            unit = torch.zeros(*self.batch_shape, self.size_in, dtype=self.dtype, device=self.device)
            unit[..., index] = 1
            columns.append(self._flat_out(self.mv(unit.reshape(self.shape_in))))
        return torch.stack(columns, -1)

    def _flat_out(self, y: Tensor) -> Tensor:
        """A cotangent as (*batch, outputs)."""
        if not self.batch_shape or self.batch_leads:
            return y.reshape(*self.batch_shape, -1)
        lead = y.ndim - 2 - len(self.batch_shape)
        mine = [lead + axis for axis, size in enumerate(self.batch_shape) if size > 1]
        rest = [axis for axis in range(y.ndim) if axis not in mine]
        return y.permute(*mine, *rest).reshape(*self.batch_shape, -1)

    def norm_certificate(
        self,
        failure_probability: float = 1e-6,
        *,
        steps: int = 200,
        dense: int = DENSE,
        generator: torch.Generator | None = None,
    ) -> Certificate:
        """An upper bound of the largest singular value over the whole batch, in float64.

        Up to `dense` inputs: the matrix is formed and its norm is proved. Others: with x uniform on the
        sphere and M = JᵀJ, |M|₂ ≤ θ (xᵀMᵏx)^{1/k} except with probability 0.8 √N θ^{-k/2} (dixon1983, Theorem
        1). The start is drawn once; whoever draws again and picks the smallest bound has no certificate.
        The derivative of a module or a function is the one that autograd takes, a hypothesis that differences
        of values in two directions confirm; where they do not, it is an error.
        """
        _check.between("failure_probability", failure_probability, 0.0, 1.0)
        if steps < 1:
            raise ArgumentError("steps", f"is {steps}", "give one or more products with JᵀJ")
        if 0 in (self.point.numel(), self.value.numel()):
            return Certificate(0.0, "at the point", Frobenius(), "an empty matrix has norm zero")
        exact = self if self.dtype == torch.float64 else self.in_double()
        exact.trusted()  # an error comes before the work
        if self.size_in <= dense:
            return exact._from_matrix()
        return exact._from_random_start(failure_probability, steps, generator)

    def _from_matrix(self) -> Certificate:
        """From the whole matrix of each element of the batch."""
        matrices = self.dense().reshape(-1, self.size_out, self.size_in)
        parts = []
        for matrix, error in zip(matrices, self._rounding().tolist(), strict=True):
            found = spectral_norm_bound(matrix)
            error = max(error, self._units() * found)
            parts.append(
                self._certificate(up(found + error), 1.0, error)
                if error <= TOO_MUCH * found
                else self._no_bound()
            )
        return _over_batch(tuple(parts))

    def _rounding(self) -> Tensor:
        """How far float64 products may be from J, in spectral norm, one for each element of the batch.

        Rounding is a small relative change of the numbers that go into sums, so its effect is that of nudging
        the inputs: the norm of the difference, from a few power steps, scaled down from the nudge to the unit
        roundoff and up by the length of the sums.
        """
        generator = torch.Generator(self.device).manual_seed(0)
        other = self.nudge(NUDGE, generator)
        v = torch.randn(self.shape_in, generator=generator, dtype=self.dtype, device=self.device)
        unit = safe_scale(self.mv(v))
        largest = torch.zeros(self.batch_shape, dtype=self.dtype, device=self.device)
        for _ in range(6):
            v = v / self.over_in(_nonzero_divisor(self.dot_in(v, v).sqrt()))
            moved = (other.mv(v) - self.mv(v)) * unit
            length = self.dot_out(moved, moved).sqrt()
            largest = torch.maximum(largest, length)
            moved = moved / self.over_out(_nonzero_divisor(length))
            v = other.rmv(moved) - self.rmv(moved)
            v = v * unit
        return (largest / unit * (self._units() / NUDGE)).reshape(-1)

    def _units(self) -> float:
        """The relative error of a sum as long as those of a product."""
        sums = self.point.shape[-1] + (self.point.shape[-2] if self.point.ndim > 1 else 1)
        return 16 * math.sqrt(sums) * torch.finfo(torch.float64).eps

    def _from_random_start(
        self, failure_probability: float, steps: int, generator: torch.Generator | None
    ) -> Certificate:
        """From `steps` products of JᵀJ with one random vector."""
        elements = max(1, self.batch_shape.numel())
        chance = failure_probability / elements
        if generator is None:
            generator = torch.Generator(self.device)
            generator.seed()
        v = torch.randn(self.shape_in, generator=generator, dtype=self.dtype, device=self.device)
        v = v / self.over_in(self.dot_in(v, v).sqrt())
        logs = torch.zeros(self.batch_shape, dtype=self.dtype, device=self.device)
        unit = safe_scale(self.mv(v))
        for _ in range(steps):
            v = self.rmv(self.mv(v) * unit) * unit
            length = self.dot_in(v, v).sqrt()
            logs = logs + length.log()
            v = v / self.over_in(_nonzero_divisor(length))
        roots = (
            ((logs / (2 * steps)).exp() / unit).reshape(-1).tolist()
        )  # |M^{k/2} x|^{1/k} = √e_k, k = 2 steps
        errors = self._rounding().tolist()
        parts = [
            self._certificate_of_root(root, error, chance, 2 * steps)
            for root, error in zip(roots, errors, strict=True)
        ]
        return _over_batch(tuple(parts))

    def _certificate_of_root(self, root: float, error: float, chance: float, power: int) -> Certificate:
        """√θ √e_k with 0.8 √N (θ^{-k/2} + 2 k ε) = chance, ε the relative error of a product."""
        if root == 0 and error == 0:
            return self._certificate(0.0, 1 - chance, 0.0)
        error = max(error, self._units() * root)
        relative = 2 * error / root if root > 0 else math.inf
        if not relative <= TOO_MUCH:
            return self._no_bound()
        share = chance / (0.8 * math.sqrt(self.size_in)) - power * relative
        if share <= 0:
            least = 0.8 * math.sqrt(self.size_in) * power * relative
            remedy = (
                f"rounding alone fails with {least:.1g} here; give more, or fewer steps, or form the "
                f"matrix with dense={self.size_in}"
            )
            raise ArgumentError("failure_probability", f"is {chance:g} for each operator", remedy)
        bound = outward(root * share ** (-1 / power), LOGARITHMS)
        return self._certificate(bound, 1 - chance, error)

    def _certificate(self, value: float, probability: float, error: float) -> Certificate:
        drawn = probability < 1
        return Certificate(
            value,
            "at the point",
            Frobenius(),
            "the randomized power bound (dixon1983)"
            if drawn
            else "a Cholesky factorization of λI - JᵀJ (rump2006)",
            (
                *(
                    (Hypothesis("the start is drawn once, independently of the data", False),)
                    if drawn
                    else ()
                ),
                *self.trusted(),
                Hypothesis(
                    f"float64 products are within {error:.1g} of J, as its response to nudged inputs says",
                    False,
                ),
            ),
            probability=probability,
        )

    def _no_bound(self) -> Certificate:
        """Infinity, because rounding is too large for a bound."""
        why = "float64 has no digits left at this point: center the points, or make the scores smaller"
        return Certificate(math.inf, "at the point", Frobenius(), "no bound", refused=(why,))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({list(self.shape_in)} -> {list(self.shape_out)})"


def _nonzero_divisor(length: Tensor) -> Tensor:
    """The lengths, with one in place of zero."""
    return torch.where(length > 0, length, torch.ones_like(length))


def _over_batch(parts: tuple[Certificate, ...]) -> Certificate:
    """One certificate for all elements: the largest value, and all chances of failure together."""
    if len(parts) == 1:
        return parts[0]
    worst = max(parts, key=lambda part: part.value)
    probability = 1 - sum(1 - part.probability for part in parts)
    return Certificate(
        worst.value, worst.domain, worst.norm, worst.theorem, worst.hypotheses, parts, probability=probability
    )


measure: Verb = Verb("measure")
"""measure.one(norm, jacobian, tolerance, max_iterations, generator): the stretch in a norm."""


@measure.rule(Frobenius)
def _frobenius(
    norm: Frobenius, jacobian: Jacobian, tolerance: float, max_iterations: int, generator: Any
) -> Estimate:
    found = jacobian.singular(1, tolerance=tolerance, max_iterations=max_iterations, generator=generator)
    return Estimate(found.value.squeeze(-1), found.residual.squeeze(-1), found.iterations)


@measure.rule(TokenMax)
def _token_max(norm: TokenMax, jacobian: Jacobian, *_: Any) -> UpperEstimate:
    return UpperEstimate(_largest(_joint_influence(jacobian).sum(-1)), norm)


@measure.rule(TokenSum)
def _token_sum(norm: TokenSum, jacobian: Jacobian, *_: Any) -> UpperEstimate:
    return UpperEstimate(_largest(_joint_influence(jacobian).sum(-2)), norm)


@measure.rule(Norm)
def _no_norm(norm: Norm, jacobian: Jacobian, *_: Any) -> UpperEstimate:
    raise ArgumentError(
        "norm", f"is {norm!r}", "a Jacobian at a point is measured in Frobenius(), TokenMax() or TokenSum()"
    )


def _largest(sums: Tensor) -> Tensor:
    return sums.amax(-1) if sums.shape[-1] else sums.new_zeros(sums.shape[:-1])


def _joint_influence(jacobian: Jacobian) -> Tensor:
    """Block norms of tokens whose outputs are those of all heads together: at most √Σ_h |J_ij^h|²."""
    influence = jacobian.influence().plain()
    unit = safe_scale(influence)
    return (influence * unit).square().sum_to_size(*jacobian.batch_shape, *influence.shape[-2:]).sqrt() / unit


def spectral_norms(blocks: Tensor) -> Tensor:
    """The largest singular value of each matrix (..., a, b), from the smaller Gram matrix."""
    if 0 in blocks.shape[-2:]:
        return blocks.new_zeros(blocks.shape[:-2])
    unit = safe_scale(blocks)
    blocks = blocks * unit
    gram = blocks @ blocks.mT if blocks.shape[-2] <= blocks.shape[-1] else blocks.mT @ blocks
    if gram.shape[-1] == 1:
        return gram[..., 0, 0].clamp_min(0).sqrt() / unit
    _check.decomposable(gram)
    return torch.linalg.eigvalsh(gram)[..., -1].clamp_min(0).sqrt() / unit
