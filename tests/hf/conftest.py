"""Names that a test registers are gone after it."""

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _tables() -> Iterator[None]:
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    kept = [(table, dict(table._global_mapping)) for table in (AttentionInterface, AttentionMaskInterface)]
    yield
    for table, before in kept:
        table._global_mapping.clear()
        table._global_mapping.update(before)
