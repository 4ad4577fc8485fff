"""Every compiled program of an engine, built ahead. Calling one can never compile: it is an executable, not a `jit` function."""

import functools
import itertools
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jspec.engine.buckets import Buckets
from jspec.models.parallel import RANKS, num_ranks, on_ranks
from jspec.spec_workers.base import DeviceState, PhaseOutput, SpecWorker
from jspec.spec_workers.upload import DECODE_COLUMNS, OUTCOME_COLUMNS, ExtendSizes, unpack_decode, unpack_extend


class DecodeKey(NamedTuple):
    """Static sizes of one decode program."""

    batch: int
    table_width: int
    depth: int


class Program(NamedTuple):
    """The programs of one launch: the first publishes, the second (if the worker has one) commits."""

    phase: Callable[..., PhaseOutput]  # (params, device, upload) -> PhaseOutput; the device is donated
    commit: Callable[..., DeviceState] | None  # (params, device, handoff) -> device; the device is donated

    def __call__(self, params, device: DeviceState, upload, *, logprobs: bool = False) -> tuple[DeviceState, Any, Any]:
        """Dispatches the launch; returns the device to be and the outcome to come, without waiting for either, and the log-probabilities if they are
        wanted: otherwise they stay where they are."""
        device, outcome, handoff, tables = self.phase(params, device, upload)
        outcome.copy_to_host_async()
        for table in tables if logprobs else ():
            table.copy_to_host_async()
        if self.commit is not None:
            device = self.commit(params, device, handoff)
        return device, outcome, tables if logprobs else ()


def use_compilation_cache() -> Path:
    """Turns on JAX's persistent compilation cache, unless the user chose a directory already; returns where it is."""
    chosen = jax.config.jax_compilation_cache_dir
    if not chosen:
        root = os.environ.get("JSPEC_CACHE_DIR") or os.path.join(os.path.expanduser("~"), ".cache", "jspec")
        chosen = os.path.join(root, "xla")
        jax.config.update("jax_compilation_cache_dir", chosen)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
    return Path(chosen)


def _shapes(tree):
    """With where each leaf lies and how, which a compiled program must be told."""

    def one(leaf):
        where = leaf.format if isinstance(leaf, jax.Array) else None
        return jax.ShapeDtypeStruct(jnp.shape(leaf), jnp.result_type(leaf), sharding=where)

    return jax.tree.map(one, tree)


def launch_functions(unpack, phase_fn, commit_fn, table_width: int) -> tuple[Callable, Callable | None]:
    """The functions behind a `Program`, to be compiled with their second argument donated."""

    def phase(params, device, upload):
        output = phase_fn(params, device, unpack(upload), table_width=table_width)
        # The second program finds the upload on the device: it crosses once.
        return output._replace(handoff=(upload, output.handoff)) if commit_fn is not None else output

    def commit(params, device, handoff):
        upload, handoff = handoff
        return commit_fn(params, device, unpack(upload), handoff, table_width=table_width)

    return phase, None if commit_fn is None else commit


def jitted(
    unpack, phase_fn, commit_fn, table_width: int, params, device, upload, mesh
) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """The functions of a launch, the first and maybe the second, as `jit` has them, and the shapes of their arguments.

    Args:
        params, device: shapes, with where their leaves lie; the device state is donated, and stays where it is.
        upload: its shape, of one rank.
        mesh: devices that share the model: what is not split lies whole on each; or ranks, with a share each of all but the parameters. None: one device.
    """
    phase, commit = launch_functions(unpack, phase_fn, commit_fn, table_width)
    phase = on_ranks(mesh, phase, params)
    whole, where, out = None, None, None
    if mesh is not None:
        whole = NamedSharding(mesh, PartitionSpec(RANKS) if num_ranks(mesh) > 1 else PartitionSpec())
        where = jax.tree.map(lambda leaf: leaf.sharding, device)
        out = PhaseOutput(device=where, outcome=whole, handoff=whole, logprobs=whole)

    def placed(tree):
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=whole), tree)

    if num_ranks(mesh) > 1:
        upload = jax.ShapeDtypeStruct((num_ranks(mesh), *upload.shape), upload.dtype)
    upload = placed(upload)
    yield jax.jit(phase, donate_argnums=1, out_shardings=out), (params, device, upload)
    if commit is not None:
        handoff = placed(jax.eval_shape(phase, params, device, upload).handoff)
        commit = on_ranks(mesh, commit, params)
        yield jax.jit(commit, donate_argnums=1, out_shardings=where), (params, device, handoff)


def _build(outcome_shape: tuple[int, ...], *launch) -> Program:
    compiled: list[Any] = []
    for function, arguments in jitted(*launch):
        lowered = function.lower(*arguments)
        given, found = arguments[1], lowered.out_info
        if not compiled:
            _check_outcome(found, outcome_shape)
            found = found.device
        _check_device("commit" if compiled else "verify or extend", found, given)
        compiled.append(lowered.compile())
    phase, *commit = compiled
    return Program(phase, *commit or [None])


def _check_outcome(found: Any, shape: tuple[int, ...]) -> None:
    """Raises ValueError where a worker's first program does not answer as the engine will read it."""
    if not isinstance(found, PhaseOutput):
        raise ValueError(f"the worker's phase returns a {type(found).__name__}: it must return a PhaseOutput")
    outcome = found.outcome
    if outcome.shape[-2:] != shape or outcome.dtype != jnp.int32:
        raise ValueError(
            f"the worker's outcome is {outcome.dtype}{list(outcome.shape)}: output_stride and the host side's outcome_words make it int32{list(shape)}; "
            "use pack_outcome"
        )


def _check_device(phase: str, found: Any, given: Any) -> None:
    """Raises ValueError where a worker's program returns another device state than it was given: what crosses an iteration has one shape for good."""
    ours, theirs = (dict(jax.tree_util.tree_leaves_with_path(tree)) for tree in (given, found))
    for path in [*ours, *(path for path in theirs if path not in ours)]:
        before, after = (
            f"{tree[path].dtype}{list(tree[path].shape)}" if path in tree else "nothing" for tree in (ours, theirs)
        )
        if before != after:
            raise ValueError(
                f"the worker's {phase} phase makes device{jax.tree_util.keystr(path)} {after}, which is {before}: "
                "it must return the device state in the shapes that `init` gave it"
            )


class Programs:
    """Programs by bucket.

    Args:
        worker: what to compile.
        device: the device state, for its shapes.
        buckets: sizes to build for.
        max_new_pages: `K` of a decode upload.
        mesh: devices that share the model; None: one.
        progress: wraps the finished builds, `progress(iterable, total=n)`, for a progress bar.
    """

    def __init__(
        self,
        worker: SpecWorker,
        device: DeviceState,
        buckets: Buckets,
        *,
        max_new_pages: int,
        mesh: Mesh | None = None,
        progress=None,
    ):
        params, shapes = _shapes(worker.params), _shapes(device)
        unpack: Callable[..., Any] = functools.partial(unpack_decode, words=worker.input_words)
        jobs: dict[DecodeKey | ExtendSizes, Callable[[], Program]] = {}
        for key in itertools.starmap(DecodeKey, itertools.product(buckets.batch, buckets.table_width, worker.depths)):
            upload = jax.ShapeDtypeStruct(
                (key.batch, DECODE_COLUMNS + max_new_pages + sum(worker.input_words)), jnp.int32
            )
            verify = functools.partial(worker.verify_phase, depth=key.depth)
            outcome = (key.batch, OUTCOME_COLUMNS + worker.output_stride + worker.outcome_words)
            jobs[key] = functools.partial(
                _build, outcome, unpack, verify, worker.commit_phase, key.table_width, params, shapes, upload, mesh
            )
        for sizes in buckets.prefill:
            unpack = functools.partial(unpack_extend, sizes=sizes)
            upload = jax.ShapeDtypeStruct((sizes.upload_len,), jnp.int32)
            functions = (unpack, worker.extend_phase, worker.extend_commit, sizes.table_width)
            outcome = (sizes.num_rows + sizes.num_tails, OUTCOME_COLUMNS + 1)
            jobs[sizes] = functools.partial(_build, outcome, *functions, params, shapes, upload, mesh)
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            futures = {pool.submit(job): key for key, job in jobs.items()}
            done: Iterable = as_completed(futures)
            if progress is not None:
                done = progress(done, total=len(futures))
            self._by_key = {futures[future]: future.result() for future in done}

    def __getitem__(self, key: DecodeKey | ExtendSizes) -> Program:
        return self._by_key[key]

    def __len__(self) -> int:
        return len(self._by_key)
