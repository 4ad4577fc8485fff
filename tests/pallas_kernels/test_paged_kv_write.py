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

from jspec.pallas_kernels.paged_kv_write import init_kv_pages, paged_kv_write
from jspec.pallas_kernels.paged_kv_write.kernel import vmem_bytes
from jspec.pallas_kernels.paged_kv_write.validate import sublane_tile, validate_dynamic

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
    out, page_size = np.array(pages, np.float32), pages.shape[3]
    for t, slot in enumerate(slots):
        if slot >= page_size:
            out[layer, slot // page_size, :, slot % page_size] = np.concatenate(
                [np.asarray(k[t], np.float32), np.asarray(v[t], np.float32)], -1
            )
    return out


def assert_written(pages, k, v, slots, backend, layer=1):
    validate_dynamic(pages, slots)
    out = np.asarray(
        jax.jit(lambda *a: paged_kv_write(*a, layer=layer, backend=backend))(pages, k, v, jnp.asarray(slots)),
        np.float32,
    )
    want = oracle(pages, k, v, slots, layer)
    np.testing.assert_array_equal(out[:, 1:], want[:, 1:])  # page 0 is the sink: its content is nobody's


@pytest.mark.parametrize("backend", ["xla", "pallas_interpret"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(
    ("page_size", "num_tokens", "order"),
    [(16, 1, "shuffled"), (16, 20, "shuffled"), (32, 37, "consecutive"), (64, 9, "consecutive")],
)
def test_tokens_arrive_and_nothing_else_changes(backend, dtype, page_size, num_tokens, order):
    """Shuffled slots put several tokens of one tile apart in the batch; consecutive ones cross tiles and pages."""
    assert_written(*case(dtype, page_size, num_tokens, order=order), backend)


@pytest.mark.parametrize("backend", ["xla", "pallas_interpret"])
def test_padding_is_dropped(backend):
    """Slots in page 0, several of them equal, anywhere in the batch; and a batch of nothing else."""
    pages, k, v, slots = case(jnp.float32, 16, 12)
    slots[[0, 3, 4, 11]] = [0, 0, 5, 0]
    assert_written(pages, k, v, slots, backend)
    assert_written(pages, k, v, np.zeros(12, np.int32), backend)


@pytest.mark.parametrize("page_size", [1, 4, 256])
def test_xla_takes_every_page_size(page_size):
    assert_written(*case(jnp.float32, page_size, 4), "xla")


def test_in_place_when_donated():
    """The pool is aliased; what the write needs beside it is far smaller."""
    pages, k, v, slots = case(jnp.float32, 64, 8)
    pages = jnp.zeros((LAYERS, 2000, *pages.shape[2:]))
    compiled = (
        jax.jit(lambda *a: paged_kv_write(*a, layer=0), donate_argnums=0)
        .lower(pages, k, v, jnp.asarray(slots))
        .compile()
    )
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == pages.nbytes
    assert memory.temp_size_in_bytes < pages.nbytes / 100


def bad_cases():
    pages, k, v, slots = case(jnp.float32, 16, 4)
    pages4 = case(jnp.float32, 4, 4)[0]
    narrow = case(jnp.float32, 16, 4, head_dim=32)
    return [
        (dict(backend="cuda"), "backend='cuda'"),
        (dict(layer=2), "layer=2"),
        (dict(layer=-1), "layer=-1"),
        (dict(pages=pages[0]), "pages.shape"),
        (dict(slots=slots[None]), "slots.shape"),
        (dict(slots=slots.astype(np.int16)), "slots.dtype"),
        (dict(k=k[:3]), "k.shape"),
        (dict(v=v[:, :2]), "v.shape"),
        (dict(k=k.astype(jnp.bfloat16)), "k.dtype"),
        (dict(pages=pages4, backend="pallas"), "page_size=4 must be a multiple of 8"),
        (dict(pages=narrow[0], k=narrow[1], v=narrow[2], backend="pallas"), "head_dim=32"),
    ]


@pytest.mark.parametrize("index", range(11))
def test_bad_arguments_are_named(index):
    changes, words = bad_cases()[index]
    pages, k, v, slots = case(jnp.float32, 16, 4)
    args = {"pages": pages, "k": k, "v": v, "slots": jnp.asarray(slots), "layer": 0, **changes}
    with pytest.raises(ValueError) as error:
        paged_kv_write(args.pop("pages"), args.pop("k"), args.pop("v"), args.pop("slots"), **args)
    assert words in str(error.value)


def test_concrete_slots_are_checked():
    pages = case(jnp.float32, 16, 4)[0]
    with pytest.raises(ValueError, match="outside the pool"):
        validate_dynamic(pages, [16 * 6])
    with pytest.raises(ValueError, match="twice"):
        validate_dynamic(pages, [20, 20])


def test_vmem_is_small():
    """Well below the 16 MiB of the smallest chip, for the widest model planned for."""
    assert vmem_bytes(8, 256, jnp.bfloat16) < 4 << 20
    assert [sublane_tile(d) for d in (jnp.float32, jnp.bfloat16, jnp.int8)] == [8, 16, 32]


AHEAD_OF_TIME = """
import jax, jax.numpy as jnp, numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jspec.pallas_kernels.paged_kv_write import paged_kv_write
for name in ("v4:2x2x1", "v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1"):
    mesh = Mesh(np.array(topologies.get_topology_desc(name, "tpu").devices[:1]), ("x",))
    with jax.sharding.set_mesh(mesh):
        for dtype, page_size, head_dim, tokens in ((jnp.bfloat16, 64, 128, 512), (jnp.bfloat16, 16, 64, 8), (jnp.float32, 64, 64, 2048)):
            spec = lambda shape, dtype: jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec()))
            pool = spec((4, 65, 8, page_size, 2 * head_dim), dtype)
            kv = spec((tokens, 8, head_dim), dtype)
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
