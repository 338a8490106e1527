"""Directories that several processes look at and make at once."""

from concurrent.futures import ThreadPoolExecutor

import pytest

import regard as r
from regard._files import check_writable


def test_many_look_at_one_directory_at_once(tmp_path):
    """Runs that begin together share parents that are not there yet."""
    places = [tmp_path / "runs" / str(number % 3) / "out" for number in range(800)]
    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(check_writable, places)) == [None] * 800
    assert list(tmp_path.iterdir()) == []


def test_a_name_that_no_directory_can_have(tmp_path):
    (tmp_path / "link").symlink_to("nowhere")
    for name in ("x" * 300, "link"):
        with pytest.raises(r.errors.ArgumentError, match=r"--out: .* cannot be written"):
            check_writable(tmp_path / name)
