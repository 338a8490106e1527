"""Cost: what a declaration, a module or a config takes to run and to train, from shapes alone."""

from regard.costs import families, maps, modules  # noqa: F401 (register the rules)
from regard.costs.account import Cost, Part
from regard.costs.architecture import Architecture
from regard.costs.costing import assess, charge, cost
from regard.costs.formulas import register_flop_formulas
from regard.costs.sizes import Sizes

register_flop_formulas()

__all__ = ["Architecture", "Cost", "Part", "Sizes", "assess", "charge", "cost", "register_flop_formulas"]
