"""A model shared by several devices gives the tokens of one device, with every algorithm. On virtual devices, in processes of their own."""

import json
import os
import subprocess
import sys

import jax
import numpy as np
import pytest
from engine.kit import build, greedy
from tiny_checkpoint import write_checkpoint

from jspec.models.llama import LlamaConfig
from jspec.models.parallel import _device_by_device, part_of
from jspec.models.tiny import random_target

_TOKENS = """
import json, sys
import jax
from jspec import Engine, EngineConfig, SamplingParams
from jspec.models.parallel import tensor_mesh
from jspec.models.tiny import random_target
from jspec.models.tiny_draft import random_draft
from jspec.spec_workers import EagleSizes, eagle, multi_layer_eagle, ngram, plain

runs = json.loads(sys.argv[1])
WORKERS = {
    "plain": plain,
    "ngram": ngram,
    "chain": lambda t: eagle(t, random_draft(t, 1), sizes=EagleSizes(num_steps=2)),
    "tree": lambda t: eagle(
        t, random_draft(t, 1), sizes=EagleSizes(num_steps=2, topk=2, num_draft_tokens=5)
    ),
    "multi-layer": lambda t: multi_layer_eagle(t, random_draft(t, 1, kind="multi-layer", num_modules=2)),
}
found = {}
for name in runs:
    for devices in runs[name]:
        target = random_target(
            1, mesh=tensor_mesh(devices), vocab_size=64, context_len=64, num_heads=8, num_kv_heads=4, head_dim=16
        )
        engine = Engine(
            EngineConfig(max_running=2, page_size=8, batch_buckets=(2,), prefill_buckets=(64,), checked=True),
            target=target, worker=WORKERS[name](target),
        )
        prompts = [[1, 2, 3], [4] * 9, [7, 8]]
        sampled = SamplingParams(max_new_tokens=20, temperature=0.9, top_p=0.9, seed=5)
        outputs = [o for p in (SamplingParams(max_new_tokens=20), sampled) for o in engine.generate(prompts, p)]
        pool = engine._loop.device.kv_pages
        found[f"{name} {devices}"] = {
            "tokens": [o.token_ids for o in outputs],
            "verifies": [len(o.accept_lens) for o in outputs],
            "heads": pool.addressable_shards[0].data.shape[2],
            "compiles": engine.summary().compiles_after_warmup,
        }
print(json.dumps(found))
"""


def on_four_devices(program, *arguments):
    environment = os.environ | {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    done = subprocess.run([sys.executable, "-c", program, *arguments], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


ALGORITHMS = {"tree": [1, 4]}
"""In CI, with how many devices; the others have no part that these have not."""


@pytest.mark.parametrize(
    "runs",
    [
        ALGORITHMS,
        pytest.param(
            {"plain": [1, 2, 4], "ngram": [1, 2], "chain": [1, 2, 4], "tree": [1, 2], "multi-layer": [1, 2]},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_every_algorithm_gives_the_tokens_of_one_device(runs):
    found = on_four_devices(_TOKENS, json.dumps(runs))
    for name, (_, *several) in runs.items():
        for devices in several:
            one, other = found[f"{name} 1"], found[f"{name} {devices}"]
            assert other["tokens"] == one["tokens"] and other["verifies"] == one["verifies"], (name, devices)
            assert other["heads"] == one["heads"] // devices and other["compiles"] == 0


_CHECKPOINT = """
import json, sys
import numpy as np
from jspec import Engine, EngineConfig, SamplingParams
from jspec.models.llama import LlamaConfig, llama_target
from jspec.models.llama_weights import fuse, tensor_shapes
from jspec.models.loading import load_model
from jspec.models.parallel import tensor_mesh

config = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=8, num_kv_heads=2, head_dim=16,
    context_len=64, qkv_bias=True, qk_norm=True, tie_embeddings=True,
)
rng = np.random.default_rng(0)
tensors = {name: rng.standard_normal(shape, np.float32) * shape[-1] ** -0.5 for name, shape in tensor_shapes(config)}
tokens = []
for devices in (1, 2):
    mesh = tensor_mesh(devices)
    target = llama_target(config, fuse(config, tensors.__getitem__, np.float32, mesh), mesh=mesh)
    engine = Engine(EngineConfig(algorithm="plain", max_running=1, page_size=16), target=target)
    outputs = engine.generate([[1, 2, 3], [9] * 7], SamplingParams(max_new_tokens=24, ignore_eos=True))
    tokens.append([output.token_ids for output in outputs])
refusals = []
for size in (4, 8):
    try:
        load_model(sys.argv[1], tensor_parallel=size)
    except ValueError as error:
        refusals.append(str(error))
print(json.dumps({"tokens": tokens, "refusals": refusals}))
"""


def test_a_checkpoint_with_biases_and_norms_of_heads(tmp_path):
    """What is fused, biases included, reaches each device in its own order; what cannot be shared is refused before weights are read."""
    found = on_four_devices(_CHECKPOINT, str(write_checkpoint(tmp_path)))
    assert found["tokens"][0] == found["tokens"][1]
    assert found["tokens"][0][0] != found["tokens"][0][1]
    assert found["refusals"] == [
        "tensor_parallel=4 must divide num_kv_heads=1: each device holds an equal part of it",
        "tensor_parallel=8 exceeds the devices of this machine, 4: lower it",
    ]


CONFIG = LlamaConfig(
    vocab_size=16,
    hidden_size=8,
    intermediate_size=6,
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    head_dim=2,
    context_len=32,
)


def test_a_part_of_a_fused_matrix_is_fused_like_the_whole():
    rows = np.arange(CONFIG.qkv_heads * 2)[:, None]  # queries 0-7, keys 8-11, values 12-15
    split = np.split(_device_by_device(CONFIG, 2, "qkv", rows)[:, 0], 2)
    assert split[0].tolist() == [0, 1, 2, 3, 8, 9, 12, 13] and split[1].tolist() == [4, 5, 6, 7, 10, 11, 14, 15]
    halves = np.split(_device_by_device(CONFIG, 2, "gate_up", np.arange(12)[:, None])[:, 0], 2)
    assert halves[0].tolist() == [0, 1, 2, 6, 7, 8] and halves[1].tolist() == [3, 4, 5, 9, 10, 11]
    bias = _device_by_device(CONFIG, 2, "qkv_bias", rows.T)
    assert bias[0].tolist() == np.concatenate(split).tolist()
    assert part_of(CONFIG, None) == CONFIG


def test_the_engine_runs_on_the_devices_of_its_target():
    with pytest.raises(ValueError, match="tensor_parallel=2, but the given target is shared by 1"):
        build(random_target(1), "plain", tensor_parallel=2)
    assert len(jax.devices()) == 1 and build(random_target(1), "plain").generate([[1]], greedy(2))[0].token_ids
