"""Cost: what a declaration, a module or a config takes to run and to train, from shapes alone."""

from regard.cost import families, maps, modules  # noqa: F401 (register the rules)
from regard.cost.account import Cost, Part
from regard.cost.architecture import Architecture
from regard.cost.costing import assess, charge, cost
from regard.cost.formulas import register_flop_formulas
from regard.cost.sizes import Sizes

register_flop_formulas()

__all__ = ["Architecture", "Cost", "Part", "Sizes", "assess", "charge", "cost", "register_flop_formulas"]
