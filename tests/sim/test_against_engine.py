"""A real engine's run, recorded and replayed: the simulation launches what the engine launched."""

import dataclasses
import functools

import numpy as np
import pytest
from engine.kit import build, greedy, markov, markov_continuation, oracle_worker, prompts_of

from jspec import sim
from jspec.state import ForwardMode

WIDTH, PAGE_SIZE, REQUESTS, TOLERANCE = 5, 4, 12, 0.05


@dataclasses.dataclass
class Recording:
    """What an engine did with a list of requests. Arrivals are numbers of calls of `step`."""

    outputs: list
    summary: object
    modes: list[ForwardMode]  # of its launches
    steps: int  # calls of `step`
    most: list[int]
    arrivals: list[int]
    limits: object
    max_running: int
    kv_pages: int


def watched(engine):
    """Modes of the launches to come, as they are made."""
    modes, launch = [], engine._launch

    def note(loop):
        loop, launched = launch(loop)
        if launched is not None:
            modes.append(launched.batches[0].forward_mode)
        return loop, launched

    engine._launch = note
    return modes


def record(engine, modes, seed) -> Recording:
    """Random prompts, at once or one after another, that end by length or with a stop token."""
    rng = np.random.default_rng(seed)
    prompts = prompts_of(REQUESTS, seed=seed, longest=30)
    most = rng.integers(1, 40, REQUESTS).tolist()
    arrivals = sorted(rng.integers(0, 70, REQUESTS).tolist()) if seed % 2 else [0] * REQUESTS
    stops = [
        (markov_continuation(prompt[-1], n)[n // 2],) if rng.random() < 0.3 else ()
        for prompt, n in zip(prompts, most, strict=True)
    ]
    engine.reset_summary()
    del modes[:]
    outputs, rids, steps = {}, [], 0
    todo = list(zip(arrivals, prompts, most, stops, strict=True))
    while todo or engine.has_work:
        while todo and todo[0][0] <= steps:
            _, prompt, n, stop = todo.pop(0)
            rids.append(engine.submit(prompt, greedy(n, stop_token_ids=stop)))
        outputs.update({e.rid: e.output for e in engine.step() if e.output is not None})
        steps += 1
    return Recording(
        outputs=[outputs[rid] for rid in rids],
        summary=engine.summary(),
        modes=list(modes),
        steps=steps,
        most=most,
        arrivals=arrivals,
        limits=engine.limits,
        max_running=engine.config.max_running,
        kv_pages=engine.num_kv_tokens // PAGE_SIZE,
    )


def replayed(recordings: list[Recording]) -> sim.Report:
    """All of them in one call, on a clock that counts iterations."""
    parts = [sim.recorded_run(r.outputs, max_new_tokens=r.most, arrival_s=r.arrivals) for r in recordings]
    longest = max(acceptance.lens.shape[1] for _, acceptance in parts)

    def field(name, of=lambda r: r.limits):
        return np.array([getattr(of(r), name) for r in recordings])

    policy = sim.policy(
        max_running=field("max_running", lambda r: r),
        verify_width=WIDTH,
        alloc_len=field("alloc_len"),
        overlap=field("depth") > 0,
        mixed=field("mixed"),
        kv_pages=field("kv_pages", lambda r: r),
        **{
            name: field(name)
            for name in ("max_prefill_tokens", "new_token_ratio", "min_new_token_ratio", "ratio_steps")
        },
    )
    requests = sim.open_trace(
        **{name: np.stack([getattr(r, name) for r, _ in parts]) for name in sim.Requests.RANKS if name != "count"}
    )
    acceptance = sim.Replayed(
        lens=np.stack([np.pad(a.lens, ((0, 0), (0, longest - a.lens.shape[1]))) for _, a in parts]),
        counts=np.stack([a.counts for _, a in parts]),
    )
    return sim.simulate(policy, requests, acceptance, sim.every_step(), page_size=PAGE_SIZE)


PRESSED = {"kv_tokens": 120, "schedule_conservativeness": 0.01}
"""A small pool, promised many times over."""

FAST = {
    "overlap, mixed, pressed": dict(max_running=4, mixed_batches=True, max_prefill_tokens=16, **PRESSED),
    "no overlap": dict(max_running=3, overlap=False),
}
SLOW = {
    "overlap": dict(max_running=4),
    "alone": dict(max_running=1),
    "two": dict(max_running=2),
    "eight": dict(max_running=8, mixed_batches=True),
    "chunks": dict(max_running=4, max_prefill_tokens=8),
    "mixed": dict(max_running=4, mixed_batches=True, max_prefill_tokens=12, overlap=False),
    "pressed": dict(max_running=4, **PRESSED),
    "pressed, no overlap": dict(max_running=6, overlap=False, **PRESSED),
}


@functools.cache
def recordings_of(name) -> list[Recording]:
    settings = {"page_size": PAGE_SIZE, "prefix_cache": False, "checked": False, **(FAST | SLOW)[name]}
    engine = build(markov(), worker=oracle_worker(WIDTH), **settings)
    modes = watched(engine)
    return [record(engine, modes, seed) for seed in range(4)]


def assert_replayed(recordings, report):
    assert report.complete.all()
    for i, recording in enumerate(recordings):
        summary = recording.summary
        # What is asked for, and then what is reached.
        assert abs(report.iterations[i] - summary.iterations) <= TOLERANCE * summary.iterations
        assert report.iterations[i] == summary.iterations
        assert report.verifies[i] == summary.verifies
        assert report.retractions[i] == summary.retractions
        assert report.tokens[i] == summary.tokens
        assert report.prefills[i] == sum(mode.is_prefill for mode in recording.modes)
        assert report.seconds[i] == recording.steps
        assert report.accept_length[i] == pytest.approx(summary.accept_length)
        assert report.output_lens[i].tolist() == [len(output.token_ids) for output in recording.outputs]


def test_a_replayed_run_has_the_engines_iterations():
    recordings = [r for name in FAST for r in recordings_of(name)]
    assert sum(r.summary.retractions for r in recordings) > 1
    assert any(ForwardMode.MIXED in r.modes for r in recordings)
    assert {o.finish_reason for r in recordings for o in r.outputs} == {"length", "stop"}
    assert_replayed(recordings, replayed(recordings))


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_other_engines(name):
    recordings = recordings_of(name)
    assert_replayed(recordings, replayed(recordings))


@pytest.mark.slow
def test_acceptance_of_a_run_foretells_another():
    """Accept lengths as a histogram, other prompts: within a tenth of what the engine needs, since texts differ."""
    recordings = recordings_of("overlap")
    lens = np.concatenate([lens for r in recordings for o in r.outputs if (lens := o.accept_lens)])
    requests, _ = sim.recorded_run(recordings[0].outputs, max_new_tokens=recordings[0].most)
    drawn = sim.histogram(np.bincount(lens, minlength=WIDTH + 1)[1:], seed=np.arange(64))
    policy = sim.policy(max_running=4, verify_width=WIDTH, mixed=False)
    report = sim.simulate(policy, requests, drawn, sim.every_step(), page_size=PAGE_SIZE)
    assert report.iterations.mean() == pytest.approx(recordings[0].summary.iterations, rel=0.25)
