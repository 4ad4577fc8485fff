"""The baseline decodes the same tokens as the paged model, so that comparing their speed means something."""

import dataclasses

import numpy as np
import pytest
from models.paging import PagedRows

from jspec.bench.bare_decode import bare_decode
from jspec.models.llama import LlamaConfig, llama_target
from jspec.models.tiny import random_params

CONFIG = LlamaConfig(
    vocab_size=64,
    hidden_size=64,
    intermediate_size=96,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    context_len=64,
)


def test_same_tokens_as_the_paged_model():
    config = dataclasses.replace(CONFIG, num_layers=1, qkv_bias=True, qk_norm=True)
    params = random_params(2, config)
    prompt = np.random.default_rng(0).integers(0, 64, 6).tolist()
    result = bare_decode(config, params, prompt, 12, cache_len=24)
    assert result.token_ids == PagedRows(llama_target(config, params), 1).greedy(prompt, 12)
    assert result.seconds_per_step > 0


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="must fit into cache_len=8"):
        bare_decode(CONFIG, {}, [1, 2, 3], 6, cache_len=8)
