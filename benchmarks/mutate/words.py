"""Words of the language that planting knows: what is a margin, a count, an opposite, a place of an axis."""

from __future__ import annotations

import ast

TINY = 1e-6
"""Constants below this are allowances for rounding."""
MARGINS = {"outward", "up"}
"""Functions that only make a bound safer."""
OPPOSITE = {
    "min": "max",
    "minimum": "maximum",
    "amin": "amax",
    "clamp_min": "clamp_max",
    "argmin": "argmax",
    "fmin": "fmax",
    "aminimum": "amaximum",
}
OPPOSITE |= {second: first for first, second in OPPOSITE.items()}
NEGATED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.GtE,
    ast.GtE: ast.Lt,
    ast.Gt: ast.LtE,
    ast.LtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
}
COUNTS = {
    "relative_error": 0,
    "rounding_error": 0,
    "gamma": 0,
    "outward": 1,
    "Upper": 1,
    "Lower": 1,
    "lengths": 1,
    "largest_roots": 1,
    "Projection": 2,
}
"""Functions that are told a count of roundings, and as which argument."""
ERRORS = {"relative_error", "rounding_error", "gamma"}
"""Functions whose value is a relative error; names that end in `unit` are such values, too."""
UNITS = {"UNIT", "EPS"}
"""What one rounding is worth: the factor before it is a count."""
ACCOUNTS = ("regard/_upper.py",)
"""Where roundings are counted: there every counter is a number like others."""
TEXTS = {"Refusal", "ArgumentError", "Theorem", "Hypothesis", "Verb", "checked", "assumed", "field"}
"""Calls whose arguments are words."""
AXES = {"dim", "dim0", "dim1", "dim2", "dims", "axis", "dtype", "keepdim", "diagonal", "offset"}
PLACED = {
    "all",
    "amax",
    "amin",
    "any",
    "arange",
    "argmax",
    "argmin",
    "cat",
    "cumsum",
    "diag_embed",
    "diff",
    "expand",
    "eye",
    "flatten",
    "flip",
    "gather",
    "index_fill",
    "index_select",
    "log_softmax",
    "logsumexp",
    "max",
    "mean",
    "min",
    "movedim",
    "narrow",
    "new_ones",
    "new_zeros",
    "norm",
    "ones",
    "permute",
    "repeat",
    "reshape",
    "round",
    "select",
    "size",
    "softmax",
    "sort",
    "split",
    "squeeze",
    "stack",
    "sum",
    "swapaxes",
    "take_along_dim",
    "transpose",
    "unflatten",
    "unsqueeze",
    "view",
    "vmap",
    "zeros",
}
"""Methods whose whole numbers are places of axes or sizes."""
