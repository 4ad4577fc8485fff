"""The paged KV write: Pallas in the TPU interpreter, with races checked, against XLA and a NumPy oracle."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from pallas_kernels.pools import quick_jit

from jspec.pallas_kernels.interpret import INTERPRET
from jspec.pallas_kernels.paged_kv_write import (
    init_kv_pages,
    kernel,
    paged_kv_write,
    validate_dynamic,
    validate_pool,
)

LAYERS, PAGES, HEADS = 2, 5, 3


def case(dtype, page_size, num_tokens, *, head_dim=64, seed=0, order="shuffled"):
    rng = np.random.default_rng(seed)
    pages = jnp.asarray(
        rng.standard_normal(init_kv_pages(LAYERS, PAGES, page_size, HEADS, head_dim, dtype).shape), dtype
    )
    k, v = (jnp.asarray(rng.standard_normal((num_tokens, HEADS, head_dim)), dtype) for _ in range(2))
    slots = rng.permutation(np.arange(page_size, (PAGES + 1) * page_size))[:num_tokens].astype(np.int32)
    if order == "consecutive":
        slots = np.arange(page_size + 3, page_size + 3 + num_tokens, dtype=np.int32)
    return pages, k, v, slots


def oracle(pages, k, v, slots, layer):
    """One token after another; the pool in f32, which holds bf16 exactly."""
    out, page_size = np.array(pages, np.float32), pages.shape[3]
    for t, slot in enumerate(slots):
        if slot >= page_size:
            token = np.concatenate([np.asarray(k[t], np.float32), np.asarray(v[t], np.float32)], -1)
            out[layer, slot // page_size, :, slot % page_size] = token
    return out


def assert_written(capfd, pages, k, v, slots, backend, layer=1):
    """The tokens are in their slots, every other bit of the pool is as before (page 0 included), and no race was seen."""
    validate_dynamic(pages, slots)
    out = quick_jit(lambda *a: paged_kv_write(*a, layer=layer, backend=backend))(pages, k, v, slots)
    np.testing.assert_array_equal(np.asarray(out, np.float32), oracle(pages, k, v, slots, layer))
    assert "RACE DETECTED" not in "".join(capfd.readouterr())


@pytest.mark.parametrize("backend", ["xla", "pallas_interpret"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(
    ("page_size", "num_tokens", "order"),
    [(16, 30, "shuffled"), (32, 21, "consecutive"), (1, 4, "shuffled"), (4, 1, "shuffled")],
)
def test_tokens_arrive_and_nothing_else_changes(capfd, backend, dtype, page_size, num_tokens, order):
    """Shuffled slots put tokens of one block apart in the batch; consecutive ones fill blocks and cross pages."""
    assert_written(capfd, *case(dtype, page_size, num_tokens, order=order), backend)


@pytest.mark.parametrize("backend", ["xla", "pallas_interpret"])
def test_padding_is_dropped(capfd, backend):
    """Slots in page 0, several of them equal, anywhere in the batch; and a batch of nothing else."""
    pages, k, v, slots = case(jnp.float32, 16, 12)
    slots[[0, 3, 4, 11]] = [0, 0, 5, 0]
    assert_written(capfd, pages, k, v, slots, backend)
    assert_written(capfd, pages, k, v, np.zeros(12, np.int32), backend)


@pytest.mark.parametrize("page_size", [1, 12, 256])
def test_xla_takes_every_page_size(capfd, page_size):
    assert_written(capfd, *case(jnp.float32, page_size, 4), "xla")


def test_several_chunks_and_more_runs_than_buffers(capfd, monkeypatch):
    """Chunks of 16 tokens: 48 tokens in shuffled slots share blocks across chunks, and each chunk has more runs than buffers."""
    monkeypatch.setattr(kernel, "CHUNK_BYTES", 16 * HEADS * 128 * 4)
    assert kernel.chunk_tokens(48, HEADS, 128) == 16 > kernel.NUM_BUFFERS
    pages, k, v, slots = case(jnp.float32, 64, 48, seed=1)
    runs = kernel.find_runs(jnp.asarray(slots), page_size=64, block=8, chunk=16)
    assert np.max(runs.num_runs) > kernel.NUM_BUFFERS
    slots[5] = 0
    assert_written(capfd, pages, k, v, slots, "pallas_interpret")


def test_the_interpreter_sees_races(capfd):
    """What the tests above rely on: two copies into one place, the second started before the first is done, are reported."""

    def careless(source, target, done):
        copies = [pltpu.make_async_copy(source.at[i], target, done.at[i]) for i in range(2)]
        for copy in copies:
            copy.start()
        for copy in copies:
            copy.wait()

    out = pl.pallas_call(
        careless,
        out_shape=jax.ShapeDtypeStruct((8, 128), jnp.float32),
        in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
        out_specs=pl.BlockSpec(memory_space=pl.ANY),
        scratch_shapes=[pltpu.SemaphoreType.DMA((2,))],
        interpret=INTERPRET,
    )(jnp.ones((2, 8, 128)))
    jax.block_until_ready(out)
    assert "RACE DETECTED" in "".join(capfd.readouterr())


@pytest.mark.parametrize("num_tokens", [1, 8])
def test_in_place_when_donated(num_tokens):
    """The pool is aliased; what the write needs beside it is far smaller."""
    pages, k, v, slots = case(jnp.float32, 64, num_tokens)
    pages = jax.ShapeDtypeStruct((LAYERS, 2000, *pages.shape[2:]), jnp.float32)
    write = jax.jit(lambda *a: paged_kv_write(*a, layer=0), donate_argnums=0)
    memory = write.lower(pages, k, v, jnp.asarray(slots)).compile().memory_analysis()
    assert memory.alias_size_in_bytes == pages.size * 4
    assert memory.temp_size_in_bytes < pages.size * 4 / 1000


def bad_cases():
    pages, k, v, slots = case(jnp.float32, 16, 4)
    pages12 = case(jnp.float32, 12, 4)[0]
    narrow = case(jnp.float32, 16, 4, head_dim=32)
    half = case(jnp.float16, 16, 4)
    many = np.zeros((20_000, HEADS, 64), np.float32)
    return [
        (dict(backend="cuda"), "backend='cuda' does not exist for paged_kv_write"),
        (dict(layer=2), "layer=2"),
        (dict(layer=-1), "layer=-1"),
        (dict(pages=pages[0]), "pages.shape"),
        (dict(slots=slots[None]), "slots.shape"),
        (dict(slots=slots[:0]), "slots.shape"),
        (dict(slots=slots.astype(np.int16)), "slots.dtype"),
        (dict(k=k[:3]), "k.shape"),
        (dict(v=v[:, :2]), "v.shape"),
        (dict(k=k.astype(jnp.bfloat16)), "k.dtype"),
        (dict(pages=pages12, backend="pallas"), "page_size=12 must be 1, 2, 4 or a multiple of 8"),
        (dict(pages=narrow[0], k=narrow[1], v=narrow[2], backend="pallas"), "head_dim=32"),
        (dict(pages=half[0], k=half[1], v=half[2], backend="pallas"), "dtype=float16"),
        (dict(k=many, v=many, slots=np.zeros(20_000, np.int32), backend="pallas"), "slots.shape=(20000,)"),
    ]


def test_bad_arguments_are_named():
    for changes, words in bad_cases():
        pages, k, v, slots = case(jnp.float32, 16, 4)
        args = {"pages": pages, "k": k, "v": v, "slots": slots, "layer": 0, **changes}
        with pytest.raises(ValueError) as error:
            paged_kv_write(**args)
        assert words in str(error.value)


@pytest.mark.parametrize("page_size", range(1, 257))
def test_a_pool_is_judged_before_it_is_made(page_size):
    """An engine asks at start-up: every page size is either taken or refused with the reason, the same for the chip and the interpreter."""
    validate_pool(page_size=page_size, head_dim=64, dtype=jnp.bfloat16, backend="xla")
    for backend in ("pallas", "pallas_interpret"):
        if page_size in (1, 2, 4) or page_size % 8 == 0:
            validate_pool(page_size=page_size, head_dim=128, dtype=jnp.bfloat16, backend=backend)
        else:
            with pytest.raises(ValueError, match="whole tiles"):
                validate_pool(page_size=page_size, head_dim=128, dtype=jnp.bfloat16, backend=backend)


def test_concrete_slots_are_checked():
    pages = case(jnp.float32, 16, 4)[0]
    with pytest.raises(ValueError, match="slots holds 96, outside the pool"):
        validate_dynamic(pages, [16 * 6])
    with pytest.raises(ValueError, match="slots holds 20 more than once"):
        validate_dynamic(pages, [20, 3, 3, 20])


def test_estimates():
    """VMEM well below the 16 MiB that a kernel gets by default, for wide models and long batches; bytes as counted by hand."""
    for heads, head_dim, page_size in ((8, 128, 64), (32, 256, 256), (1, 64, 1)):
        pages = jax.ShapeDtypeStruct((2, 10, heads, page_size, 2 * head_dim), jnp.bfloat16)
        assert kernel.vmem_bytes(pages, 8192) < 8 << 20
    pages = jax.ShapeDtypeStruct((2, 10, 8, 64, 256), jnp.bfloat16)
    assert kernel.cost_estimate(pages, 3).bytes_accessed == 3 * 8 * 256 * (4 + 2 * 8 * 2)


AHEAD_OF_TIME = """
import jax, jax.numpy as jnp, numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jspec.pallas_kernels.paged_kv_write import paged_kv_write
for name in ("v4:2x2x1", "v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1"):
    mesh = Mesh(np.array(topologies.get_topology_desc(name, "tpu").devices[:1]), ("x",))
    with jax.sharding.set_mesh(mesh):
        for dtype, page_size, heads, head_dim, tokens in (
            (jnp.bfloat16, 64, 8, 128, 512),
            (jnp.bfloat16, 16, 3, 64, 8),
            (jnp.float32, 256, 3, 64, 2048),
            (jnp.bfloat16, 8, 1, 128, 1),
            (jnp.bfloat16, 1, 8, 64, 5),
            (jnp.float32, 4, 8, 128, 16),
        ):
            spec = lambda shape, dtype: jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec()))
            pool = spec((4, 65, heads, page_size, 2 * head_dim), dtype)
            kv = spec((tokens, heads, head_dim), dtype)
            write = jax.jit(lambda *a: paged_kv_write(*a, layer=1, backend="pallas"), donate_argnums=0)
            compiled = write.trace(pool, kv, kv, spec((tokens,), jnp.int32)).lower(lowering_platforms=("tpu",)).compile()
            assert compiled.memory_analysis().alias_size_in_bytes == np.prod(pool.shape) * jnp.dtype(dtype).itemsize
    print("compiled for", name)
"""


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="compiling for TPU needs the `tpu` extra (libtpu)"
)
def test_compiles_ahead_of_time_for_every_generation():
    """v4, v5e, v5p, v6e, v7x, with no TPU: the pool stays aliased."""
    env = os.environ | {"TPU_SKIP_MDS_QUERY": "1", "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", AHEAD_OF_TIME], env=env, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("compiled for") == 5
