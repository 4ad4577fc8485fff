"""What the requests hold of tokens, text and log-probabilities, while they wait or run. The scheduler's state knows lengths only."""

from collections.abc import Sequence

import numpy as np

from jspec.config import SamplingParams
from jspec.engine import events
from jspec.engine.grammars import Grammars
from jspec.engine.logprobs import read_logprobs
from jspec.engine.logs import Request, TokenLogs
from jspec.engine.meters import Meters
from jspec.engine.outputs import ERRORS, FINISH_NAMES, Emission, Emissions, RequestOutput
from jspec.engine.text import TextStops
from jspec.scheduler import Left, Settled
from jspec.spec_workers import SpecWorker
from jspec.spec_workers.base import HostLaunch, HostOutcome
from jspec.state.batches import ScheduleBatch
from jspec.state.prefix_cache import page_keys
from jspec.state.requests import FinishReason, seqlen
from jspec.state.results import GenerationBatchResult, Launched
from jspec.state.scheduler_state import Limits, SchedulerState


class Contents:
    """Every request that waits or runs, by submission number, name and row; and its end, as a user sees it.

    Args:
        num_rows: `R`.
        limits: of the scheduler.
        worker: whose output is kept.
        page_size: tokens a page holds; None where nothing is left to the prefix cache.
        grammars: those of the requests; None where they have none.
        meters: told of starts, retractions and ends.
    """

    def __init__(
        self,
        num_rows: int,
        limits: Limits,
        worker: SpecWorker,
        *,
        page_size: int | None,
        grammars: Grammars | None,
        meters: Meters,
    ):
        self._limits, self._worker, self._page_size = limits, worker, page_size
        self._grammars, self.meters = grammars, meters
        self._logs = TokenLogs(num_rows, limits, worker.output_stride)
        self._by_serial: dict[int, Request] = {}
        self._by_rid: dict[str, list[int]] = {}
        self._by_row = np.full(num_rows, None, object)
        self._text_stops = TextStops()
        self._num_asking = 0  # requests that want log-probabilities

    def __len__(self) -> int:
        return len(self._by_serial)

    def get(self, serial: int) -> Request | None:
        """The request of that number, unless it has ended."""
        return self._by_serial.get(serial)

    def serials(self, rid: str) -> Sequence[int]:
        """Numbers of the requests of that name."""
        return tuple(self._by_rid.get(rid, ()))

    def page_keys(self, tokens: np.ndarray, known: tuple[bytes, ...] = ()) -> tuple[bytes, ...]:
        """Names of the pages that the tokens fill; none where nothing is shared."""
        if self._page_size is None:
            return ()
        return page_keys(tokens, page_size=self._page_size, lookahead=self._worker.lookahead, known=known)

    def add(self, request: Request) -> None:
        """A request was queued."""
        self._by_serial[request.serial] = request
        self._by_rid.setdefault(request.rid, []).append(request.serial)
        self._num_asking += _asks(request.params)
        if request.params.stop:
            self._text_stops.watch(request)

    # --- rows ----------------------------------------------------------------------------------------------------------

    def place(self, batch: ScheduleBatch) -> list[Request]:
        """The requests of the prompt rows of a batch, which have these rows now."""
        requests = [self._by_serial[serial] for serial in batch.serials.tolist()]
        for request, row, start in zip(requests, batch.rows.tolist(), batch.prefix_lens.tolist(), strict=True):
            if request.row != row:
                if request.row == 0 and not request.retractions:
                    request.cached_tokens = start
                request.row = row
                self._by_row[row] = request
                self._logs.open(row, request)
                self.meters.started(request)
                events.started(request, row, cached_tokens=start)
        return requests

    def take_off(self, gone: Left) -> Emission | None:
        """A request lost its row in a plan: it waits again, or has ended, and this is its end."""
        request = self._by_serial[gone.serial]
        self._logs.keep(gone.row, gone.output_len, request)
        request.row = 0
        if gone.reason is not FinishReason.NONE:
            return self.end_off_row(gone.serial, gone.reason)
        request.retractions += 1
        self.meters.retracted()
        events.retracted(request, gone)
        return None

    def end_off_row(self, serial: int, reason: FinishReason) -> Emission:
        """A request ends that holds no row, with what it had emitted before."""
        request = self._by_serial[serial]
        output = self._forget(request, request.kept.tolist(), request.kept_accept_lens.tolist(), reason)
        text = None if request.text is None else request.text.take()
        return Emission(rid=request.rid, token_ids=[], output=output, index=request.index, text=text)

    # --- a launch is settled -------------------------------------------------------------------------------------------

    def find_stops(self, state: SchedulerState, result: GenerationBatchResult) -> GenerationBatchResult:
        """The result of the oldest launch, before it is settled, with where its text stops."""
        return self._text_stops.find(state, result)

    def append(self, launched: Launched, settled: Settled, result: GenerationBatchResult) -> None:
        """The tokens of a settled launch."""
        self._logs.append(launched, settled, result)

    def host_launch(self, batch: ScheduleBatch, state: SchedulerState) -> HostLaunch:
        """A planned batch, for the worker's host side. `state` is that of the plan."""
        lengths = seqlen(state.requests)

        def tokens_of(row: int) -> np.ndarray:
            return self._text(row, int(lengths[row]) - len(self._by_row[row].prompt))

        return HostLaunch(batch.rows, batch.epochs, tokens_of)

    def host_outcome(
        self, launched: Launched, settled: Settled, result: GenerationBatchResult, words: np.ndarray
    ) -> HostOutcome:
        """A settled launch whose tokens were appended, for the worker's host side."""
        lengths = settled.start + settled.num_new
        finished = settled.finish_reason != FinishReason.NONE
        return HostOutcome(
            launched.rows,
            launched.epochs,
            settled.live,
            finished,
            result.accept_lens,
            words,
            lambda row: self._text(row, int(lengths[launched.rows == row][0])),
        )

    def _text(self, row: int, num_output: int) -> np.ndarray:
        """Prompt and output of a row, `i32[n]`."""
        return np.concatenate([self._by_row[row].prompt, self._logs.output_ids(row, num_output)]).astype(np.int32)

    def keys_of_finished(
        self, state: SchedulerState, launched: Launched, settled: Settled
    ) -> dict[int, tuple[bytes, ...]]:
        """What requests that ended leave to the prefix cache: the pages of their prompt, and of their output where the worker's are fit for others."""
        keys: dict[int, tuple[bytes, ...]] = {}
        for i in np.nonzero(settled.finish_reason)[0].tolist():
            row = int(launched.rows[i])
            request = self._by_serial[int(state.requests.serial[row])]
            committed = int(state.ledger.kv_committed_len[row])
            if settled.finish_reason[i] == FinishReason.ERROR:
                keys[row] = ()
            elif self._worker.caches_output and committed > len(request.prompt):
                output = self._logs.output(row, committed - len(request.prompt))
                keys[row] = self.page_keys(np.concatenate([request.prompt, output]), known=request.page_keys)
            else:
                keys[row] = request.page_keys
        return keys

    def emit(self, launched: Launched, settled: Settled, result: GenerationBatchResult) -> Emissions:
        """What a settled launch brought, ends of requests included."""
        requests = self._by_row[launched.rows]
        requests[~settled.live] = None
        outputs = {}
        for i in np.nonzero(settled.finish_reason)[0].tolist():
            row, length = int(launched.rows[i]), int(settled.start[i] + settled.num_visible[i])
            output = self._logs.output(row, length)
            reason = FinishReason(int(settled.finish_reason[i]))
            outputs[i] = self._forget(requests[i], output, self._logs.accept_lens(row), reason)
        self.meters.settled(launched, settled, requests)

        def so_far(i: int) -> list[int]:
            return self._logs.output(int(launched.rows[i]), int(settled.start[i] + settled.num_visible[i]))

        return Emissions(requests, result.next_token_ids, settled.start, settled.num_visible, outputs, so_far)

    def anybody_asks(self, launched: Launched) -> bool:
        """Whether a row of a launch wants log-probabilities."""
        return self._num_asking > 0 and any(_asks(request.params) for request in self._by_row[launched.rows])

    def take_logprobs(
        self, batch: ScheduleBatch, tables, launched: Launched, settled: Settled, result: GenerationBatchResult
    ) -> None:
        """What the launch says of the tokens it emitted, and of the prompts it computed."""
        of_output, *of_prompt = (np.asarray(table) for table in tables)
        num_prompts = batch.rows.shape[0] if of_prompt else 0
        index = np.arange(launched.rows.shape[0])
        if of_prompt:
            index[num_prompts:] += self._limits.max_prefill_rows - num_prompts
        ends = np.cumsum(batch.extend_lens)
        for i in np.nonzero(settled.live)[0].tolist():
            request, count = self._by_row[launched.rows[i]], int(settled.num_visible[i])
            if request.logprobs is not None and count:
                emitted = result.next_token_ids[i, :count].tolist()
                request.logprobs += read_logprobs(of_output[index[i], :count], emitted, request.params.logprobs)
            known = request.prompt_logprobs
            if known is not None and i < num_prompts and len(known) < len(request.prompt):
                # After a retraction the prompt is computed from the start again, and what is known already is passed over.
                passed = len(known) - 1 - int(batch.prefix_lens[i])
                table = of_prompt[0][ends[i] - batch.extend_lens[i] + passed : ends[i]]
                following = request.prompt[len(known) :][: len(table)].tolist()
                known += read_logprobs(table[: len(following)], following, request.params.prompt_logprobs)

    def _forget(
        self, request: Request, token_ids: list[int], accept_lens: list[int], reason: FinishReason
    ) -> RequestOutput:
        del self._by_serial[request.serial]
        self._text_stops.forget(request.serial)
        self._num_asking -= _asks(request.params)
        failed = None if self._grammars is None else self._grammars.close(request.serial)
        self._by_rid[request.rid].remove(request.serial)
        if not self._by_rid[request.rid]:
            del self._by_rid[request.rid]
        if request.text is not None:
            request.text.catch_up(token_ids, ended=True)
        output = RequestOutput(
            rid=request.rid,
            index=request.index,
            prompt_token_ids=request.prompt.tolist(),
            token_ids=token_ids,
            text=None if request.text is None else request.text.whole(),
            finish_reason="timeout"
            if request.is_late and reason is FinishReason.ABORT
            else "error"
            if failed is not None
            else FINISH_NAMES[reason],
            accept_lens=accept_lens,
            logprobs=request.logprobs,
            prompt_logprobs=request.prompt_logprobs,
            cached_tokens=request.cached_tokens,
            retractions=request.retractions,
            lossy=self._worker.lossy and request.params.temperature > 0,
            error=ERRORS.get(reason) if failed is None else f"the grammar could not be followed: {failed}",
        )
        self.meters.ended(request, output)
        events.finished(request, output)
        return output


def _asks(params: SamplingParams) -> bool:
    return params.logprobs is not None or params.prompt_logprobs is not None
