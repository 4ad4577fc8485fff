"""Prometheus metrics of an engine, read off its state and its meters when they are collected: the loop does nothing for them."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from jspec.engine.meters import Meters
from jspec.state.ledger import num_pages_held, total_pages
from jspec.state.scheduler_state import SchedulerState

Observe = Callable[[], tuple[tuple[SchedulerState, ...], Meters]]
"""The states of an engine's ranks, and its meters, as they are now."""


def make_registry(observe: Callable[[], Observe | None]) -> CollectorRegistry:
    """A registry of one engine's own.

    Args:
        observe: a weak reference, so that a registry keeps no engine alive: without the engine there are no metrics.
    """
    registry = CollectorRegistry()
    registry.register(EngineCollector(observe))
    return registry


class EngineCollector(Collector):
    """The metrics. May be collected from another thread: the state is one sound value, counts may be a step apart from it.

    Names are those of SGLang (`num_queue_reqs`, `generation_tokens`, `spec_accept_length`, ...) or vLLM (`spec_decode_...`) where they have the same.
    """

    def __init__(self, observe: Callable[[], Observe | None]):
        self._observe = observe

    def collect(self) -> Iterator[Metric]:
        """Every metric, with its value now."""
        observe = self._observe()
        if observe is None:
            return
        states, meters = observe()
        yield from _of_states(states)
        yield from _of_meters(meters)


def _of_states(states: Sequence[SchedulerState]) -> Iterator[Metric]:
    """Sums over the ranks; beside them, where there are several, how the requests are shared out."""

    def total(of_state: Callable[[SchedulerState], Any]) -> int:
        return sum(int(of_state(state)) for state in states)

    def private(state: SchedulerState):
        ledger = state.ledger
        return (num_pages_held(ledger) - ledger.cache_protected_len // ledger.page_size).sum()

    def running(state: SchedulerState):
        return (state.requests.serial > 0).sum()

    yield _gauge("num_queue_reqs", "Requests that wait for a row.", total(lambda s: len(s.waiting)))
    yield _gauge("num_running_reqs", "Requests that hold a row.", total(running))
    yield _gauge("kv_pages", "KV pages that exist: free + cached + held.", total(lambda s: total_pages(s.ledger)))
    yield _gauge("kv_free_pages", "KV pages that nobody holds.", total(lambda s: s.ledger.num_free))
    yield _gauge(
        "kv_cached_pages", "KV pages of the prefix cache, shared or not.", total(lambda s: len(s.prefix_cache.pages))
    )
    yield _gauge("kv_held_pages", "KV pages that a running request holds alone.", total(private))
    ratio = sum(float(state.new_token_ratio) for state in states) / len(states)
    yield _gauge("new_token_ratio", "Share of their remaining tokens that requests are expected to want.", ratio)
    unsettled = max(len(state.launched) for state in states)
    yield _gauge("unsettled_launches", "Launches under way, or whose outcome was not read yet.", unsettled)
    if len(states) > 1:
        by_rank = GaugeMetricFamily("jspec_rank_running_reqs", "Requests that hold a row of a rank.", labels=["rank"])
        for rank, state in enumerate(states):
            by_rank.add_metric([str(rank)], int(running(state)))
        yield by_rank


def _of_meters(m: Meters) -> Iterator[Metric]:
    yield _counter(
        "requests_submitted",
        "Requests queued, each answer to a prompt counted; those refused are not among them.",
        m.requests,
    )
    finished = CounterMetricFamily("jspec_requests_finished", "Requests that ended.", labels=["finish_reason"])
    for reason, count in list(m.finished.items()):
        finished.add_metric([reason], count)
    yield finished
    yield _counter("retractions", "Times a request lost its row and waited again.", m.retractions)
    yield _counter("prompt_tokens", "Prompt tokens of requests that started.", m.prompt_tokens)
    yield _counter("cached_tokens", "Of these, tokens found in the prefix cache.", m.cached_tokens)
    yield _counter("generation_tokens", "Tokens emitted.", m.tokens)

    accepted = m.accepted_by_position()
    yield _counter("verifies", "Verifies, counted a request at a time.", m.verifies)
    yield _counter("spec_decode_num_accepted_tokens", "Draft tokens accepted and emitted.", sum(accepted))
    by_position = CounterMetricFamily(
        "jspec_spec_decode_num_accepted_tokens_per_pos",
        "Draft tokens accepted and emitted, by their place in the draft, from 0.",
        labels=["position"],
    )
    for position, count in enumerate(accepted):
        by_position.add_metric([str(position)], count)
    yield by_position
    yield _gauge("spec_accept_length", "Tokens per verify, bonus included.", m.accept_length)

    yield _counter("decode_steps", "Decode launches settled.", m.iterations)
    yield _counter("compiles_after_warmup", "Programs compiled inside an iteration.", m.compiles)
    yield _counter("host_seconds", "Host time of decode iterations, without waiting for the device.", m.host_s)
    yield _counter("exposed_host_seconds", "Host time in which the device had nothing to do.", m.exposed_s)
    for name, text, histogram in (
        ("time_to_first_token_seconds", "From a request's submission to its first token.", m.time_to_first_token),
        (
            "request_time_per_output_token_seconds",
            "Of a request: its mean inter-token latency, from its first token to its end.",
            m.time_per_output_token,
        ),
        ("e2e_request_latency_seconds", "From a request's submission to its end.", m.end_to_end),
    ):
        yield HistogramMetricFamily(f"jspec_{name}", text, buckets=histogram.buckets(), sum_value=histogram.sum)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"jspec_{name}", text, value=value)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(f"jspec_{name}", text, value=value)


class MetricsServer:
    """Serves a registry over HTTP, at `/metrics` on every interface, from a thread of its own.

    Args:
        registry: what to serve.
        port: 0 takes any free one.

    Raises:
        OSError: the port cannot be had.
    """

    def __init__(self, registry: CollectorRegistry, port: int):
        try:
            self._server, self._thread = start_http_server(port, registry=registry)
        except OSError as error:
            raise OSError(error.errno, f"metrics_port={port}: {error.strerror}") from None
        self.port: int = self._server.server_port

    def close(self) -> None:
        """Stops it and frees the port; harmless to ask twice."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
