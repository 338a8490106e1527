"""One long text over several processes: causal attention on a ring, forward and backward.

    torchrun --nproc-per-node 2 examples/ring.py --tokens 4096

Every rank holds its part of the tokens and prints how far it is from one process that holds all.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist

import regard
from regard.engines import Ring, ZigZag


def main() -> None:
    """Compare the ring with one process, and print what each rank found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--heads", type=int, default=4)
    asked = parser.parse_args()
    dist.init_process_group("gloo")
    ring = Ring(timeout=30.0, shards=ZigZag())
    x = torch.randn(asked.heads, asked.tokens, 32, generator=torch.Generator().manual_seed(0))
    potential = regard.Rotary(regard.Dot())

    mine = ring.shard(x).requires_grad_()
    out = regard.attend(mine, mine, mine, potential=potential, support=regard.Causal(), engine=ring)
    out.square().sum().backward()

    every = x.clone().requires_grad_()
    whole = regard.attend(every, every, every, potential=potential, support=regard.Causal())
    whole.square().sum().backward()
    assert mine.grad is not None
    assert every.grad is not None
    errors = [
        float((found - ring.shard(expected)).abs().max() / expected.abs().max())
        for found, expected in ((out.detach(), whole.detach()), (mine.grad, every.grad))
    ]
    told = f"rank {dist.get_rank()} of {dist.get_world_size()}: {mine.shape[-2]} tokens"
    print(f"{told}, output within {errors[0]:.0e}, gradient within {errors[1]:.0e}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
