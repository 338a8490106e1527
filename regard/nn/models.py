"""Models of token sequences: a decoder alone, and an encoder with a decoder."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from regard._kinds import names_wrong_kinds
from regard.certificate import Certificate, round_up
from regard.domains import Whole
from regard.errors import ArgumentError
from regard.maps import Affine, Compose
from regard.nn.cache import Cache
from regard.nn.design import Design
from regard.nn.embedding import Embedding
from regard.nn.generation import (
    Sampling,
    at_rest,
    check_end,
    check_padding,
    check_request,
    finish,
    seen_after,
    steps,
)
from regard.nn.initialization import initialize
from regard.nn.orthogonal import Orthogonal
from regard.nn.positions import LearnedPositions
from regard.nn.promises import check_finite, exact
from regard.nn.stacks import Decoder, Encoder
from regard.proofs.certification import certify
from regard.supports import Full, Support


class LanguageModel(nn.Module):
    """ids (batch, n) ↦ logits (batch, n, vocabulary) of what comes next at each place: a decoder alone.

    tied: the output uses the table of the embedding.

    Examples:
        >>> from regard.nn import Design, LanguageModel
        >>> model = LanguageModel(Design(8, 2), vocabulary=11, layers=2)
        >>> model(torch.tensor([[1, 2, 3]])).shape
        torch.Size([1, 3, 11])
    """

    @names_wrong_kinds
    def __init__(self, design: Design, vocabulary: int, layers: int, *, tied: bool = True) -> None:
        super().__init__()
        if tied and design.promise is not None:
            found = "is True, and the table of an embedding keeps no promise"
            raise ArgumentError("tied", found, "give tied=False")
        self.design, self.vocabulary, self.tied = design, vocabulary, tied
        self.embedding = Embedding(vocabulary, design)
        self.decoder = Decoder(design, layers, cross=False)
        self.output = None if tied else self._made_output()
        if isinstance(self.output, nn.Linear):
            initialize(self.output, design.initialization, layers)

    def forward(
        self,
        ids: Tensor,
        *,
        support: Support = Full(),
        cache: Cache | None = None,
        padding: Tensor | None = None,
    ) -> Tensor:
        """Logits of the next token at each place; with a cache, ids follow those it has seen.

        padding (batch,): how many places at the beginning of each sequence are no tokens; positions count
        from there, and `support` has to hide them.
        """
        past = 0 if cache is None else cache.length
        x = self.embedding(ids, past if padding is None else past - padding.unsqueeze(-1))
        x = self.decoder(x, support=support, cache=cache)
        if self.design.promise is not None:
            x = self.design.promise.value * x
        return self.embedding.logits(x) if self.output is None else self.output(x)

    def _made_output(self) -> nn.Module:
        if self.design.promise is None:
            return nn.Linear(self.design.width, self.vocabulary, bias=False)
        return Orthogonal(self.design.width, self.vocabulary)

    def certificate(self, tokens: int | None = None) -> Certificate:
        """What is proved of the weights as they are: how far logits move, in the norm of the promise, when
        embedded tokens move; for texts of so many tokens, or of any number.
        """
        promise = self.design.promise
        if promise is None:
            raise ArgumentError("design", "has no promise", "build with Design(..., promise=Promise(...))")
        check_finite(self)
        return certify(Logits(self), Whole(tokens=tokens), promise.norm)

    def keep(self, tokens: int | None = None) -> Certificate:
        """The certificate, or an error where it is above the promise."""
        found, promise = self.certificate(tokens), self.design.promise
        assert promise is not None
        if not promise.kept_by(found):
            why = f" ({found.refused[0]})" if found.refused else ""
            stated = f"is {promise.value:g} in {promise.norm!r} and the model has the certificate "
            raise ArgumentError(
                "promise",
                stated + round_up(found.value) + why,
                "restore it from before it was changed",
            )
        return found

    def declare_logits(self) -> Compose:
        """From embedded tokens to logits, as one map, in float64 and cut off from the parameters."""
        if self.output is None:
            read = Affine(exact(self.embedding.weight).mT.contiguous())
        elif isinstance(self.output, Orthogonal):
            read = self.output.declare()
        else:
            assert isinstance(self.output, nn.Linear)
            read = Affine(exact(self.output.weight).mT.contiguous())
        promise = self.design.promise
        read = read if promise is None else Affine(read.w * promise.value, read.b)
        return Compose((*self.declare().maps, read))

    def cache(self) -> Cache:
        """A new cache for one batch of sequences."""
        return Cache(len(self.decoder.layers))

    def declare(self) -> Compose:
        """From embedded tokens to what the output reads, as one map,
        in float64 and cut off from the parameters.
        """
        return self.decoder.declare()

    def generate(
        self,
        ids: Tensor,
        tokens: int,
        *,
        sampling: Sampling = Sampling(),
        seed: int | None = None,
        end: int | None = None,
        real: Tensor | None = None,
    ) -> Tensor:
        """ids (batch, n) continued by `tokens` tokens: (batch, n + tokens), or fewer where every sequence
        came to its `end`.

        Tokens are drawn at temperature 1 unless a sampling is given; Sampling(temperature=0.0) takes the
        likeliest. real (batch, n): True for tokens, False for padding, which stands before them; each
        sequence goes on as it would alone.
        """
        return finish(ids, self.stream(ids, tokens, sampling=sampling, seed=seed, end=end, real=real))

    def stream(
        self,
        ids: Tensor,
        tokens: int,
        *,
        sampling: Sampling = Sampling(),
        seed: int | None = None,
        end: int | None = None,
        real: Tensor | None = None,
    ) -> Iterator[Tensor]:
        """The same, one token (batch,) at a time."""
        check_room(self.design, ids, tokens)
        check_end(end, self.vocabulary)
        cache, parts = self.cache(), list(self.modules())
        hidden = None if real is None else check_padding(real, ids)

        def logits(new: Tensor) -> Tensor:
            support = Full() if hidden is None else seen_after(hidden, cache.length + new.shape[-1])
            with at_rest(parts):
                found: Tensor = self(new, support=support, cache=cache, padding=hidden)
            return found

        return steps(logits, ids, tokens, sampling=sampling, seed=seed, end=end)


@dataclass(frozen=True)
class Logits:
    """What a promise of a language model is about: from embedded tokens to logits."""

    model: LanguageModel


class SequenceToSequence(nn.Module):
    """source (batch, m) and target (batch, n) ↦ logits (batch, n,
    vocabulary) of what follows each target token.

    Examples:
        >>> from regard.nn import Design, SequenceToSequence
        >>> model = SequenceToSequence(Design(8, 2), source=5, target=7, layers=1)
        >>> model(torch.tensor([[1, 2, 3]]), torch.tensor([[0, 1]])).shape
        torch.Size([1, 2, 7])
    """

    @names_wrong_kinds
    def __init__(self, design: Design, source: int, target: int, layers: int) -> None:
        super().__init__()
        self.design, self.source, self.target = design, source, target
        self.source_embedding, self.embedding = Embedding(source, design), Embedding(target, design)
        self.encoder, self.decoder = Encoder(design, layers), Decoder(design, layers)

    def forward(self, source: Tensor, target: Tensor, *, source_support: Support = Full()) -> Tensor:
        """Logits of the next target token at each place; source_support: what may be seen of the source,
        e.g. Padding.
        """
        encoded = self.encode(source, source_support=source_support)
        return self.embedding.logits(
            self.decoder(self.embedding(target), encoded, context_support=source_support)
        )

    def encode(self, source: Tensor, *, source_support: Support = Full()) -> Tensor:
        """The source as points (batch, m, width)."""
        return self.encoder(self.source_embedding(source), support=source_support)

    def generate(
        self,
        source: Tensor,
        start: Tensor,
        tokens: int,
        *,
        sampling: Sampling = Sampling(temperature=0.0),
        seed: int | None = None,
        end: int | None = None,
        source_support: Support = Full(),
    ) -> Tensor:
        """Targets that begin with start (batch, n), continued by `tokens` tokens;
        greedy unless a sampling is given.
        """
        return finish(
            start,
            self.stream(
                source, start, tokens, sampling=sampling, seed=seed, end=end, source_support=source_support
            ),
        )

    def stream(
        self,
        source: Tensor,
        start: Tensor,
        tokens: int,
        *,
        sampling: Sampling = Sampling(temperature=0.0),
        seed: int | None = None,
        end: int | None = None,
        source_support: Support = Full(),
    ) -> Iterator[Tensor]:
        """The same, one token (batch,) at a time."""
        check_room(self.design, start, tokens)
        check_end(end, self.target)
        if len(source) != len(start):
            raise ArgumentError(
                "start",
                f"has {len(start)} sequences for {len(source)} sources",
                "give one start for each source",
            )
        cache, encoded, parts = Cache(len(self.decoder.layers)), None, list(self.modules())

        def logits(new: Tensor) -> Tensor:
            nonlocal encoded
            with at_rest(parts):
                encoded = self.encode(source, source_support=source_support) if encoded is None else encoded
                points = self.embedding(new, cache.length)
                return self.embedding.logits(
                    self.decoder(points, encoded, context_support=source_support, cache=cache)
                )

        return steps(logits, start, tokens, sampling=sampling, seed=seed, end=end)


def check_room(design: Design, ids: Tensor, tokens: int) -> None:
    """A request that can be met: learned positions end somewhere, which is said before the work begins."""
    check_request(ids, tokens)
    longest = design.positions.longest if isinstance(design.positions, LearnedPositions) else None
    if longest is not None and ids.shape[-1] + tokens - 1 > longest:
        raise ArgumentError(
            "tokens",
            f"is {tokens} after {ids.shape[-1]} given ones, and {longest} positions are learned",
            f"ask for at most {max(longest - ids.shape[-1] + 1, 0)}",
        )
