"""A batch split over devices trains what one device does."""

import json
import os
import subprocess
import sys

import numpy as np

_ON_EIGHT = """
import json, sys, pathlib
import jax, numpy as np
from training import kit
from jspec.training.batches import make_batches
from jspec.training.checkpoints import TrainState
from jspec.training.optimizer import make_optimizer
from jspec.training.program import data_mesh, make_program
from jspec.training.recipes import recipe_of
from jspec.training.train import train

jax.config.update("jax_disable_most_optimizations", True)
assert len(jax.devices()) == 8
stored = kit.store(pathlib.Path(sys.argv[1]), kit.answers(8))
batch = make_batches(stored, range(8), batch_size=8, seq_len=20).at(0)
config, options = kit.draft_config(), kit.train_options()
recipe = recipe_of(config, kit.target(), None, options)
params = recipe.init(jax.random.key(0))
optimizer = make_optimizer(options)
totals, weights = [], []
for devices in (jax.devices()[:1], jax.devices()):
    program = make_program(recipe, optimizer, mesh=data_mesh(devices))
    state = program.replicate(TrainState(params, optimizer.init(params)))
    for _ in range(2):
        state, metrics = program.train(state, batch, 2)
    totals.append({name: np.asarray(metrics[name]).tolist() for name in ("total", "agree", "accept_len", "grad_norm")})
    assert len(state.params["fc"].sharding.device_set) == len(devices)
    weights.append(jax.device_get(state.params))
try:
    train(config, kit.target(), stored, kit.train_options(batch_size=4), work_dir=pathlib.Path(sys.argv[1]))
except ValueError as error:
    refusal = str(error)
distance = max(jax.tree.leaves(jax.tree.map(lambda a, b: float(abs(a - b).max()), *weights)))
print(json.dumps({"totals": totals, "distance": distance, "refusal": refusal}))
"""


def test_eight_devices_compute_what_one_does(tmp_path):
    environment = os.environ | {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    done = subprocess.run(
        [sys.executable, "-c", _ON_EIGHT, str(tmp_path)], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    one, eight = found["totals"]
    for name, value in one.items():
        np.testing.assert_allclose(eight[name], value, rtol=1e-5, atol=1e-5, err_msg=name)
    assert found["distance"] < 1e-4
    assert "batch_size=4 must be a multiple of the 8 devices" in found["refusal"]
