"""The contract between the engine and a spec worker: a bundle of pure functions and the static facts the scheduler plans with."""

import dataclasses
import enum
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from jspec.future_map import FutureMap, init_future_map
from jspec.models.target import TargetModel
from jspec.spec_workers.sampling import SamplingState, idle_rows, sampling_of
from jspec.spec_workers.upload import DecodeInputs, ExtendInputs


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceState:
    """All that lives on the device, as one value. Donated to each program and rebound to what it returns; `()` where a worker has no such part."""

    kv_pages: Any  # the target's KV pool; its layout is the kernels' business
    page_table: Any  # i32[R, P]  pages of each row; 0 where none
    future: FutureMap
    sampling_rows: Any  # i32[R, SAMPLING_COLUMNS]  `sampling` as bits: each leaf that a program is given costs the host its share of a dispatch
    token_pages: (
        Any  # i32[N + 1, page_size]  the tokens whose KV a page holds, and the pending one where its page is there
    )
    draft_kv_pages: Any = ()  # the draft's pool: the same page ids, other contents
    recurrent: Any = ()  # what the target's recurrent layers remember, one entry a row; see `jspec.models.recurrence`
    page_size: int = dataclasses.field(metadata={"static": True})
    masks: Callable[..., Any] | None = dataclasses.field(default=None, metadata={"static": True})
    """Asked for the tokens that grammars allow, see `adjust_logits`; None: no row has one."""

    @property
    def sampling(self) -> SamplingState:
        """How each row's request wants to be sampled."""
        return SamplingState(**sampling_of(self.sampling_rows))


class DeviceSizes(NamedTuple):
    """Sizes a worker allocates with."""

    num_rows: int  # R, row 0 included
    num_pages: int  # N, the sink not counted
    pages_per_row: int  # P
    page_size: int
    prefix_cache: bool = True  # rows may start from the end of a page that another row filled


class VerifyKind(enum.Enum):
    """Shape of what one verify checks."""

    CHAIN = "chain"
    TREE = "tree"
    RAGGED = "ragged"


class PhaseOutput(NamedTuple):
    """What the first program of a launch leaves."""

    device: DeviceState  # frontier published
    outcome: Any  # i32[B, 3 + O] (one token column after EXTEND, tails last), see `pack_outcome`: all the host ever sees of a step
    handoff: Any  # pytree for the commit program; `()` if there is none
    logprobs: Any = ()  # of the emitted tokens, i32[B, O, COLUMNS], and after EXTEND of the prompts', i32[T, COLUMNS]; see `token_logprobs`


class ExtendFn(Protocol):
    def __call__(self, params: Any, device: DeviceState, inputs: ExtendInputs, *, table_width: int) -> PhaseOutput:
        """Prefills the rows of `inputs`, moves its tails on by their pending token, and publishes the frontiers.

        Writes the target's KV of the prompts, samples the next token (pending: its KV is written by the next step), publishes `new_seq_lens =
        prefix_lens + extend_lens`, with no +1. A tail starts from the frontier in the FutureMap and publishes that + 1, the one such place. Where the prompt
        goes on nothing is emitted, and the carry is made of the prompt's own next tokens. A worker without `extend_commit` also stashes it here.

        Args:
            params: the worker's `params`.
            device: with the rows' page table and sampling parameters in place.
            inputs: one EXTEND batch, padded to its bucket.
            table_width: static; pages of a row that this program may read or write.
        """


class VerifyFn(Protocol):
    def __call__(
        self, params: Any, device: DeviceState, inputs: DecodeInputs, *, table_width: int, depth: int
    ) -> PhaseOutput:
        """One step of the rows of `inputs`: resolve, draft, verify, accept, publish.

        Reads the frontier and the carry from the FutureMap inside the program. Writes KV at positions `[L, L + alloc_len)` at most, `L` the frontier it
        resolved. Publishes `new_seq_lens = L + accept_lens`; `accept_lens` counts the bonus token. A worker without `commit_phase` also stashes.

        Args: as `ExtendFn`, and
            depth: static; how deep this step drafts, one of the worker's `depths`.
        """


class CommitFn(Protocol):
    def __call__(self, params: Any, device: DeviceState, inputs: Any, handoff: Any, *, table_width: int) -> DeviceState:
        """What the next forward needs but the scheduler does not: draft extend, injection, recurrent state. Stashes the carry.

        What it must know of the depth of the step is in the shapes of `handoff`.

        The host may read the outcome of the first program while this one runs; the boundary between the two is SGLang's `on_publish`.
        """


class HostLaunch(NamedTuple):
    """A DECODE launch that is being planned, as the host side of a worker sees it."""

    rows: Any  # i32[B]
    epochs: Any  # i32[B]  of the rows: another epoch is another request
    tokens_of: Callable[[int], Any]  # row -> i32[n], prompt and settled output


class HostOutcome(NamedTuple):
    """A launch that was settled."""

    rows: Any  # i32[B]
    epochs: Any  # i32[B]  when it was planned
    live: Any  # bool[B]  the row still belongs to the request that it was launched for
    finished: Any  # bool[B]  and that request ends here
    accept_lens: Any  # i32[B]  tokens that the launch emitted
    words: Any  # i32[B, outcome_words]; of no rows after a prefill
    tokens_of: Callable[[int], Any]  # of live rows, this launch's tokens included


class HostSide(NamedTuple):
    """What a worker computes on the host for each DECODE launch, from what was settled by then.

    Its words ride in the one upload and the one outcome of a launch. The engine folds `state`, a value, through both functions. Under overlap the newest launch is
    not settled when the next one is planned, so what `inputs` sees is older by a launch; of a row of another epoch it knows nothing.
    """

    row_words: int  # i32 words of each row that a launch is given, `DecodeInputs.row_words`
    batch_words: int  # and of the launch as a whole, `DecodeInputs.batch_words`
    outcome_words: int  # i32 words of each row that a verify gives back, see `pack_outcome`
    init: Callable[[int], Any]  # `init(num_rows) -> state`
    inputs: Callable[
        [Any, HostLaunch], tuple[Any, Any]
    ]  # `inputs(state, launch) -> (i32[B, row_words], i32[batch_words])`
    observe: Callable[[Any, HostOutcome], Any]  # `observe(state, outcome) -> state`


class InitFn(Protocol):
    def __call__(self, sizes: DeviceSizes) -> DeviceState:
        """An idle device: pools zeroed, relay empty, the carry's type fixed."""


class SpecWorker(NamedTuple):
    """An algorithm, as a value. Built by a factory that binds its options; nobody asks which one it is."""

    name: str
    verify_width: int  # W: tokens of a row that one verify checks, the pending one included
    output_stride: int  # O: columns of the outcome that hold tokens
    alloc_len: int  # 1 + the highest offset past the frontier that a step ever writes
    num_non_draft_tokens: int  # tokens of a run that no draft proposed: correct drafts = accept_lens - this
    fixed_accept: int | None  # tokens a step emits, where that is known before it runs
    verify_kind: VerifyKind
    capture_layers: tuple[int, ...]  # target layers whose hidden states the worker needs
    params: Any  # weights of target and draft: an argument of every program
    init: InitFn
    extend_phase: ExtendFn
    extend_commit: CommitFn | None  # None: prefill leaves nothing to do after publish
    verify_phase: VerifyFn
    commit_phase: CommitFn | None  # None: a step leaves nothing to do after publish
    depths: tuple[int, ...] = (
        0,
    )  # depths a step can be run at, ascending; the last is what `verify_width` was made for
    draft_kv_bytes_per_token: int = 0  # of the draft's pool, which lies beside the target's
    draft_kv_bytes_per_row: Callable[[int], int] = lambda page_size: (
        0
    )  # and of what the draft keeps for a row whatever its length, by page size
    lookahead: int = 0  # tokens past a position that the draft's KV at that position depends on
    caches_output: bool = (
        True  # the draft's KV of emitted tokens is what a prefill of them would have written, so that others may use it
    )
    lossy: bool = False  # rows that sample do not have the target's distribution
    host: HostSide | None = None  # None: a launch needs nothing of the host but the batch

    @property
    def input_words(self) -> tuple[int, int]:
        """Words of each row, and of the launch as a whole, that the host side gives a DECODE launch."""
        return (0, 0) if self.host is None else (self.host.row_words, self.host.batch_words)

    @property
    def outcome_words(self) -> int:
        """Words of each row that a verify gives the host side."""
        return 0 if self.host is None else self.host.outcome_words


def target_state(target: TargetModel, sizes: DeviceSizes) -> dict[str, Any]:
    """The target's parts of an idle device, for `init_device`."""
    num_pages = sizes.num_pages if sizes.prefix_cache else 0
    return {
        "kv_pages": target.init_kv(sizes.num_pages, sizes.page_size),
        "recurrent": target.init_recurrent(sizes.num_rows, num_pages, sizes.page_size),
    }


def init_device(sizes: DeviceSizes, *, kv_pages: Any, carry: Any, **parts: Any) -> DeviceState:
    """An idle `DeviceState`. `carry` is a pytree of `jax.ShapeDtypeStruct` of one row; `parts` are the optional fields."""
    return DeviceState(
        kv_pages=kv_pages,
        page_table=jnp.zeros((sizes.num_rows, sizes.pages_per_row), jnp.int32),
        token_pages=jnp.zeros((sizes.num_pages + 1, sizes.page_size), jnp.int32),
        future=init_future_map(sizes.num_rows, carry),
        sampling_rows=idle_rows(sizes.num_rows),
        page_size=sizes.page_size,
        **parts,
    )
