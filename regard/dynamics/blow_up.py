"""BlowUpError: where a flow leaves the numbers."""

from __future__ import annotations

from regard.errors import RegardError


class BlowUpError(RegardError, ArithmeticError):
    """A flow left the range of floating-point numbers between two times: it is known until the first of them.

    Examples:
        >>> issubclass(regard.dynamics.BlowUpError, regard.errors.RegardError)
        True
        >>> error = regard.dynamics.BlowUpError(1.0, 1.1)
        >>> error.last, error.beyond
        (1.0, 1.1)
    """

    def __init__(self, last: float, beyond: float) -> None:
        self.last, self.beyond = last, beyond
        super().__init__(
            f"the flow leaves the range of floating-point numbers between t = {last:.6g} and {beyond:.6g}; "
            f"it is known until "
            f"t = {last:.6g}: shorten until=, take smaller steps, or another space (Rescaled(v), Sphere())"
        )
