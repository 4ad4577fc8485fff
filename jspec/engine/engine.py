"""The impure shell: it takes requests in, folds the pure transitions over the device, and gives tokens out."""

import dataclasses
import heapq
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from prometheus_client import CollectorRegistry

from jspec.config import EngineConfig, SamplingParams
from jspec.engine import events
from jspec.engine.adaptive import after_settle, depth_of
from jspec.engine.admission import Prompt, bad_word_tokens, check_chunks, check_request, new_token_ratios, tokenize
from jspec.engine.buckets import fit, make_buckets
from jspec.engine.contents import Contents
from jspec.engine.extend_upload import extend_upload
from jspec.engine.grammars import Grammars, check_grammar_use, grammar_of
from jspec.engine.logs import Request
from jspec.engine.meters import Meters
from jspec.engine.metrics import MetricsServer, make_registry
from jspec.engine.outputs import Emission, RequestOutput, Summary
from jspec.engine.pool import num_kv_pages
from jspec.engine.programs import DecodeKey, Programs, use_compilation_cache
from jspec.engine.text import RequestText
from jspec.models.loading import load_model
from jspec.models.parallel import num_devices, replicate
from jspec.models.target import TargetModel
from jspec.models.tokenizer import Tokenizer
from jspec.scheduler import (
    Aborted,
    Depth,
    DepthRules,
    Settled,
    abort,
    initial_depths,
    max_new_pages,
    plan,
    retire,
    settle_oldest,
    submit,
)
from jspec.spec_workers import SpecWorker, build_worker, check_algorithm
from jspec.spec_workers.base import DeviceSizes, DeviceState
from jspec.spec_workers.upload import pack_decode, unpack_outcome
from jspec.state.batches import ForwardMode, ScheduleBatch
from jspec.state.invariants import check
from jspec.state.ledger import total_pages
from jspec.state.requests import FinishReason, Waiting
from jspec.state.results import GenerationBatchResult, Launched, RowStatus
from jspec.state.scheduler_state import Limits, SchedulerState, init_state


@dataclasses.dataclass(frozen=True)
class Loop:
    """What an iteration is folded over. The engine is its one holder: the device part is donated to each launch."""

    state: SchedulerState
    device: DeviceState
    outcomes: tuple[Any, ...]  # of state.launched, oldest first; still being computed
    logprobs: tuple[Any, ...]  # of state.launched: the batch and its tables; None where nobody asked
    ran_at: tuple[int, ...]  # draft depths of state.launched
    depths: tuple[Depth, ...]  # to draft at next, by batch size; () where the worker has one depth


class Engine:
    """Decodes requests with one model and one algorithm.

    Args:
        config: how it is built.
        target: a model to use instead of loading `config.model`.
        tokenizer: its tokenizer; without one, prompts are token ids and outputs carry no text.
        worker: a spec worker to use instead of the one `config.algorithm` names.
        progress: wraps the builds of compiled programs, `progress(iterable, total=n)`.

    Raises:
        ValueError: the configuration does not fit the model, naming the field.
    """

    def __init__(
        self,
        config: EngineConfig | None = None,
        *,
        target: TargetModel | None = None,
        tokenizer: Tokenizer | None = None,
        worker: SpecWorker | None = None,
        progress: Callable[..., Iterable] | None = None,
    ):
        self.config = config = config or EngineConfig()
        if config.compilation_cache:
            use_compilation_cache()
        if worker is None:
            check_algorithm(config)
        if target is None:
            loaded = load_model(config.model, kernels=config.kernels, tensor_parallel=config.tensor_parallel)
            target, tokenizer = loaded.target, tokenizer or loaded.tokenizer
        if config.kernels is not None and target.kernels != config.kernels:
            raise ValueError(
                f"kernels={config.kernels!r}, but the given target runs {target.kernels!r}: build it with the same, or leave kernels out"
            )
        if config.tensor_parallel not in (1, num_devices(target.mesh)):
            raise ValueError(
                f"tensor_parallel={config.tensor_parallel}, but the given target is shared by {num_devices(target.mesh)}: "
                "build it with the same, or leave tensor_parallel out"
            )
        self.target, self.tokenizer = target, tokenizer
        worker = worker or build_worker(target, config)
        self.worker = worker = worker._replace(params=replicate(worker.params, target.mesh))
        facts = target.facts
        if config.context_len is not None and config.context_len > facts.context_len:
            raise ValueError(
                f"context_len={config.context_len} exceeds the {facts.context_len} tokens the model was made for"
            )
        context_len = config.context_len or facts.context_len
        first_ratio, last_ratio = new_token_ratios(config.schedule_conservativeness)
        self.limits = Limits(
            context_len=context_len,
            alloc_len=worker.alloc_len,
            depth=int(config.overlap),
            max_prefill_tokens=config.max_prefill_tokens
            or (config.prefill_buckets[-1] if config.prefill_buckets else min(context_len, 2048)),
            max_prefill_rows=min(config.max_running, 8),
            lookahead=worker.lookahead,
            mixed=config.mixed_batches and config.max_running > 1,
            policy=config.policy,
            new_token_ratio=first_ratio,
            min_new_token_ratio=last_ratio,
        )
        check_chunks(self.limits, page_size=config.page_size)
        num_pages = num_kv_pages(
            config,
            self.limits,
            vocab_size=facts.vocab_size,
            kv_bytes_per_token=facts.kv_bytes_per_token // num_devices(target.mesh) + worker.draft_kv_bytes_per_token,
            verify_width=worker.verify_width,
        )
        state = init_state(
            limits=self.limits, max_running=config.max_running, num_pages=num_pages, page_size=config.page_size
        )
        pages_per_row = state.ledger.page_table.shape[1]
        sizes = DeviceSizes(
            num_rows=config.max_running + 1,
            num_pages=num_pages,
            pages_per_row=pages_per_row,
            page_size=config.page_size,
        )
        self._grammars = None
        if config.structured_output:
            self._grammars = Grammars(
                check_grammar_use(tokenizer, facts), vocab_size=facts.vocab_size, eos_token_ids=facts.eos_token_ids
            )
        self._rules = DepthRules(slots=config.adaptive_steps)
        depths = initial_depths(self._rules, worker.depths[-1])
        device = dataclasses.replace(worker.init(sizes), masks=self._grammars)
        self._loop = Loop(state, replicate(device, target.mesh), (), (), (), depths)
        self._buckets = make_buckets(config, self.limits, pages_per_row=pages_per_row)
        pages = max_new_pages(alloc_len=worker.alloc_len, depth=self.limits.depth, page_size=config.page_size)
        self._programs = Programs(
            worker,
            self._loop.device,
            self._buckets,
            max_new_pages=pages,
            mesh=target.mesh,
            progress=progress,
        )
        self._deadlines: list[tuple[float, int]] = []  # heap of (time, serial)
        self._num_submitted = 0
        self._meters = Meters(worker.output_stride)
        self._contents = Contents(
            sizes.num_rows,
            self.limits,
            worker,
            page_size=config.page_size if config.prefix_cache else None,
            grammars=self._grammars,
            meters=self._meters,
        )
        self._metrics = make_registry(weakref.WeakMethod(self._observed))
        port = config.metrics_port
        self._metrics_server = MetricsServer(self._metrics, port) if port is not None else None
        self._undelivered: list[Emission] = []

    # --- what a caller asks of the engine --------------------------------------------------------------------------

    @property
    def num_kv_tokens(self) -> int:
        """Tokens the KV pool holds."""
        return total_pages(self._loop.state.ledger) * self.config.page_size

    @property
    def state(self) -> SchedulerState:
        """The scheduler's state: a value, safe to keep."""
        return self._loop.state

    @property
    def has_work(self) -> bool:
        """Whether a call of `step` can do anything."""
        return bool(len(self._contents) or self._loop.state.launched or self._undelivered)

    def summary(self) -> Summary:
        """Counters and times since the engine was built, or since `reset_summary`."""
        return self._meters.summary()

    @property
    def metrics(self) -> CollectorRegistry:
        """Prometheus metrics of this engine, read when they are collected; see `jspec.engine.metrics`."""
        return self._metrics

    @property
    def metrics_port(self) -> int | None:
        """Where they are served; None: nowhere."""
        return None if self._metrics_server is None else self._metrics_server.port

    def close(self) -> None:
        """Stops serving metrics. Requests stay as they are; asking twice is harmless."""
        if self._metrics_server is not None:
            self._metrics_server.close()
            self._metrics_server = None

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def _observed(self) -> tuple[SchedulerState, Meters]:
        return self._loop.state, self._meters

    def reset_summary(self) -> None:
        """Starts the counters of `summary` anew."""
        self._meters.reset()

    def submit(self, prompt: Prompt, params: SamplingParams | None = None, *, rid: str | None = None) -> str:
        """Queues a request.

        Args:
            prompt: text (needs a tokenizer) or token ids.
            params: how to decode it; greedy by default.
            rid: its name in emissions; must not name a request that waits or runs.

        Returns:
            The name.

        Raises:
            TypeError, ValueError: the request cannot run: field, value, rule. Nothing has changed, for anybody.
        """
        try:
            return self._queue(prompt, params or SamplingParams(), rid)
        except (TypeError, ValueError) as error:
            self._meters.refused()
            events.refused(rid, error)
            raise

    def _queue(self, prompt: Prompt, params: SamplingParams, rid: str | None) -> str:
        tokens = tokenize(prompt, self.tokenizer)
        if params.stop and self.tokenizer is None:
            raise ValueError(f"stop={params.stop} needs a tokenizer: give the engine one, or stop_token_ids")
        pages = total_pages(self._loop.state.ledger)
        max_new_tokens = check_request(
            tokens,
            params,
            facts=self.target.facts,
            limits=self.limits,
            page_size=self.config.page_size,
            num_pages=pages,
        )
        bad_words = bad_word_tokens(params.bad_words, self.tokenizer)
        first = self._num_submitted + 1
        rid = rid if rid is not None else f"r{first}"
        if self._contents.serials(rid):
            raise ValueError(
                f"rid={rid!r} already names a request that waits or runs: choose another, or let the engine choose"
            )
        if (asked := grammar_of(params)) is not None:
            if self._grammars is None:
                raise ValueError(
                    f"{asked[0]} needs EngineConfig.structured_output=True: this engine's programs cannot follow grammars"
                )
            for serial in range(first, first + params.n):
                self._grammars.open(serial, params)
        # A prompt whose log-probabilities are wanted is computed whole.
        stops, keys = (
            self._stop_ids(params),
            () if params.prompt_logprobs is not None else self._contents.page_keys(tokens),
        )
        for index in range(params.n):
            serial = first + index
            waiting = Waiting(serial, len(tokens), max_new_tokens, stops, priority=params.priority, page_keys=keys)
            self._loop = dataclasses.replace(self._loop, state=submit(self._loop.state, waiting))
            request = Request(
                rid=rid,
                serial=serial,
                prompt=tokens,
                params=params,
                stop_ids=stops,
                page_keys=keys,
                index=index,
                bad_words=bad_words,
                text=self._text_of(params),
                logprobs=None if params.logprobs is None else [],
                prompt_logprobs=None if params.prompt_logprobs is None else [None],
            )
            self._contents.add(request)
            if params.timeout_s is not None:
                heapq.heappush(self._deadlines, (time.monotonic() + params.timeout_s, serial))
            self._meters.submitted(request)
            events.submitted(request, max_new_tokens=max_new_tokens)
        self._num_submitted += params.n
        self._check_state()
        return rid

    def abort(self, rid: str) -> bool:
        """Ends a request: a waiting one at once, a running one with the tokens of the step under way. Its last emission comes from `step`.

        Returns:
            False if no request of that name waits or runs; asking twice is harmless.
        """
        serials = self._contents.serials(rid)
        for serial in serials:
            self._abort(serial)
        return bool(serials)

    def _abort(self, serial: int) -> None:
        state, found = abort(self._loop.state, serial)
        self._loop = dataclasses.replace(self._loop, state=state)
        if found is Aborted.WAITING:
            self._undelivered.append(self._contents.end_off_row(serial, FinishReason.ABORT))
        self._check_state()

    def step(self) -> Iterable[Emission]:
        """One iteration: plan and launch the next step, then settle the launch before it (the same one, without overlap).

        Returns:
            The tokens of the settled launch, and the ends of requests that were aborted, or ran out of time, while they waited.
        """
        self._meters.iteration_starts()
        self._end_late_requests()
        self._loop, batch = self._launch(self._loop)
        unsettled = len(self._loop.state.launched)
        emissions: Iterable[Emission] = ()
        if unsettled > (self.limits.depth if batch is not None else 0):
            self._loop, launched, settled, result = self._settle(self._loop)
            emissions = self._contents.emit(launched, settled, result)
        self._meters.iteration_ends(decode=batch is not None and batch.forward_mode is ForwardMode.DECODE)
        if self._undelivered:
            kept, self._undelivered = self._undelivered, []
            emissions = [*kept, *emissions]
        return emissions

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        stream: bool = False,
    ) -> list[RequestOutput] | Iterator[Emission]:
        """Decodes prompts to their ends.

        Args:
            prompts: one prompt or several; each is text or token ids.
            params: for all, or one a prompt.
            stream: yield tokens as they come instead of returning at the end.

        Returns:
            Results in the order of the prompts, those of one prompt (`SamplingParams.n`) together, or an iterator of `Emission`s whose last one of a request
            carries its result. A prompt that cannot run has finish reason "refused" and an `error`; the others run.
        """
        single = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], (int, np.integer)))
        several: list[Any] = [prompts] if single else list(prompts)
        each = (
            [params or SamplingParams()] * len(several)
            if params is None or isinstance(params, SamplingParams)
            else list(params)
        )
        if len(each) != len(several):
            raise ValueError(f"{len(each)} params for {len(several)} prompts: give one for all, or one each")
        if stream:
            return self._stream(several, each)
        rids, refused = self._submit_all(several, each)
        outputs = {(e.rid, e.index): e.output for e in self._drain(rids, refused) if e.output is not None}
        return [outputs[name] for name in rids]

    def _end_late_requests(self) -> None:
        """Time is the shell's: to the scheduler a request that ran out of it is one that was aborted."""
        while self._deadlines and self._deadlines[0][0] <= time.monotonic():
            _, serial = heapq.heappop(self._deadlines)
            request = self._contents.get(serial)
            if request is None or self._loop.state.requests.to_finish[request.row]:
                continue  # ended, or ending
            request.is_late = True
            self._abort(serial)

    # --- the fold ----------------------------------------------------------------------------------------------------

    def _launch(self, loop: Loop) -> tuple[Loop, ScheduleBatch | None]:
        """Plans a batch and dispatches its programs; waits for nothing."""
        state, batch, left = plan(loop.state, limits=self.limits)
        for gone in left:
            if (emission := self._contents.take_off(gone)) is not None:
                self._undelivered.append(emission)
        if batch is None:
            return dataclasses.replace(loop, state=state), None
        depth = depth_of(loop.depths, self._rules, batch, full=self.worker.depths[-1])
        program, upload = self._extend(batch) if batch.forward_mode.is_prefill else self._decode(batch, depth)
        asked = self._contents.anybody_asks(state.launched[-1])
        device, outcome, logprobs = program(self.worker.params, loop.device, upload, logprobs=asked)
        previous = loop.outcomes[-1] if loop.outcomes else None
        self._meters.launched(
            decode=batch.forward_mode is ForwardMode.DECODE,
            previous_running=previous is not None and not previous.is_ready(),
            chained=batch.expected_iter.max() == batch.forward_iter - 1,
        )
        events.launched(batch)
        loop = Loop(
            state,
            device,
            (*loop.outcomes, outcome),
            (*loop.logprobs, (batch, logprobs) if asked else None),
            (*loop.ran_at, depth),
            loop.depths,
        )
        self._check_state(loop)
        return loop, batch

    def _settle(self, loop: Loop) -> tuple[Loop, Launched, Settled, GenerationBatchResult]:
        """Waits for the oldest outcome and applies it."""
        start = time.perf_counter()
        outcome = np.asarray(loop.outcomes[0])
        self._meters.waited(start)
        launched = loop.state.launched[0]
        num_tails = int(launched.commits.sum()) if launched.forward_mode is ForwardMode.MIXED else 0
        num_rows = launched.rows.shape[0] - num_tails
        result = unpack_outcome(outcome, num_rows, num_tails=num_tails, tails_at=self.limits.max_prefill_rows)
        if (result.status == RowStatus.STALE_RELAY).any():
            raise RuntimeError(
                f"launch {loop.state.launched[0].forward_iter} read a FutureMap row that nobody published for it: a fault of jspec"
            )
        result = self._contents.find_stops(loop.state, result)
        state, launched, settled = settle_oldest(loop.state, result)
        self._contents.append(launched, settled, result)
        if loop.logprobs[0] is not None:
            batch, tables = loop.logprobs[0]
            self._contents.take_logprobs(batch, tables, launched, settled, result)
        if (settled.finish_reason != FinishReason.NONE).any():
            state = retire(state, self._contents.keys_of_finished(state, launched, settled))
        correct = result.accept_lens - self.worker.num_non_draft_tokens
        depths = after_settle(loop.depths, self._rules, launched, correct[settled.live], depth=loop.ran_at[0])
        loop = Loop(state, loop.device, loop.outcomes[1:], loop.logprobs[1:], loop.ran_at[1:], depths)
        self._check_state(loop)
        return loop, launched, settled, result

    def _decode(self, batch: ScheduleBatch, depth: int):
        bucket = fit(self._buckets.batch, batch.rows.shape[0])
        width = fit(self._buckets.table_width, -(-int(batch.kv_bound) // self.config.page_size))
        return self._programs[DecodeKey(bucket, width, depth)], pack_decode(batch, bucket=bucket)

    def _extend(self, batch: ScheduleBatch):
        requests = self._contents.place(batch)
        sizes = self._buckets.extend(int(batch.extend_lens.sum()), tails=batch.tails is not None)
        return self._programs[sizes], extend_upload(batch, requests, sizes, seed_of=self._seed)

    def _stop_ids(self, params: SamplingParams) -> tuple[int, ...]:
        """Ids that end a request."""
        ids = () if params.ignore_eos else (*self.target.facts.eos_token_ids, *params.stop_token_ids)
        return tuple(dict.fromkeys(ids))

    def _text_of(self, params: SamplingParams) -> RequestText | None:
        if self.tokenizer is None:
            return None
        return RequestText(self.tokenizer.stream(stop=params.stop, min_new_tokens=params.min_new_tokens))

    # --- requests run to their end -----------------------------------------------------------------------------------

    def _submit_all(self, prompts, params) -> tuple[list[tuple[str, int]], list[Emission]]:
        """Submits what can run; returns name and index of every request, in order, and an emission for each that was refused."""
        rids: list[tuple[str, int]] = []
        refused = []
        for prompt, param in zip(prompts, params, strict=True):
            try:
                rid = self.submit(prompt, param, rid=f"r{self._num_submitted + 1}")
                rids += [(rid, index) for index in range(param.n)]
            except (TypeError, ValueError) as error:
                self._num_submitted += 1
                rids.append((f"r{self._num_submitted}", 0))
                output = RequestOutput(
                    rid=rids[-1][0],
                    prompt_token_ids=[],
                    token_ids=[],
                    text=None,
                    finish_reason="refused",
                    accept_lens=[],
                    error=str(error),
                )
                refused.append(Emission(rid=output.rid, token_ids=[], output=output))
        return rids, refused

    def _drain(self, rids: list[tuple[str, int]], refused: list[Emission]) -> Iterator[Emission]:
        """Runs until the requests have ended. Emissions of other requests are kept for the next `step`."""
        open_rids = set(rids)
        emissions: Iterable[Emission] = refused
        try:
            while True:
                others = []
                for emission in emissions:
                    if (emission.rid, emission.index) not in open_rids:
                        others.append(emission)
                        continue
                    if emission.output is not None:
                        open_rids.remove((emission.rid, emission.index))
                    yield emission
                if not open_rids:
                    self._undelivered.extend(others)
                    return
                emissions = [*others, *self.step()]
        finally:  # a caller that stops reading ends what it asked for
            for rid, _ in open_rids:
                self.abort(rid)

    def _stream(self, prompts, params) -> Iterator[Emission]:
        rids, refused = self._submit_all(prompts, params)
        yield from self._drain(rids, refused)

    # --- checks ------------------------------------------------------------------------------------------------------

    def _seed(self, request: Request) -> int:
        if request.params.seed is not None:
            return (request.params.seed + request.index) % 2**32
        return (self.config.seed * 0x9E3779B1 + request.serial) % 2**32

    def _check_state(self, loop: Loop | None = None) -> None:
        if self.config.checked:
            loop = loop or self._loop
            check(
                loop.state,
                limits=self.limits,
                frontier=np.array(loop.device.future.new_seq_lens),
                max_accept=self.worker.output_stride,
            )
