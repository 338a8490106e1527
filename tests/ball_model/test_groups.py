"""Remainders that tokens share: sizes are at least the true ones, which rationals know."""

from fractions import Fraction

import torch

from regard.proofs.ball_model.groups import Groups

D = torch.float64


def _square(columns):
    return sum(Fraction(float(entry)) ** 2 for entry in columns.flatten())


def test_sizes_count_what_sums_forget():
    """1 + 4,000 · 2^-54: each addition rounds to one again, along columns and along their entries."""
    many = torch.full((4001,), 2.0**-27, dtype=D)
    many[0] = 1.0
    for shape in ((1, 1, 4001), (1, 4001, 1)):
        columns = many.reshape(shape)
        count = shape[-1]
        found = Groups(columns, torch.arange(count), torch.zeros(count, dtype=torch.long)).sizes.bound
        bound, square = Fraction(float(found)) ** 2, _square(columns)
        assert square <= bound <= square * (1 + Fraction(2 * 4100, 2**52))
    alone = torch.zeros(())
    for entry in many.square().tolist():
        alone = alone.double() + entry
    assert float(alone) == 1.0  # the sum that was asked for is lost
