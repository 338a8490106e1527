"""Flows to look at: simulated particles and layers of trained models, as pages that play from disk."""

from regard.flows.layers import Iterated, Layer, iterated, layers_of
from regard.flows.page import save
from regard.flows.phase import Phases, phases
from regard.flows.recipe import Recipe
from regard.flows.simulation import Simulation

__all__ = ["Iterated", "Layer", "Phases", "Recipe", "Simulation", "iterated", "layers_of", "phases", "save"]
