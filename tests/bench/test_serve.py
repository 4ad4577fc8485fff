"""The serving bench: what a trace launches, what a prefix finds in the cache, and what a soak would notice."""

import dataclasses
import json

import numpy as np
import pytest
from tiny_checkpoint import CONTEXT_LEN, write_checkpoint
from typer.testing import CliRunner

from jspec.bench import soak as soak_module
from jspec.bench.decode_compare import Difference
from jspec.bench.prompts import encode_prompt
from jspec.bench.serve import ServeJob, prepare
from jspec.bench.serve_prefix import ENDING_TOKENS, NEW_TOKENS, fit_prefix, measure_prefix
from jspec.bench.serve_report import PrefixTurn, ServeBench, ServeTrace, WarmPrefix, measure_served, serve_json, spread
from jspec.bench.serve_trace import Launches, Served, arrival_times, is_long, random_prompts, serve, text_prompts
from jspec.bench.soak import find_faults, growth_allowed, page_account, run_soak
from jspec.bench.tables import console, serve_tables
from jspec.cli import app
from jspec.config import EngineConfig, SamplingParams
from jspec.engine import Engine
from jspec.models.loading import load_model
from jspec.models.tiny import random_target
from jspec.state.dense import replace
from jspec.state.scheduler_state import Limits, init_state

PAGE = 16


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(write_checkpoint(tmp_path_factory.mktemp("models") / "chat"))


@pytest.fixture(scope="module")
def soaked():
    """Every invariant is checked after every transition."""
    return run_soak(300, checked=True)


@pytest.fixture(scope="module")
def both(model):
    """Trace and warm prefix of a tiny model, as JSON."""
    result = run(
        *(
            "--model",
            model,
            "--requests",
            6,
            "--random-prompts",
            "--long-tokens",
            150,
            "--long-every",
            2,
            "--rate",
            1000,
        ),
        *("--max-new-tokens", 8, "--ignore-eos", "--max-running", 2, "--max-prefill-tokens", 64, "--page-size", PAGE),
        *("--prefix-tokens", 100, "--rounds", 2, "--json"),
    )
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def run(*args):
    return CliRunner().invoke(app, ["bench", "serve", *(str(arg) for arg in args)])


# --- the trace ------------------------------------------------------------------------------------------------------------


def test_arrivals_are_the_seeds():
    times = arrival_times(50, rate=2.0, seed=3)
    assert times[0] == 0 and times == sorted(times) and len(times) == 50
    assert times == arrival_times(50, rate=2.0, seed=3) != arrival_times(50, rate=2.0, seed=4)
    np.testing.assert_allclose(arrival_times(50, rate=4.0, seed=3), np.array(times) / 2)
    assert arrival_times(0, rate=1.0, seed=0) == [] and arrival_times(1, rate=1.0, seed=0) == [0.0]


def test_random_prompts():
    prompts = random_prompts(8, long_every=4, long_tokens=200, vocab_size=10, seed=0)
    assert [i for i in range(8) if is_long(i, 4)] == [3, 7] and not any(is_long(i, 0) for i in range(8))
    assert [len(prompts[i]) for i in (3, 7)] == [200, 200]
    assert all(8 <= len(prompts[i]) <= 64 for i in range(8) if not is_long(i, 4))
    assert {token for prompt in prompts for token in prompt} == set(range(10))
    assert prompts == random_prompts(8, long_every=4, long_tokens=200, vocab_size=10, seed=0)


def test_a_long_prompt_is_texts_in_a_row(model):
    tokenizer = load_model(model).tokenizer
    texts = ["a" * 10, "b" * 20, "c" * 30]  # a token a byte, and the assistant's mark
    prompts = text_prompts(texts, tokenizer, 4, long_every=2, long_tokens=70, chat=None)
    assert [len(prompt) for prompt in prompts] == [11, 20 + 2 + 30 + 2 + 10 + 1, 31, 10 + 2 + 20 + 2 + 30 + 1]
    assert prompts[1] == encode_prompt(tokenizer, "\n\n".join((texts[1], texts[2], texts[0])))
    (whole,) = text_prompts(texts, tokenizer, 1, long_every=1, long_tokens=5, chat=None)
    assert len(whole) == 11, "at least one text"


@pytest.fixture(scope="module")
def at_once():
    """A short prompt and one of three chunks and a bit, there from the start, with mixed batches and without."""
    target, prompts = random_target(0, context_len=128), [[1, 2, 3], list(range(60)) + [7] * 40]

    def served(mixed):
        config = EngineConfig(
            algorithm="plain",
            page_size=PAGE,
            max_running=2,
            batch_buckets=(2,),
            max_prefill_tokens=32,
            prefill_buckets=(32,),
            mixed_batches=mixed,
            prefix_cache=False,
            checked=True,
        )
        return serve(Engine(config, target=target), prompts, [0.0, 0.0], SamplingParams(max_new_tokens=10))

    return served(False), served(True)


def test_launches_are_counted(at_once):
    separate, mixed = at_once
    # 3 tokens and a first chunk of 16 together, then 32, 32 and the last 20; what is left to decode goes side by side.
    assert (separate.launches.prefill, separate.launches.mixed, separate.launches.chunks) == (4, 0, 3)
    assert (mixed.launches.prefill, mixed.launches.mixed, mixed.launches.chunks) == (1, 3, 3)
    assert separate.launches.decode == 9 and mixed.launches.decode == 9, "the long prompt's tokens, the first aside"
    assert separate.token_ids == mixed.token_ids and [len(tokens) for tokens in mixed.token_ids] == [10, 10]


def test_times_are_of_every_token(at_once):
    for served in at_once:
        assert len(served.first_token_s) == 2 and len(served.between_tokens_s) == 18
        assert served.tokens_per_s == pytest.approx(20 / served.seconds)
        assert 0 < served.first_token_s[0] < served.first_token_s[1] < served.seconds
        first_and_between = sum(served.first_token_s) + sum(served.between_tokens_s)
        assert first_and_between <= 2 * served.seconds * (1 + 1e-9), "each request's add up to its last token"
        assert (served.retractions, served.compiles) == (0, 0)


def test_the_trace_of_a_model(both):
    trace = both["trace"]
    assert [(c["algorithm"], c["mixed"]) for c in trace["contenders"]] == [
        ("plain", False),
        ("plain", True),
        ("ngram", False),
        ("ngram", True),
    ]
    for contender in trace["contenders"]:
        assert contender["identical"] == contender["outputs"] == 12 and contender["near_ties"] == 0
        assert contender["compiles_after_warmup"] == contender["retractions"] == 0
        assert (contender["launches"]["mixed"] > 0) is contender["mixed"]
        assert set(contender["tokens_per_s"]) == {"median", "low", "high"}
        if not contender["mixed"]:
            assert contender["speedup"] == {"median": 1.0, "low": 1.0, "high": 1.0}
    assert trace["lossless"] and both["ok"] and both["soak"] is None
    assert trace["differences"] == {f"{a}, {b}": [] for a in ("plain", "ngram") for b in ("separate", "mixed")}
    assert (trace["requests"], trace["rounds"], trace["max_prefill_tokens"]) == (6, 2, 64)
    assert (trace["arrivals_per_s"], trace["arrivals_given"]) == (1000.0, True)
    assert len(trace["prompt_tokens"]) == 6 and trace["prompt_tokens"][1::2] == [150] * 3, "of three chunks"
    chunks = [contender["launches"]["chunks"] for contender in trace["contenders"]]
    assert min(chunks) >= 2 * 3 * 2, "two before the last of each, in two rounds"


def served_of(tokens, seconds):
    return Served(
        token_ids=tokens,
        first_token_s=[0.1, 0.3],
        between_tokens_s=[0.01] * 5,
        seconds=seconds,
        launches=Launches(prefill=1, mixed=2, decode=3, chunks=4),
        accept_length=1.5,
        retractions=1,
        compiles=0,
    )


def difference(gap):
    return Difference(prompt=1, position=0, plain_token=3, token=4, logit_gap=gap)


def trace_of(differences):
    slow, fast = served_of([[1, 2], [3, 4]], 2.0), served_of([[1, 2], [4, 4]], 1.0)
    separate = measure_served("plain", False, [slow, slow], [slow, slow], [])
    mixed = measure_served("plain", True, [fast, slow], [slow, slow], differences)
    return ServeTrace(
        model="tiny",
        requests=2,
        prompts=["bundled (8)"],
        prompt_tokens=[3, 100],
        max_new_tokens=2,
        max_prefill_tokens=64,
        max_running=2,
        rounds=2,
        arrivals_per_s=3.0,
        arrivals_given=False,
        contenders=[separate, mixed],
        differences={"plain, separate": [], "plain, mixed": differences},
    )


def test_figures_of_a_contender():
    _, mixed = trace_of([]).contenders
    assert mixed.tokens_per_s == spread([4.0, 2.0]) and mixed.speedup == spread([2.0, 1.0])
    assert dataclasses.astuple(mixed.speedup) == (1.5, 1.0, 2.0)
    assert mixed.first_token_p50_ms.median == pytest.approx(200) and mixed.between_tokens_p95_ms.low == pytest.approx(
        10
    )
    assert mixed.between_tokens_max_ms == mixed.between_tokens_p95_ms, "all gaps are alike"
    assert mixed.launches == Launches(prefill=2, mixed=4, decode=6, chunks=8) and mixed.retractions == 2
    one_token = dataclasses.replace(served_of([[1], [2]], 1.0), between_tokens_s=[])
    assert measure_served("plain", True, [one_token], [one_token], []).between_tokens_p50_ms is None


def test_differences_fail_the_bench_unless_they_are_near_ties():
    for found, lossless, word in (
        ([], True, "yes"),
        ([difference(1e-5)], True, "1 by a near tie"),
        ([difference(1e-5), difference(0.5)], False, "real difference"),
    ):
        bench = ServeBench(trace=trace_of(found), prefix=None, soak=None)
        assert bench.ok is bench.trace.lossless is lossless
        assert [d["near_tie"] for d in serve_json(bench)["trace"]["differences"]["plain, mixed"]] == [
            d.near_tie for d in found
        ]
        assert word in printed(bench)


# --- the warm prefix -------------------------------------------------------------------------------------------------------


def test_what_a_warm_prefix_finds(both):
    prefix = both["prefix"]
    assert (prefix["algorithm"], prefix["prefix_tokens"], prefix["prompt_tokens"]) == ("plain", 100, 116)
    assert {turn["name"]: turn["cached_tokens"] for turn in prefix["turns"]} == {
        "cold": [0, 0],
        "the same again": [112, 112],  # 7 whole pages of 116 tokens
        "another ending": [96, 96],  # 6 of the 100 that are the same
    }
    assert prefix["lossless"] and prefix["differences"] == [] and prefix["note"] == "" and prefix["goal"] == 5.0
    assert prefix["compiles_after_warmup"] == 0
    assert prefix["turns"][0]["speedup"] == {"median": 1.0, "low": 1.0, "high": 1.0}


def test_a_prompt_that_fills_its_last_page_computes_a_token():
    target = random_target(0, context_len=128)
    fitted = fit_prefix(EngineConfig(page_size=PAGE), 64, model_context_len=128)
    found = measure_prefix(fitted, "plain", target, rounds=1, seed=0)
    assert found.prompt_tokens == 80 and [turn.cached_tokens for turn in found.turns] == [[0], [64], [64]]
    assert found.lossless


def test_a_prefix_is_cut_to_the_model():
    config = EngineConfig(page_size=PAGE, max_running=8, max_prefill_tokens=64)
    fitted = fit_prefix(config, 2000, model_context_len=CONTEXT_LEN)
    assert fitted.prefix_tokens == CONTEXT_LEN - ENDING_TOKENS - NEW_TOKENS == 492
    assert "prefix_tokens=2000" in fitted.note and "492" in fitted.note and "512" in fitted.note
    assert (fitted.config.context_len, fitted.config.max_running, fitted.config.prefix_cache) == (512, 1, True)
    assert fitted.config.prefill_buckets == (64, 512), "a warm prompt computes 32 tokens at most"
    assert fit_prefix(config, 492, model_context_len=CONTEXT_LEN).note == ""
    large = fit_prefix(EngineConfig(page_size=128), 4000, model_context_len=8192)
    assert large.config.prefill_buckets == (64, 128, 256, 2048) and large.config.max_prefill_tokens == 2048


def test_another_output_of_a_warm_prompt_fails_the_bench():
    turns = [PrefixTurn(name=n, first_token_ms=spread([1.0]), speedup=spread([1.0]), cached_tokens=[0]) for n in "abc"]
    prefix = WarmPrefix(
        algorithm="plain",
        prefix_tokens=100,
        prompt_tokens=116,
        page_size=PAGE,
        rounds=1,
        turns=turns,
        differences=[difference(0.5)],
        compiles_after_warmup=0,
        note="a note",
    )
    bench = ServeBench(trace=None, prefix=prefix, soak=None)
    assert not bench.ok and "real difference" in printed(bench) and "a note" in printed(bench)
    tie = dataclasses.replace(prefix, differences=[difference(1e-5)])
    assert ServeBench(trace=None, prefix=tie, soak=None).ok


# --- the soak ------------------------------------------------------------------------------------------------------------


def test_a_soak_loses_nothing(soaked):
    assert soaked.ok and soaked.faults == []
    assert sum(soaked.ended.values()) == 300 and set(soaked.ended) == {"abort", "length"}
    assert (soaked.pages.total, soaked.pages.lost, soaked.pages.locked) == (24, 0, 0)
    assert soaked.pages.free + soaked.pages.cached == 24


def test_a_soak_does_what_it_is_for(soaked):
    assert soaked.launches.chunks > 0 and soaked.launches.mixed > 0 and soaked.launches.decode > 0
    assert soaked.retractions > 0 and soaked.evicted_pages > 0 and soaked.cached_tokens > 0
    assert soaked.cached_tokens % 16 == 0


def test_a_soak_is_its_seeds(soaked):
    counts = ("ended", "tokens", "launches", "retractions", "evicted_pages", "cached_tokens", "pages")
    again, other = run_soak(300), run_soak(300, seed=1)
    assert [getattr(again, name) for name in counts] == [getattr(soaked, name) for name in counts]
    assert [getattr(other, name) for name in counts] != [getattr(soaked, name) for name in counts]


LIMITS = Limits(context_len=64, alloc_len=4, depth=1, max_prefill_tokens=64, max_prefill_rows=4)


def faults_of(state, *, ended=10, memory=(10**9, 10**9)):
    at_tenth, at_end = memory
    return find_faults(state, LIMITS, requests=10, ended=ended, memory_at_tenth=at_tenth, memory_at_end=at_end)


def test_a_soak_notices_what_is_wrong():
    """The last state of an idle engine, doctored."""
    state = init_state(limits=LIMITS, max_running=4, num_pages=20, page_size=PAGE)
    assert faults_of(state) == []
    ledger = state.ledger
    lost = replace(state, ledger=replace(ledger, num_free=ledger.num_free - np.int32(2)))
    assert page_account(lost).lost == 2
    found = faults_of(lost)
    assert found[0] == "2 pages are lost: 18 free and 0 cached are not the 20 there are"
    assert "not sound" in found[1] and "free + cached + held == total" in found[1]
    twice = ledger.free_pages.copy()
    twice[0] = twice[1]
    (found,) = faults_of(replace(state, ledger=replace(ledger, free_pages=twice)))
    assert "every page is in one place" in found, "the count alone would not tell"
    locks = ledger.page_locks.copy()
    locks[3] = 1
    assert "1 pages are locked" in faults_of(replace(state, ledger=replace(ledger, page_locks=locks)))[0]
    assert faults_of(state, ended=9) == ["9 of 10 requests ended"]
    serial = state.requests.serial.copy()
    serial[1] = 7
    runs = replace(state, requests=replace(state.requests, serial=serial))
    assert "still waits or runs" in faults_of(runs)[0]


def test_memory_may_grow_a_little():
    state = init_state(limits=LIMITS, max_running=4, num_pages=20, page_size=PAGE)
    mib = 2**20
    assert growth_allowed(100 * mib) == 50 * mib and growth_allowed(1000 * mib) == 100 * mib
    assert faults_of(state, memory=(100 * mib, 150 * mib)) == []
    (found,) = faults_of(state, memory=(100 * mib, 151 * mib))
    assert found == "memory grew by 51 MiB after a tenth, more than 50 MiB"


def test_a_soak_alone_needs_no_model():
    args = ["--model", "/nowhere", "--requests", 0, "--prefix-tokens", 0, "--soak", 40, "--json"]
    result = run(*args)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["trace"] is None and found["prefix"] is None and found["ok"] and found["soak"]["ok"]
    assert found["soak"]["requests"] == sum(found["soak"]["ended"].values()) == 40


@pytest.mark.parametrize("as_json", [True, False])
def test_a_soak_that_finds_a_fault_fails(monkeypatch, as_json):
    lost = {"total": 24, "free": 3, "cached": 20, "locked": 0}
    monkeypatch.setattr(soak_module, "page_account", lambda _: soak_module.PageAccount(**lost))
    result = run("--requests", 0, "--prefix-tokens", 0, "--soak", 20, *(["--json"] if as_json else []))
    assert result.exit_code == 1, result.output
    fault = "1 pages are lost: 3 free and 20 cached are not the 24 there are"
    if as_json:
        found = json.loads(result.stdout)
        assert not found["ok"] and not found["soak"]["ok"] and found["soak"]["faults"] == [fault]
    else:
        assert fault in result.stdout


# --- all of it -----------------------------------------------------------------------------------------------------------


def printed(bench):
    out = console()
    with out.capture() as captured:
        out.print(serve_tables(bench))
    return captured.get()


def test_tables_name_every_figure(soaked):
    text = printed(ServeBench(trace=trace_of([]), prefix=None, soak=soaked))
    for label in (
        "tokens/s",
        "over separate prefill",
        "ms to first token, p50",
        "p95",
        "ms between tokens, p50",
        "longest",
    ):
        assert label in text
    for label in ("mixed", "chunks before", "identical output", "requests/s", "retractions", "evicted", "pages lost"):
        assert label in text
    for label in ("memory at a tenth", "memory at the end", "Nothing lost", "0 locked"):
        assert label in text


@pytest.mark.parametrize(
    ("options", "pieces"),
    [
        (["--requests", -1], ["requests=-1", "at least 0"]),
        (["--requests", 0, "--prefix-tokens", 0], ["requests=0", "soak=0", "nothing to measure"]),
        (["--rounds", 0], ["rounds=0"]),
        (["--rate", 0], ["rate=0", "positive"]),
        (["--rate", "inf"], ["rate=inf", "finite"]),
        (["--long-tokens", 0], ["long_tokens=0"]),
        (["--max-running", 1], ["max_running=1", "at least 2"]),
        (["--max-prefill-tokens", 0], ["max_prefill_tokens=0"]),
        (["--algorithms", "plain,eagle9"], ["algorithms: 'eagle9'", "ngram"]),
        (["--prompts", "gsm8k"], ["prompts='gsm8k'", "mt-bench"]),
        (["--long-tokens", 500], ["long_tokens=500", "max_new_tokens=64", "512", "lower"]),
        (["--prefix-tokens", 64, "--long-tokens", 100], ["prefix_tokens=64", "page_size=64", "0 to leave"]),
        (
            ["--prefix-tokens", 0, "--long-tokens", 100, "--max-prefill-tokens", 8],
            ["max_prefill_tokens=8", "page_size"],
        ),
    ],
)
def test_bad_options(model, options, pieces):
    result = run("--model", model, "--long-tokens", 300, *options)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ") and all(piece in line for piece in pieces), line


def test_prompts_of_a_set(model):
    config = EngineConfig(model=model, max_prefill_tokens=64)
    prepared = prepare(ServeJob(config=config, requests=10, long_every=5, long_tokens=300))
    lens = [len(prompt) for prompt in prepared.trace.prompts]
    assert lens[0] == lens[8] and len(set(lens[:4])) == 4, "eight texts in turn"
    assert prepared.trace.config.context_len == min(max(lens) + 64, CONTEXT_LEN)
    assert (prepared.trace.config.batch_buckets, prepared.trace.config.prefill_buckets) == ((8,), (64,))
    (line,) = prepared.trace.sets
    assert "bundled (8)" in line and "chat template" in line


def test_random_prompts_need_no_tokenizer(tmp_path):
    config = EngineConfig(model=str(write_checkpoint(tmp_path / "mute", tokenizer=False)), max_prefill_tokens=64)
    job = ServeJob(config=config, requests=4, long_tokens=100, prefix_tokens=0)
    with pytest.raises(ValueError, match="no tokenizer"):
        prepare(job)
    prepared = prepare(dataclasses.replace(job, random_prompts=True))
    assert len(prepared.trace.prompts) == 4 and len(prepared.trace.prompts[3]) == 100
    assert (prepared.trace.config.context_len, prepared.trace.config.prefix_cache) == (164, False)
    assert prepared.prefix is None
