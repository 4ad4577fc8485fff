"""Compiles jobs for one chip, in a process of its own: libtpu reads its options once, when it is loaded.

`python -m jspec.tpu_report.compiler CHIP kernels|steps` reads jobs from standard input and prints a JSON line for each result: a kernel gives one, a
worker's steps one for each of their programs and an empty line behind them.
"""

import dataclasses
import json
import os
import pathlib
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

from jspec.tpu_report.chips import CHIPS
from jspec.tpu_report.jobs import MOVE, PEER, PREFILL, SHAPES, VERIFY, WRITE, KernelJob
from jspec.tpu_report.schedule import block_loop, estimated_cycles, read_loops, row_bundles, run_loop

_DUMP = "--xla_jf_dump_to={} --xla_jf_dump_llo_text=true --xla_jf_dump_llo_static_gaps=true --xla_jf_dump_llo_pass_label_regex=final.*"


def main() -> None:
    """Command line, see above."""
    chip, what = sys.argv[1:]
    os.environ |= {"TPU_SKIP_MDS_QUERY": "1", "JAX_PLATFORMS": "cpu", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    if what == "steps":
        for line in sys.stdin:
            for result in run_steps(chip, json.loads(line)):
                print(json.dumps(result), flush=True)
            print(flush=True)
        return
    with tempfile.TemporaryDirectory() as folder:
        os.environ["LIBTPU_INIT_ARGS"] = _DUMP.format(folder)
        for line in sys.stdin:
            print(json.dumps(run_job(chip, KernelJob(**json.loads(line)), pathlib.Path(folder))), flush=True)


def run_steps(chip: str, job: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Figures of each program of a worker on a model."""
    import jax

    from jspec.models import parallel
    from jspec.tpu_report.jobs import RANKS, StepJob
    from jspec.tpu_report.steps import build, mesh_size, programs

    step = StepJob(**job)
    ranks = RANKS.get(step.worker)
    size, axis = (ranks, parallel.RANKS) if ranks else (mesh_size(step, CHIPS[chip].hbm_gib << 30), parallel.AXIS)
    mesh, _ = _mesh(chip, size, axis)
    worker = build(step, mesh)
    with jax.sharding.set_mesh(mesh):
        for name, function, arguments in programs(step, worker, mesh):
            started = time.monotonic()
            try:
                compiled = function.trace(*arguments).lower(lowering_platforms=("tpu",)).compile()
            except Exception as error:  # whatever the compiler refuses is a line of the report
                yield {"program": name, "devices": mesh.size, "error": _first_line(error)}
                continue
            pool = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(arguments[1].kv_pages))
            text = compiled.as_text()
            yield {
                "program": name,
                "devices": mesh.size,
                **_memory(compiled, started),
                "pool_bytes": pool // mesh.size,
                "host_transfers": text.count("is_host_transfer=true"),
                "f64": "f64[" in text,
                "xla_cycles": estimated_cycles(text),
            }


def _first_line(error: Exception) -> str:
    first = next((line for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {first[:300]}"


def _memory(compiled: Any, started: float) -> dict[str, Any]:
    memory = compiled.memory_analysis()
    return {
        "compile_s": round(time.monotonic() - started, 1),
        "argument_bytes": memory.argument_size_in_bytes,
        "alias_bytes": memory.alias_size_in_bytes,
        "temp_bytes": memory.temp_size_in_bytes,
    }


def _mesh(chip: str, size: int = 1, axis: str = "tensor") -> tuple[Any, Any]:
    """A mesh of devices of the chip, and the sharding that puts an array on each."""
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    devices = topologies.get_topology_desc(CHIPS[chip].topology, "tpu").devices
    mesh = Mesh(np.array(devices[:size]), (axis,))
    return mesh, NamedSharding(mesh, PartitionSpec())


def run_job(chip: str, job: KernelJob, dumps: pathlib.Path) -> dict[str, Any]:
    """Figures of one job: `error`, or bytes and the loop over blocks."""
    for file in dumps.iterdir():
        file.unlink()
    started = time.monotonic()
    try:
        compiled, block_tokens = _compile(chip, job)
    except Exception as error:  # whatever the compiler refuses is a line of the report
        return {"error": _first_line(error)}
    result: dict[str, Any] = _memory(compiled, started)
    name = "ragged_paged_attention" if job.kernel == PEER else job.kernel
    files = [
        f for f in dumps.glob(f"*{name}*final_bundles.txt") if not ("schedule-analysis" in f.name or "gap" in f.name)
    ]
    if block_tokens and files:
        with max(files, key=lambda f: f.stat().st_size).open() as lines:
            loops = read_loops(lines)
        if loop := run_loop(loops, block_tokens) if job.kernel == WRITE else block_loop(loops):
            result |= {"block_tokens": block_tokens, "row_bundles": row_bundles(loops), **dataclasses.asdict(loop)}
    return result


def _compile(chip: str, job: KernelJob) -> tuple[Any, int]:
    """The compiled program, and the tokens of a block of keys (0 where there is no such loop)."""
    import jax
    import jax.numpy as jnp

    shape, dtype = SHAPES[job.shape], jnp.dtype(job.dtype)
    mesh, everywhere = _mesh(chip)

    def array(*dims: int, of: Any = jnp.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, of, sharding=everywhere)

    table_width = job.context // job.page_size
    pool = array(2, job.batch * table_width + 1, shape.num_kv_heads, job.page_size, 2 * shape.head_dim, of=dtype)
    rows = (array(job.batch, table_width), array(job.batch), array(job.batch))
    with jax.sharding.set_mesh(mesh):
        function, arguments, block_tokens = _BUILD[job.kernel](job, shape, dtype, array, pool, rows)
        donated = (0,) if job.kernel in (WRITE, MOVE) else ()
        traced = jax.jit(function, donate_argnums=donated).trace(*arguments)
        return traced.lower(lowering_platforms=("tpu",)).compile(), block_tokens


def _verify(job, shape, dtype, array, pool, rows):
    import jax.numpy as jnp

    from jspec.pallas_kernels.block_sizes import block_sizes, pages_at_once, tile_lines
    from jspec.pallas_kernels.verify_attention.kernel import verify_attention_kernel

    lines = tile_lines(job.width, shape.group, dtype)
    sizes = block_sizes(pool, lines=lines, max_len=job.context, **_chip())
    sizes = sizes._replace(
        block_len=job.block_len or sizes.block_len, heads_at_once=job.heads_at_once or sizes.heads_at_once
    )

    def attend(q, pages, page_table, prefix_lens, query_lens, ancestors=None):
        return verify_attention_kernel(
            q, pages, page_table, prefix_lens, query_lens, ancestors=ancestors, layer=1, scale=0.1, window=job.window,
            soft_cap=job.soft_cap, sizes=sizes,
        )  # fmt: skip

    q = array(job.batch, job.width, shape.num_kv_heads * shape.group, shape.head_dim, of=dtype)
    nodes = (array(job.batch, job.width, of=jnp.uint32),) if job.tree else ()
    return attend, (q, pool, *rows, *nodes), pages_at_once(sizes, job.page_size)[0] * job.page_size


def _chip() -> dict[str, Any]:
    from jax.experimental.pallas import tpu as pltpu

    info = pltpu.get_tpu_info()
    return {"capacity": info.vmem_capacity_bytes, "chip": info.chip_version.value}


def _prefill(job, shape, dtype, array, pool, rows):
    from jspec.pallas_kernels.block_sizes import block_sizes, pages_at_once, tile_lines
    from jspec.pallas_kernels.prefill_attention import prefill_attention
    from jspec.pallas_kernels.prefill_attention.kernel import QUERY_BLOCK

    def attend(*arguments):
        return prefill_attention(*arguments, layer=1, scale=0.1, backend="pallas")

    q = array(8 * job.width, shape.num_kv_heads * shape.group, shape.head_dim, of=dtype)
    lines = tile_lines(QUERY_BLOCK, shape.group, dtype)
    sizes = block_sizes(pool, lines=lines, max_len=job.context, **_chip())
    return attend, (q, pool, *rows), pages_at_once(sizes, job.page_size)[0] * job.page_size


def _write(job, shape, dtype, array, pool, rows):
    from jspec.pallas_kernels.paged_kv_write import paged_kv_write
    from jspec.pallas_kernels.paged_kv_write.kernel import block_rows

    tokens = job.batch * job.width
    kv = array(tokens, shape.num_kv_heads, shape.head_dim, of=dtype)
    return (
        lambda *a: paged_kv_write(*a, layer=1, backend="pallas"),
        (pool, kv, kv, array(tokens)),
        block_rows(job.page_size),
    )


def _move(job, shape, dtype, array, pool, rows):
    from jspec.pallas_kernels.kv_move import kv_move

    slots = array(job.batch * job.width)
    return lambda *a: kv_move(*a, backend="pallas"), (pool, slots, slots), 0


def _peer(job, shape, dtype, array, pool, rows):
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

    block = 512

    def attend(q, pages, lens, table, starts, count):
        return ragged_paged_attention(
            q, pages, lens, table, starts, count, sm_scale=0.1, num_kv_pages_per_block=block // job.page_size,
            num_queries_per_block=job.width, vmem_limit_bytes=48 << 20,
        )  # fmt: skip

    table_width = job.context // job.page_size
    q = array(job.batch * job.width, shape.num_kv_heads * shape.group, shape.head_dim, of=dtype)
    pages = array(job.batch * table_width + 1, job.page_size, 2 * shape.num_kv_heads, shape.head_dim, of=dtype)
    return attend, (q, pages, array(job.batch), array(job.batch, table_width), array(job.batch + 1), array(1)), block


_BUILD: dict[str, Callable[..., Any]] = {VERIFY: _verify, PREFILL: _prefill, WRITE: _write, MOVE: _move, PEER: _peer}

if __name__ == "__main__":
    main()
