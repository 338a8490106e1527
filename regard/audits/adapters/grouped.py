"""Grouped queries: projections named q_proj, k_proj, v_proj and o_proj,
with fewer heads of keys than of queries.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from regard.audits.adapters.base import Matrices
from regard.audits.adapters.projections import affine, output_projection, parameter_names, split

NAMES = ("q_proj", "k_proj", "v_proj", "o_proj")


def grouped_matrices(module: nn.Module, scale: float, softcap: float | None = None) -> Matrices:
    """Heads of the width head_dim, as many as each projection holds."""
    width: Any = module.head_dim
    read = {name: affine(module, name) for name in NAMES}
    (w_q, b_q), (w_k, b_k), (w_v, b_v) = (
        split(read[name], read[name][0].shape[-1] // width) for name in NAMES[:3]
    )
    w_o, b_o = output_projection(read["o_proj"], len(w_q))
    return Matrices(w_q, w_k, w_v, w_o, scale, b_q, b_k, b_v, b_o, softcap)


def grouped_names(path: str, module: nn.Module) -> tuple[str, ...]:
    """The names of what `grouped_matrices` reads."""
    return parameter_names(path, module, *NAMES)
