"""Several processes for one test: each joins a group, runs a task, and writes down what it found.

A server forks them, which has imported torch once.
"""

import json
import multiprocessing
import os
import traceback
from datetime import timedelta
from importlib import import_module
from pathlib import Path

import torch
import torch._dynamo  # torch.func imports it when it first runs: here it is once for all ranks
import torch.distributed as dist
from torch.distributed.tensor import DTensor  # noqa: F401  (the same)


def run_processes(target, world, *arguments):
    """The exit codes of as many processes as ranks, each called with its rank and the world."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.ranks", "regard"])
    ranks = [context.Process(target=target, args=(rank, world, *arguments)) for rank in range(world)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(90)
        if process.is_alive():
            process.kill()
    return [process.exitcode for process in ranks]


def run_ranks(folder, world, task):
    """Each rank's findings of a task, a function of its rank and the world; None of ranks that died."""
    run_processes(_start, world, str(folder), task.__module__, task.__name__)
    files = [folder / f"{rank}.json" for rank in range(world)]
    return [json.loads(file.read_text()) if file.exists() else None for file in files]


def _wait_for_all(rank, world, folder):
    """Until every rank is connected: one that ends before is a broken connection for those that are not."""
    store = dist.FileStore(f"{folder}/connected", world)
    store.set(str(rank), "yes")
    store.wait([str(each) for each in range(world)], timedelta(seconds=60))


def _start(rank, world, folder, module, task):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=60),
    )
    _wait_for_all(rank, world, folder)
    try:
        found = getattr(import_module(module), task)(rank, world)
    except Exception as error:
        where = traceback.format_exc().splitlines()[-12:]
        found = {"failed": f"{type(error).__name__}: {error}", "where": where}
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    os._exit(0)
