"""Small networks of every kind, and attacks on them."""

import torch

import regard as r
from regard import maps

D = torch.float64


def drawn(generator, *shape):
    return torch.randn(*shape, generator=generator, dtype=D)


def attention(generator, width, heads=2, keys=None, sharp=1.0, turned=None, support=r.Full()):
    """Heads with biases, grouped keys, positions and a mask."""
    keys, inner = keys or heads, 4
    size = sharp / width**0.5
    dot = r.Dot(
        drawn(generator, heads, width, inner) * size,
        drawn(generator, keys, width, inner) * size,
        b_q=0.3 * drawn(generator, heads, inner),
        b_k=0.3 * drawn(generator, keys, inner),
    )
    potential = {None: dot, "rotary": r.Rotary(dot), "alibi": dot + r.Alibi(0.3), "scaled": 0.7 * dot}[turned]
    values = r.Linear(drawn(generator, keys, width, inner) / width**0.5, 0.2 * drawn(generator, keys, inner))
    mixed = drawn(generator, heads, inner, width) / 2
    return maps.Heads(r.Attention(potential, values, support=support), mixed, 0.1 * drawn(generator, width))


def hidden(generator, width, activation, gated=False, inner=10):
    """A feed-forward layer."""
    first, second = (drawn(generator, width, inner) / width**0.5 for _ in range(2))
    out, bias = drawn(generator, inner, width) / inner**0.5, 0.3 * drawn(generator, inner)
    if gated:
        return maps.Gated(activation, first, second, out, bias, 0.3 * drawn(generator, inner))
    return maps.feed_forward(activation, first, out, bias, 0.1 * drawn(generator, width))


def norm(generator, width, centered=True, eps=1e-5):
    bias = 0.1 * drawn(generator, width) if centered else None
    return maps.Normalize(eps, 1 + 0.3 * drawn(generator, width), bias, centered=centered)


def network(
    seed, layers=2, width=8, pre=False, activation=maps.Gelu(), gated=False, norms=(True, 1e-5), **scores
):
    """A stack of blocks; norms: whether they are centered, and their eps."""
    generator = torch.Generator().manual_seed(seed)
    block = maps.pre_norm if pre else maps.post_norm
    return maps.Compose(
        tuple(
            block(
                attention(generator, width, **scores),
                hidden(generator, width, activation, gated),
                norm(generator, width, *norms),
                norm(generator, width, *norms),
            )
            for _ in range(layers)
        )
    )


def sequence(seed, tokens=4, width=8):
    return drawn(torch.Generator().manual_seed(1000 + seed), tokens, width)


def farthest(map, domain, steps=15, starts=2, seed=0):
    """The largest move of the value that ascent finds in a neighborhood."""
    from regard.proofs.places import farthest as corner

    generator, still, best = torch.Generator().manual_seed(seed), map(domain.measure.points), 0.0
    for _ in range(starts):
        x = corner.one(domain, drawn(generator, *domain.measure.points.shape))
        for _ in range(steps):
            leaf = x.detach().requires_grad_()
            move = (map(leaf) - still).norm()
            best = max(best, float(move.detach()))
            x = corner.one(domain, torch.autograd.grad(move, leaf)[0])
    return best


def rounded(dtype):
    """A layer whose bias leaves bfloat16 no digit after the point."""
    layer = torch.nn.Linear(2, 2).to(dtype)
    layer.weight.data, layer.bias.data = torch.eye(2, dtype=dtype), torch.full((2,), 256.0, dtype=dtype)
    return layer
