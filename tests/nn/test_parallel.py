"""Modules of regard.nn under torch's data, fully sharded and tensor parallelism train as in one process."""

import pytest
import torch

from tests.nn import parallel_ranks
from tests.ranks import run_ranks


@pytest.mark.parametrize(
    "task", [parallel_ranks.data_parallel, parallel_ranks.fully_sharded, parallel_ranks.tensor_parallel]
)
def test_trains_as_in_one_process(task, tmp_path):
    """Every parameter, those of learned potentials too, after two steps; and every head is watched."""
    for rank, found in enumerate(run_ranks(tmp_path, 2, task)):
        assert found is not None, f"rank {rank} died"
        assert "failed" not in found, (rank, found)
        names = found["differences"]
        assert any("mechanism" in name for name in names)
        assert max(names.values()) <= 1e-12, (rank, names)
        assert found["moved"] > 1e-9  # training moves every parameter, so that equality says something
        assert not found["not covered"]
        assert len(found["watched"]) == 2
        torch.testing.assert_close(torch.tensor(found["watched"]), torch.tensor(found["expected"]))
