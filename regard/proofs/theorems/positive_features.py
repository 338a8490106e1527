"""Positive random features: how far their outputs are from attention, before any feature is drawn."""

from __future__ import annotations

import torch
from torch import Tensor

from regard._enclosed import Numbers, computed_lengths
from regard._upper import ELEMENTARY, Lower, Upper, exact, exact_lower, relative_error
from regard.proofs.near.local_scores import rounding_of_logs
from regard.proofs.theorem import Theorem

THEOREM = Theorem(
    name="positive_features",
    title="outputs of positive random features",
    statement=r"""
$\varphi(z) = r^{-1/2}e^{\Omega z - |z|^2/2}$ with $r$ independent standard Gaussian rows of $\Omega$. For a
query $q$ and keys $k_j$ with weights $w_j$ let $P_j \propto w_je^{q\cdot k_j}$ be the row of softmax, $o$ its
output, $z_j = V_j - o$, and $\hat o$ the output with $\varphi(q)\cdot\varphi(k_j)$ in place of
$e^{q\cdot k_j}$. The estimates have no bias, their relative errors $\varepsilon_j$ the covariances
$$ \mathbb{E}\,\varepsilon_j\varepsilon_l = \frac1r\left(e^{(q + k_j)\cdot(q + k_l)} - 1\right), $$ and with
$$ V = \frac1r\sum_{jl}P_jP_l\,e^{(q + k_j)\cdot(q + k_l)}\,z_j\cdot z_l,\qquad U = \frac1r\Big(\sum_{jl}
P_jP_l\,e^{(q + k_j)\cdot(q + k_l)} - 1\Big) $$
$|\hat o - o| \le \sqrt{2V/\delta}\,/\,(1 - \sqrt{2U/\delta})$ with probability at least $1 - \delta$, where
$2U < \delta$. $V$ is the mean square error of $\hat o$ to first order in $1/r$.
""",
    hypotheses=("softmax rows", "dot-product scores", "independent Gaussian features"),
    source="(choromanski2021)",
    proof=r"""
For one Gaussian $\omega$, $\mathbb{E}\,e^{\omega\cdot a} = e^{|a|^2/2}$. With $a = q + k_j$ the estimate
$e^{\omega\cdot(q + k_j) - |q|^2/2 - |k_j|^2/2}$ has the mean $e^{q\cdot k_j}$. For the product of the
estimates of $k_j$ and $k_l$, $a = 2q + k_j + k_l$, and $|a|^2/2 - |q|^2 - |k_j|^2/2 - |k_l|^2/2 - q\cdot
k_j - q\cdot k_l = (q + k_j)\cdot(q + k_l)$. An average of $r$ independent ones divides the covariance by
$r$.

$\hat o = \sum P_j(1 + \varepsilon_j)V_j/\sum P_j(1 + \varepsilon_j)$, so $\hat o - o = \sum
P_j\varepsilon_jz_j\,/\,(1 + \sum P_j\varepsilon_j)$, since $\sum P_jz_j = 0$. The mean of $|\sum
P_j\varepsilon_jz_j|^2$ is $V$, again since $\sum P_jz_j = 0$, and that of $(\sum P_j\varepsilon_j)^2$ is
$U$. By Markov's inequality each is at most $2/\delta$ times its mean but for a probability of $\delta/2$.
""",
)


def moments(queries: Tensor, keys: Tensor, logs: Tensor, values: Tensor) -> tuple[Upper, Upper]:
    """r V and r U (m,), from above: queries (m, c), keys (n, c), logs (m, n) of the rows, values (n, e).

    Each row by itself. What rounding changed is relative to the sizes of the terms.
    """
    found = [_moments(query, keys, row, values) for query, row in zip(queries, logs, strict=True)]
    return Upper(torch.stack([v for v, _ in found])), Upper(torch.stack([u for _, u in found]))


def _moments(query: Tensor, keys: Tensor, logs: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    count, width = keys.shape
    law = logs.softmax(-1)
    away = values - law @ values
    joint = query + keys
    exponents = joint @ joint.mT
    longest = computed_lengths(joint).amax()
    lost = relative_error(width + 4) * longest.square() + 2 * rounding_of_logs(logs, count)
    scaled = Numbers(exponents + logs.log_softmax(-1).unsqueeze(-1) + logs.log_softmax(-1), lost).exp()
    lengths = computed_lengths(away)
    signed = (scaled.value * (away @ away.mT)).sum()
    sizes = (scaled * (lengths.unsqueeze(-1) * lengths.unsqueeze(-2))).sum(-1).sum(-1)
    rounding = lost.expm1() + lost.expm1() + relative_error(2 * count + values.shape[-1] + 4 * ELEMENTARY)
    offset = lengths.amax() * rounding  # the output that z is about is rounded too
    mixed = (scaled * (2 * lengths.amax() * offset + offset.square())).sum(-1).sum(-1)
    first = Upper(signed.clamp_min(0.0), 2) + 2 * rounding * sizes + mixed
    return first.bound, (scaled.sum(-1).sum(-1) - exact_lower(1.0)).bound


def bounds(queries: Upper, mass: Upper, count: int, doubt: float) -> Upper:
    """√(2V/δ)/(1 - √(2U/δ)), ∞ where 2U ≥ δ; from r V and r U."""
    chance = Lower(torch.tensor(doubt * count / 2, dtype=torch.float64), 4)
    wide = (queries / chance).sqrt()
    rest = exact_lower(1.0) - (mass / chance).sqrt()
    return Upper(torch.where(rest.bound > 0, (wide / rest).bound, torch.inf)).maximum(exact(0.0))
