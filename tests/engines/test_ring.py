"""Attention over several processes equals that of one: outputs, log-sum-exps, and gradients of everything.

A rank that is gone, hangs or has something wrong is an error on every other rank.
"""

import re
import socket

import pytest
import torch
import torch.utils._pytree as pytree

import regard as r
from regard.compute.engine import Plan
from regard.compute.engines.sdpa import FusedPlan
from regard.compute.engines.tiled import OnlinePlan
from regard.compute.ring import turns
from regard.compute.ring.pieces import Union, attend_piece, count_pairs_seen, pieces_of
from regard.compute.selection import select
from regard.compute.tensors import pose_tensors
from tests.engines import ring_ranks
from tests.ranks import run_processes, run_ranks

FLOOR = {"float64": 1e-12, "bfloat16": 1e-2, "adaptive": 1e-4}


@pytest.mark.parametrize("world", [2, 3, 4])
def test_equals_one_process(world, tmp_path):
    """To a millionth in float32, beside float64; half precision as well as one process does it."""
    for rank, found in enumerate(run_ranks(tmp_path, world, ring_ranks.compare_all)):
        assert found is not None, f"rank {rank} died"
        assert "failed" not in found, (rank, found)
        assert len(found) > 20
        for name, errors in found.items():
            for what, (error, of_one_process) in errors.items():
                floor = FLOOR.get(name.split()[0], 1e-6)
                floor = max(floor, 3 * of_one_process) if name.startswith("bfloat16") else floor
                assert error <= floor, (rank, name, what, error, of_one_process)


@pytest.mark.parametrize("task", [ring_ranks.die, ring_ranks.die_on_the_way])
def test_every_rank_names_one_that_dies(task, tmp_path):
    found = run_ranks(tmp_path, 4, task)
    assert found[1] is None
    for rank in (0, 2, 3):
        kind, text, seconds = found[rank]
        assert kind == "RankLostError", (rank, kind, text)
        assert text.startswith("rank 1 of the ring"), (rank, text)
        assert seconds < 2, (rank, seconds)


@pytest.mark.parametrize("task", [ring_ranks.hang, ring_ranks.stay_away])
def test_every_rank_names_one_that_hangs(task, tmp_path):
    found = run_ranks(tmp_path, 4, task)
    for rank in (0, 2, 3):
        kind, text, seconds = found[rank]
        assert kind == "RankLostError", (rank, kind, text)
        assert text.startswith("rank 1 of the ring"), (rank, text)
        assert 1 <= seconds < 2, (rank, seconds)


SAID = {
    "dtypes": ("ArgumentError", "float32 on rank 0 and float64 on rank 1"),
    "no tokens": ("ArgumentError", "a shard without tokens"),
    "declarations": ("ArgumentError", "Dot Softmax Full on rank 0 and Dot Softmax Causal on rank 1"),
    "parameters": ("ArgumentError", "2.0"),
    "batch": ("ArgumentError", "[2] on rank 0 and [4] on rank 1"),
    "a matrix": ("ArgumentError", "(..., tokens, width)"),
    "a normalizer": ("RefusalError", "Entmax is not a softmax"),
    "devices": ("ArgumentError", "meta"),
    "zigzag": ("ArgumentError", "Ring.shard"),
    "a DTensor": ("ArgumentError", "to_local()"),
    "a law": ("RefusalError", "all keys in one process"),
    "weights": ("ArgumentError", "log_weights"),
    "forward mode": ("RefusalError", "forward mode"),
    "noise": ("ArgumentError", "draw the same numbers"),
    "a map": ("ArgumentError", "MixTokens"),
    "positions": ("RefusalError", "whole positions"),
    "nothing": ("nothing", ""),
}


def test_bad_input_is_an_error_on_every_rank(tmp_path):
    for rank, found in enumerate(run_ranks(tmp_path, 2, ring_ranks.bad_input)):
        assert set(found) == set(SAID), (rank, found)
        for name, (kind, words) in SAID.items():
            assert found[name][0] == kind, (rank, name, found[name])
            assert words in found[name][1], (rank, name, found[name])
            assert found[name][2] < 5, (rank, name, found[name])


def test_every_rank_names_one_of_another_width(tmp_path):
    for rank, found in enumerate(run_ranks(tmp_path, 3, ring_ranks.another_width)):
        assert found is not None, f"rank {rank} died"
        (kind, text, _), after = found
        assert kind == "ArgumentError"
        assert "width of queries and keys of the problem" in text
        assert "[3] on rank 0 and [8] on rank 1, 2" in text
        assert after[0] == "nothing"


def test_nothing_keeps_a_group_that_is_destroyed(tmp_path):
    """Threads of a group that outlives destroy_process_group() abort processes that end (SIGABRT)."""
    for found in run_ranks(tmp_path, 3, ring_ranks.ending):
        assert found["kept"] is False
        assert found["threads"] == 1
        assert found["after"][0] == "RefusalError"
        assert "init_process_group" in found["after"][1]


def test_some_ranks_of_a_world(tmp_path):
    found = run_ranks(tmp_path, 3, ring_ranks.some_ranks)
    assert found[1][0] == "ArgumentError"
    assert "that this rank belongs to" in found[1][1]
    for rank in (0, 2):
        assert found[rank][0] == "nothing", found
        assert found[rank][2] <= 1e-12


def test_a_world_of_one(tmp_path):
    (found,) = run_ranks(tmp_path, 1, ring_ranks.alone)
    assert found["error"] <= 1e-6
    assert found["how"].startswith("ring: about")
    assert "keys of 1 ranks" in found["how"]


def test_without_a_group():
    x = torch.randn(4, 3)
    with pytest.raises(r.errors.RefusalError, match="init_process_group"):
        r.attend(x, x, x, engine=r.engines.Ring())
    with pytest.raises(r.errors.ArgumentError, match="timeout"):
        r.engines.Ring(timeout=0.0)
    with pytest.raises(r.errors.ArgumentError, match="ZigZag"):
        r.engines.Ring(shards="zigzag")


def pairs_of(shards, rank, world, count):
    """How many pairs a rank computes under a causal support."""
    q = torch.zeros(len(shards.marks(rank, world, count)), 2)
    total = 0
    for source in range(world):
        marks = shards.marks(rank, world, count), shards.marks(source, world, count)
        k = torch.zeros(len(marks[1]), 2)
        problem = pose_tensors(q, k, k, r.Dot(), r.Softmax(), r.Causal(), None, marks)
        total += count_pairs_seen(problem)
    return total


@pytest.mark.parametrize("world", [2, 3, 4])
def test_zigzag_balances_the_past(world):
    """All ranks compute as many pairs, none that nobody sees; of consecutive shards the last has most."""
    count = 24 * world
    found = [pairs_of(r.engines.ZigZag(), rank, world, count) for rank in range(world)]
    assert len(set(found)) == 1
    assert sum(found) == count * (count + 1) / 2
    plain = [pairs_of(r.engines.Consecutive(), rank, world, count) for rank in range(world)]
    assert sum(plain) == sum(found)
    assert plain[-1] > 1.4 * found[0]


@pytest.mark.parametrize("shards", [r.engines.Consecutive(), r.engines.ZigZag()])
@pytest.mark.parametrize("count", [0, 3, 8, 17])
def test_shards_are_a_partition(shards, count):
    every = torch.cat([shards.marks(rank, 4, count) for rank in range(4)])
    assert every.sort().values.tolist() == list(range(count))


def test_the_example(tmp_path):
    """As torchrun starts it: the group is found through the environment and a store on a port."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    assert run_processes(ring_ranks.start_example, 2, str(tmp_path), port) == [0, 0]
    for rank in (0, 1):
        line = (tmp_path / f"{rank}.txt").read_text()
        found = re.fullmatch(
            rf"rank {rank} of 2: 50 tokens, output within (\S+), gradient within (\S+)\n", line
        )
        assert found, line
        output, gradient = map(float, found.groups())
        assert output <= 1e-6
        assert gradient <= 2e-5  # of q, k and v together; that of one process is off by 2e-6 beside float64


@pytest.mark.parametrize("shards", [r.engines.Consecutive(), r.engines.ZigZag()])
@pytest.mark.parametrize("reach", range(0, 9))
def test_pieces_join_to_the_whole(shards, reach):
    """Windows that end at every place of a shard: what is left out is what nobody sees."""
    count, world = 16, 2
    q, k, v = (torch.randn(count, 4, dtype=torch.float64) for _ in range(3))
    for support in (r.Window(reach, 0), r.Window(0, reach), r.Causal() & r.Window(reach, None)):
        whole = r.attend(q, k, v, support=support, engine=r.engines.ReferenceEngine())
        for rank in range(world):
            own, union = shards.marks(rank, world, count), None
            for source in range(world):
                other = shards.marks(source, world, count)
                tensors = (q[own], k[other], v[other])
                posed = pose_tensors(*tensors, r.Dot(), r.Softmax(), support, None, (own, other))
                union = Union.empty(posed) if union is None else union
                for piece in pieces_of(posed):
                    union.add(piece.rows, attend_piece(select(piece.problem)))
            torch.testing.assert_close(union.out, whole[own])


@pytest.mark.parametrize("potential", ["gaussian", "alibi", "laplace"])
@pytest.mark.parametrize("given", [True, False])
def test_gradients_of_pieces_are_those_of_the_whole(given, potential, monkeypatch):
    """From what came out of all keys where a plan takes that, and else from each piece, computed again."""
    if not given:
        for kind in (FusedPlan, OnlinePlan):
            monkeypatch.setattr(kind, "pull_part", Plan.pull_part)
    double = torch.float64
    noun, normalizer = ring_ranks.potentials(double)[potential], r.Softmax(torch.tensor(1.3, dtype=double))
    parameters = [t for t in pytree.tree_leaves((noun, normalizer)) if isinstance(t, torch.Tensor)]
    shape = (ring_ranks.HEADS, 10, 4)
    tensors = [ring_ranks.draw(*shape, seed=seed, kind=double) for seed in range(4)]
    counts, by_level = (ring_ranks.draw(*shape[:2], seed=seed, kind=double) for seed in (4, 5))
    moving = [t.requires_grad_() for t in (*parameters, *tensors[:3], counts)]
    places = torch.arange(10)

    def pose(rows, columns):
        q, k, v = tensors[0][:, rows], tensors[1][:, columns], tensors[2][:, columns]
        return pose_tensors(q, k, v, noun, normalizer, r.Causal(), counts[:, columns], (rows, columns))

    out, level = select(pose(places, places)).run_with_level(double)
    loss = (out * tensors[3]).sum() + (level * by_level).sum()
    exact = torch.autograd.grad(loss, moving)
    found = [torch.zeros_like(t) for t in moving]
    for own in places.split(6):
        some = slice(int(own[0]), int(own[-1]) + 1)
        pull = turns._Pull(
            None, out.detach()[:, some], level.detach()[:, some], tensors[3][:, some], by_level[:, some]
        )
        for other in places.split(6):
            posed = pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, pose(own, other))
            columns = slice(int(other[0]), int(other[-1]) + 1)
            *inner, q, k, v, n = found
            totals = [*inner, q[:, some], k[:, columns], v[:, columns], n[:, columns]]
            if posed.queries is not None and isinstance(posed.queries, tuple):  # positions have no gradient
                totals = [
                    *inner,
                    q[:, some],
                    torch.zeros(6, 1),
                    k[:, columns],
                    torch.zeros(6, 1),
                    *totals[-2:],
                ]
            for piece in pieces_of(posed):
                pull.add(piece, totals)
    for one, other in zip(found, exact, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)
