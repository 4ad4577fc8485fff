"""Ranks with requests of their own give the tokens of one, whatever the others do, and wait for nobody forever. On virtual devices, in processes of their own."""

import json
import os
import subprocess
import sys

import jax
import pytest
from engine.kit import build
from tiny_checkpoint import INTERMEDIATE, write_checkpoint

from jspec import EngineConfig
from jspec.models.parallel import data_mesh
from jspec.models.tiny import random_target

PATIENCE_S = 600
"""No process here takes nearly as long, compilation included: one that does hangs."""


def on_eight_devices(program, *arguments, quick=True):
    """What `program` prints last, as JSON. `quick`: compile in half the time what then runs slower."""
    flags = "--xla_force_host_platform_device_count=8" + " --xla_backend_optimization_level=0" * quick
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", program, *map(json.dumps, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr[-8000:]
    return json.loads(done.stdout.splitlines()[-1])


_RUNS = """
import collections, json, sys
import jax
import numpy as np
from jspec import Engine, EngineConfig, SamplingParams
from jspec.bench.host_probe import counted_traffic
from jspec.models.parallel import data_mesh
from jspec.models.tiny import random_target
from jspec.models.tiny_draft import random_draft
from jspec.spec_workers import EagleSizes, eagle, multi_layer_eagle, ngram, plain

WORKERS = {
    "plain": plain,
    "ngram": lambda t: ngram(t, num_draft_tokens=4, min_ngram=1),
    "chain": lambda t: eagle(t, random_draft(t, 1), sizes=EagleSizes(num_steps=2)),
    "while-sure": lambda t: eagle(t, random_draft(t, 1), sizes=EagleSizes(num_steps=2, min_draft_prob=0.3)),
    "adaptive": lambda t: eagle(t, random_draft(t, 1), sizes=EagleSizes(num_steps=2, depths=(0, 1, 2))),
    "tree": lambda t: eagle(t, random_draft(t, 1), sizes=EagleSizes(num_steps=2, topk=2, num_draft_tokens=5)),
    "multi-layer": lambda t: multi_layer_eagle(t, random_draft(t, 1, kind="multi-layer", num_modules=2)),
}
VOCAB, CONTEXT = 64, 64


def prompts_of(count, seed, shortest=1, longest=30):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCAB, rng.integers(shortest, longest + 1)).tolist() for _ in range(count)]


def params_of(count, length, **also):
    # Greedy and sampled by turns; every third ends where one of seven tokens comes, if one does.
    sampled = [{}, {"temperature": 1.0, "seed": 3}, {"temperature": 0.8, "top_p": 0.9, "seed": 4}]
    stops = [{}, {}, {"stop_token_ids": tuple(range(0, 64, 10))}]
    each = [{**sampled[i % 3], **stops[(i // 2) % 3], **also} for i in range(count)]
    return [SamplingParams(max_new_tokens=max(length - 3 * i, 1), **given) for i, given in enumerate(each)]


class Watched:
    # An engine whose launches and ends are kept.

    def __init__(self, engine):
        self.engine, self.modes, self.ended = engine, collections.Counter(), {}
        self.emitted = collections.defaultdict(list)
        launch = engine._launch

        def watched(loop):
            loop, launched = launch(loop)
            if launched is not None:
                kinds = [batch.forward_mode.value for batch in launched.batches]
                assert set(kinds) <= {"decode", "idle"} or set(kinds) <= {"extend", "mixed", "idle"}, kinds
                assert set(kinds) != {"idle"}
                self.modes[" ".join(sorted(set(kinds)))] += 1
                self.modes["tails alone"] += any(b.tails is not None and not len(b.rows) for b in launched.batches)
                for state, batch in zip(loop.states, launched.batches):
                    busy = batch.forward_mode.value == "idle" and bool((state.requests.serial > 0).any())
                    self.modes["waits"] += busy and "decode" not in kinds
            assert len({len(state.launched) for state in loop.states}) == 1
            return loop, launched

        engine._launch = watched

    def step(self, count=1):
        for _ in range(count):
            for emission in self.engine.step():
                name = f"{emission.rid} {emission.index}"
                self.emitted[name] += emission.token_ids
                if emission.output is not None:
                    assert emission.output.token_ids == self.emitted[name], name
                    self.ended[name] = emission.output

    def forget(self, name):
        self.ended = {key: output for key, output in self.ended.items() if not key.startswith(name)}

    def busy(self):
        # Requests of each rank, running or waiting.
        return [int((state.requests.serial > 0).sum()) + len(state.waiting) for state in self.engine.states]

    def drain(self):
        # To the end; then nothing is held, nothing waits, every page is free or cached, on every rank.
        while self.engine.has_work:
            self.step()
        for state in self.engine.states:
            assert not state.waiting and not state.launched and not state.requests.serial.any()
            assert int(state.ledger.num_free) + len(state.prefix_cache.pages) == state.ledger.free_pages.shape[0] - 1
            assert not state.ledger.page_locks.any() and not state.ledger.kv_allocated_len.any()

    def submit_to_last_rank(self, prompts, params, name):
        # What is outstanding elsewhere sends them there; then it is taken back before it began.
        ranks = len(self.engine.states)
        for rank in range(ranks - 1):
            self.engine.submit([rank] * 20, SamplingParams(max_new_tokens=40, n=8), rid=f"filler {rank}")
        for i, (prompt, given) in enumerate(zip(prompts, params)):
            self.engine.submit(prompt, given, rid=f"{name} {i}")
        for rank in range(ranks - 1):
            assert self.engine.abort(f"filler {rank}")
        assert self.busy() == [0] * (ranks - 1) + [len(prompts)], self.busy()


def one_request(w):
    # First of all: the engine has never run.
    w.engine.submit([1, 2, 3], SamplingParams(max_new_tokens=12), rid="alone")
    w.drain()
    w.engine.submit(list(range(40)), SamplingParams(max_new_tokens=12, temperature=1.0, seed=1), rid="alone, in chunks")
    w.drain()


def again(w):
    # A prompt that a rank has in its cache goes there again.
    (prompt,) = prompts_of(1, 3, 25, 30)
    w.submit_to_last_rank([prompt], [SamplingParams(max_new_tokens=5)], "first")
    w.drain()
    w.engine.submit(prompt, SamplingParams(max_new_tokens=5), rid="again")
    assert w.busy() == [0] * (len(w.engine.states) - 1) + [1]
    w.drain()
    w.forget("filler")
    assert (w.ended["first 0 0"].cached_tokens, w.ended["again 0"].cached_tokens >= 20) == (0, True)


def together(w):
    # More requests than one rank has rows, of all lengths; some want log-probabilities.
    for i, (prompt, params) in enumerate(zip(prompts_of(9, 5), params_of(9, 28))):
        w.engine.submit(prompt, params, rid=f"together {i}")
    w.engine.submit(
        prompts_of(1, 6)[0], SamplingParams(max_new_tokens=9, n=2, temperature=1.0, seed=9, logprobs=2), rid="n answers"
    )
    w.engine.submit(
        prompts_of(1, 7, 20, 30)[0], SamplingParams(max_new_tokens=12, logprobs=3, prompt_logprobs=1), rid="logprobs"
    )
    w.step(4)
    running = [w.engine.metrics.get_sample_value("jspec_rank_running_reqs", {"rank": str(r)}) for r in range(9)]
    states = w.engine.states
    if len(states) > 1:
        assert running == [float((s.requests.serial > 0).sum()) for s in states] + [None] * (9 - len(states)), running
        assert w.engine.metrics.get_sample_value("jspec_num_running_reqs") == sum(running[: len(states)]) > 0
    else:
        assert running == [None] * 9
    w.drain()


def on_one_rank(w):
    # Five on the same one, which has three rows and pages for fewer: they are retracted, while nobody else has anything to do.
    prompts = prompts_of(5, 8, 3, 9)
    w.submit_to_last_rank(prompts, params_of(5, 45, ignore_eos=True), "one rank")
    before = w.engine.summary().retractions
    w.drain()
    w.forget("filler")
    w.modes["retracted"] += w.engine.summary().retractions - before


def staggered(w):
    # Long prompts arrive, in chunks, while others decode, and while others have ended.
    for i, prompt in enumerate(prompts_of(6, 10, 2, 12)):
        w.engine.submit(prompt, params_of(6, 30)[i], rid=f"short {i}")
    for i, prompt in enumerate(prompts_of(4, 11, 44, 50)):
        w.step(5)
        w.engine.submit(prompt, params_of(4, 13)[i], rid=f"long {i}")
    w.drain()


def aborted(w):
    # One that runs, one that is in the middle of its prompt, one that waits; their neighbours notice nothing.
    for i, prompt in enumerate(prompts_of(5, 12, 2, 12)):
        w.engine.submit(prompt, params_of(5, 24)[i], rid=f"stays {i}")
    w.engine.submit([5, 6, 7], SamplingParams(max_new_tokens=50), rid="aborted, running")
    w.step(6)
    w.engine.submit(prompts_of(1, 13, 50, 50)[0], SamplingParams(max_new_tokens=9), rid="aborted, filling")
    w.step(2)
    w.engine.submit([7] * 30, SamplingParams(max_new_tokens=9), rid="aborted, waiting")
    for rid in ("aborted, waiting", "aborted, filling", "aborted, running"):
        assert w.engine.abort(rid)
    w.engine.submit([8, 9], SamplingParams(max_new_tokens=9, timeout_s=1e-6), rid="late")
    w.drain()


def traffic(w):
    # A decode launch of all ranks is one upload and one download.
    with counted_traffic(w.engine) as counted:
        w.engine.generate([[3, 4], [5]], SamplingParams(max_new_tokens=8))
    per_launch = counted.per_launch()
    assert counted.launches > 1 and per_launch["uploads"] == per_launch["downloads"] == 1, per_launch
    assert per_launch["dispatches"] == 1 + (w.engine.worker.commit_phase is not None), per_launch


def told(table):
    return table and [t and [t.token_id, t.logprob, *t.top, *t.top.values()] for t in table]


def memory(engine, ranks):
    # KV of its own on each device, and a part of the MLPs; the rest whole.
    def parts(array):
        assert len({shard.device for shard in array.addressable_shards}) == ranks
        (shape,) = {shard.data.shape for shard in array.addressable_shards}
        return list(shape)

    params = engine.worker.params.get("target", engine.worker.params)["layer_0"]
    return {
        "pool": parts(engine._loop.device.kv_pages),
        "gate_up": parts(params["gate_up"]), "down": parts(params["down"]), "qkv": parts(params["qkv"]),
    }


SCENARIOS = [one_request, again, together, on_one_rank, staggered, aborted, traffic]
found = []
layers, runs = json.loads(sys.argv[1]), json.loads(sys.argv[2])
for name, ranks, settings in runs:
    target = random_target(
        1, mesh=data_mesh(ranks), vocab_size=VOCAB, context_len=CONTEXT, hidden_size=32, intermediate_size=64, num_layers=layers,
        eos_token_ids=(17,),
    )
    sizes = {"batch_buckets": (3,), "prefill_buckets": (16,), **settings}
    config = EngineConfig(
        max_running=3, page_size=4, max_prefill_tokens=16, kv_tokens=96, schedule_conservativeness=0.01, data_parallel=ranks,
        checked=True, compilation_cache=False, **sizes,
    )
    engine = Engine(config, target=target, worker=WORKERS[name](target))
    watched = Watched(engine)
    for scenario in SCENARIOS:
        scenario(watched)
    try:
        one_state = engine.state is engine.states[0]
    except ValueError as error:
        one_state = str(error)
    found.append({
        "outputs": {key: (o.token_ids, o.finish_reason, o.error) for key, o in watched.ended.items()},
        "logprobs": {key: (told(o.logprobs), told(o.prompt_logprobs)) for key, o in watched.ended.items()},
        "modes": watched.modes,
        "verifies": sum(len(o.accept_lens) for o in watched.ended.values()),
        "accepted": sum(length > 1 for o in watched.ended.values() for length in o.accept_lens),
        "compiles": engine.summary().compiles_after_warmup,
        "memory": memory(engine, ranks),
        "state": one_state,
        "ranks": len(engine.states),
    })
print(json.dumps(found))
"""


def runs(layers, *engines, quick=True):
    """`_RUNS` of `(worker, ranks, settings)`."""
    return on_eight_devices(_RUNS, layers, engines, quick=quick)


def assert_agree(found, one):
    """What `found` says is what `one` says, who has a rank to itself: token ids, finish reasons, log-probabilities."""
    assert found["outputs"].keys() == one["outputs"].keys()
    for name, (tokens, reason, error) in found["outputs"].items():
        expected, expected_reason, _ = one["outputs"][name]
        assert error is None and reason == expected_reason, (name, reason, expected_reason, error)
        if name.startswith(("aborted", "late")):
            assert reason == ("timeout" if name.startswith("late") else "abort")
            length = min(len(tokens), len(expected))
            tokens, expected = tokens[:length], expected[:length]
        else:
            assert reason in ("length", "stop"), name
        assert tokens == expected, name
    for name, tables in found["logprobs"].items():
        if name.startswith(("n answers", "logprobs")):
            for table, expected in zip(tables, one["logprobs"][name], strict=True):
                assert (table is None) == (expected is None), name
                for token, other in zip(table or (), expected or (), strict=True):
                    assert token is other is None or token == pytest.approx(other, abs=1e-4), name
    assert found["compiles"] == one["compiles"] == 0


def assert_idled(found, *, mixed):
    """Every kind of joint launch was made: ranks without work beside prompts and beside decodes, and, without `mixed`, ranks that had to wait."""
    modes = found["modes"]
    assert modes.get("decode idle") and modes.get("extend idle") and modes["retracted"], modes
    if mixed:
        assert modes.get("tails alone"), modes
    else:
        assert modes.get("waits") and not any("mixed" in kinds for kinds in modes) and not modes.get("tails alone"), (
            modes
        )


def assert_shared(found, one):
    """Each device has the pool of a rank, and its part of the MLPs."""
    ranks, ours, whole = found["ranks"], found["memory"], one["memory"]
    assert ours["pool"] == [1, *whole["pool"]]
    assert ours["qkv"] == whole["qkv"]
    assert ours["gate_up"] == [whole["gate_up"][0] // ranks, whole["gate_up"][1]]
    assert ours["down"] == [whole["down"][0], whole["down"][1] // ranks]


def test_every_rank_gives_the_tokens_of_one():
    """B61: one request, all requests on one rank, chunks beside decodes, aborts, retraction: as on one rank, and no launch is waited for in vain."""
    one, ngram, chain = runs(
        1,
        ("plain", 1, {}),
        ("ngram", 2, {}),
        ("chain", 4, {"mixed_batches": False, "batch_buckets": (1, 3)}),
    )
    for found, mixed in ((ngram, True), (chain, False)):
        assert_agree(found, one)
        assert_idled(found, mixed=mixed)
        assert_shared(found, one)
        assert found["accepted"] > 2
    assert one["state"] is True and not any("idle" in kinds for kinds in one["modes"])
    assert chain["state"] == "there are 4 ranks with a state each: ask for `states`"


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no-overlap"])
@pytest.mark.parametrize("worker", ["plain", "ngram", "chain", "while-sure", "adaptive", "tree", "multi-layer"])
def test_every_algorithm_on_two_and_four_ranks(worker, overlap):
    """B61, with prompts apart and with rows riding along: as one rank with the same settings."""
    settings = {"overlap": overlap}
    if worker == "adaptive":
        settings["adaptive_steps"] = ((1, (0, 1, 2)), (2, (0, 2)))
    for mixed in (True, False):
        one, *several = runs(2, *((worker, ranks, settings | {"mixed_batches": mixed}) for ranks in (1, 2, 4)))
        for found in several:
            assert_agree(found, one)
            assert_idled(found, mixed=mixed)
            assert_shared(found, one)
            assert worker == "plain" or found["accepted"]


@pytest.mark.slow
def test_eight_ranks():
    """With programs of several sizes, compiled as they are in earnest: the rank with the most to do chooses for all."""
    sizes = {"batch_buckets": (1, 2, 3), "prefill_buckets": (4, 8, 16)}
    one, eight = runs(2, ("ngram", 1, sizes), ("ngram", 8, sizes), quick=False)
    assert_agree(eight, one)
    assert_idled(eight, mixed=True)
    assert_shared(eight, one)


_GRAMMARS = """
import json, sys
from engine.test_structured_output import EOS, GRAMMARS, letters
from jspec import Engine, EngineConfig, SamplingParams
from jspec.models.parallel import data_mesh
from jspec.models.tiny import random_target
from jspec.spec_workers import ngram

found = []
for ranks in json.loads(sys.argv[1]):
    target = random_target(0, mesh=data_mesh(ranks), vocab_size=64, context_len=128, eos_token_ids=(EOS,))
    config = EngineConfig(
        max_running=2, page_size=4, batch_buckets=(2,), max_prefill_tokens=16, prefill_buckets=(16,), structured_output=True,
        checked=True,
    )
    engine = Engine(config, target=target, worker=ngram(target, num_draft_tokens=4, min_ngram=1), tokenizer=letters())
    params = [
        SamplingParams(max_new_tokens=40 - i, **also, **given)
        for i, given in enumerate([*GRAMMARS.values(), {}, {"stop": ("e", "q", "07")}] * 2)
        for also in ({}, {"temperature": 1.5, "seed": i})
    ]
    outputs = engine.generate([[i, 2 * i, 3] * (1 + i) for i in range(len(params))], params)
    assert not engine.has_work or not list(engine.step())
    found.append([(o.token_ids, o.text, o.finish_reason) for o in outputs])
print(json.dumps(found))
"""


@pytest.mark.slow
def test_output_follows_its_grammar_on_any_rank():
    """Ranks ask for the masks of their own rows, in the same launch."""
    one, two, four = on_eight_devices(_GRAMMARS, [1, 2, 4])
    assert two == one and four == one
    assert sum(reason == "stop" for _, _, reason in one) > 3


_CHECKPOINT = """
import json, sys
import numpy as np
from jspec import Engine, EngineConfig, SamplingParams
from jspec.models.llama import LlamaConfig, llama_target
from jspec.models.llama_weights import fuse, tensor_shapes
from jspec.models.parallel import data_mesh

config = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=3, num_kv_heads=1, head_dim=16,
    context_len=64, qkv_bias=True, qk_norm=True, tie_embeddings=True,
)
rng = np.random.default_rng(0)
tensors = {name: rng.standard_normal(shape, np.float32) * shape[-1] ** -0.5 for name, shape in tensor_shapes(config)}
found = []
for ranks in (1, 3):
    mesh = data_mesh(ranks)
    target = llama_target(config, fuse(config, tensors.__getitem__, np.float32, mesh), mesh=mesh)
    engine = Engine(EngineConfig(algorithm="plain", max_running=1, page_size=16), target=target)
    outputs = engine.generate([[1, 2, 3], [9] * 7], SamplingParams(max_new_tokens=24, ignore_eos=True))
    found.append([output.token_ids for output in outputs])
for ranks in (1, 2):
    model = EngineConfig(
        model=json.loads(sys.argv[1]), algorithm="plain", data_parallel=ranks, max_running=1, context_len=64, page_size=16
    )
    engine = Engine(model)
    assert len(engine.states) == ranks
    found.append([o.token_ids for o in engine.generate(["a text", "another"], SamplingParams(max_new_tokens=24))])
print(json.dumps(found))
"""


@pytest.mark.slow
def test_a_checkpoint_with_biases_and_norms_of_heads(tmp_path):
    """Three ranks that could not share its one KV head hold it whole; and a checkpoint from files."""
    one, three, from_files, on_two = on_eight_devices(_CHECKPOINT, str(write_checkpoint(tmp_path)))
    assert one == three and from_files == on_two
    assert one[0] != one[1] and from_files[0] != from_files[1]


_REFUSALS = """
import json, sys
from jspec import Engine, EngineConfig
from jspec.models.loading import load_model
from jspec.models.parallel import data_mesh
from jspec.models.tiny import random_target

path = json.loads(sys.argv[1])
attempts = {
    "load 3": lambda: load_model(path, data_parallel=3),
    "load 9": lambda: load_model(path, data_parallel=9),
    "engine 16": lambda: Engine(EngineConfig(model=path, algorithm="plain", data_parallel=16)),
    "other": lambda: Engine(EngineConfig(algorithm="plain", data_parallel=4), target=random_target(1, mesh=data_mesh(2))),
    "tensor": lambda: Engine(EngineConfig(algorithm="plain", tensor_parallel=2), target=random_target(1, mesh=data_mesh(2))),
}
refusals = {}
for name, attempt in attempts.items():
    try:
        attempt()
    except ValueError as error:
        refusals[name] = str(error)
print(json.dumps(refusals))
"""


def test_what_ranks_cannot_share_is_refused(tmp_path):
    """Before weights are read, or anything is compiled."""
    assert on_eight_devices(_REFUSALS, str(write_checkpoint(tmp_path))) == {
        "load 3": f"data_parallel=3 must divide intermediate_size={INTERMEDIATE}: each rank holds an equal part of the MLPs",
        "load 9": "data_parallel=9 exceeds the devices of this machine, 8: lower it",
        "engine 16": "data_parallel=16 exceeds the devices of this machine, 8: lower it",
        "other": "data_parallel=4, but the given target is shared by 2: build it with the same, or leave data_parallel out",
        "tensor": "tensor_parallel=2, but the given target is shared by 1: build it with the same, or leave tensor_parallel out",
    }


def test_ranks_of_one_device_are_refused():
    with pytest.raises(
        ValueError, match="data_parallel=2, but the given target is shared by 1: build it with the same"
    ):
        build(random_target(1), "plain", data_parallel=2)
    with pytest.raises(ValueError, match="data_parallel=2 exceeds the devices of this machine, 1: lower it"):
        data_mesh(2)
    with pytest.raises(
        ValueError, match="data_parallel=2 and tensor_parallel=4: a rank's attention runs on one device"
    ):
        EngineConfig(data_parallel=2, tensor_parallel=4)
    assert data_mesh(1) is None and len(jax.devices()) == 1
