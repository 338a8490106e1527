"""The derivatives of a declaration, and of any map: exact products, blocks, norms."""

from regard.derive.estimate import Estimate, UpperEstimate
from regard.derive.jacobian import Jacobian
from regard.derive.linearization import linearize

__all__ = ["Estimate", "Jacobian", "UpperEstimate", "linearize"]
