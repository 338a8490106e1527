"""What ranks do in the tests of data, parameters and matrices that lie over several processes."""

import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import regard as r


def build():
    """Two layers with learned potentials: a bandwidth for each head, a table of relative positions."""
    torch.manual_seed(0)
    widths, table = nn.Parameter(torch.tensor([2.0, 3.0])), nn.Parameter(torch.randn(2, 5))
    learned = r.Gaussian(bandwidth=widths) + r.RelativeBias(table, r.potentials.Clipped(2))
    design = r.nn.Design(width=16, heads=2, hidden=32, mechanism=r.Attention(learned))
    return nn.Sequential(r.nn.EncoderLayer(design), r.nn.EncoderLayer(design)).double()


def batch():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2, 4, 6, 16, generator=generator, dtype=torch.float64)


def train(model, x, y):
    """Two steps, with every head watched; the numbers of the last look."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with r.nn.monitor(model, every=1) as watch:
        for _ in range(2):
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            watch.step(loss=loss.detach())
    return watch


def differences(model, alone):
    """The largest difference of each kind of parameter after training."""
    found = {}
    for (name, mine), theirs in zip(model.named_parameters(), alone.parameters(), strict=True):
        whole = mine.full_tensor() if isinstance(mine, DTensor) else mine
        found[name] = float((whole - theirs).detach().abs().max())
    return found


def compare(wrap, rank, world, split):
    """Training of a wrapped model on some of the sequences, or on all, beside that of one process."""
    x, y = batch()
    alone, model = build(), build()
    begun = copy.deepcopy(alone)
    expected = train(alone, x, y)
    wrapped = wrap(model)
    some = slice(rank, None, world) if split else slice(None)
    watch = train(wrapped, x[some], y[some])
    both = zip(alone.parameters(), begun.parameters(), strict=True)
    return {
        "differences": differences(model, alone),
        "moved": min(float((a - b).detach().abs().max()) for a, b in both),
        "watched": norms(watch),
        "expected": norms(expected),
        "not covered": dict(watch.not_covered),
    }


def norms(watch):
    """What the last look says of the weights of every layer, in order."""
    return [[layer["qk_norm"], layer["ov_norm"]] for layer in watch.history[-1]["layers"].values()]


def data_parallel(rank, world):
    return compare(DistributedDataParallel, rank, world, True)


def fully_sharded(rank, world):
    mesh = init_device_mesh("cpu", (world,))

    def wrap(model):
        for layer in model:
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    return compare(wrap, rank, world, True)


def tensor_parallel(rank, world):
    mesh = init_device_mesh("cpu", (world,))
    plan = {
        "feed_forward.inner": ColwiseParallel(),
        "feed_forward.outer": RowwiseParallel(),
        "attention.output": RowwiseParallel(input_layouts=Replicate()),
    }

    def wrap(model):
        for layer in model:
            parallelize_module(layer, mesh, plan)
        return model

    return compare(wrap, rank, world, False)
