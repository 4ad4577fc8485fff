"""Output that is not what plain decoding, or a rule, says, and engines that do not stop: black-box scenarios. Ids (B19, ...) name the kind of fault."""

import functools
import os
import signal
import socket
import string
import subprocess
import sys
import threading
import time

import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from engine.kit import (
    ACCEPT,
    VOCAB,
    assert_idle,
    build,
    greedy,
    markov,
    markov_continuation,
    markov_table,
    oracle_worker,
    prompts_of,
    shadow_draft,
    slow_greedy,
    transformer,
    wrong_tokens,
)
from engine.test_frozen_kv import often_right
from engine.test_uno import random_lora
from tiny_checkpoint import write_checkpoint
from tokenizers import decoders, models, pre_tokenizers

from jspec import SamplingParams
from jspec.bench.stub import stub_target, stub_worker
from jspec.engine.programs import Program
from jspec.models.tiny_draft import random_draft
from jspec.models.tokenizer import Tokenizer
from jspec.spec_workers import EagleSizes, Proposal, chain, eagle, frozen_kv_mtp, multi_layer_eagle, ngram, uno
from jspec.state import ForwardMode
from jspec.state.requests import is_filling

# --- every width --------------------------------------------------------------------------------------------------------

CONTEXT, TOKENS, AT_ONCE = 64, 24, 12


def target():
    return transformer(context_len=CONTEXT)


@functools.cache
def alone(prompt: tuple[int, ...]) -> list[int]:
    return slow_greedy(target(), list(prompt), TOKENS)


@functools.cache
def to_copy(page_size: int) -> list[list[int]]:
    """Prompts that end at each place of a page, twice, and as many that say the same eight ids again and again."""
    ids = prompts_of(1, seed=19, shortest=8, longest=8)[0]
    ends = [prompts_of(1, seed=n, shortest=n, longest=n)[0] for n in range(1, 2 * page_size + 1)]
    return [*ends, *([*ids, *ids, *ids[: n % 8]] for n in range(2 * page_size))]


def known(num_drafts: int, page_size: int):
    """Drafts what the target will say after the prompts above, but for a wrong token at every 17th place, another in each text: nearly all lengths are accepted, in
    the middle and at the end of pages, and the KV of each token counts."""
    texts = np.zeros((len(to_copy(page_size)), CONTEXT + num_drafts), np.int32)
    for text, prompt in zip(texts, to_copy(page_size), strict=True):
        whole = [*prompt, *alone(tuple(prompt))]
        text[: len(whole)] = whole
    texts = jnp.asarray(texts)

    def propose(history, lens) -> Proposal:
        before = jnp.arange(CONTEXT) < lens[:, None]
        same = (texts[:, None, :CONTEXT] == history[:, :CONTEXT]) | ~before
        which = jnp.argmax(jnp.all(same, axis=2), axis=0)
        place = lens[:, None] + jnp.arange(num_drafts)
        drafts = jnp.take_along_axis(texts[which], place, axis=1)
        wrong = (place + which[:, None]) % 17 == 0
        return Proposal(jnp.where(wrong, (drafts + 1) % VOCAB, drafts), jnp.full_like(lens, num_drafts))

    return chain("known", target(), propose, verify_width=num_drafts + 1)


SWEPT = {
    "known": known,
    "ngram": lambda num_drafts, _: ngram(target(), num_draft_tokens=num_drafts + 1, min_ngram=1),
    "chain": lambda num_drafts, _: eagle(target(), shadow_draft(target()), sizes=EagleSizes(num_steps=num_drafts)),
    "tree": lambda num_drafts, _: eagle(
        target(), shadow_draft(target()), sizes=EagleSizes(num_steps=4, topk=3, num_draft_tokens=num_drafts + 1)
    ),
    "multi-layer": lambda num_drafts, _: multi_layer_eagle(
        target(), random_draft(target(), 3, kind="multi-layer", num_modules=num_drafts)
    ),
    "frozen-kv": lambda num_drafts, _: frozen_kv_mtp(
        target(), often_right(target()), sizes=EagleSizes(num_steps=num_drafts)
    ),
    "uno": lambda num_drafts, _: uno(target(), random_lora(target()), block_size=num_drafts + 1),
    "uno tree": lambda num_drafts, _: uno(
        target(), random_lora(target()), block_size=3, topk=3, num_draft_tokens=num_drafts + 1
    ),
}

WIDTHS = [("known", num_drafts, page_size) for page_size in (4, 16) for num_drafts in range(1, 13)]
WIDTHS += [(name, num_drafts, 4) for name in ("ngram", "chain", "tree") for num_drafts in range(1, 13)]
WIDTHS += [("multi-layer", num_drafts, 4) for num_drafts in range(1, 6)]
WIDTHS += [(name, num_drafts, 4) for name in ("frozen-kv", "uno") for num_drafts in range(1, 13)]
WIDTHS += [("uno tree", num_drafts, 4) for num_drafts in range(2, 13)]
WIDTHS = [pytest.param(*case, marks=() if case == ("known", 6, 4) else pytest.mark.slow) for case in WIDTHS]


@pytest.mark.parametrize(("worker", "num_drafts", "page_size"), WIDTHS)
def test_b19_every_width_copies_exactly(worker, num_drafts, page_size):
    """B19 (sglang issues 34959, 33800): 1 to 12 drafts, prompts that end at each place of a page, twelve at once: as recomputing everything says."""
    sizes = {"page_size": page_size, "max_running": AT_ONCE, "max_prefill_tokens": 64}
    engine = build(target(), worker=SWEPT[worker](num_drafts, page_size), **sizes)
    prompts = to_copy(page_size) * (1 if page_size == 16 else 3)
    outputs = engine.generate(prompts, greedy(TOKENS))
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.token_ids == alone(tuple(prompt)), f"a prompt of {len(prompt)}"
    lengths = {n for output in outputs for n in output.accept_lens}
    assert worker == "multi-layer" or len(lengths) > 1, "no draft was accepted: the test shows little"
    assert worker != "known" or ({1, num_drafts + 1} <= lengths and len(lengths) >= num_drafts)
    assert_idle(engine)


# --- rules that follow the tokens ---------------------------------------------------------------------------------------

TEXTS = [*string.digits, *string.ascii_lowercase, *string.ascii_uppercase, "_", "<eos>"]
"""A character a token. The last is the end."""

EOS = VOCAB - 1
ANY = range(EOS)
WIDTH = 5


@functools.cache
def letters() -> Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE(vocab={text: i for i, text in enumerate(TEXTS)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([TEXTS[EOS]])
    return Tokenizer(backend=backend, eos_token_ids=(EOS,))


@functools.cache
def ruled(overlap: bool = True):
    """M1 under grammars. Drafts are M1's own continuation, grammar or not, and wrong after some tokens."""
    settings = {"page_size": 4, "max_prefill_tokens": 16, "context_len": 64, "overlap": overlap}
    model = markov(eos_token_ids=(EOS,))
    return build(model, worker=oracle_worker(WIDTH), tokenizer=letters(), structured_output=True, **settings)


def says(token: int, allowed) -> int:
    """What M1 says after `token`: the table's token if it is allowed, else the lowest that is, for all others are equally likely."""
    return markov_table()[token] if markov_table()[token] in allowed else min(allowed)


def accepted(start: int, out: list[int]) -> list[int]:
    """Accept lengths of the drafts of M1's continuation, wrong after some tokens, where the text is `out`."""
    lens, done = [], 1
    while done < len(out):
        draft, run = out[done - 1], 1
        while run < min(WIDTH, len(out) - done):
            follows = markov_table()[draft]
            if out[done + run - 1] != (follows + (draft in wrong_tokens())) % VOCAB:
                break
            draft, run = follows, run + 1
        lens.append(run)
        done += run
    return lens


def class_of(allowed) -> str:
    return "[" + "".join(TEXTS[token] for token in sorted(allowed)) + "]"


LOW, END = (EOS - 1, EOS - 2), [EOS]
TAILS = {
    "refused at once": [LOW, LOW, ANY, LOW],
    "goes on as it was": [ANY, ANY, LOW, ANY],
    "nothing": [],
}
"""What may come after the marker, place by place: what the model would say is refused first, or later, or the text is over."""


def after_marker(start: int, place: int, tail) -> tuple[str, list[int]]:
    """A grammar whose marker is what the model says at index `place`, and the text: free up to the marker, then as the tail says, then the end."""
    free = []
    while len(free) <= place:
        free.append(says(free[-1] if free else start, ANY))
    marker, out = free[-1], list(free)
    assert marker not in free[:-1]
    for allowed in [*tail, END]:
        out.append(says(out[-1], allowed))
    unmarked = set(ANY) - {marker}
    return class_of(unmarked) + "*" + TEXTS[marker] + "".join(class_of(allowed) for allowed in tail), out


@pytest.mark.parametrize("overlap", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_b46_a_rule_that_begins_inside_a_run(overlap):
    """B46 (vllm issue 43388): free text, a marker, then a rule; the marker at every place of a run, accepted or not. The first token after it is masked,
    none is swallowed or taken twice, and drafts are accepted as far as the rule lets them be right."""
    engine, cases = ruled(overlap), []
    for level in ACCEPT.values():
        for place in range(12):
            cases += [(level[4], *after_marker(level[4], place, tail)) for tail in TAILS.values()]
    params = [greedy(40, regex=regex) for _, regex, _ in cases]
    outputs = engine.generate([[7, start] for start, *_ in cases], params)
    for (start, regex, out), output in zip(cases, outputs, strict=True):
        assert (output.token_ids, output.finish_reason) == (out, "stop"), regex
        assert output.accept_lens == accepted(start, out), regex
    assert {n for output in outputs for n in output.accept_lens} == set(range(1, WIDTH + 1))
    assert_idle(engine)


@pytest.mark.parametrize(
    ("overlap", "repeats"), [(True, 4), *(pytest.param(o, 100, marks=pytest.mark.slow) for o in (True, False))]
)
def test_b32_what_is_forced_at_each_index(overlap, repeats):
    """B32 (sglang issues 21724, 8056): jspec takes no processors of logits from its users, and says so. What forces a token at each index is a grammar of one
    sentence: exactly it comes, with drafts that foresee stretches of it, in every repeat, beside requests that are free."""
    with pytest.raises(TypeError, match="custom_logit_processor"):
        SamplingParams(custom_logit_processor=max)
    engine, wanted = ruled(overlap), []
    for start, jump in ((2, 3), (25, 4), (44, 5)):
        sentence = [start]
        for i in range(1, 24):
            follows = says(sentence[-1], ANY)
            sentence.append(follows if i % jump else (follows + 13) % EOS)
        wanted.append((start, [*sentence[1:], EOS]))
    prompts, params = [], []
    for start, out in wanted * repeats:
        prompts += [[start], [start]]
        params += [greedy(40, regex="".join(TEXTS[token] for token in out[:-1])), greedy(9, ignore_eos=True)]
    outputs = engine.generate(prompts, params)
    for (start, out), forced, free in zip(wanted * repeats, outputs[::2], outputs[1::2], strict=True):
        assert (forced.token_ids, forced.finish_reason) == (out, "stop")
        assert forced.accept_lens == accepted(start, out)
        assert free.token_ids == markov_continuation(start, 9)
    assert max(n for output in outputs[::2] for n in output.accept_lens) > 2
    assert_idle(engine)


# --- stopping -----------------------------------------------------------------------------------------------------------

SOON_S = 10
"""Seconds within which whatever is stopped must be over."""


def serving(**settings):
    """An engine over a worker that computes nothing, whose metrics are served; prompts go in chunks of 16."""
    sizes = {"page_size": 4, "max_running": 8, "max_prefill_tokens": 16, "metrics_port": 0, **settings}
    return build(stub_target(128), worker=stub_worker(verify_width=4, accept_len=3), **sizes)


def drained(engine, most: int = 300) -> dict:
    """Outputs by name, of what is left to do: it must end in so many steps."""
    ended = {}
    for _ in range(most):
        ended |= {e.rid: e.output for e in engine.step() if e.output is not None}
        if not engine.has_work:
            assert_idle(engine)
            return ended
    raise AssertionError(f"there is work after {most} steps")


def assert_port_is_free(port: int):
    with socket.create_server(("", port)):
        pass


def in_a_prompt(engine):
    engine.submit(list(range(60)), greedy(9))
    engine.step()
    assert is_filling(engine.state.requests, engine.state.ledger.kv_committed_len).any()


def in_a_verify(engine):
    engine.submit([1, 2], greedy(60))
    for _ in range(3):
        engine.step()
    assert engine.state.launched[-1].forward_mode is ForwardMode.DECODE


def with_a_queue(engine):
    for _ in range(16):
        engine.submit([1, 2], greedy(9))
    engine.step()
    assert len(engine.state.waiting) == 8


def with_a_stream(engine):
    stream = engine.generate([[1, 2]] * 16, greedy(9), stream=True)
    next(stream)
    return stream


PHASES = {
    "idle": lambda engine: None,
    "in a prompt": in_a_prompt,
    "in a verify": in_a_verify,
    "with a queue": with_a_queue,
    "with a stream": with_a_stream,
}


@pytest.mark.parametrize("phase", PHASES)
def test_b72_close_in_every_phase(phase):
    """B72 (vllm pull request 54553): closed twice, the port is free at once; what was asked for still ends, and so does a stream."""
    engine = serving()
    port, stream, start = engine.metrics_port, PHASES[phase](engine), time.monotonic()
    engine.close()
    engine.close()
    assert engine.metrics_port is None
    assert_port_is_free(port)
    if stream is not None:
        reasons = [emission.output.finish_reason for emission in stream if emission.output is not None]
        assert reasons == ["length"] * 16
    elif phase != "idle":
        assert {output.finish_reason for output in drained(engine).values()} == {"length"}
    assert_idle(engine)
    assert time.monotonic() - start < SOON_S


@pytest.mark.parametrize(
    ("launch", "error"),
    [pytest.param(1, RuntimeError, marks=pytest.mark.slow), (3, KeyboardInterrupt), (7, RuntimeError)],
)
def test_b72_a_failure_reaches_the_caller(monkeypatch, launch, error):
    """B72: a launch fails, or is interrupted, while a stream is open: the reader gets the error and no more, what was streamed is aborted, and the next engine
    has the port."""
    launches, call = [], Program.__call__

    def failing(*args, **options):
        launches.append(1)
        if len(launches) == launch:
            raise error("the worker is gone")
        return call(*args, **options)

    engine = serving()
    port, other = engine.metrics_port, engine.submit([5], greedy(60))
    monkeypatch.setattr(Program, "__call__", failing)
    with pytest.raises(error, match="the worker is gone"), engine:
        stream = engine.generate([list(range(40)), [1, 2], [3]], greedy(30), stream=True)
        for _ in stream:
            pass
    assert next(stream, None) is None and engine.metrics_port is None
    ended = drained(engine)
    assert len(ended[other].token_ids) == 60
    assert [output.finish_reason for rid, output in ended.items() if rid != other] == ["abort"] * 3
    with serving(metrics_port=port) as second:
        assert second.generate([[3]], greedy(4))[0].finish_reason == "length"
    assert_port_is_free(port)


def test_b72_eight_requests_drain_to_none():
    """B72 (vllm issue 51593): they end one after another, and the last one too; then eight more."""
    engine = serving(metrics_port=None)
    for _ in range(2):
        lengths = {engine.submit([1, 2, i], greedy(3 * i + 1)): 3 * i + 1 for i in range(8)}
        ended = drained(engine, 40)
        assert {rid: len(output.token_ids) for rid, output in ended.items()} == lengths
        assert {output.finish_reason for output in ended.values()} == {"length"}


SERVER = """
import itertools, signal, sys, time
from jspec import Engine, EngineConfig, SamplingParams
from jspec.bench.stub import stub_target, stub_worker
from jspec.engine.programs import Program
from jspec.models.parallel import data_mesh
from jspec.models.tiny import random_target
from jspec.spec_workers import ngram

signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever started this may ignore it
phase = sys.argv[1]

def ready():
    print(engine.metrics_port if engine else 0, flush=True)

def progress(jobs, *, total):
    for job in jobs:
        if phase == "warming up":
            ready()
            time.sleep(100)
        yield job

def fail(*_, **__):
    raise RuntimeError("the worker is gone")

engine, target, worker = None, stub_target(128), stub_worker()
if phase == "with an idle rank":
    target = random_target(0, context_len=128, mesh=data_mesh(2))
    worker = ngram(target)
sizes = dict(max_running=2, page_size=4, max_prefill_tokens=16, batch_buckets=(2,), metrics_port=0)
engine = Engine(EngineConfig(**sizes), target=target, worker=worker, progress=progress)
if phase == "in a prompt":
    engine.submit(list(range(100)), SamplingParams(max_new_tokens=9))
if phase in ("in a verify", "with an idle rank", "left", "closed", "failing"):
    engine.submit([1, 2], SamplingParams(max_new_tokens=60))
for _ in range({"in a prompt": 1, "idle": 0}.get(phase, 4)):
    engine.step()
if phase == "failing":
    Program.__call__ = fail
if phase == "closed":
    engine.close()
if phase == "with a stream":
    for i in itertools.count():
        for _ in engine.generate([[1, 2, 3]] * 8, SamplingParams(max_new_tokens=60), stream=True):
            if i == 0 and _.output is not None:
                ready()
ready()
if phase == "failing":
    engine.step()
if phase not in ("left", "closed"):
    time.sleep(100)
"""


def run_and_stop(command: list[str], stop: signal.Signals | None) -> tuple[int, str]:
    """Starts a process, stops it when it says its first line, and waits for it, but not long. Returns its exit code and that line."""
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    quiet = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    with subprocess.Popen(command, env=environment, **quiet) as process:
        late = threading.Timer(300, process.kill)
        late.start()
        try:
            said = process.stdout.readline()
            assert said, "it ended before it was ready"
            if stop is not None:
                process.send_signal(stop)
            return process.wait(SOON_S), said
        finally:
            late.cancel()
            process.kill()


SIGNALS = (signal.SIGINT, signal.SIGTERM)
STOPPED = ("warming up", "idle", "in a prompt", "in a verify", "with a stream", "with an idle rank")
ENDS = [("left", None, True), ("closed", None, True), ("failing", None, False)]
ENDS += [(phase, stop, False) for phase in STOPPED for stop in SIGNALS]
OFTEN = (("left", None, True), ("with a stream", signal.SIGINT, False))


@pytest.mark.parametrize(
    ("phase", "stop", "clean"), [pytest.param(*end, marks=() if end in OFTEN else pytest.mark.slow) for end in ENDS]
)
def test_b72_a_process_ends(phase, stop, clean):
    """B72 (vllm pull request 54553, llama.cpp issue 27388): stopped by a signal in every phase, failing, or left with requests under way and metrics served:
    the process ends soon, with 0 only if nothing was wrong, and nobody keeps its port."""
    code, said = run_and_stop([sys.executable, "-c", SERVER, phase], stop)
    assert (code == 0) == clean
    if said.strip().isdigit() and int(said):
        assert_port_is_free(int(said))


@pytest.mark.slow
@pytest.mark.parametrize("stop", SIGNALS)
def test_b72_the_command_ends(tmp_path, stop):
    """B72: the same of `jspec generate`, in the middle of what it prints."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("".join(f"prompt {i}\n" for i in range(500)))
    model = write_checkpoint(tmp_path / "model")
    code = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\nfrom jspec.cli import main\nmain()"
    options = [
        "--model",
        str(model),
        "--prompt-file",
        str(prompts),
        "--max-new-tokens",
        "400",
        "--ignore-eos",
        "--stream",
    ]
    found, said = run_and_stop([sys.executable, "-c", code, "generate", *options], stop)
    assert found != 0 and said.startswith("---")
