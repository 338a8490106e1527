"""The hull law: for which flows no particle leaves the convex hull of all of them."""

from __future__ import annotations

import warnings

from torch import Tensor

from regard.attention import Attention
from regard.dynamics.displacement import Displacement
from regard.dynamics.schemes import Euler, Scheme
from regard.dynamics.spaces import Euclidean, Rescaled, Space
from regard.lookups import Identity
from regard.maps import Mapping
from regard.moments import Mean


class HullWarning(UserWarning):
    """Steps that are too long for the convex hull to shrink, though that of the flow does.

    Examples:
        >>> import warnings
        >>> from regard.dynamics import Euler, Rescaled
        >>> layer, x = regard.Attention(regard.Dot()), torch.eye(2)
        >>> with warnings.catch_warnings(record=True) as heard:
        ...     warnings.simplefilter("always")
        ...     end = regard.flow(layer, x, Euler(1.5), 3.0, space=Rescaled(1.0)).at(3.0)
        >>> heard[0].category is regard.dynamics.HullWarning
        True
    """


def keeps_hull(map: Mapping, space: Space) -> bool:
    """Whether velocities point from each particle to an average of all: x' = P x - x, with laws as rows."""
    if isinstance(map, Displacement) and isinstance(space, Euclidean):
        return _averages(map.map)
    one = isinstance(space, Rescaled) and not isinstance(space.v, Tensor) and space.v == 1
    return one and _averages(map)


def _averages(map: Mapping) -> bool:
    return (
        isinstance(map, Attention)
        and map.normalizer.laws
        and isinstance(map.lookup, Identity)
        and isinstance(map.moment, Mean)
    )


def warn_of_long_steps(maps: tuple[Mapping, ...], space: Space, scheme: Scheme) -> None:
    """Euler steps of at most one are convex combinations, longer ones are not."""
    if isinstance(scheme, Euler) and scheme.step > 1 and any(keeps_hull(map, space) for map in maps):
        message = (
            f"step: is {scheme.step:g}, and Euler steps longer than 1 are not convex combinations: particles "
            "may leave the convex hull, which the flow itself never does; take Euler(step) with a step of at "
            "most 1"
        )
        warnings.warn(message, HullWarning, stacklevel=3)
