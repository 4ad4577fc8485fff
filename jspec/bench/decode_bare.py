"""The bare loop as a contender of `jspec bench decode`: compiled once, run on many prompts."""

import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jspec.bench.bare_decode import bare_step, init_caches
from jspec.bench.decode_run import Run
from jspec.engine.meters import compiles
from jspec.models.llama import LlamaConfig

CHUNKS = (64, 8, 1)
"""Sizes a prompt is fed in, largest first: three programs serve every length, and the last is the decode step."""


class BareLoop:
    """Greedy decoding in plain JAX with a dense cache, one sequence at a time.

    Args:
        config, params: the model, `params` as the target's.
        cache_len: the longest prompt + output.
    """

    def __init__(self, config: LlamaConfig, params: Any, *, cache_len: int):
        self._params, self._cache_len = params, cache_len
        self._new_caches = lambda: init_caches(config, cache_len, params["embed"].dtype)
        step = bare_step(config)
        shapes = jax.eval_shape(self._new_caches)
        at = jax.ShapeDtypeStruct((), jnp.int32)
        self._steps = {
            size: step.lower(params, shapes, jax.ShapeDtypeStruct((size,), jnp.int32), at).compile() for size in CHUNKS
        }

    def run(self, prompt: Sequence[int], num_tokens: int) -> Run:
        """Decodes `num_tokens`, whatever they are: the bare loop knows no end-of-sequence."""
        caches, compiled = self._new_caches(), compiles()
        jax.block_until_ready(caches)
        start = time.perf_counter()
        done, token = 0, jnp.zeros(1, jnp.int32)
        while done < len(prompt):
            size = next(size for size in CHUNKS if size <= len(prompt) - done)
            chunk = np.asarray(prompt[done : done + size], np.int32)
            token, caches = self._steps[size](self._params, caches, chunk, jnp.int32(done))
            done += size
        positions = [jnp.int32(done + i) for i in range(num_tokens - 1)]
        jax.block_until_ready((token, positions))
        first = time.perf_counter()
        tokens = [token]
        for position in positions:
            token, caches = self._steps[1](self._params, caches, token, position)
            tokens.append(token)
        jax.block_until_ready(token)
        last = time.perf_counter()
        return Run(
            token_ids=[[int(t[0]) for t in tokens]],
            accept_lens=[[1] * (num_tokens - 1)],
            prefill_s=first - start,
            decode_s=last - first,
            compiles=compiles() - compiled,
            summary=None,
        )
