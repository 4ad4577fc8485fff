"""Runs to be shown, and a browser to show them in, where there is one."""

import dataclasses
import functools
import shutil
import subprocess
import tempfile
from pathlib import Path

import numpy as np
import pytest

from jspec import Engine, EngineConfig, SamplingParams
from jspec.bench.stub import stub_target, stub_worker
from jspec.trace.format import read_trace
from jspec.trace.timeline import Timeline, timeline

NASTY = "</script><script>alert(1)</script><b title='x\">"
"""A name that a careless page would run."""

BROWSERS = ("chromium", "chromium-headless-shell", "chromium-browser", "google-chrome", "google-chrome-stable")


@functools.cache
def recording() -> bytes:
    """The file of a run with chunks, tails, retractions, aborts, stale results and second programs; its worker computes nothing."""
    rng = np.random.default_rng(0)
    target = stub_target(128)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "run.jspec")
        config = EngineConfig(
            page_size=4,
            max_running=3,
            kv_tokens=160,
            max_prefill_tokens=24,
            schedule_conservativeness=0.01,
            batch_buckets=(3,),
            prefill_buckets=(24,),
            trace=str(path),
        )
        with Engine(config, target=target, worker=stub_worker()) as engine:
            names, step = [NASTY, "ü 😀 &amp;", "one of two"], 0
            lens = rng.integers(3, 50, 12).tolist()
            while lens or engine.has_work:
                if lens and step % 3 == 0:
                    params = SamplingParams(max_new_tokens=50, n=2 if len(lens) == 10 else 1)
                    engine.submit(
                        rng.integers(0, 1000, lens.pop(0)).tolist(), params, rid=names.pop(0) if names else None
                    )
                if step == 14:
                    engine.abort("r5")
                if step == 40:
                    engine.abort("r9")
                list(engine.step())
                step += 1
        return path.read_bytes()


@functools.cache
def run() -> Timeline:
    """That run."""
    return _read(recording())


def cut_run(num_bytes: int) -> Timeline:
    """Its beginning."""
    return _read(recording()[:num_bytes])


def _read(data: bytes) -> Timeline:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "run.jspec")
        path.write_bytes(data)
        return timeline(read_trace(path))


def two_ranks() -> Timeline:
    """The run as if a second rank had idled beside it."""
    found = run()
    iterations = [dataclasses.replace(it, modes=(*it.modes, "idle")) for it in found.iterations]
    header = dataclasses.replace(found.header, num_ranks=2)
    return dataclasses.replace(found, header=header, iterations=iterations, num_pages=2 * found.num_pages)


def repeated(times: int) -> Timeline:
    """The run so many times, one after the other."""
    found = run()
    requests, iterations = {}, []
    end = max(life.ended or 0 for life in found.requests.values()) + 1000
    most, last = max(found.requests), found.iterations[-1].forward_iter
    for k in range(times):

        def later(item, names, by):
            moved = {name: getattr(item, name) for name in names}
            moved = {name: None if value is None else value + by for name, value in moved.items()}
            return dataclasses.replace(item, **moved)

        for life in found.requests.values():
            life = later(life, ("submitted", "aborted", "ended"), k * end)
            life = dataclasses.replace(life, serial=life.serial + k * most, rid=f"{k}/{life.rid}")
            requests[life.serial] = life
        for it in found.iterations:
            times_of = ("begun", "planned", "dispatched", "waited", "ready", "settled", "published", "committed")
            it = later(later(it, times_of, k * end), ("forward_iter", "settled_in"), k * last)
            it.lines = [
                dataclasses.replace(line, serial=line.serial + k * most, rid=f"{k}/{line.rid}") for line in it.lines
            ]
            it.left = [gone._replace(serial=gone.serial + k * most, when=gone.when + k * end) for gone in it.left]
            iterations.append(it)
    return dataclasses.replace(found, requests=requests, iterations=iterations)


def browser() -> str:
    """Path of a browser; the test is skipped where there is none."""
    for name in BROWSERS:
        if path := shutil.which(name):
            return path
    pytest.skip("no chromium or google-chrome on the PATH: what the page's script draws is not looked at")


def _browse(page: Path, address: str, *options: str) -> str:
    with tempfile.TemporaryDirectory() as profile:
        command = [browser(), "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        command += [f"--user-data-dir={profile}", "--enable-logging=stderr", "--virtual-time-budget=1000"]
        command += [*options, page.as_uri() + address]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, encoding="utf-8")
    complaints = [line for line in done.stderr.splitlines() if ":CONSOLE" in line]
    assert done.returncode == 0 and not complaints, complaints or done.stderr
    return done.stdout


def document_of(page: Path, address: str = "", *options: str) -> str:
    """The page's document after its script ran; the script must not have complained."""
    return _browse(page, address, *options, "--dump-dom")


def picture_of(page: Path, address: str = "", *options: str) -> np.ndarray:
    """What it looks like: u8[height, width, 3]."""
    from matplotlib.image import imread

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "page.png")
        _browse(page, address, *options, f"--screenshot={file}")
        return (imread(file)[..., :3] * 255).round().astype(np.uint8)
