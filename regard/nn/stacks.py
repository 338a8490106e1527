"""Stacks of layers: encoder, decoder, and both together."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from regard._kinds import names_wrong_kinds
from regard.errors import ArgumentError
from regard.maps import Compose, Map
from regard.nn.attention import check_tokens
from regard.nn.cache import Cache
from regard.nn.declaration import norm_map
from regard.nn.design import Design
from regard.nn.initialization import initialize
from regard.nn.layers import DecoderLayer, EncoderLayer, require_context
from regard.nn.naming import refuse_torch_names
from regard.nn.promised_layers import PromisedDecoderLayer
from regard.nn.walking import Walk
from regard.proofs.locating import steps
from regard.supports import Causal, Full, Support


class Encoder(nn.Module):
    """Encoder layers one after the other; a last norm where norms come first, or where it is asked for.

    Examples:
        >>> from regard.nn import Design, Encoder
        >>> Encoder(Design(8, 2), layers=2)(torch.randn(1, 4, 8)).shape
        torch.Size([1, 4, 8])
    """

    @names_wrong_kinds
    def __init__(self, design: Design, layers: int, *, final_norm: bool | None = None) -> None:
        super().__init__()
        check_layers(layers)
        self.design = design
        self.final_norm = design.norm_first if final_norm is None else final_norm
        if design.promise is not None:
            found = "has a promise, which LanguageModel keeps"
            raise ArgumentError("design", found, "for an encoder with a promise use regard.nn.Guaranteed")
        self.layers = nn.ModuleList(EncoderLayer(design) for _ in range(layers))
        self.norm = design.normalization() if self.final_norm else nn.Identity()
        initialize(self, design.initialization, layers)

    def forward(self, x: Tensor, *, support: Support = Full(), **torch_names: Any) -> Tensor:
        """Tokens (..., n, width) in, as many out."""
        refuse_torch_names(torch_names, self)
        for layer in self.layers:
            x = layer(x, support=support)
        return self.norm(x)

    def declare(self) -> Compose:
        """All layers as one map, in float64 and cut off from the parameters."""
        return _compose([layer.declare() for layer in self.layers], self.norm)  # type: ignore[operator]


class Decoder(nn.Module):
    """Decoder layers one after the other: masked self-attention,
    and attention to a context unless cross=False. support: what tokens see of each other, their past.

    Examples:
        >>> from regard.nn import Decoder, Design
        >>> decoder = Decoder(Design(8, 2), 2).eval()
        >>> decoder(torch.randn(1, 4, 8), torch.randn(1, 6, 8)).shape  # the target, and its context
        torch.Size([1, 4, 8])
    """

    @names_wrong_kinds
    def __init__(
        self,
        design: Design,
        layers: int,
        *,
        cross: bool = True,
        final_norm: bool | None = None,
        support: Support = Causal(),
    ) -> None:
        super().__init__()
        check_layers(layers)
        self.design, self.cross, self.support = design, cross, support
        usual = design.norm_first and design.promise is None
        self.final_norm = usual if final_norm is None else final_norm
        self.layers = nn.ModuleList(_decoder_layer(design, cross, support) for _ in range(layers))
        self.norm = design.normalization() if self.final_norm else nn.Identity()
        initialize(self, design.initialization, layers)

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        support: Support = Full(),
        context_support: Support = Full(),
        cache: Cache | None = None,
        **torch_names: Any,
    ) -> Tensor:
        """Tokens (..., n, width) that see their past, and the context (..., m, width) where there is one."""
        refuse_torch_names(torch_names, self)
        self._check(context, cache)
        walk = None if cache is None or type(support) is not Full else cache.walk(self, Walk.through)
        if cache is not None and walk is not None and walk.is_open(x, cache):
            x = walk.go(x, cache)
            cache.end()
            return x
        for number, layer in enumerate(self.layers):
            entry = None if cache is None else (cache.tokens[number], cache.contexts[number])
            x = layer(x, context, support=support, context_support=context_support, cache=entry)
        x = self.norm(x)
        if cache is not None:
            cache.end()
        return x

    def _check(self, context: Tensor | None, cache: Cache | None) -> None:
        if self.cross:
            require_context(context)
        elif context is not None:
            raise ArgumentError(
                "context",
                "is given to a decoder without cross-attention",
                "leave it out, or build with cross=True",
            )
        if cache is not None and len(cache) != len(self.layers):
            raise ArgumentError(
                "cache",
                f"is for {len(cache)} layers and there are {len(self.layers)}",
                "make one with Cache(layers)",
            )
        if cache is not None:
            cache.begin()
        if cache is not None and context is not None:
            for entry in cache.contexts:
                entry.known(context)  # before anything is written into the cache

    def declare(self, context: Tensor | None = None) -> Compose:
        """All layers as one map of the tokens, for one context,
        in float64 and cut off from the parameters.
        """
        self._check(context, None)
        return _compose([layer.declare(context) for layer in self.layers], self.norm)  # type: ignore[operator]


class Transformer(nn.Module):
    """Encoder and decoder on points, without embeddings:
    the counterpart of torch.nn.Transformer (vaswani2017, 3). support: what the target sees of itself.

    Examples:
        >>> from regard.nn import Design, Transformer
        >>> model = Transformer(Design(8, 2), 1, 1)
        >>> model(torch.randn(1, 4, 8), torch.randn(1, 3, 8)).shape  # source, target
        torch.Size([1, 3, 8])
    """

    @names_wrong_kinds
    def __init__(
        self,
        design: Design,
        encoder_layers: int,
        decoder_layers: int,
        *,
        final_norm: bool = True,
        support: Support = Causal(),
    ) -> None:
        super().__init__()
        self.encoder = Encoder(design, encoder_layers, final_norm=final_norm)
        self.decoder = Decoder(design, decoder_layers, final_norm=final_norm, support=support)
        self.design, self.final_norm, self.support = design, final_norm, support

    def forward(
        self,
        source: Tensor,
        target: Tensor,
        *,
        source_support: Support = Full(),
        target_support: Support = Full(),
        **torch_names: Any,
    ) -> Tensor:
        """Source (..., m, width) is encoded; target (..., n, width) sees its past and all of the encoded
        source.

        source_support is what anyone may see of the source: one that looks at keys alone, as Padding or Where
        with one row do.
        """
        refuse_torch_names(torch_names, self)
        check_tokens("source", source, self.design.width)
        encoded = self.encoder(source, support=source_support)
        return self.decoder(target, encoded, support=target_support, context_support=source_support)

    def declare(self, source: Tensor) -> Compose:
        """The decoder as a map of the target, for one source (m, width)."""
        return self.decoder.declare(self.encoder(source.unsqueeze(0)).squeeze(0))


def _decoder_layer(design: Design, cross: bool, support: Support) -> nn.Module:
    if design.promise is None:
        return DecoderLayer(design, cross=cross, support=support)
    if not isinstance(support, Causal):
        raise ArgumentError("support", f"is {support!r}, and the promise is for Causal()", "leave it out")
    if cross:
        found = "has a promise, and attention to a context has none"
        raise ArgumentError("design", found, "leave the promise out, or build with cross=False")
    return PromisedDecoderLayer(design.width, design.heads, design.positions)


def check_layers(layers: int) -> None:
    """A stack has layers."""
    if not isinstance(layers, int) or isinstance(layers, bool) or layers < 1:
        raise ArgumentError("layers", f"is {layers!r}", "give the number of layers, one or more")


def _compose(layers: list[Map], norm: nn.Module) -> Compose:
    last = [] if isinstance(norm, nn.Identity) else [norm_map(norm)]
    return Compose(steps(Compose((*layers, *last))))
