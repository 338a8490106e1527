"""Supports: which keys a query may see."""

from regard.supports.base import And, Full, Or, Support
from regard.supports.order import Causal, Window
from regard.supports.tokens import Document, Padding, Where

__all__ = ["And", "Causal", "Document", "Full", "Or", "Padding", "Support", "Where", "Window"]
