"""What `regard cheaper` measures and shows: which cheaper attention is good enough, layer by layer."""

from regard.choices.choosing import Choosing
from regard.choices.found import Applied, Found, LayerFound
from regard.choices.reading import Text, read_text

__all__ = ["Applied", "Choosing", "Found", "LayerFound", "Text", "read_text"]
