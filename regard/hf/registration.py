"""register: make attention known to transformers under a name. verify: that a model really asks for it."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import nn

from regard.errors import ArgumentError, MissingExtraError
from regard.hf.plug import Plug
from regard.hf.recorder import Recorder
from regard.normalizers import Normalizer, Softmax
from regard.potentials import Potential

TAKEN = ("eager", "sdpa", "flash", "flex", "paged")
"""Words that transformers looks for inside names."""


def register(
    name: str = "regard",
    *,
    potential: Potential | None = None,
    normalizer: Normalizer = Softmax(),
    record: Recorder | None = None,
) -> str:
    """Make attn_implementation=name run this attention in every model that uses the attention interface;
    returns the name.

    The potential replaces scaled dot products of the queries and keys that a module hands over (None: Dot
    with the module's own scaling), the normalizer replaces softmax. Registering a name again replaces it, for
    models that use it already too.

    Examples:
        >>> import transformers
        >>> sizes = {"vocab_size": 20, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
        >>> config = transformers.LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1)
        >>> model, ids = transformers.LlamaModel(config).eval(), torch.tensor([[1, 2, 3]])
        >>> theirs = model(ids).last_hidden_state
        >>> model.set_attn_implementation(regard.hf.register())
        >>> torch.allclose(model(ids).last_hidden_state, theirs, atol=1e-5)
        True
    """
    attention, masks, mask_function = interfaces()
    _check_name(name, attention._global_mapping)
    for argument, value, kind in (
        ("potential", potential, Potential),
        ("normalizer", normalizer, Normalizer),
        ("record", record, Recorder),
    ):
        if not isinstance(value, kind) and not (value is None and argument != "normalizer"):
            raise ArgumentError(argument, f"is {value!r}", f"give a {kind.__name__}")
    if record is not None and not normalizer.rowwise:
        raise ArgumentError(
            "record",
            f"cannot read {type(normalizer).__name__}, which couples the rows",
            "record a normalizer of single rows",
        )
    attention.register(name, Plug(potential, normalizer, record))
    masks.register(name, guard(mask_function))
    return name


def verify(model: nn.Module) -> None:
    """Raise if a part of a model that is set to a registered attention never asks for it: such a model
    runs its own and says nothing.

    Examples:
        >>> import transformers
        >>> sizes = {"vocab_size": 20, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
        >>> config = transformers.LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1)
        >>> model = transformers.LlamaModel(config)
        >>> model.set_attn_implementation(regard.hf.register())
        >>> regard.hf.verify(model)  # silent: the model asks for it
    """
    attention = interfaces()[0]
    for module in model.modules():
        config = getattr(module, "config", None)
        if isinstance(attention._global_mapping.get(getattr(config, "_attn_implementation", None)), Plug):
            _refuse_deaf(type(module))


def interfaces() -> tuple[Any, Any, Any]:
    """transformers' table of attention functions, that of mask functions,
    and the function that makes boolean masks.
    """
    try:
        from transformers import AttentionInterface
        from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
    except ImportError as error:
        raise MissingExtraError("transformers", "hf") from error
    return AttentionInterface, AttentionMaskInterface, sdpa_mask


def guard(mask_function: Callable[..., Any]) -> Callable[..., Any]:
    """The mask function, which first refuses models that never ask the attention interface: these would
    take a mask that is left out, because causal order says it, for no mask.
    """

    def mask(*arguments: Any, config: Any = None, **options: Any) -> Any:
        from transformers import MODEL_MAPPING

        for kind in () if torch.compiler.is_compiling() else _models(MODEL_MAPPING.get(type(config), None)):
            _refuse_deaf(kind)
        return mask_function(*arguments, config=config, **options)

    return mask


def _models(found: Any) -> tuple[type, ...]:
    """A configuration has one class of models, or several, or none that transformers knows."""
    return found if isinstance(found, tuple) else () if found is None else (found,)


def _refuse_deaf(kind: type) -> None:
    """Raise for a class of models that does not ask the attention interface,
    which transformers finds out from its source.
    """
    if not _asks(kind):
        found = f"{kind.__name__} does not ask the attention interface and would run its own attention"
        raise ArgumentError(
            "attn_implementation",
            found,
            "use 'eager' there, or a family that asks: regard's page on transformers names them",
        )


@cache
def _asks(kind: type) -> bool:
    """Whether it asks; found once, because transformers reads a file for it."""
    asks = getattr(kind, "_can_set_attn_implementation", None)
    return asks is None or bool(asks())


def _check_name(name: str, known: dict[str, Any]) -> None:
    if (
        not isinstance(name, str)
        or not re.fullmatch(r"\w[\w.-]*", name)
        or any(word in name for word in TAKEN)
    ):
        raise ArgumentError(
            "name",
            f"is {name!r}",
            f"give letters, digits, '_', '-' or '.', and none of {', '.join(TAKEN)} inside",
        )
    if name in known and not isinstance(known[name], Plug):
        raise ArgumentError("name", f"{name!r} is already registered by another package", "take another name")
