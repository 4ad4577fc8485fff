"""A state of the search as far as the host and the device's tables go, and its canonical form."""

import hashlib
import marshal
from typing import NamedTuple

from jspec.explore.config import ExploreConfig
from jspec.explore.contents import Contents
from jspec.explore.outcomes import LOST
from jspec.state import SchedulerState


class Node(NamedTuple):
    """What a plan, a settle, an arrival or an abort leads from and to.

    The device's part here is what does not depend on the outcomes of unsettled launches; its frontiers, which do, and the outcomes are added by the search.
    KV content is not part of it. A launch writes to no page that another live row or the cache could read (checked when it is planned), and a row reads
    what it wrote itself, in order, or what the cache names as the same tokens (checked when it is shared): so what may be read is right, and what else lies
    in a page cannot matter.
    """

    state: SchedulerState
    live: tuple[tuple[int, int], ...]  # (serial, index of the request) of all that wait or run, in the order they came
    arrivals: tuple[int, ...]  # indexes of requests that are still to come
    num_submitted: int
    tables: tuple[tuple[int, ...], ...]  # of each row, its pages as the device has been told
    relay: tuple[int, ...]  # of each row, the newest launch that published for its request
    launches: tuple[tuple[tuple[int, int], ...], ...]  # unsettled, oldest first: (row, kind) of each of its rows

    @property
    def index_of(self) -> dict[int, int]:
        """Index of the request by serial."""
        return dict(self.live)

    def with_lost(self, rows) -> "Node":
        """These rows have lost their requests: what is under way with them counts for nobody, and nothing on the device is theirs."""
        return self._replace(
            launches=tuple(
                tuple((row, LOST if row in rows else kind) for row, kind in launch) for launch in self.launches
            ),
            tables=tuple(() if row in rows else pages for row, pages in enumerate(self.tables)),
            relay=tuple(0 if row in rows else newest for row, newest in enumerate(self.relay)),
        )


class Canonical:
    """Maps nodes to bytes, equal for nodes that differ only by names and absolute counts.

    Left out or reduced, and why nothing that follows can tell the difference:

    * `forward_iter`, `last_launch`, epochs: the scheduler compares them, for equality, and nothing else. Kept: whether they agree with the launches.
    * serials: compared, too, and ordered. Kept: the order of those that wait or run; a later one is higher than all.
    * names of pages: given out and compared. Kept: which places hold the same page, in the order of rows, columns, and the cache's last use.
    * the order of free pages: any is as good as another.
    * `last_used`, `clock`: ordered. Kept: the order among cached pages.
    * names of cached prefixes that no request still to end could have: never looked up again.
    * which of several requests that are alike is which.

    What should follow from the rest, such as locks and the device's page tables, is kept all the same, or whether it does.
    """

    def __init__(self, config: ExploreConfig, contents: Contents):
        alike: dict[object, int] = {}
        own_pages = config.prefix_cache
        self._class = []
        for index, request in enumerate(config.requests):
            name: object = request
            if own_pages and request.shared < request.prompt_len:
                name = index  # its pages have names of their own
            self._class.append(alike.setdefault(name, len(alike) + 1))
        self._contents = contents

    def alike(self, index: int) -> int:
        """A number that requests have in common which cannot be told apart."""
        return self._class[index]

    def key(self, node: Node) -> bytes:
        """The canonical form of a node, hashed to 128 bits."""
        state = node.state
        requests, ledger = state.requests, state.ledger
        rank = {serial: place for place, (serial, _) in enumerate(node.live, 1)}
        epochs = requests.epoch.tolist()
        facts: list = [
            [rank.get(serial, -1) if serial else 0 for serial in requests.serial.tolist()],
            [self._class[index] for _, index in node.live],
            [self._class[index] for index in node.arrivals],
            [(rank.get(r.serial, -1), r.prompt_len, r.output_len, r.max_new_tokens, r.priority) for r in state.waiting],
            sorted(rank.get(serial, -1) for serial in state.admitted),
            [self._launch(item, known, epochs) for item, known in zip(state.launched, node.launches, strict=False)],
            len(state.launched) - len(node.launches),
            [newest == known for newest, known in zip(requests.last_launch.tolist(), node.relay, strict=True)],
            *self._pages(node),
        ]
        arrays = (
            requests.prompt_len,
            requests.output_len,
            requests.fill_len,
            requests.priority,
            requests.max_new_tokens,
            requests.stop_token_ids,
            requests.to_finish,
            ledger.cache_protected_len,
            ledger.kv_committed_len,
            ledger.kv_allocated_len,
            state.new_token_ratio,
        )
        # Version 2 writes equal values alike, whatever else refers to them.
        content = marshal.dumps(facts, 2) + b"".join([array.tobytes() for array in arrays])
        return hashlib.blake2b(content, digest_size=16).digest()

    def _launch(self, item, known, epochs) -> list:
        """An unsettled launch: of rows that count for nobody, nothing."""
        kept: list = [item.forward_mode.is_prefill]
        columns = (
            item.rows.tolist(),
            item.epochs.tolist(),
            item.emits.tolist(),
            item.commits.tolist(),
            item.end_lens.tolist(),
        )
        for (row, kind), (its_row, epoch, emits, commits, end) in zip(known, zip(*columns, strict=True), strict=True):
            counts = epochs[its_row] == epoch
            if counts or kind != LOST:
                kept.append((row, its_row, kind, counts, emits, commits, end))
        return kept

    def _pages(self, node: Node) -> list:
        """Who holds which pages, by names that are given here."""
        state = node.state
        ledger, cache = state.ledger, state.prefix_cache
        names = {0: 0}
        host = ledger.page_table.tolist()
        tables = [[names.setdefault(page, len(names)) for page in row if page] for row in host]
        on_device = [
            row[: len(known)] == list(known) and not any(row[len(known) :])
            for row, known in zip(host, node.tables, strict=True)
        ]
        locks = ledger.page_locks.tolist()
        cached = []
        if cache.keys or cache.pages:
            depth, used = cache.depth.tolist(), cache.last_used.tolist()
            order = sorted(page for page, d in enumerate(depth) if d)
            order.sort(key=lambda page: (used[page], depth[page]))
            uses = {clock: place for place, clock in enumerate(sorted({used[page] for page in order}))}
            ends = tuple(sorted({index for _, index in node.live} | set(node.arrivals)))
            for page in order:
                key = cache.keys.get(page)
                label = b"?" if key is None else self._contents.label(key, ends)
                cached.append(
                    (
                        names.setdefault(page, len(names)),
                        depth[page],
                        uses[used[page]],
                        label,
                        cache.pages.get(key) == page,
                    )
                )
            cached.sort()
        free = ledger.free_pages[: max(int(ledger.num_free), 0)].tolist()
        odd = [names.get(page, page) for page in free if page in names or not 0 < page < len(locks)]
        return [
            tables,
            on_device,
            cached,
            len(cache.pages) - len(cache.keys),
            sorted((names.get(page, -1), count) for page, count in enumerate(locks) if count),
            int(ledger.num_free),
            len(set(free)),
            odd,
        ]
