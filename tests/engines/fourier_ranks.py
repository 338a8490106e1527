"""What ranks do in the tests of a series over several processes: each says how far it is from one process."""

import os
import time

import torch
import torch.distributed as dist

import regard as r
from regard.compute.application import problem_of
from regard.compute.fourier.nonuniform import has_finufft
from regard.compute.ring.ranks import Ranks
from regard.compute.selection import select, select_within
from regard.compute.tensors import pose_tensors
from regard.dynamics import DormandPrince, Euler, RungeKutta
from regard.engines import Finufft, Fourier, Ring, Separable, Tiled, ZigZag
from tests.engines.ring_ranks import attempt, draw, far

D = torch.float64
KEYS, QUERIES = 41, 23
FEW = (3, 1, 2)  # rows of the first ranks; the last one has the rest


def mine(tensor, dim=-2):
    """Shards that differ much in length."""
    world, count = dist.get_world_size(), tensor.shape[dim]
    lengths = [*FEW[: world - 1], count - sum(FEW[: world - 1])]
    return tensor.split(lengths, dim)[dist.get_rank()].contiguous()


def declarations():
    return {
        "gaussian": (r.Gaussian(bandwidth=1.0), r.Softmax(), 2),
        "bandwidths": (r.Gaussian(bandwidth=torch.tensor([0.5, 1.5], dtype=D)), r.Softmax(), 1),
        "temperature": (r.Gaussian(bandwidth=0.8), r.Softmax(torch.tensor(0.7, dtype=D)), 3),
        "dot": (r.Dot(scale=0.8), r.Softmax(), 2),
    }


def run(potential, normalizer, tensors, engine, some):
    """Outputs, energies and gradients, of own tokens or of all."""
    moving = [t.clone().requires_grad_() for t in tensors]
    learned = [
        t.requires_grad_()
        for t in (*vars(potential).values(), *vars(normalizer).values())
        if isinstance(t, torch.Tensor)
    ]
    with engine.posing(*moving[:2]) as marks:
        problem = pose_tensors(*moving[:3], potential, normalizer, r.Full(), moving[3], marks)
    plan = select(problem, engine)
    out, energy = plan.run(), plan.free_energy()
    by_out = some(draw(2, QUERIES, 3, seed=7, kind=D))
    by_energy = some(draw(2, QUERIES, seed=8, kind=D), -1)
    loss = (out * by_out).sum() + (energy * by_energy).sum()
    gradients = torch.autograd.grad(loss, [*moving, *learned])
    names = ["q", "k", "v", "counts", *(f"parameter {i}" for i in range(len(learned)))]
    return {"out": out, "energy": energy, **dict(zip(names, gradients, strict=True))}, plan


def compare(name, transform):
    """Own parts beside those of one process, and beside sums over pairs with what is proved of them."""
    potential, normalizer, width = declarations()[name]
    tensors = [draw(2, n, width, seed=seed, kind=D).clamp(-2, 2) for seed, n in ((1, QUERIES), (2, KEYS))]
    tensors += [draw(2, KEYS, 3, seed=3, kind=D), draw(2, KEYS, seed=4, kind=D)]
    single, alone = run(potential, normalizer, tensors, Fourier(1e-7, transform), lambda t, dim=-2: t)
    local = [mine(t, -1 if place == 3 else -2) for place, t in enumerate(tensors)]
    shared, plan = run(potential, normalizer, local, Fourier(1e-7, transform, Ring(timeout=20.0)), mine)
    exact, _ = run(potential, normalizer, tensors, Tiled(), lambda t, dim=-2: t)
    assert plan.series.modes == alone.series.modes
    assert abs(plan.facts.share / alone.facts.share - 1) < 1e-12
    assert plan.facts.keys == KEYS
    found = {}
    for what, expected in single.items():
        if what.startswith("parameter"):
            dist.all_reduce(shared[what])
        else:
            expected = mine(expected, -1 if what in ("energy", "counts") else -2)
        found[f"{name}, {what}"] = far(shared[what], expected)
    proved = plan.certify()
    error = torch.linalg.vector_norm(proved.outputs - mine(exact["out"].detach()), dim=-1)
    found[f"{name}, bound"] = float((error / proved.bounds).max())
    found[f"{name}, a priori"] = float(error.max() / (plan.bound * plan.facts.radius.min()))
    return found


def compare_all(rank, world):
    """Every declaration, by both transforms in turn; by the other one in the next world."""
    transforms, found = (Separable(), Finufft() if has_finufft() else Separable()), {}
    for place, name in enumerate(declarations()):
        found |= compare(name, transforms[(place + world) % 2])
    return {**found, **flows()}


def flows():
    """Particles end where those of one process do, on the series and where it does not pay."""
    ring = Ring(shards=ZigZag())
    x = 4 * torch.rand(4000, 2, generator=torch.Generator().manual_seed(0), dtype=D)
    attention, engine = r.Attention(r.Gaussian(bandwidth=1.0)), Fourier(1e-8, ring=ring)
    problem = problem_of(attention, ring.shard(x), None, engine)
    assert select_within(problem, engine).engine is engine
    single = r.flow(attention, x, RungeKutta(0.5), 1.0, engine=Fourier(1e-8)).at(1.0)
    shared = r.flow(attention, ring.shard(x), RungeKutta(0.5), 1.0, engine=engine).at(1.0)
    adaptive = r.flow(attention, ring.shard(x), DormandPrince(1e-5), 0.2, engine=engine).at(0.2)
    beside = r.flow(attention, x, DormandPrince(1e-5), 0.2, engine=Fourier(1e-8)).at(0.2)
    few = x[:30]
    assert select_within(problem_of(attention, ring.shard(few), None, engine), engine).engine is ring
    pairs = r.flow(attention, ring.shard(few), Euler(0.5), 1.0, engine=engine).at(1.0)
    whole = r.flow(attention, few, Euler(0.5), 1.0).at(1.0)
    return {
        "flow": far(shared, ring.shard(single)),
        "adaptive": far(adaptive, ring.shard(beside)),
        "flow of few": far(pairs, ring.shard(whole)),
    }


def particles(kind=D):
    return draw(5 + dist.get_rank(), 2, seed=dist.get_rank(), kind=kind)


def call(x=None, potential=None, timeout=10.0, tolerance=1e-6, **declared):
    x = particles() if x is None else x
    engine = Fourier(tolerance, ring=Ring(timeout=timeout))
    return r.attend(x, x, x, potential=potential or r.Gaussian(bandwidth=1.0), engine=engine, **declared)


def bad_input(rank, world):
    """What is wrong on one rank, or between ranks, is an error on all; the series still runs after it."""
    first, x = rank == 1, particles()
    spoiled = torch.where(torch.arange(len(x)).unsqueeze(-1) == 2 * first - 1, torch.nan, x)
    calls = {
        "dtypes": lambda: call(particles(torch.float32 if first else D)),
        "no tokens": lambda: call(x[: 0 if first else None]),
        "tolerances": lambda: call(tolerance=1e-3 if first else 1e-6),
        "bandwidths": lambda: call(potential=r.Gaussian(bandwidth=torch.tensor(2.0 + first, dtype=D))),
        "not a number": lambda: call(spoiled),
        "a mask": lambda: call(support=r.Causal()),
        "four features": lambda: call(torch.cat([x, x], -1)),
        "a box": lambda: call(x * (1e9 if first else 1)),
        "devices": lambda: call(x.to("meta") if first else x),
        "weights": lambda: r.apply(
            r.Attention(r.Gaussian(bandwidth=1.0)), r.Measure(x, x[:, 0]), engine=_engine()
        ),
        "forward mode": lambda: torch.func.jvp(call, (x,), (x,)),
        "noise": lambda: r.flow(
            r.Attention(r.Gaussian(bandwidth=1.0)), x, Euler(0.1), 1.0, noise=0.1, engine=_engine()
        ),
        "no ring": lambda: Fourier(ring="ring"),
        "nothing": lambda: call(),
    }
    return {name: attempt(action) for name, action in calls.items()}


def _engine():
    return Fourier(ring=Ring(timeout=10.0))


def die(rank, world):
    """Rank 1 ends while grids are added."""
    call(timeout=30.0)
    if rank == 1:
        Ranks.total = lambda self, tensor: os._exit(1)
    return attempt(lambda: call(timeout=30.0))


def hang(rank, world):
    """Rank 1 stops while grids are added, and the others wait for a second."""
    call(timeout=1.0)
    if rank == 1:
        Ranks.total = lambda self, tensor: time.sleep(3)
        attempt(lambda: call(timeout=1.0))
        os._exit(0)
    return attempt(lambda: call(timeout=1.0))
