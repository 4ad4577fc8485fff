"""Many configurations in one call."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jspec.scheduler import pages_to_finish
from jspec.sim.acceptance import Acceptance, Drawn, Replayed
from jspec.sim.checks import require
from jspec.sim.inputs import Policy, Requests
from jspec.sim.latency import LatencyModel, Measured
from jspec.sim.plan import MOST_PREFILL_ROWS, put_back
from jspec.sim.state import Counts, SimState, Sizes, Step, init
from jspec.sim.step import World, has_work, step
from jspec.state import Limits


@dataclasses.dataclass(frozen=True)
class Report:
    """What came of each configuration, on NumPy arrays; without the axis `C` where nothing that was given has one. `Q` requests.

    Times are simulated seconds. A percentile over requests is `np.nanpercentile(report.first_token_s, 99, axis=-1)`.
    """

    complete: Any  # bool[C]  all requests ended; False: `max_steps` came before
    seconds: Any  # f32[C]  at the end of its last iteration
    busy_s: Any  # f32[C]  of these, the device ran
    steps: Any  # i32[C]  iterations that did something
    iterations: Any  # i32[C]  decode launches settled, as `Summary.iterations`
    prefills: Any  # i32[C]  launches with prompts
    row_rounds: Any  # i32[C]  rows of all launches
    verifies: Any  # i32[C]  decode steps, counted a request at a time, as `Summary.verifies`
    wasted: Any  # i32[C]  rows launched for a request that had ended, or lost its row, by the time its result came
    tokens: Any  # i32[C]
    verified_tokens: Any  # i32[C]  of these, by verifies: without those of prefills and tails
    retractions: Any  # i32[C]
    output_lens: Any  # i32[C, Q]  tokens of each request; 0 behind `Requests.count`
    arrival_s: Any  # f32[C, Q]
    first_at_s: Any  # f32[C, Q]  when its first token came; NaN if none did
    finish_at_s: Any  # f32[C, Q]  when it ended

    @property
    def tokens_per_s(self):
        """f64[C] tokens over the whole time."""
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.float64(self.tokens) / self.seconds

    @property
    def accept_length(self):
        """f64[C] tokens a verify, bonus included."""
        return np.float64(self.verified_tokens) / np.maximum(self.verifies, 1)

    @property
    def utilization(self):
        """f64[C] share of the time in which the device ran."""
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.float64(self.busy_s) / self.seconds

    @property
    def first_token_s(self):
        """f32[C, Q] time to first token: from the arrival."""
        return self.first_at_s - self.arrival_s

    @property
    def output_token_s(self):
        """f32[C, Q] time per output token after the first; NaN for a request of one token."""
        after_first = self.output_lens - 1
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(after_first > 0, (self.finish_at_s - self.first_at_s) / after_first, np.nan)

    @property
    def latency_s(self):
        """f32[C, Q] from the arrival to the end."""
        return self.finish_at_s - self.arrival_s


class _Outcome(NamedTuple):
    """What a compiled simulation gives back: leaves with an axis of configurations."""

    done: Any
    now_s: Any
    busy_s: Any
    counts: Counts
    output_lens: Any
    first_at_s: Any
    finish_at_s: Any


def _axes_of(part) -> Any:
    """0 for each leaf with an axis of configurations, else None; a part that does not say how many axes its fields have is one for all."""
    ranks = getattr(type(part), "RANKS", {})

    def axis(path, leaf):
        name = getattr(path[0], "name", None)
        return 0 if name in ranks and np.ndim(leaf) > ranks[name] else None

    return jax.tree_util.tree_map_with_path(axis, part)


def _num_configurations(world: World) -> int | None:
    """`C`; None where nothing has that axis."""
    lengths: dict[int, str] = {}
    for part in world:
        ranks = getattr(type(part), "RANKS", {})
        for name, rank in ranks.items():
            shape = np.shape(getattr(part, name))
            require(
                rank <= len(shape) <= rank + 1,
                f"{name} of {type(part).__name__} has {len(shape)} axes: it takes {rank}, or {rank + 1} with one of configurations",
            )
            if len(shape) > rank:
                lengths.setdefault(shape[0], f"{name} of {type(part).__name__}")
    if len(lengths) > 1:
        (a, first), (b, second) = list(lengths.items())[:2]
        raise ValueError(
            f"{first} is given for {a} configurations, but {second} for {b}: give each for all, or once (see `grid`)"
        )
    return next(iter(lengths), None)


class _Fit(NamedTuple):
    """What the longest request of each configuration wants."""

    positions: Any  # i32[C] prompt + output
    pages: Any  # i32[C] that it holds at most


def _fit(policy: Policy, requests: Requests, page_size: int) -> _Fit:
    """Checked as `Engine.submit` and the engine's constructor do.

    Raises:
        ValueError: a request could never run.
    """
    reserve_len = np.asarray(policy.reserve_len)
    prompt, most = (np.asarray(values) for values in (requests.prompt_len, requests.max_new_tokens))
    longest, pages = (prompt + most).max(axis=-1), np.zeros((), np.int32)
    for one in np.unique(reserve_len).tolist():
        limits = Limits(context_len=0, alloc_len=one, depth=0, max_prefill_tokens=0, max_prefill_rows=0)
        wanted = pages_to_finish(prompt, most, limits=limits, page_size=page_size).max(axis=-1)
        pages = np.where(reserve_len == one, wanted, pages)
    budget = np.asarray(policy.max_prefill_tokens)
    require(
        bool(np.all(budget >= np.minimum(page_size, longest))),
        f"max_prefill_tokens={budget.min()} must be at least page_size={page_size}: a chunk is a page or more",
    )
    pool, pages = np.broadcast_arrays(np.asarray(policy.kv_pages), pages)
    if (short := pages > pool).any():
        raise ValueError(
            f"kv_pages={pool[short].reshape(-1)[0]} cannot hold the longest request, which needs {pages[short].reshape(-1)[0]} pages of {page_size}, "
            "reserve included: raise kv_pages, or lower max_new_tokens"
        )
    return _Fit(longest, pages)


def _sizes(policy: Policy, requests: Requests, page_size: int) -> tuple[Sizes, Policy]:
    """Shapes for all configurations; and the policy with no more pages than can ever be wanted."""
    fit = _fit(policy, requests, page_size)
    rows, reserve_len = int(np.max(policy.max_running)), int(np.max(policy.reserve_len))
    rows = min(rows, np.shape(requests.prompt_len)[-1])
    pages_per_row = -(-(int(fit.positions.max()) + reserve_len) // page_size)
    # A row holds so many pages at most, and is promised as many again: more change nothing.
    running = np.minimum(policy.max_running, rows)
    kv_pages = np.minimum(policy.kv_pages, running * (2 * pages_per_row)).astype(np.int32)
    sizes = Sizes(
        rows=rows,
        num_requests=np.shape(requests.prompt_len)[-1],
        num_pages=int(kv_pages.max()),
        pages_per_row=pages_per_row,
        page_size=page_size,
        reserve_len=reserve_len,
        prefill_rows=min(rows, MOST_PREFILL_ROWS),
    )
    return sizes, dataclasses.replace(policy, kv_pages=kv_pages, max_running=running.astype(np.int32))


def _narrowed(acceptance: Acceptance, policy: Policy, num_requests: int) -> Acceptance:
    """The acceptance without what no verify is wide enough for.

    Raises:
        ValueError: it says nothing about some requests, or about verifies as wide as the policy's.
    """
    if isinstance(acceptance, Drawn):
        return dataclasses.replace(
            acceptance, survival=acceptance.survival[..., : int(np.max(policy.verify_width)) - 1]
        )
    if isinstance(acceptance, Replayed):
        known = np.shape(acceptance.lens)[-2]
        require(
            known == num_requests,
            f"{known} requests were recorded, but {num_requests} are simulated: give both in the same order, one for one",
        )
    return acceptance


@dataclasses.dataclass(frozen=True)
class Simulation:
    """Configurations that are ready to run. Made by `prepare`; `init` and `step` are pure, for `jit`, `lax.scan` and loops of your own."""

    sizes: Sizes
    world: World
    axes: World  # of the same structure: 0 where a leaf has an axis of configurations, else None
    count: int  # `C`
    scalar: bool  # nothing that was given has an axis of configurations: `C` is 1

    def init(self) -> SimState:
        """The state of every configuration before its first iteration: leaves with a leading axis `C`."""
        return _init(self.sizes, self.world, self.axes, self.count)

    def step(self, states: SimState) -> tuple[SimState, Step]:
        """One iteration of each: the states after it, and what it did (leaves `[C]`). One whose work is done does not change."""
        return step(self.sizes, self.world, self.axes, states)

    def has_work(self, states: SimState) -> Any:
        """bool[C]: an iteration could do anything."""
        return _has_work(self.world, self.axes, states)


def prepare(
    policy: Policy, requests: Requests, acceptance: Acceptance, latency: LatencyModel, *, page_size: int = 16
) -> Simulation:
    """Checks that the parts fit together, and finds the shapes that hold all configurations. See `simulate`."""
    require(page_size >= 1, f"page_size={page_size} must be at least 1: tokens a page holds")
    given = World(policy, requests, acceptance, latency)
    count = _num_configurations(given)
    sizes, policy = _sizes(policy, requests, page_size)
    acceptance = _narrowed(acceptance, policy, sizes.num_requests)
    if isinstance(latency, Measured):
        latency.check(rows=int(np.max(policy.max_running)), width=int(np.max(policy.verify_width)))
    world = World(policy, requests, acceptance, latency)
    return Simulation(sizes, world, World(*map(_axes_of, world)), count or 1, count is None)


def _has_work(world: World, axes: World, states: SimState) -> Any:
    return jax.vmap(lambda w, state: has_work(w.requests, state), in_axes=(axes, 0))(world, states)


def _init(sizes: Sizes, world: World, axes: World, count: int) -> SimState:
    def one(world: World) -> SimState:
        return init(sizes, world.policy.kv_pages, world.policy.new_token_ratio)

    return jax.vmap(one, in_axes=(axes,), axis_size=count)(world)


class _Shape(NamedTuple):
    """All that a program is compiled for, hashable."""

    sizes: Sizes
    tree: Any
    kinds: tuple[int | None, ...]  # of the leaves of a `World`

    def world(self, own, shared) -> World:
        """The leaves with an axis of configurations, and the others, in their places."""
        own, shared = iter(own), iter(shared)
        return jax.tree.unflatten(self.tree, [next(own) if kind == 0 else next(shared) for kind in self.kinds])


@functools.partial(jax.jit, static_argnames=("shape",))
def _run(shape: _Shape, own, shared, max_steps) -> _Outcome:
    """Leaves of `own` are [chunks, configurations of a chunk, ...]: chunks run one after another, each until all of it has ended."""
    axes = jax.tree.unflatten(shape.tree, shape.kinds)

    def chunk(own) -> _Outcome:
        count = own[0].shape[0]
        world = shape.world(own, shared)

        def works(carry):
            _, turns, moved = carry
            return moved & (turns < max_steps)

        def advance(carry):
            states, turns, _ = carry
            after, _ = step(shape.sizes, world, axes, states)
            said = [(state.counts, state.clock.now_s) for state in (states, after)]
            changes = jax.tree.leaves(jax.tree.map(lambda a, b: jnp.any(a != b), *said))
            return after, turns + 1, functools.reduce(jnp.logical_or, changes)

        # An iteration that changes nothing would not do so later: all is done, or, against all checks, stuck.
        start = _init(shape.sizes, world, axes, count)
        states, *_ = jax.lax.while_loop(works, advance, (start, jnp.int32(0), jnp.bool_(True)))
        states = jax.vmap(lambda state: put_back(state, jnp.arange(shape.sizes.rows + 1)))(states)
        kept = states.per_request
        most = jnp.minimum(world.requests.stop_len, world.requests.max_new_tokens)
        return _Outcome(
            done=~_has_work(world, axes, states),
            now_s=states.clock.now_s,
            busy_s=states.clock.busy_s,
            counts=states.counts,
            output_lens=jnp.minimum(kept.settled_len[:, 1:], most),  # what follows a stop is settled, but not seen
            first_at_s=kept.first_token_s[:, 1:],
            finish_at_s=kept.finish_s[:, 1:],
        )

    return jax.lax.map(chunk, own)


ROWS_AT_ONCE = 1024
"""Rows of one chunk, about: enough that an operation is worth its start, few enough that the state stays in the cache of a core."""


def _expected_steps(world: World) -> np.ndarray:
    """f64[C] or f64[]: roughly how long each configuration runs, so that those of a chunk end together."""
    policy, requests, acceptance, _ = world
    width = np.asarray(policy.verify_width)
    mean: Any = np.ones(())
    if isinstance(acceptance, Drawn):
        reached = np.arange(1, acceptance.survival.shape[-1] + 1) < width[..., None]
        mean = 1 + (acceptance.survival * reached).sum(axis=-1)
    there = np.arange(np.shape(requests.stop_len)[-1]) < np.asarray(requests.count)[..., None]
    tokens = (np.minimum(requests.max_new_tokens, requests.stop_len) * there).sum(axis=-1)
    return tokens / (mean * np.asarray(policy.max_running))


def simulate(
    policy: Policy,
    requests: Requests,
    acceptance: Acceptance,
    latency: LatencyModel,
    *,
    page_size: int = 16,
    max_steps: int = 1 << 20,
) -> Report:
    """Runs every configuration to its end, all in one compiled call.

    The scheduler is the engine's: `launchable`, `reserve`, `settle`, `release`, `prepare_extend` are the same functions, traced. Admission and retraction follow
    the planner's rules (first come first served, promised tokens, chunks, tails) on arrays. Not simulated: the prefix cache, priorities, aborts, adaptive
    depth, several ranks, the padding of batches to buckets, and the lookahead that a draft model wants at a chunk's end.

    Args:
        policy: how the engine is set up; see `jspec.sim.policy`.
        requests: what it is asked; see `closed_batch`, `open_trace`, `recorded_run`.
        acceptance: tokens a verify emits; see `geometric`, `by_position`, `histogram`, `recorded`.
        latency: seconds a launch takes; see `roofline`, `measured`, `every_step`.
        page_size: tokens a KV page holds; the same for all configurations.
        max_steps: iterations after which a configuration is left as it is; see `Report.complete`.

    Returns:
        A `Report`. A field of any part may have one axis more than it needs, of length `C`: then there are `C` configurations, and every array of the
        report has that axis first. Parts without it are the same for all.

    Raises:
        TypeError, ValueError: a part is wrong, or two do not fit together: field, value, rule, way out.
    """
    require(max_steps >= 1, f"max_steps={max_steps} must be at least 1")
    simulation = prepare(policy, requests, acceptance, latency, page_size=page_size)
    sizes, world, count = simulation.sizes, simulation.world, simulation.count
    leaves, tree = jax.tree.flatten(world)
    kinds = tuple(jax.tree.leaves(simulation.axes, is_leaf=lambda axis: axis is None))
    order = np.argsort(np.broadcast_to(_expected_steps(world), (count,)), kind="stable")
    num_chunks = -(-count * sizes.rows // ROWS_AT_ONCE)
    per_chunk = -(-count // num_chunks)
    # What is left over in the last chunk runs its configuration again.
    places = np.append(order, np.repeat(order[-1:], num_chunks * per_chunk - count)).reshape(num_chunks, per_chunk)
    own = [leaf[places] for leaf, kind in zip(leaves, kinds, strict=True) if kind == 0]
    shared = [leaf for leaf, kind in zip(leaves, kinds, strict=True) if kind is None]
    if simulation.scalar:  # one leaf has to say how many there are
        kinds, shared = (0, *kinds[1:]), shared[1:]
        own = [np.broadcast_to(leaves[0], (1, 1, *np.shape(leaves[0])))]
    outcome = _run(_Shape(sizes, tree, kinds), own, shared, np.int32(max_steps))
    back = np.empty(count, int)
    back[order] = np.arange(count)

    def unpacked(leaf):
        flat = np.asarray(leaf).reshape(num_chunks * per_chunk, *leaf.shape[2:])[:count][back]
        return flat[0] if simulation.scalar else flat

    found: _Outcome = jax.tree.map(unpacked, outcome)
    return Report(
        complete=found.done,
        seconds=found.now_s,
        busy_s=found.busy_s,
        output_lens=found.output_lens,
        arrival_s=np.broadcast_to(np.asarray(requests.arrival_s), found.first_at_s.shape),
        first_at_s=found.first_at_s,
        finish_at_s=found.finish_at_s,
        **{field.name: getattr(found.counts, field.name) for field in dataclasses.fields(Counts)},
    )
