"""What a record costs its engine: the same tokens, no program but the receipt of a second one, no compilation, nothing at all where there is none."""

import builtins
import dataclasses
import gc
import threading

import jax
import pytest

from jspec import EngineConfig, SamplingParams
from jspec.bench.host_probe import counted_traffic
from jspec.state import FinishReason
from jspec.trace.format import read_trace
from jspec.trace.replay import replay_until
from jspec.trace.timeline import timeline

from .kit import MIXED, RIGHT, WORKERS, WRONG, Watched, everything, everything_of, frames_of, record, twin

BOTH = ("oracle", "eagle")


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "jspec trace"]


def test_without_a_trace_nothing_is_written_and_no_thread_started(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before, opened, real = threading.active_count(), [], builtins.open

    def watched(file, mode="r", *args, **kwargs):
        opened.extend([file] if "w" in mode else [])
        return real(file, mode, *args, **kwargs)

    monkeypatch.setattr(builtins, "open", watched)
    engine = twin("oracle", trace=None)
    assert engine._recorder is None
    (output,) = engine.generate([[RIGHT]], SamplingParams(max_new_tokens=9, ignore_eos=True))
    engine.close()
    assert len(output.token_ids) == 9 and opened == [] and list(tmp_path.iterdir()) == []
    assert threading.active_count() == before and not threads()


def told(watched: Watched) -> dict:
    """What users were told, but for where they lay."""
    return {
        name: (o.token_ids, o.text, o.finish_reason, o.accept_lens, o.cached_tokens, o.retractions)
        for name, o in watched.outputs.items()
    }


@pytest.mark.parametrize("worker", WORKERS)
def test_the_same_tokens_with_and_without(worker):
    plain = Watched(twin(worker))
    everything(plain)
    recorded = everything_of(worker).watched
    assert told(plain) == told(recorded) and len(told(plain)) > 20
    assert plain.engine.summary().compiles_after_warmup == recorded.engine.summary().compiles_after_warmup == 0
    assert [kind for kind, _ in plain.seen] == [kind for kind, _ in recorded.seen]


@pytest.mark.parametrize(("worker", "of_programs"), [("oracle", 1), ("eagle", 2)])
def test_what_is_dispatched_and_what_crosses(worker, of_programs, tmp_path, monkeypatch):
    """Of each decode launch: the programs, and with a second one its receipt, whether the trace knows it by name or not."""
    calls, real = [0], jax.stages.Compiled.__call__

    def counted(self, *args):
        calls[0] += 1
        return real(self, *args)

    monkeypatch.setattr(jax.stages.Compiled, "__call__", counted)
    counts = {}
    for path in (None, str(tmp_path / "run.jspec")):
        with twin(worker, trace=path) as engine:
            for token in (RIGHT, WRONG):
                engine.submit([token], SamplingParams(max_new_tokens=30, ignore_eos=True))
            engine.step()
            before = calls[0]
            with counted_traffic(engine) as traffic:
                for _ in range(8):
                    engine.step()
            counts[path] = (traffic.per_launch(), (calls[0] - before) / traffic.launches)
            while engine.has_work:
                engine.step()
            assert engine.summary().compiles_after_warmup == 0
    (without, programs), (with_trace, and_receipt) = counts.values()
    assert without == with_trace, "the same programs, uploads and downloads"
    assert programs == of_programs == without["dispatches"]
    assert and_receipt == of_programs + (of_programs == 2)


def test_no_compilation_once_it_is_built():
    from jspec.engine.meters import compiles

    def run(watched: Watched) -> None:
        before = compiles()
        for token in (RIGHT, MIXED, WRONG):
            watched.submit([token], SamplingParams(max_new_tokens=20))
        watched.drain()
        watched.engine.close()
        assert compiles() == before

    for worker in BOTH:
        record(worker, run)


def test_closed_once_or_twice(tmp_path):
    """The last frame is there, launches under way are waited for, the thread is gone, and the engine goes on without a record."""
    path = tmp_path / "run.jspec"
    engine = twin("eagle", trace=str(path))
    engine.submit([RIGHT], SamplingParams(max_new_tokens=20, ignore_eos=True))
    for _ in range(3):
        engine.step()
    assert len(engine._loop.unsettled) == 1 and len(threads()) == 1
    recorder = engine._recorder
    engine.close()
    data = path.read_bytes()
    frames = [frame for _, frame in frames_of(data)]
    assert frames[-1][0] == "end" and sum(frame[0] == "device" for frame in frames) == 3
    assert not threads()
    engine.close()
    recorder.close()
    while engine.has_work:
        engine.step()
    assert path.read_bytes() == data
    assert read_trace(path).broken is None and len(timeline(read_trace(path)).iterations) == 3


def test_a_context_closes(tmp_path):
    path = tmp_path / "run.jspec"
    with twin("oracle", trace=str(path)) as engine:
        engine.generate([[RIGHT]], SamplingParams(max_new_tokens=3))
        assert read_trace(path).broken is not None
    assert read_trace(path).broken is None


def test_a_file_that_is_there_is_written_over(tmp_path):
    path = tmp_path / "run.jspec"
    path.write_bytes(b"x" * 100_000)
    with twin("oracle", trace=str(path)):
        pass
    assert path.stat().st_size < 500 and read_trace(path).frames == []


@pytest.mark.parametrize("worker", ["oracle", "eagle"])
def test_a_path_that_cannot_be_written_is_refused_at_once(worker, tmp_path):
    for path in (tmp_path / "none" / "run.jspec", tmp_path):
        with pytest.raises(OSError, match=str(path)):
            twin(worker, trace=str(path))
    with pytest.raises(OSError, match="/dev/full"):
        twin(worker, trace="/dev/full")
    gc.collect()
    assert not threads()


@pytest.mark.parametrize("path", ["", 3, b"run"])
def test_a_path_that_is_none(path):
    with pytest.raises(TypeError, match=r"trace=.* must be the path of a file, as a string"):
        EngineConfig(trace=path)
    assert EngineConfig().trace is None


def test_nothing_is_kept_of_requests_that_ended():
    """However they end: names of pages are kept while they may be needed, and no longer."""
    for worker in BOTH:
        assert everything_of(worker).watched.recorder._prompt_keys == {}


def test_what_a_request_leaves_to_the_cache_is_told_in_short():
    """Names of pages of its prompt by their number, others in full; of one that was aborted, whose names are not kept, all in full."""
    frames = everything_of("oracle").recording.frames
    named = {key for frame in frames if frame[0] == "submit" for key in frame[11]}
    ended = [end for frame in frames if frame[0] == "settle" for rank in frame[2] for end in rank[5]]
    assert any(count > 0 and beyond for _, _, count, beyond in ended)
    assert not any(named & set(beyond) for _, reason, _, beyond in ended if reason != FinishReason.ABORT)


def test_a_program_that_fails_is_no_matter_of_the_record(tmp_path):
    """The watching thread goes on to the next launch; the engine hears of it where it reads the outcome."""

    class Failed:
        def block_until_ready(self):
            raise RuntimeError("the device is gone")

    path = tmp_path / "run.jspec"
    engine = twin("oracle", trace=str(path))
    recorder = engine._recorder
    planned = recorder.planned

    def second_fails(ranks, *, outcome=None, **facts):
        fails = outcome is not None and ranks[0].state.forward_iter == 2
        planned(ranks, outcome=Failed() if fails else outcome, **facts)

    recorder.planned = second_fails
    engine.generate([[RIGHT]], SamplingParams(max_new_tokens=12))
    engine.close()
    frames = read_trace(path).frames
    assert [frame[1] for frame in frames if frame[0] == "device"] == [1, 3, 4]
    assert read_trace(path).broken is None and replay_until(read_trace(path)).num_iterations == 4


def test_a_draft_s_depth_is_on_record():
    """With one depth it is that one."""
    assert {it.depth for it in timeline(everything_of("oracle").recording).iterations} == {0}
    eagle = timeline(everything_of("eagle").recording)
    assert {it.depth for it in eagle.iterations if it.modes == ("decode",)} == {2}


def test_the_header_says_what_ran():
    header = everything_of("eagle").recording.header
    engine = everything_of("eagle").watched.engine
    assert header.limits == engine.limits
    assert header.first_state().ledger.page_table.shape == engine.state.ledger.page_table.shape
    assert (header.algorithm, header.num_pages, header.num_ranks) == (engine.worker.name, 40, 1)
    assert header.carry == type(engine._loop.device.future.carry).__name__
    assert header.started_at > 1.7e9
    assert dataclasses.asdict(header)["max_running"] == 4
