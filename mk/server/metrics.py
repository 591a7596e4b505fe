"""What /metrics tells Prometheus."""

from __future__ import annotations

import time
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from mk.batching.worker import Worker

_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)


class Metrics:
    """Gauges and counters are the engine's own; latencies are measured where answers leave for the client."""

    def __init__(self, worker: Worker) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_Engine(worker))

        def histogram(name: str, what: str) -> Histogram:
            return Histogram(f"mk_{name}_seconds", what, registry=self.registry, buckets=_SECONDS)

        self.ttft = histogram("time_to_first_token", "From a request's arrival to its first token")
        self.itl = histogram("inter_token_latency", "Between deliveries of tokens, a token")
        self.tpot = histogram("time_per_output_token", "A request's time after its first token, a token")
        self.duration = histogram("request_duration", "From a request's arrival to its end")

    def render(self) -> bytes:
        return generate_latest(self.registry)

    def clock(self) -> Clock:
        """Of a request that arrives now."""
        return Clock(self)


class Clock:
    """The latencies of one answer."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._start = self._last = time.perf_counter()
        self._first = 0.0
        self._tokens = 0

    def tokens(self, count: int) -> None:
        """`count` tokens have arrived together."""
        now = time.perf_counter()
        if self._tokens:
            self._metrics.itl.observe((now - self._last) / count)
        else:
            self._first = now
            self._metrics.ttft.observe(now - self._start)
        self._tokens += count
        self._last = now

    def end(self) -> None:
        self._metrics.duration.observe(time.perf_counter() - self._start)
        if self._tokens > 1:
            self._metrics.tpot.observe((self._last - self._first) / (self._tokens - 1))


class _Engine(Collector):
    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def collect(self) -> Iterator[Metric]:
        now = self._worker.snapshot
        yield GaugeMetricFamily("mk_requests_running", "Requests in batch slots", now.running)
        yield GaugeMetricFamily("mk_requests_waiting", "Requests in the queue, preempted ones included", now.waiting)
        used = GaugeMetricFamily("mk_kv_pages_in_use", "KV pages that requests hold", labels=["kind"])
        pool = GaugeMetricFamily("mk_kv_pages", "KV pages in all", labels=["kind"])
        for kind, pages in now.pages.items():
            used.add_metric([kind], now.pages_in_use[kind])
            pool.add_metric([kind], pages)
        yield used
        yield pool
        yield CounterMetricFamily("mk_prompt_tokens", "Prompt tokens", now.prompt_tokens)
        yield CounterMetricFamily("mk_prefix_hit_tokens", "Prompt tokens that the cache had", now.cached_tokens)
        yield CounterMetricFamily("mk_generated_tokens", "Generated tokens", now.generated_tokens)
        steps = CounterMetricFamily("mk_decode_steps", "Decode steps by batch size", labels=["batch"])
        for batch, count in now.steps.items():
            steps.add_metric([str(batch)], count)
        yield steps
        yield CounterMetricFamily("mk_preemptions", "Requests that gave way to earlier ones", now.preemptions)
        finished = CounterMetricFamily("mk_requests_finished", "Requests by how they ended", labels=["reason"])
        for reason, count in now.finished.items():
            finished.add_metric([reason], count)
        yield finished
