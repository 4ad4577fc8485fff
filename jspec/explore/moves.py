"""The real transitions, one at a time, each held against what a plain device and a plain reading of the requests say it must have done."""

import functools
from collections import Counter
from typing import NamedTuple

import numpy as np

from jspec.explore.config import ExploreConfig
from jspec.explore.contents import Contents
from jspec.explore.node import Canonical, Node
from jspec.explore.outcomes import CHUNK, LOST, PROMPT, STEP, TAIL, Outcomes, plain_rule
from jspec.explore.results import Results
from jspec.explore.rules import Columns, outputs_of, require_kept_row, require_rows_kept, require_same_requests
from jspec.explore.violation import Violation, require
from jspec.scheduler import Aborted, abort, plan, retire, settle_oldest, submit
from jspec.state import (
    FinishReason,
    ForwardMode,
    ScheduleBatch,
    SchedulerState,
    Waiting,
    init_state,
)
from jspec.state.invariants import InvariantError, check


class Prompt(NamedTuple):
    """A row of a launch that prefills."""

    row: int
    end: int  # positions whose KV is right after it: the frontier that it publishes


class Moving(NamedTuple):
    """A row of a launch that moves on from its frontier."""

    row: int
    allocated: int  # positions it may write to
    written: int  # tokens that it writes, from its frontier on


class Launch(NamedTuple):
    """What a plan launches."""

    rows: tuple[tuple[int, int], ...]  # (row, kind), as in the batch, tails last
    prompts: tuple[Prompt, ...]
    moving: tuple[Moving, ...]


class Moves:
    """Transitions of nodes under one configuration. Each raises `Violation` where it does what it must not."""

    def __init__(self, config: ExploreConfig):
        self.config, self.limits, self.plan_limits = config, config.limits, config.plan_limits
        self.contents, self.outcomes = Contents(config), Outcomes(config)
        self._canonical = Canonical(config, self.contents)
        self.key, self.alike = self._canonical.key, self._canonical.alike
        self.results = Results(config, self.outcomes)
        self._plain_rule = functools.cache(plain_rule)
        self.met: Counter[str] = Counter()
        """Real transitions so far in which something was met that not every search meets."""
        self.ends: dict[int, tuple[bytes, ...]] = {}
        """Of the newest settle: by row that ended, the pages that it left to the prefix cache."""

    def root(self) -> Node:
        """Nobody has come."""
        config, rows = self.config, self.config.rows + 1
        state = init_state(
            limits=self.limits, max_running=config.rows, num_pages=config.pages, page_size=config.page_size
        )
        return Node(state, (), tuple(range(len(config.requests))), 0, ((),) * rows, (0,) * rows, ())

    def check(self, node: Node) -> None:
        """Every invariant, with the device's frontiers as far ahead as outcomes can bring them: what bounds them from below, the search checks in each state."""
        frontier = node.state.ledger.kv_committed_len.copy()
        for launch in node.launches:
            for row, kind in launch:
                frontier[row] += self.config.verify_width if kind == STEP else kind == TAIL
        try:
            check(node.state, limits=self.limits, frontier=frontier, max_accept=self.config.verify_width)
        except InvariantError as error:
            name, _, details = str(error).partition(" fails at ")
            raise Violation(name, details) from None

    # --- what users do -----------------------------------------------------------------------------------------------

    def arrivals(self, node: Node) -> list[int]:
        """Indexes of requests that may come next: of those alike, the first."""
        return list({self.alike(index): index for index in reversed(node.arrivals)}.values())[::-1]

    def submit(self, node: Node, index: int) -> Node:
        """A request comes."""
        request, serial = self.config.requests[index], node.num_submitted + 1
        waiting = Waiting(
            serial,
            request.prompt_len,
            request.max_new_tokens,
            self.contents.stop_token_ids(),
            priority=request.priority,
            page_keys=self.contents.prompt_keys(index),
        )
        state = submit(node.state, waiting)
        arrivals = tuple(other for other in node.arrivals if other != index)
        after = node._replace(state=state, live=(*node.live, (serial, index)), arrivals=arrivals, num_submitted=serial)
        require_rows_kept(node.state, state, "a submission leaves running requests alone")
        require_same_requests(after, outputs_of(node.state), "a submission adds one request to the queue")
        return after

    def abort(self, node: Node, serial: int) -> Node:
        """A request that waits or runs is aborted."""
        runs = serial in node.state.requests.serial.tolist()
        state, found = abort(node.state, serial)
        require(found is (Aborted.RUNNING if runs else Aborted.WAITING), "an abort finds the request", serial=serial)
        if found is Aborted.RUNNING:
            flags = np.where(node.state.requests.serial == serial, True, node.state.requests.to_finish)
            require(
                bool((state.requests.to_finish == flags).all()),
                "an abort marks the request, and no other",
                serial=serial,
            )
            after = node._replace(state=state)
        else:
            after = node._replace(state=state, live=tuple(item for item in node.live if item[0] != serial))
        require_rows_kept(node.state, state, "an abort leaves running requests alone")
        require_same_requests(after, outputs_of(node.state), "an abort ends one waiting request, and no other")
        return after

    # --- a plan, and the launch -----------------------------------------------------------------------------------------

    def plan(self, node: Node) -> tuple[Node, Launch | None]:
        """Plans, and launches what was planned. The launch's outcomes are the caller's to choose."""
        before = node.state
        after, batch, left = plan(before, limits=self.plan_limits)
        outputs, live = outputs_of(before), dict(node.live)
        for gone in left:
            held = before.requests.serial[gone.row] == gone.serial
            require(bool(held) and outputs.get(gone.serial) == gone.output_len, "who leaves had the row", left=gone)
            if gone.reason is FinishReason.NONE:
                self.met["preempted" if gone.for_priority else "retracted"] += 1
                continue
            require(gone.reason is not FinishReason.OUT_OF_PAGES, "a request that fits alone gets its pages", left=gone)
            aborted = gone.reason is FinishReason.ABORT and before.requests.to_finish[gone.row]
            require(bool(aborted), "only an aborted request ends in a plan", left=gone)
            del live[gone.serial]
        lost = {gone.row for gone in left}
        if after.prefix_cache is not before.prefix_cache:
            self.met["evicted"] += bool(((before.prefix_cache.depth > 0) & (after.prefix_cache.depth == 0)).any())
        node = node.with_lost(lost)._replace(state=after, live=tuple(live.items()))
        require_same_requests(node, outputs, "a plan keeps every request, with its tokens")
        for row in np.nonzero(before.requests.serial)[0].tolist():
            if row not in lost:
                require_kept_row(before, after, row)
        if batch is None:
            require(len(after.launched) == len(before.launched), "nothing planned, nothing on record")
            require(bool(node.launches or not live), "somebody waits or runs, so something is launched or under way")
            return node, None
        return self._launch(node, before, batch, lost)

    def _launch(self, node: Node, before: SchedulerState, batch: ScheduleBatch, lost: set[int]) -> tuple[Node, Launch]:
        """The device's side of a plan: it reads its own relay and page table, and takes from the batch what it is told."""
        state = node.state
        decode = batch.forward_mode is ForwardMode.DECODE
        parts = [(batch, i, STEP if decode else CHUNK if batch.goes_on[i] else PROMPT) for i in range(len(batch.rows))]
        if batch.tails is not None:
            self.met["mixed"] += 1
            require(self.config.mixed, "tails ride along where batches are mixed")
            parts += [(batch.tails, i, TAIL) for i in range(len(batch.tails.rows))]
        tables, relay = list(node.tables), list(node.relay)
        rows: list[tuple[int, int]] = []
        prompts: list[Prompt] = []
        moving: list[Moving] = []
        for part, i, kind in parts:
            row, serial = int(part.rows[i]), int(part.serials[i])
            require(
                0 < row <= self.config.rows and row not in [r for r, _ in rows],
                "rows of a launch are distinct",
                row=row,
            )
            require(
                state.requests.serial[row] == serial > 0 and state.requests.epoch[row] == part.epochs[i],
                "a launch runs the request that holds the row",
                row=row,
            )
            pages = tuple(page for page in part.new_pages[i].tolist() if page > 0)
            committed, length = int(before.ledger.kv_committed_len[row]), int(state.ledger.kv_allocated_len[row])
            if kind in (TAIL, STEP):
                require(relay[row] == part.expected_iter[i], "the relay row holds what the launch before left",
                        row=row, found=relay[row], expected=int(part.expected_iter[i]))  # fmt: skip
                require(len(tables[row]) == part.first_page[i], "new pages go behind the row's last", row=row)
                require(
                    committed >= before.requests.fill_len[row], "a row moves on when its prompt is prefilled", row=row
                )
                tables[row], start = (*tables[row], *pages), committed
                moving.append(Moving(row, length, self.config.step_len if kind == STEP else 1))
                require(bool(batch.kv_bound >= length), "kv_bound bounds the launch", row=row)
            else:
                start = int(part.prefix_lens[i])
                end = start + int(part.extend_lens[i])
                goes_on = before.requests.serial[row] == serial and row not in lost
                self._require_prompt(node, row, start, end, committed if goes_on else None, kind)
                tables[row] = pages
                prompts.append(Prompt(row, end))
                require(bool(batch.kv_bound >= end), "kv_bound bounds the launch", row=row)
            self._require_own_pages(state, tables[row], row, start)
            relay[row] = int(batch.forward_iter)
            rows.append((row, kind))
        if prompts:
            require(batch.extend_lens.sum() <= self.limits.max_prefill_tokens, "a launch keeps to its token budget")
            require(len(prompts) <= self.limits.max_prefill_rows, "a launch keeps to its number of prompts")
        require(len(state.launched) == len(before.launched) + 1, "a launch is put on record")
        launch = Launch(tuple(rows), tuple(prompts), tuple(moving))
        node = node._replace(tables=tuple(tables), relay=tuple(relay), launches=(*node.launches, launch.rows))
        return node, launch

    def _require_prompt(self, node: Node, row: int, start: int, end: int, committed: int | None, kind: int) -> None:
        """A prompt begins with cached pages that say what it says, or goes on where its last chunk ended. `committed`: None for a new row."""
        state, page = node.state, self.config.page_size
        fill_len = int(state.requests.fill_len[row])
        require(
            start < end <= fill_len and start % page == 0,
            "a prefill computes a part of its prompt",
            row=row,
            start=start,
            end=end,
        )
        self.met["in chunks"] += kind == CHUNK
        self.met["reused in the same plan"] += committed is None and any(
            row == r for launch in node.launches for r, _ in launch
        )
        require(
            (kind == CHUNK) == (end < fill_len),
            "a launch knows whether its prompt goes on",
            row=row,
            end=end,
            fill_len=fill_len,
        )
        require(state.ledger.kv_committed_len[row] == end, "a prefill commits what it computes", row=row, end=end)
        require(not state.requests.to_finish[row], "no prompt of an aborted request is launched", row=row)
        if committed is not None:
            require(
                start == committed, "a chunk begins where the last one ended", row=row, start=start, committed=committed
            )
            return
        index = node.index_of[int(state.requests.serial[row])]
        self.met["began with cached pages"] += start > 0
        for column in range(start // page):
            key = state.prefix_cache.keys.get(int(state.ledger.page_table[row, column]))
            require(key is not None and self.contents.is_page_of(key, index, column),
                    "a shared page holds the prompt's own tokens", row=row, column=column)  # fmt: skip

    def _require_own_pages(self, state: SchedulerState, device: tuple[int, ...], row: int, start: int) -> None:
        """The device knows the row's pages, and those from position `start` on are nobody else's: there the launch may write."""
        ledger, table = state.ledger, state.ledger.page_table
        host = table[row].tolist()
        require(host[: len(device)] == list(device) and not any(host[len(device) :]), "the device knows the row's pages",
                row=row, host=host, device=device)  # fmt: skip
        others = {page for other, pages in enumerate(table.tolist()) if other != row for page in pages}
        own = device[start // self.config.page_size :]
        cached = state.prefix_cache.depth
        ok = len(set(own)) == len(own) and not others & set(own) and not any(cached[page] for page in own)
        require(
            ok and not ledger.page_locks[list(own)].any(), "a launch writes to pages of its own", row=row, pages=own
        )

    # --- a launch is settled ---------------------------------------------------------------------------------------------

    def settle(self, node: Node, code: int) -> Node:
        """Settles the oldest launch, whose outcomes `code` says; requests that end are retired.

        Args:
            node: has unsettled launches.
            code: see `Outcomes`. A lost row has outcome 0: its result is made up, and must not matter.
        """
        before, launch = node.state, node.launches[0]
        state, _, settled = settle_oldest(before, self.results.of_launch(launch, code))
        old = Columns.of(before)
        live, index_of = dict(node.live), node.index_of
        outputs, committed = list(old.output_len), list(old.committed)
        ends: dict[int, tuple[bytes, ...]] = {}
        for (row, kind), *got in zip(launch, *(column.tolist() for column in settled), strict=True):
            if kind == LOST:
                self.met["late results"] += 1
                require(
                    not (got[0] or got[2] or got[3] or got[4]), "a late result changes nothing", row=row, settled=got
                )
                continue
            outcome, serial = self.outcomes[self.outcomes.digit(code, row)], old.serial[row]
            taken = self._plain_rule(outcome, outputs[row], old.max_new_tokens[row], old.to_finish[row])
            wanted = [True, outputs[row], taken.num_new, taken.num_visible, taken.reason]
            require(
                got == wanted,
                "a run is taken as plain decoding would",
                row=row,
                outcome=outcome,
                settled=got,
                wanted=wanted,
            )
            if taken.reason is not FinishReason.NONE:
                self.met[f"ended by {taken.reason.name}"] += 1
                eos_at = None
                if outcome.token_stop:
                    eos_at = old.prompt_len[row] + outputs[row] + outcome.token_stop - 1
                ends[row] = ()
                if taken.reason is not FinishReason.ERROR:
                    ends[row] = self.contents.left_keys(index_of[serial], committed[row] + outcome.advance, eos_at)
                del live[serial]
            outputs[row] += taken.num_new
            committed[row] += 0 if outcome.failed else outcome.advance
        pages, now = state.ledger.page_table, state.ledger.kv_committed_len.tolist()
        require(
            now == committed,
            "KV is committed as far as tokens were accepted, and no other",
            found=now,
            wanted=committed,
        )
        self.ends = ends
        if ends:
            state = retire(state, ends)
        if state.prefix_cache is not before.prefix_cache:
            self._require_cached(node, before, state, pages, now, ends)
        new, after = Columns.of(state), node._replace(state=state, launches=node.launches[1:])
        for row, serial in enumerate(old.serial):
            if row in ends:
                left = new.epoch[row] != old.epoch[row] and not new.serial[row]
                require(left, "a request that ended has left its row, and its epoch is over", row=row)
            else:
                kept = (serial, old.epoch[row], outputs[row], old.allocated[row], old.to_finish[row])
                found = (new.serial[row], new.epoch[row], new.output_len[row], new.allocated[row], new.to_finish[row])
                require(found == kept, "a settle keeps whoever did not end", row=row, found=found, wanted=kept)
        if ends:
            after = after._replace(live=tuple(live.items())).with_lost(ends)
        require(state.waiting is before.waiting, "a settle leaves the queue alone")
        require(len(state.launched) == len(after.launches), "the oldest launch leaves the record")
        return after

    def _require_cached(
        self, node: Node, before: SchedulerState, state: SchedulerState, pages, committed, ends
    ) -> None:
        """What the cache got, it got from rows whose KV there is right, under the name of its tokens."""
        page_size, new = (
            self.config.page_size,
            np.nonzero((state.prefix_cache.depth > 0) & (before.prefix_cache.depth == 0))[0],
        )
        for page in new.tolist():
            places = np.argwhere(pages == page).tolist()
            require(len(places) == 1, "a page comes to the cache from one row", page=page, places=places)
            row, column = places[0]
            right = (column + 1) * page_size <= committed[row]
            require(right, "a cached page holds committed KV", row=row, column=column, committed=committed[row])
            index = node.index_of[int(before.requests.serial[row])]
            names = ends[row] if row in ends else self.contents.prompt_keys(index)
            named = column < len(names) and state.prefix_cache.keys.get(page) == names[column]
            require(named, "a cached page is named by its tokens", row=row, column=column)
