"""A worker of one's own: passed as a value, or found by the name under which a package offers it; refused where it does not keep the contract."""

import dataclasses
from importlib.metadata import EntryPoint

import jax.numpy as jnp
import numpy as np
import pytest
from engine.kit import VOCAB, assert_idle, build, greedy, markov, markov_continuation, prompts_of
from typer.testing import CliRunner

from jspec import Engine, EngineConfig
from jspec.cli import app
from jspec.spec_workers import Algorithm, HostSide, Proposal, algorithms, chain, registry
from jspec.spec_workers.upload import pack_outcome


def counting(target, config=None):
    """Says that every token is followed by the next number."""

    def propose(history, lens):
        last = jnp.take_along_axis(history, jnp.maximum(lens - 1, 0)[:, None], axis=1)
        return Proposal((last + jnp.arange(1, 4)) % VOCAB, jnp.full_like(lens, 3))

    return chain("counting", target, propose, verify_width=4)


@pytest.fixture
def offered(monkeypatch):
    """A package that offers something under a name."""

    def offer(name, value):
        class Point(EntryPoint):
            def load(self):
                return value

        point = Point(name, "a_package:thing", registry.ENTRY_POINTS)
        monkeypatch.setattr(registry, "entry_points", lambda group: [point] if group == registry.ENTRY_POINTS else [])
        algorithms.cache_clear()

    yield offer
    monkeypatch.undo()
    algorithms.cache_clear()


def test_an_offered_worker_is_one_of_the_algorithms(offered):
    offered("counting", Algorithm("counts on", counting))
    engine = Engine(EngineConfig(algorithm="counting", max_running=2, prefill_buckets=(64,)), target=markov())
    for prompt, output in zip(prompts_of(3), engine.generate(prompts_of(3), greedy(12)), strict=True):
        assert output.token_ids == markov_continuation(prompt[-1], 12)
    assert_idle(engine)
    listed = CliRunner().invoke(app, ["algorithms"])
    assert listed.exit_code == 0 and "counting" in listed.stdout and "counts on" in listed.stdout
    assert all(name in listed.stdout for name in registry.ALGORITHMS)
    with pytest.raises(ValueError, match="topk=2 means nothing to algorithm='counting'"):
        Engine(EngineConfig(algorithm="counting", topk=2), target=markov())


def test_a_name_that_is_taken_and_a_thing_that_is_none(offered):
    offered("ngram", Algorithm("mine", counting))
    with pytest.raises(ValueError, match=r"entry point 'ngram' .*\(a_package:thing\): the name is taken"):
        algorithms()
    offered("mine", counting)
    with pytest.raises(
        TypeError, match=r"entry point 'mine' .* is a function: it must be a jspec.spec_workers.Algorithm"
    ):
        algorithms()
    listed = CliRunner().invoke(app, ["algorithms"])
    assert listed.exit_code == 2 and "entry point 'mine'" in listed.stderr


def wrong(target, change):
    """`counting`, whose verify answers otherwise than the contract says."""
    worker = counting(target)

    def verify_phase(*args, **kwargs):
        return change(worker.verify_phase(*args, **kwargs))

    return worker._replace(verify_phase=verify_phase)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda out: out.device, "returns a DeviceState: it must return a PhaseOutput"),
        (lambda out: out._replace(outcome=out.outcome[:, :-1]), r"outcome is int32\[4, 6\].* make it int32\[4, 7\]"),
        (lambda out: out._replace(outcome=out.outcome.astype(jnp.float32)), r"outcome is float32\[4, 7\]"),
        (
            lambda out: out._replace(device=dataclasses.replace(out.device, draft_kv_pages=jnp.zeros(3))),
            r"makes device.draft_kv_pages float32\[3\], which is nothing",
        ),
        (
            lambda out: out._replace(device=dataclasses.replace(out.device, page_table=out.device.page_table[:, :1])),
            r"makes device.page_table int32\[5, 1\], which is int32\[5, \d+\]",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:Some donated buffers")
def test_a_worker_that_answers_wrong_shapes_is_refused_at_start_up(change, message):
    with pytest.raises(ValueError, match=message):
        build(markov(), worker=wrong(markov(), change))


# --- a host side -------------------------------------------------------------------------------------------------------------------


def told(target, log):
    """A worker without drafts, whose host side sends the number of each row's settled tokens down, and gets it back with twice the launch's word."""
    plain = chain("told", target, verify_width=1)

    def verify_phase(params, device, inputs, *, table_width, depth):
        out = plain.verify_phase(params, device, inputs, table_width=table_width, depth=depth)
        words = jnp.stack([inputs.row_words[:, 0], jnp.full_like(inputs.rows, 2 * inputs.batch_words[0])], axis=1)
        tokens, lens, new, status = out.outcome[:, 3:], *out.outcome[:, :3].T
        return out._replace(outcome=pack_outcome(tokens, lens, new, status, words))

    def inputs(state, launch):
        settled = [len(launch.tokens_of(int(row))) for row in launch.rows]
        log.append(("launch", state, launch.rows.tolist(), settled))
        return np.array(settled, np.int32)[:, None], np.array([state], np.int32)

    def observe(state, outcome):
        texts = [
            outcome.tokens_of(int(row)).tolist() for row, live in zip(outcome.rows, outcome.live, strict=True) if live
        ]
        log.append(("settle", outcome.words.tolist(), texts, outcome.finished.tolist()))
        return state + 1

    side = HostSide(1, 1, 2, lambda num_rows: 0, inputs, observe)
    return plain._replace(verify_phase=verify_phase, host=side)


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no-overlap"])
def test_a_host_side_sees_what_is_settled_and_no_more(overlap):
    """One row: launch k is told of the tokens settled when it is planned, one fewer under overlap; its words come back with its own outcome."""
    log = []
    engine = build(markov(), worker=told(markov(), log), overlap=overlap, max_running=1)
    output = engine.generate([[1, 2, 3]], greedy(6))[0]
    assert output.token_ids == markov_continuation(3, 6)
    settled = [entry[3] for entry in log if entry[0] == "launch"]
    lag = 1 if overlap else 0
    assert settled[:5] == [[3 + max(1 + k - lag, 0)] for k in range(5)]
    back = [entry for entry in log if entry[0] == "settle" and entry[1]]
    sent = [entry for entry in log if entry[0] == "launch"]
    for (_, words, texts, _), (_, state, _, lens) in zip(back, sent, strict=False):
        assert words == [[lens[0], 2 * state]]
        if texts:
            assert texts[0] == [1, 2, 3, *markov_continuation(3, len(texts[0]) - 3)]
    assert [entry[3] for entry in back if any(entry[3])] == [[True]] and len(back[4][2][0]) == 9
    assert engine.summary().compiles_after_warmup == 0


def test_a_worker_without_a_host_side_pays_nothing():
    """Bytes of a launch, with and without: the words are all the difference."""
    from engine.kit import oracle_worker

    for worker, words in ((oracle_worker(), (0, 0)), (told(markov(), []), (1, 1))):
        engine = build(markov(), worker=worker)
        assert worker.input_words == words
        assert all(type(host) is int for host in engine._loop.hosts) and len(engine._loop.hosts) == bool(sum(words))
