"""A series over several processes is that of one: each adds its grid, and all prove the same error."""

import pytest
import torch

import regard as r
from tests.engines import fourier_ranks
from tests.ranks import run_ranks


@pytest.mark.parametrize("world", [2, 3, 4])
def test_equals_one_process(world, tmp_path):
    """Outputs, energies and gradients to rounding; no row errs by more than is proved of it."""
    for rank, found in enumerate(run_ranks(tmp_path, world, fourier_ranks.compare_all)):
        assert found is not None, f"rank {rank} died"
        assert "failed" not in found, (rank, found)
        assert len(found) > 20
        for name, error in found.items():
            limit = 1.0 if name.endswith(("bound", "a priori")) else 1e-4 if name == "adaptive" else 1e-11
            assert error <= limit, (rank, name, error)


SAID = {
    "dtypes": ("ArgumentError", "float64 on rank 0 and float32 on rank 1"),
    "no tokens": ("ArgumentError", "a shard without tokens"),
    "tolerances": ("ArgumentError", "1e-06, the faster on rank 0 and 0.001, the faster on rank 1"),
    "bandwidths": ("ArgumentError", "not the same on all ranks"),
    "not a number": ("RefusalError", "must be finite"),
    "a mask": ("RefusalError", "masks pairs"),
    "four features": ("RefusalError", "at most three"),
    "a box": ("RefusalError", "larger bandwidth"),
    "devices": ("RefusalError", "only recorded"),
    "weights": ("ArgumentError", "does not know how ranks compare"),
    "forward mode": ("RefusalError", "forward mode"),
    "noise": ("ArgumentError", "draw the same numbers"),
    "no ring": ("ArgumentError", "Ring() of regard.engines"),
    "nothing": ("nothing", ""),
}


def test_bad_input_is_an_error_on_every_rank(tmp_path):
    for rank, found in enumerate(run_ranks(tmp_path, 2, fourier_ranks.bad_input)):
        assert found is not None
        assert set(found) == set(SAID), (rank, found)
        for name, (kind, words) in SAID.items():
            assert found[name][0] == kind, (rank, name, found[name])
            assert words in found[name][1], (rank, name, found[name])
            assert found[name][2] < 5, (rank, name, found[name])


def test_every_rank_names_one_that_dies(tmp_path):
    found = run_ranks(tmp_path, 4, fourier_ranks.die)
    assert found[1] is None
    for rank in (0, 2, 3):
        kind, text, seconds = found[rank]
        assert (kind, text.split(":")[0]) == ("RankLostError", "rank 1 of the ring"), (rank, kind, text)
        assert seconds < 2, (rank, seconds)


def test_every_rank_names_one_that_hangs(tmp_path):
    found = run_ranks(tmp_path, 4, fourier_ranks.hang)
    for rank in (0, 2, 3):
        kind, text, seconds = found[rank]
        assert (kind, text.split(":")[0]) == ("RankLostError", "rank 1 of the ring"), (rank, kind, text)
        assert 1 <= seconds < 2, (rank, seconds)


def test_without_a_group():
    x = torch.randn(4, 2, dtype=torch.float64)
    with pytest.raises(r.errors.RefusalError, match="init_process_group"):
        r.attend(
            x, x, x, potential=r.Gaussian(bandwidth=1.0), engine=r.engines.Fourier(ring=r.engines.Ring())
        )
