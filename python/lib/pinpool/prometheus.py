"""Pools for Prometheus, under the names that the Rust library's own metrics have.

    from prometheus_client import REGISTRY
    from pinpool.prometheus import Collector

    REGISTRY.register(Collector(pool))

`python -m pinpool top URL` shows them, and so do the dashboard and the alerts of examples/dashboard.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from ._native import Pool

_STATES = ("free", "checked_out", "in_flight", "quarantined", "cut")
_SIZES = ("pinned", "unpinned", "capacity", "cached", "requested", "rounding", "largest_free")
_COUNTS = "checkouts returns misses reclaims growths growth_failures waits timeouts abandoned"
_REFUSALS = ("exhausted", "queue_full", "impossible")


class Collector:
    """Reads the pools whenever it is asked for metrics. The names of the pools are to differ."""

    def __init__(self, *pools: Pool) -> None:
        self._pools = pools

    def collect(self) -> Iterator[Metric]:
        stats = [(pool.name, pool.stats()) for pool in self._pools]

        def metric(kind: Any, name: str, keys: dict[str, str], label: str | None = None) -> Any:
            """keys: which number of the statistics it has, by the value of the label."""
            labels = ["pool", label] if label else ["pool"]
            family = kind(f"pinpool_{name}", f"Pinpool: {name.replace('_', ' ')}.", labels=labels)
            for pool, numbers in stats:
                for value, key in keys.items():
                    family.add_metric([pool, value][: len(labels)], numbers[key])
            return family

        states = {state: f"{state}_bytes" for state in _STATES}
        yield metric(GaugeMetricFamily, "memory_bytes", states, "state")
        for size in _SIZES:
            yield metric(GaugeMetricFamily, f"memory_{size}_bytes", {"": f"{size}_bytes"})
        yield metric(GaugeMetricFamily, "waiting_requests", {"": "waiting"})
        for count in _COUNTS.split():
            yield metric(CounterMetricFamily, count, {"": count})
        refusals = {reason: reason for reason in _REFUSALS}
        yield metric(CounterMetricFamily, "refused", refusals, "reason")
