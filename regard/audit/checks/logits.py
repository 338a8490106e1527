"""How large the scores of a head get: the first sign of a head that is about to saturate."""

from __future__ import annotations

import torch
from torch import Tensor

from regard.audit.checks.base import Check, register
from regard.audit.site import Site


def largest_logit(site: Site) -> Tensor:
    """max_ij |s_ij| over what is visible, for each head."""
    marks = torch.arange(site.points.shape[-2])
    allowed = site.attention.support.allows(marks, marks)
    return site.scores().abs().masked_fill(~allowed, 0.0).amax((0, -1, -2))


register(
    Check(
        name="largest_logit",
        title="absolute logit",
        meaning="Largest absolute score before the softmax, over all visible pairs and inputs, with the scale included.",
        measure=largest_logit,
        combine=lambda values: values.amax(0),
        high_is_alarming=True,
    )
)
