"""What the ranks of a ring do in the tests: each runs all cases and says how far it is from one process."""

import contextlib
import os
import runpy
import sys
import threading
import time
import weakref
from pathlib import Path

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import regard as r
from regard.compute.ring import turns
from regard.compute.selection import select
from regard.compute.tensors import pose_tensors
from regard.dynamics import DormandPrince, Euler, RungeKutta

COUNT, WIDTH = 22, 8  # tokens: no world of two, three or four cuts them evenly
HEADS = 2


def draw(*shape, seed, kind):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(kind)


def potentials(kind):
    slopes = torch.tensor([0.5, 0.1], dtype=kind)
    return {
        "dot": r.Dot(),
        "heads": r.Dot(scale=torch.tensor([0.5, 0.3], dtype=kind)),
        "gaussian": r.Gaussian(bandwidth=torch.tensor(2.0, dtype=kind)),
        "rotary": r.Rotary(r.Dot()),
        "cosine": r.Cosine(scale=3.0),
        "alibi": r.Dot() + r.Alibi(slopes),
        "relative": r.Dot() + r.RelativeBias(draw(HEADS, 7, seed=9, kind=kind), r.potentials.Clipped(3)),
        "laplace": r.Laplace(bandwidth=3.0),
    }


def supports():
    ids = torch.arange(COUNT) // 6
    return {
        "full": r.Full(),
        "causal": r.Causal(),
        "window": r.Window(4, 2),
        "causal window": r.Causal() & r.Window(5, None),
        "documents": r.Document(ids) & r.Causal(),
        "padding": r.Padding(torch.tensor(COUNT - 9)),
        "nothing": r.Window(0, 0) & r.Padding(torch.tensor(5)),
    }


def cases():
    """(name, potential, support, counts, shards, dtype): every potential and every support, in turn."""
    both = (r.engines.Consecutive(), r.engines.ZigZag())
    for place, support in enumerate(supports()):
        for other, potential in enumerate(potentials(torch.float32)):
            if support in ("full", "causal") or (place + other) % 4 == 0:
                shards = both[(place + other) % 2]
                yield f"{potential}, {support}", potential, support, other % 2 == 0, shards, torch.float32
    for shards in both:
        yield f"float64 {shards}", "gaussian", "causal", True, shards, torch.float64
        yield f"bfloat16 {shards}", "dot", "causal", False, shards, torch.bfloat16


def differences(potential, support, counted, shards, kind):
    """How far outputs, log-sum-exps and all gradients of this rank are from float64, and one process is."""
    ring = r.engines.Ring(timeout=20.0, shards=shards)
    drawn = [draw(HEADS, COUNT, WIDTH, seed=seed, kind=kind) for seed in range(3)]
    drawn += [draw(HEADS, COUNT, seed=4, kind=kind)] if counted else []
    wide = torch.promote_types(kind, torch.float32)
    noun = potentials(wide)[potential]
    normalizer = r.Softmax(torch.tensor(1.3, dtype=wide)) if counted else r.Softmax()
    exact, one = (
        run([t.to(dtype) for t in drawn], *_in((noun, normalizer), other), supports()[support], None)
        for dtype, other in ((torch.float64, torch.float64), (kind, wide))
    )
    local = [ring.shard(t, -1 if place == 3 else -2) for place, t in enumerate(drawn)]
    mine = run(local, noun, normalizer, supports()[support], ring)
    found = {}
    for name in exact:
        if exact[name] is None:
            continue
        if name.startswith("parameter"):
            dist.all_reduce(mine[name])
            expected, others = exact[name], one[name]
        else:
            dim = -1 if name in ("energy", "counts") else -2
            expected, others = ring.shard(exact[name], dim), ring.shard(one[name], dim)
        found[name] = far(mine[name], expected), far(others, expected)
    return found


def run(tensors, noun, normalizer, support, engine):
    """Outputs, energies where a row sees something, and gradients, by name; on a ring or in one process."""
    some = (lambda t, dim=-2: t) if engine is None else engine.shard
    moving = [t.clone().requires_grad_() for t in tensors]
    noun, normalizer = pytree.tree_map_only(
        torch.Tensor, lambda t: t.clone().requires_grad_(), (noun, normalizer)
    )
    counts = moving[3] if len(moving) == 4 else None
    with (r.engines.ReferenceEngine() if engine is None else engine).posing(*moving[:2]) as marks:
        problem = pose_tensors(*moving[:3], noun, normalizer, support, counts, marks)
    plan = select(problem, r.engines.Tiled() if engine is None else engine)
    out, energy = plan.run_with_free_energy()
    assert out.dtype == tensors[0].dtype
    energy = torch.where(energy > -torch.inf, energy, 0.0)
    by_out, by_energy = (
        some(draw(*shape, seed=7, kind=torch.float64), dim)
        for shape, dim in (((HEADS, COUNT, WIDTH), -2), ((HEADS, COUNT), -1))
    )
    loss = (out * by_out).sum() + (energy * by_energy).sum()
    learned = [t for t in pytree.tree_leaves((noun, normalizer)) if isinstance(t, torch.Tensor)]
    gradients = torch.autograd.grad(loss, [*moving, *learned], allow_unused=True)
    names = [*("q", "k", "v", "counts")[: len(moving)], *(f"parameter {i}" for i in range(len(learned)))]
    return {"out": out, "energy": energy, **dict(zip(names, gradients, strict=True))}


def _in(nouns, kind):
    return pytree.tree_map_only(torch.Tensor, lambda t: t.to(kind) if t.is_floating_point() else t, nouns)


def far(found, expected):
    """The largest difference over the largest entry, or over one."""
    assert found.shape == expected.shape
    difference = (found.detach().double() - expected.detach().double()).abs().max()
    return float(difference / expected.detach().abs().max().clamp_min(1.0))


def compare_all(rank, world):
    found = {}
    for name, potential, support, counted, shards, kind in cases():
        found[name] = differences(potential, support, counted, shards, kind)
    return {**found, **flows()}


def flows():
    """Particles on the ring end where those of one process do."""
    ring = r.engines.Ring(shards=r.engines.ZigZag())
    x = draw(COUNT, 2, seed=1, kind=torch.float64)
    attention = r.Attention(r.Gaussian(bandwidth=1.0))
    single = r.flow(attention, x, RungeKutta(0.25), 1.0).at(1.0)
    shared = r.flow(attention, ring.shard(x), RungeKutta(0.25), 1.0, engine=ring).at(1.0)
    adaptive = r.flow(attention, ring.shard(x), DormandPrince(1e-5), 1.0, engine=ring).at(1.0)
    layers = r.iterate(attention, ring.shard(x), 3, engine=ring).at(3.0)
    stepped = r.iterate(attention, x, 3).at(3.0)
    return {
        "float64 flow": {"points": (far(shared, ring.shard(single)), 0.0)},
        "adaptive flow": {"points": (far(adaptive, ring.shard(single)), 0.0)},
        "float64 layers": {"points": (far(layers, ring.shard(stepped)), 0.0)},
    }


def tokens(kind=torch.float32):
    return draw(HEADS, 6, WIDTH, seed=dist.get_rank(), kind=kind)


def call(ring, x=None, **declared):
    x = tokens() if x is None else x
    return r.attend(x, x, x, engine=ring, **declared)


def attempt(action):
    """The error of an action, as its class and text, and the seconds until it came."""
    begun = time.monotonic()
    try:
        action()
    except Exception as error:
        return [type(error).__name__, str(error), time.monotonic() - begun]
    return ["nothing", "", time.monotonic() - begun]


def die(rank, world):
    """Rank 1 ends between two calls."""
    ring = r.engines.Ring(timeout=30.0)
    call(ring)
    if rank == 1:
        time.sleep(0.3)
        os._exit(1)
    return attempt(lambda: call(ring))


def die_on_the_way(rank, world):
    """Rank 1 ends while keys travel, in the backward pass."""
    ring = r.engines.Ring(timeout=30.0)
    x = tokens().requires_grad_()
    out = call(ring, x)
    if rank == 1:
        turns.pieces_of = lambda problem: os._exit(1)
    return attempt(lambda: out.sum().backward())


def hang(rank, world):
    """Rank 1 stops while keys travel, and the others wait for a second."""
    ring = r.engines.Ring(timeout=1.0)
    call(ring)
    if rank == 1:
        turns.pieces_of = lambda problem: time.sleep(3) or iter(())
        os._exit(0 if attempt(lambda: call(ring))[2] >= 3 else 1)
    return attempt(lambda: call(ring))


def stay_away(rank, world):
    """Rank 1 does not make the call that the others make."""
    ring = r.engines.Ring(timeout=1.0)
    call(ring)
    if rank == 1:
        time.sleep(4)
        return ["nothing", "", 0.0]
    return attempt(lambda: call(ring))


def bad_input(rank, world):
    """What is wrong on one rank, or between ranks, is an error on all; the ring still runs after it."""
    ring = r.engines.Ring(timeout=10.0)
    first = rank == 1
    found = {}

    def see(name, x=None, **declared):
        found[name] = attempt(lambda: call(ring, x, **declared))

    see("dtypes", tokens(torch.float64 if first else torch.float32))
    see("no tokens", tokens()[:, : 0 if first else None])
    see("declarations", support=r.Causal() if first else r.Full())
    see("parameters", potential=r.Gaussian(bandwidth=2.0 if first else 3.0))
    see("batch", torch.cat([tokens()] * 2) if first else tokens())
    see("a matrix", tokens()[0, 0] if first else tokens())
    see("a normalizer", normalizer=r.Entmax(1.5))
    x, key = tokens(), tokens().to("meta") if first else tokens()
    found["devices"] = attempt(lambda: r.attend(x, key, x, engine=ring))
    found["zigzag"] = attempt(
        lambda: call(r.engines.Ring(shards=r.engines.ZigZag()), tokens()[:, : 3 if first else None])
    )
    mesh = init_device_mesh("cpu", (world,))
    split = DTensor.from_local(tokens(), mesh, [Shard(1)])
    found["a DTensor"] = attempt(lambda: call(ring, split))
    found["a law"] = attempt(lambda: r.apply(r.Attention(r.Dot(), moment=r.Law()), x, engine=ring))
    found["weights"] = attempt(lambda: r.apply(r.Attention(r.Dot()), r.Measure(x, x[..., 0]), engine=ring))
    found["forward mode"] = attempt(lambda: torch.func.jvp(lambda t: call(ring, t), (x,), (x,)))
    far_off = r.Measure(x, marks=torch.arange(6) + (1 << 23) * rank)
    found["noise"] = attempt(lambda: r.flow(r.Attention(r.Dot()), x, Euler(0.1), 1.0, noise=0.1, engine=ring))
    mixed = r.nonexpansive.MixTokens(torch.eye(6))
    found["a map"] = attempt(lambda: r.flow(mixed, x[0], Euler(0.1), 1.0, engine=ring).at(1.0))
    found["positions"] = attempt(lambda: r.apply(r.Attention(r.Dot() + r.Alibi(0.1)), far_off, engine=ring))
    see("nothing")
    return found


def another_width(rank, world):
    """Queries and keys of rank 0 have another width, and values the same; the ring still runs after it."""
    ring = r.engines.Ring(timeout=10.0)
    x = tokens()
    narrow = x[..., :3] if rank == 0 else x
    return [attempt(lambda q=q: r.attend(q, q, x, engine=ring)) for q in (narrow, x)]


def ending(rank, world):
    """References to the group and running threads after a backward pass whose result is still held."""
    ring = r.engines.Ring(dist.group.WORLD, timeout=10.0)
    x = tokens().requires_grad_()
    out = call(ring, x)
    out.square().sum().backward()
    group = weakref.ref(dist.group.WORLD)
    dist.destroy_process_group()
    kept = group() is not None
    kind, text, _ = attempt(lambda: call(ring, x))
    return {"kept": kept, "threads": threading.active_count(), "after": [kind, text], "out": len(out)}


def some_ranks(rank, world):
    """A ring of the first and the last rank; the one between does not belong to it."""
    ring = r.engines.Ring(dist.new_group([0, 2]), timeout=10.0)
    x = draw(HEADS, 12, WIDTH, seed=3, kind=torch.float64)
    if rank == 1:
        return attempt(lambda: call(ring))
    mine = ring.shard(x).requires_grad_()
    call(ring, mine, support=r.Causal()).square().sum().backward()
    whole = x.clone().requires_grad_()
    r.attend(whole, whole, whole, support=r.Causal()).square().sum().backward()
    return ["nothing", "", far(mine.grad, ring.shard(whole.grad))]


def alone(rank, world):
    """A world of one, a flow on it, and its explanation."""
    ring = r.engines.Ring()
    x = tokens()
    explanation = str(r.explain(r.Attention(r.Dot()), x, engine=ring))
    return {
        "error": far(call(ring, support=r.Causal()), r.attend(x, x, x, support=r.Causal())),
        "how": explanation,
    }


def start_example(rank, world, folder, port):
    """One process of examples/ring.py as torchrun starts it; what it prints goes to a file."""
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        LOCAL_RANK=str(rank),
    )
    example = Path(__file__).parents[2] / "examples" / "ring.py"
    sys.argv = [str(example), "--tokens", "100"]
    with Path(folder, f"{rank}.txt").open("w") as file, contextlib.redirect_stdout(file):
        runpy.run_path(str(example), run_name="__main__")
