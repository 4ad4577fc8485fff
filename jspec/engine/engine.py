"""The impure shell: it takes requests in, folds the pure transitions over the device, and gives tokens out."""

import dataclasses
import heapq
import itertools
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

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
from jspec.models.parallel import every_rank, num_devices, num_ranks, replicate
from jspec.models.target import TargetModel
from jspec.models.tokenizer import Tokenizer
from jspec.scheduler import (
    Aborted,
    Depth,
    DepthRules,
    abort,
    initial_depths,
    max_new_pages,
    plan_ranks,
    retire,
    route,
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
from jspec.state.results import Launched, RowStatus
from jspec.state.scheduler_state import Limits, SchedulerState, init_state
from jspec.trace.format import Header
from jspec.trace.recorder import MOST_PROMPT_CHARS, RankSettled, Recorder


class Unsettled(NamedTuple):
    """A launch of all ranks, still being computed."""

    batches: tuple[ScheduleBatch, ...]  # of each rank
    outcome: Any
    logprobs: tuple[Any, ...]  # tables; () where nobody asked
    depth: int  # that it drafts to

    @property
    def is_decode(self) -> bool:
        return any(batch.forward_mode is ForwardMode.DECODE for batch in self.batches)


@dataclasses.dataclass(frozen=True)
class Loop:
    """What an iteration is folded over. The engine is its one holder: the device part is donated to each launch."""

    states: tuple[SchedulerState, ...]  # of each rank
    device: DeviceState  # of all ranks; with a leading axis of them where there are several
    unsettled: tuple[Unsettled, ...]  # the launches on record in the states, oldest first
    depths: tuple[Depth, ...]  # to draft at next, by batch size; () where the worker has one depth
    hosts: tuple[Any, ...]  # of each rank, the state of the worker's host side; () where it has none

    def with_state(self, rank: int, state: SchedulerState) -> "Loop":
        """This loop with another state of one rank."""
        return dataclasses.replace(self, states=(*self.states[:rank], state, *self.states[rank + 1 :]))


class Engine:
    """Decodes requests with one model and one algorithm.

    Args:
        config: how it is built.
        target: a model to use instead of loading `config.model`.
        target_name: what a trace calls it.
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
        target_name: str = "a given target",
        tokenizer: Tokenizer | None = None,
        worker: SpecWorker | None = None,
        progress: Callable[..., Iterable] | None = None,
    ):
        self.config = config = config or EngineConfig()
        if config.compilation_cache:
            use_compilation_cache()
        self._model = config.model if target is None else target_name
        if worker is None:
            check_algorithm(config)
        if target is None:
            loaded = load_model(
                config.model,
                kernels=config.kernels,
                tensor_parallel=config.tensor_parallel,
                data_parallel=config.data_parallel,
            )
            target, tokenizer = loaded.target, tokenizer or loaded.tokenizer
        if config.kernels is not None and target.kernels != config.kernels:
            raise ValueError(
                f"kernels={config.kernels!r}, but the given target runs {target.kernels!r}: build it with the same, or leave kernels out"
            )
        for field, found in (("tensor_parallel", num_devices(target.mesh)), ("data_parallel", num_ranks(target.mesh))):
            if getattr(config, field) not in (1, found):
                raise ValueError(
                    f"{field}={getattr(config, field)}, but the given target is shared by {found}: "
                    f"build it with the same, or leave {field} out"
                )
        self.target, self.tokenizer = target, tokenizer
        worker = worker or build_worker(target, config, tokenizer)
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
            mixed=config.mixed_batches and (config.max_running > 1 or num_ranks(target.mesh) > 1),
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
            recurrent_bytes=facts.recurrent_bytes,
            draft_row_bytes=worker.draft_kv_bytes_per_row(config.page_size),
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
            prefix_cache=config.prefix_cache,
        )
        self._grammars = None
        if config.structured_output:
            self._grammars = Grammars(
                check_grammar_use(tokenizer, facts), vocab_size=facts.vocab_size, eos_token_ids=facts.eos_token_ids
            )
        self._rules = DepthRules(slots=config.adaptive_steps)
        depths = initial_depths(self._rules, worker.depths[-1])
        device = dataclasses.replace(every_rank(target.mesh, lambda: worker.init(sizes)), masks=self._grammars)
        ranks = num_ranks(target.mesh)
        hosts = () if worker.host is None else tuple(worker.host.init(sizes.num_rows) for _ in range(ranks))
        self._loop = Loop((state,) * ranks, replicate(device, target.mesh), (), depths, hosts)
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
        self._contents = tuple(
            Contents(
                sizes.num_rows,
                self.limits,
                worker,
                page_size=config.page_size if config.prefix_cache else None,
                grammars=self._grammars,
                meters=self._meters,
            )
            for _ in self._loop.states
        )
        self._metrics = make_registry(weakref.WeakMethod(self._observed))
        port = config.metrics_port
        self._metrics_server = MetricsServer(self._metrics, port) if port is not None else None
        self._undelivered: list[Emission] = []
        self._recorder = self._start_recording(state) if config.trace is not None else None

    # --- what a caller asks of the engine --------------------------------------------------------------------------

    @property
    def num_kv_tokens(self) -> int:
        """Tokens the KV pool holds; of each rank."""
        return total_pages(self._loop.states[0].ledger) * self.config.page_size

    @property
    def states(self) -> tuple[SchedulerState, ...]:
        """The scheduler's state of each rank: values, safe to keep."""
        return self._loop.states

    @property
    def state(self) -> SchedulerState:
        """The scheduler's state, of the only rank.

        Raises:
            ValueError: there are several.
        """
        if len(self._loop.states) > 1:
            raise ValueError(f"there are {len(self._loop.states)} ranks with a state each: ask for `states`")
        return self._loop.states[0]

    @property
    def has_work(self) -> bool:
        """Whether a call of `step` can do anything."""
        return bool(any(map(len, self._contents)) or self._loop.unsettled or self._undelivered)

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
        """Stops serving metrics and ends the trace. Requests stay as they are; asking twice is harmless."""
        if self._metrics_server is not None:
            self._metrics_server.close()
            self._metrics_server = None
        if self._recorder is not None:
            self._recorder.close()
            self._recorder = None

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def _observed(self) -> tuple[tuple[SchedulerState, ...], Meters]:
        return self._loop.states, self._meters

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
        pages = total_pages(self._loop.states[0].ledger)
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
        if self._serials(rid):
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
            () if params.prompt_logprobs is not None else self._contents[0].page_keys(tokens),
        )
        rank = route(self._loop.states, keys)  # all answers to a prompt share its KV
        for index in range(params.n):
            serial = first + index
            waiting = Waiting(serial, len(tokens), max_new_tokens, stops, priority=params.priority, page_keys=keys)
            self._loop = self._loop.with_state(rank, submit(self._loop.states[rank], waiting))
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
            self._contents[rank].add(request)
            if self._recorder is not None:
                self._recorder.submitted(rank, waiting, rid=rid, index=index, prompt=self._head_of(tokens))
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
        serials = self._serials(rid)
        for rank, serial in serials:
            self._abort(rank, serial)
        return bool(serials)

    def _serials(self, rid: str) -> list[tuple[int, int]]:
        """Rank and number of each request of that name."""
        return [(rank, serial) for rank, contents in enumerate(self._contents) for serial in contents.serials(rid)]

    def _abort(self, rank: int, serial: int) -> None:
        state, found = abort(self._loop.states[rank], serial)
        self._loop = self._loop.with_state(rank, state)
        if self._recorder is not None:
            self._recorder.aborted(rank, serial)
        if found is Aborted.WAITING:
            self._undelivered.append(self._contents[rank].end_off_row(serial, FinishReason.ABORT))
        self._check_state()

    def step(self) -> Iterable[Emission]:
        """One iteration: plan and launch the next step, then settle the launch before it (the same one, without overlap).

        Returns:
            The tokens of the settled launch, and the ends of requests that were aborted, or ran out of time, while they waited.
        """
        self._meters.iteration_starts()
        self._end_late_requests()
        self._loop, launch = self._launch(self._loop)
        emissions: Iterable[Emission] = ()
        if len(self._loop.unsettled) > (self.limits.depth if launch is not None else 0):
            self._loop, emissions = self._settle(self._loop)
        self._meters.iteration_ends(decode=launch is not None and launch.is_decode)
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
            for rank, (contents, state) in enumerate(zip(self._contents, self._loop.states, strict=True)):
                request = contents.get(serial)
                if request is None or state.requests.to_finish[request.row]:
                    continue  # on another rank; ended, or ending
                request.is_late = True
                self._abort(rank, serial)

    # --- the fold ----------------------------------------------------------------------------------------------------

    def _launch(self, loop: Loop) -> tuple[Loop, Unsettled | None]:
        """Plans a batch for each rank and dispatches the programs; waits for nothing."""
        if self._recorder is not None:
            self._recorder.iteration_starts()
        planned = plan_ranks(loop.states, limits=self.limits)
        if self._recorder is not None:
            self._recorder.has_planned()
        for contents, (_, _, left) in zip(self._contents, planned, strict=True):
            for gone in left:
                if (emission := contents.take_off(gone)) is not None:
                    self._undelivered.append(emission)
        loop = dataclasses.replace(loop, states=tuple(state for state, _, _ in planned))
        batches = tuple(batch for _, batch, _ in planned if batch is not None)
        if not batches:
            if self._recorder is not None:
                self._recorder.planned(planned)
            return loop, None
        is_prefill = any(batch.forward_mode.is_prefill for batch in batches)
        most_rows = max(batch.rows.shape[0] for batch in batches)
        full = self.worker.depths[-1]
        depth = full if is_prefill else depth_of(loop.depths, self._rules, most_rows, full=full)
        program, uploads = self._extend(batches) if is_prefill else self._decode(loop, batches, depth)
        upload = uploads[0] if len(uploads) == 1 else np.stack(uploads)
        asked = any(
            contents.anybody_asks(state.launched[-1])
            for contents, state in zip(self._contents, loop.states, strict=True)
        )
        device, outcome, logprobs = program(self.worker.params, loop.device, upload, logprobs=asked)
        previous = loop.unsettled[-1].outcome if loop.unsettled else None
        launch = Unsettled(batches, outcome, logprobs, depth)
        if self._recorder is not None:
            stashed = device.future.stashed_iter if program.commit is not None else None
            self._recorder.planned(planned, depth=depth, outcome=outcome, stashed_iter=stashed)
        self._meters.launched(
            decode=launch.is_decode,
            previous_running=previous is not None and not previous.is_ready(),
            chained=any((batch.expected_iter == batch.forward_iter - 1).any() for batch in batches),
        )
        for batch in batches:
            events.launched(batch)
        loop = dataclasses.replace(loop, device=device, unsettled=(*loop.unsettled, launch))
        self._check_state(loop)
        return loop, launch

    def _settle(self, loop: Loop) -> tuple[Loop, Iterable[Emission]]:
        """Waits for the oldest outcome and applies it, rank by rank."""
        launch = loop.unsettled[0]
        if self._recorder is not None:
            self._recorder.waits()
        start = time.perf_counter()
        outcomes = self._by_rank(launch.outcome)
        self._meters.waited(start)
        if self._recorder is not None:
            self._recorder.is_ready()
        tables = tuple(map(self._by_rank, launch.logprobs))
        states, emissions, correct, done, hosts = [], [], [], [], []
        for rank, (contents, state) in enumerate(zip(self._contents, loop.states, strict=True)):
            launched = state.launched[0]
            num_tails = int(launched.commits.sum()) if launched.forward_mode is ForwardMode.MIXED else 0
            sizes = {"num_tails": num_tails, "tails_at": self.limits.max_prefill_rows}
            outcome, words = self._without_words(outcomes[rank], launched)
            result = unpack_outcome(outcome, launched.rows.shape[0] - num_tails, **sizes)
            if (result.status == RowStatus.STALE_RELAY).any():
                raise RuntimeError(
                    f"launch {launched.forward_iter} read a FutureMap row that nobody published for it: a fault of jspec"
                )
            result = contents.find_stops(state, result)
            state, launched, settled = settle_oldest(state, result)
            contents.append(launched, settled, result)
            if self.worker.host is not None:
                seen = contents.host_outcome(launched, settled, result, words)
                hosts.append(self.worker.host.observe(loop.hosts[rank], seen))
            if tables:
                own = [table[rank] for table in tables]
                contents.take_logprobs(launch.batches[rank], own, launched, settled, result)
            keys: Mapping[int, tuple[bytes, ...]] = {}
            if (settled.finish_reason != FinishReason.NONE).any():
                keys = contents.keys_of_finished(state, launched, settled)
            done.append(RankSettled(state, launched, settled, result, keys))
            if keys:
                state = retire(state, keys)
            correct.append((result.accept_lens - self.worker.num_non_draft_tokens)[settled.live])
            emissions.append(contents.emit(launched, settled, result))
            states.append(state)
        self._meters.step_settled(decode=launch.is_decode)
        if self._recorder is not None:
            self._recorder.settled(done, states)
        depths = loop.depths
        if depths and launch.is_decode:
            sizes = {"batch_size": max(batch.rows.shape[0] for batch in launch.batches), "depth": launch.depth}
            depths = after_settle(depths, self._rules, np.concatenate(correct), **sizes)
        loop = Loop(tuple(states), loop.device, loop.unsettled[1:], depths, tuple(hosts))
        self._check_state(loop)
        return loop, emissions[0] if len(emissions) == 1 else list(itertools.chain.from_iterable(emissions))

    def _by_rank(self, array: Any) -> np.ndarray:
        """On the host, with a leading axis of ranks."""
        found = np.asarray(array)
        return found if len(self._contents) > 1 else found[None]

    def _without_words(self, outcome: np.ndarray, launched: Launched) -> tuple[np.ndarray, np.ndarray]:
        """An outcome, and the words of its rows for the worker's host side."""
        if launched.forward_mode is not ForwardMode.DECODE:
            return outcome, outcome[:0, :0]
        end = outcome.shape[1] - self.worker.outcome_words
        return outcome[:, :end], outcome[: launched.rows.shape[0], end:]

    def _decode(self, loop: Loop, batches: tuple[ScheduleBatch, ...], depth: int):
        bucket = fit(self._buckets.batch, max(batch.rows.shape[0] for batch in batches))
        bound = max(int(batch.kv_bound) for batch in batches)
        width = fit(self._buckets.table_width, -(-bound // self.config.page_size))
        if (host := self.worker.host) is None:
            uploads = [pack_decode(batch, bucket=bucket) for batch in batches]
        else:
            given = zip(batches, loop.states, self._contents, loop.hosts, strict=True)
            uploads = [
                pack_decode(batch, bucket=bucket, words=host.inputs(known, contents.host_launch(batch, state)))
                for batch, state, contents, known in given
            ]
        return self._programs[DecodeKey(bucket, width, depth)], uploads

    def _extend(self, batches: tuple[ScheduleBatch, ...]):
        num_tokens = max(int(batch.extend_lens.sum()) for batch in batches)
        sizes = self._buckets.extend(num_tokens, tails=any(batch.tails is not None for batch in batches))
        uploads = [
            extend_upload(batch, contents.place(batch), sizes, seed_of=self._seed)
            for contents, batch in zip(self._contents, batches, strict=True)
        ]
        return self._programs[sizes], uploads

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
        open_rids, unread, others = set(rids), list(refused), list[Emission]()
        try:
            while True:
                while unread:
                    emission = unread.pop(0)
                    if (emission.rid, emission.index) not in open_rids:
                        others.append(emission)
                        continue
                    if emission.output is not None:
                        open_rids.remove((emission.rid, emission.index))
                    yield emission
                if not open_rids:
                    return
                unread = list(self.step())
        finally:  # a caller that stops reading ends what it asked for, and nothing of the others is lost
            others += [emission for emission in unread if (emission.rid, emission.index) not in open_rids]
            self._undelivered = [*others, *self._undelivered]
            for rid, _ in open_rids:
                self.abort(rid)

    def _stream(self, prompts, params) -> Iterator[Emission]:
        rids, refused = self._submit_all(prompts, params)
        yield from self._drain(rids, refused)

    # --- checks and records ------------------------------------------------------------------------------------------------------

    def _seed(self, request: Request) -> int:
        if request.params.seed is not None:
            return (request.params.seed + request.index) % 2**32
        return (self.config.seed * 0x9E3779B1 + request.serial) % 2**32

    def _head_of(self, tokens: np.ndarray) -> str:
        head = tokens[:MOST_PROMPT_CHARS].tolist()
        return " ".join(map(str, head)) if self.tokenizer is None else self.tokenizer.decode(head)

    def _start_recording(self, state: SchedulerState) -> Recorder:
        config, future = self.config, self._loop.device.future
        assert config.trace is not None
        header = Header(
            limits=self.limits,
            max_running=config.max_running,
            num_pages=total_pages(state.ledger),
            page_size=config.page_size,
            num_ranks=len(self._loop.states),
            verify_width=self.worker.verify_width,
            output_stride=self.worker.output_stride,
            algorithm=self.worker.name,
            model=self._model,
            carry=type(future.carry).__name__,
            started_at=time.time(),
        )
        return Recorder(config.trace, header, future.stashed_iter)

    def _check_state(self, loop: Loop | None = None) -> None:
        if self.config.checked:
            loop = loop or self._loop
            frontiers = self._by_rank(loop.device.future.new_seq_lens)
            for state, frontier in zip(loop.states, frontiers, strict=True):
                check(state, limits=self.limits, frontier=frontier, max_accept=self.worker.output_stride)
