"""Recorder: what the rows of attention were like while a model ran."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from regard.derive.rows import RowStatistics

COLUMNS = ("entropy", "effective_support", "sink_mass", "max_logit")


class Recorder:
    """Collects row statistics of every layer while a model runs inside `with recorder:`; outside it costs
    nothing.

    It keeps five numbers for each query and head, never a matrix. Rows that see no key are left out.
    Run a model with gradient checkpointing backward after the block: its second forward pass would count
    again.

    Examples:
        >>> import transformers
        >>> sizes = {"vocab_size": 20, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
        >>> config = transformers.LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1)
        >>> model, recorder = transformers.LlamaModel(config).eval(), regard.hf.Recorder()
        >>> model.set_attn_implementation(regard.hf.register("watched", record=recorder))
        >>> with torch.no_grad(), recorder.name(model):
        ...     _ = model(torch.tensor([[1, 2, 3]]))
        >>> recorder.layers["layers.0.self_attn"].entropy.shape  # heads, rows
        torch.Size([2, 3])
    """

    def __init__(self) -> None:
        self.recording = False
        self._names: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
        self._calls: dict[str, list[RowStatistics]] = {}

    def __enter__(self) -> Recorder:
        self._calls = {}
        self.recording = True
        return self

    def __exit__(self, *_: Any) -> None:
        self.recording = False

    def name(self, model: nn.Module) -> Recorder:
        """Call layers by their paths in this model, not by their order."""
        for path, module in model.named_modules():
            self._names[module] = path
        return self

    def add(self, module: nn.Module, statistics: RowStatistics) -> None:
        """Keep the statistics (batch, heads, m) of one call of a layer."""
        seen = (statistics.max_logit > -torch.inf).any(1)
        name = self._names.setdefault(module, f"{len(self._calls)} {type(module).__name__}")
        self._calls.setdefault(name, []).append(
            _map_statistics(lambda column: column.movedim(1, 0)[:, seen], [statistics])
        )

    @property
    def layers(self) -> dict[str, RowStatistics]:
        """For each layer, in the order they ran, the statistics (heads, rows) of all calls."""
        return {
            name: _map_statistics(lambda *columns: torch.cat(columns, -1), calls)
            for name, calls in self._calls.items()
        }

    def __repr__(self) -> str:
        if not self._calls:
            return (
                "Recorder: nothing recorded; run a model whose implementation has this recorder inside "
                "`with recorder:`"
            )
        width = max(len("layer"), *map(len, self._calls))
        lines = [
            f"{'layer':<{width}} {'heads':>6} {'rows':>7} {'entropy':>8} {'support':>8} {'sink':>6} "
            f"{'logit':>8}"
        ]
        lines += [f"{name:<{width}} {_line(statistics)}" for name, statistics in self.layers.items()]
        return "\n".join(
            [
                *lines,
                "means over heads and rows, the logit is the largest; entropy in nats, support is 1/Σp² "
                "keys, sink the first key",
            ]
        )


def _line(statistics: RowStatistics) -> str:
    heads, rows = statistics.entropy.shape
    if not rows:
        return f"{heads:>6} {rows:>7}"
    entropy, support, sink = (float(getattr(statistics, name).mean()) for name in COLUMNS[:3])
    return (
        f"{heads:>6} {rows:>7} {entropy:>8.3f} {support:>8.2f} {sink:>6.3f} "
        f"{float(statistics.max_logit.max()):>8.2f}"
    )


def _map_statistics(function: Any, calls: list[RowStatistics]) -> RowStatistics:
    columns: list[list[Tensor]] = [
        [getattr(call, name) for call in calls] for name in RowStatistics.__dataclass_fields__
    ]
    return RowStatistics(*(function(*column) for column in columns))
