"""direct: the fused kernel at once, where a declaration leaves nothing to decide.

Small calls are what inference and tests are made of, and there a plan costs more than the kernel. The
conditions here are those under which the plan would make this very call.
"""

from __future__ import annotations

import torch
from torch import Tensor

from regard._object import tensors_in
from regard._refused import Refused
from regard._transforms import is_only_run
from regard.compute.kept import slopes, turns
from regard.compute.kernel.call import LEAST_WIDTH
from regard.compute.precision import loses_digits
from regard.normalizers import Normalizer, Softmax
from regard.potentials import Alibi, Cosine, Dot, Gaussian, Potential, Rotary
from regard.potentials.base import Sum
from regard.potentials.reductions import Reduction, calm_gaussian, reduce
from regard.supports import Causal, Full, Support

_kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_FLOATING = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def direct(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    potential: Potential,
    normalizer: Normalizer,
    support: Support,
    query_marks: Tensor | None = None,
) -> Tensor | None:
    """softmax(scale · q kᵀ + bias) v for plain tensors (B, H, tokens, width) on a CPU; else None.

    query_marks (m,): where the queries stand among keys 0, 1, 2, ...; None means in order.
    """
    kind = type(support)
    causal = kind is Causal and query_marks is None
    if type(normalizer) is not Softmax or isinstance(normalizer.temperature, Tensor):
        return None
    if not (causal or kind is Full) or not _is_plain(q, k, v):
        return None
    if _is_bare(potential):
        assert isinstance(potential, Dot)
        factor = potential.factor(q.shape[-1])
        if not isinstance(factor, Tensor) and factor > 0:
            return _kernel(q, k, v, 0.0, causal, scale=float(factor / normalizer.temperature))[0]
    if q.dtype.itemsize < 4:
        return None
    if type(potential) is Gaussian and _is_unprojected(potential):
        bandwidth = potential.bandwidth_at(q.shape[-1])
        calm = calm_gaussian(q, k, 1 / bandwidth**2) if isinstance(bandwidth, float) else None
        if calm is not None:
            return _run_kernel(calm, v, causal, normalizer.temperature)
    if not _is_product(potential):
        return None
    if any(t.dtype != q.dtype or not t.is_cpu or not is_only_run(t) for t in tensors_in(potential)):
        return None
    found = None if query_marks is not None else _run_kept(q, k, v, potential, causal, normalizer.temperature)
    if found is not None:
        return found
    return _run_reduced(q, k, v, potential, causal, normalizer.temperature, query_marks)


def _run_kept(
    q: Tensor, k: Tensor, v: Tensor, potential: Potential, causal: bool, temperature: float
) -> Tensor | None:
    """The kernel on products of points with a bias that falls with distance, or turned to their positions,
    from tables that are kept.
    """
    product, bias = potential, None
    if isinstance(potential, Sum):
        product, *others = potential.terms
        if len(others) != 1 or type(others[0]) is not Alibi or not _is_bare(product):
            return None
        bias = slopes(others[0], q, k)
        if bias is None or not _broadcasts(bias.shape[:-2], v.shape[:2]):
            return None
        bias = bias if temperature == 1.0 else bias / temperature
        bias = bias.reshape((1,) * (4 - bias.ndim) + bias.shape)
    elif type(potential) is Rotary:
        product, kept = potential.potential, turns(potential, q, k)
        if kept is None or not _is_bare(product):
            return None
        q, k = potential.turn(q, *kept), potential.turn(k, *kept)
    else:
        return None
    assert isinstance(product, Dot)
    factor = product.factor(q.shape[-1])
    if isinstance(factor, Tensor) or factor <= 0:
        return None
    return _kernel(q, k, v, 0.0, causal, attn_mask=bias, scale=float(factor / temperature))[0]


def _run_reduced(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    potential: Potential,
    causal: bool,
    temperature: float,
    query_marks: Tensor | None,
) -> Tensor | None:
    """The kernel on the features of a potential, where its scores have few enough terms and enough digits."""
    own, places = _marks(q, k, query_marks) if _reads_marks(potential) else (q, k)
    found = reduce.one(potential, *potential.features(q, k, own, places), causal)
    if isinstance(found, Refused) or not _fits(found, q, k, v) or loses_digits(found):
        return None
    return _run_kernel(found, v, causal, temperature)


def _run_kernel(found: Reduction, v: Tensor, causal: bool, temperature: float) -> Tensor:
    """The kernel on a reduction that it takes as it is."""
    bias = found.key_bias
    if bias is not None:
        bias = bias.reshape((1,) * (3 - bias.ndim) + bias.shape).unsqueeze(-2)
        bias = bias if temperature == 1.0 else bias / temperature
    scale = float(found.scale / temperature)
    return _kernel(found.queries, found.keys, v, 0.0, causal, attn_mask=bias, scale=scale)[0]


def _marks(q: Tensor, k: Tensor, query_marks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Where queries and keys stand."""
    places = torch.arange(k.shape[-2], device=k.device)
    if query_marks is not None:
        return query_marks, places
    return places if q.shape[-2] == k.shape[-2] else torch.arange(q.shape[-2], device=k.device), places


def _is_bare(potential: Potential) -> bool:
    """Whether scores are products of the points as they are."""
    return type(potential) is Dot and _is_unprojected(potential)


def _is_unprojected(potential: Dot | Gaussian) -> bool:
    return potential.w_q is potential.w_k is potential.b_q is potential.b_k is None


def _is_product(potential: Potential) -> bool:
    """Whether scores may be products of features plus a bias on keys; it is not tried for other kinds."""
    if isinstance(potential, Sum):
        return all(map(_is_product, potential.terms))
    if isinstance(potential, Rotary):
        return _is_product(potential.potential)
    return type(potential) in (Dot, Gaussian, Cosine, Alibi)


def _reads_marks(potential: Potential) -> bool:
    """Whether one of these potentials looks at positions."""
    if isinstance(potential, Sum):
        return any(map(_reads_marks, potential.terms))
    return type(potential) in (Rotary, Alibi)


def _fits(found: Reduction, q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the kernel takes a reduction as it is."""
    bias, scale = found.key_bias, found.scale
    return (
        not found.residues
        and not isinstance(scale, Tensor)
        and scale > 0
        and found.queries.shape[:-1] == q.shape[:-1]
        and found.keys.shape[:-1] == k.shape[:-1]
        and found.queries.shape[-1] == v.shape[-1]
        and found.queries.dtype == found.keys.dtype == v.dtype
        and (bias is None or (bias.dtype == v.dtype and _broadcasts(bias.shape[:-1], v.shape[:2])))
    )


def _broadcasts(shape: tuple[int, ...], batch: tuple[int, ...]) -> bool:
    """Whether a shape adds nothing to a batch shape."""
    return len(shape) <= len(batch) and all(
        size in (1, own) for size, own in zip(reversed(shape), reversed(batch), strict=False)
    )


def _is_plain(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the kernel takes them as they are, and nobody asks for derivatives or records a program."""
    if not (type(q) is type(k) is type(v) is Tensor) or not is_only_run(q, k, v):
        return False
    shape, kind = k.shape, q.dtype
    return (
        len(q.shape) == len(shape) == 4
        and q.shape[:2] == shape[:2]
        and q.shape[3] == shape[3] >= LEAST_WIDTH
        and v.shape == shape
        and kind == k.dtype == v.dtype
        and kind in _FLOATING
        and q.device.type == k.device.type == v.device.type == "cpu"
        and q.stride(3) == k.stride(3) == v.stride(3) == 1
        and q.numel() > 0
        and shape[2] > 0
        and not torch.is_autocast_enabled("cpu")
    )
