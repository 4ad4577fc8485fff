"""Tiny targets, a worker whose accept lengths are known in advance, and slow oracles for the engine's output."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from jspec import Engine, EngineConfig, SamplingParams
from jspec.models.draft import DraftFacts, DraftModel
from jspec.models.tiny import markov_target, random_target
from jspec.spec_workers.chain import Proposal, chain
from jspec.spec_workers.forward import prefill_batch

VOCAB = 64
CONTEXT = 128


ACCEPT = {"all": range(0, 21), "mixed": range(21, 42), "none": range(42, VOCAB)}
"""M1's vocabulary falls into three cycles. After a token of the first, the oracle worker's drafts are right; after one of the second, right unless the
token is a multiple of 3; after one of the third, wrong. So the last token of a prompt chooses how its drafts fare."""


def _is_wrong_after(token: int) -> bool:
    return token in ACCEPT["none"] or (token in ACCEPT["mixed"] and token % 3 == 0)


@functools.cache
def markov_table() -> tuple[int, ...]:
    table = np.empty(VOCAB, int)
    for cycle in ACCEPT.values():
        order = np.random.default_rng(cycle.start).permutation(cycle)
        table[order] = np.roll(order, -1)
    return tuple(table.tolist())


@functools.cache
def markov(context_len: int = CONTEXT, eos_token_ids: tuple[int, ...] = ()):
    """M1: the next token is a function of the current one."""
    return markov_target(markov_table(), num_layers=1, context_len=context_len, eos_token_ids=eos_token_ids)


def markov_continuation(token: int, length: int) -> list[int]:
    """What M1 decodes greedily after `token`."""
    out = []
    for _ in range(length):
        token = markov_table()[token]
        out.append(token)
    return out


@functools.cache
def transformer(context_len: int = CONTEXT, eos_token_ids: tuple[int, ...] = ()):
    """M2: a random f32 transformer; misplaced or stale KV changes its text. Greedy, it soon loops (M3)."""
    return random_target(0, vocab_size=VOCAB, context_len=context_len, eos_token_ids=eos_token_ids)


def oracle_worker(width: int = 5):
    """Drafts M1's own continuation, made wrong after chosen tokens: the accept length of every verify is known in advance."""
    table = jnp.asarray(markov_table(), jnp.int32)
    wrong = jnp.asarray([_is_wrong_after(token) for token in range(VOCAB)])

    def propose(history, lens) -> Proposal:
        token = jnp.take_along_axis(history, jnp.maximum(lens - 1, 0)[:, None], axis=1)[:, 0]
        drafts = []
        for _ in range(width - 1):
            follows = table[token]
            drafts.append(jnp.where(wrong[token], (follows + 1) % VOCAB, follows))
            token = follows
        return Proposal(jnp.stack(drafts, axis=1), jnp.full_like(lens, width - 1))

    return chain("oracle", markov(), propose, verify_width=width)


def wrong_tokens() -> tuple[int, ...]:
    """Tokens after which the oracle's drafts are wrong."""
    return tuple(token for token in range(VOCAB) if _is_wrong_after(token))


def shadow_draft(target) -> DraftModel:
    """A draft that is the target itself, but never saw the first token: often right, sometimes wrong, and every KV entry of its pool counts."""
    facts = target.facts

    def forward(params, token_ids, hidden, batch, kv_pages, *, module=0):
        del hidden
        out = target.forward(params, dataclasses.replace(batch, input_ids=token_ids), kv_pages)
        return out.hidden, out.kv_pages

    return DraftModel(
        facts=DraftFacts(
            vocab_size=facts.vocab_size,
            draft_vocab_size=facts.vocab_size,
            hidden_size=facts.hidden_size,
            num_modules=1,
            capture_layers=(),
            context_len=facts.context_len,
            chained=False,
            kv_bytes_per_token=facts.kv_bytes_per_token,
        ),
        config=None,
        params=target.params,
        init_kv=target.init_kv,
        feature=lambda params, captured, hidden: hidden,
        forward=forward,
        logits=lambda params, hidden, *, module=0: target.logits(params, hidden),
        token_ids=lambda params, ids: ids,
        project_in=None,
        project_out=None,
    )


def oracle_accept_lens(token: int, num_tokens: int, width: int = 5) -> list[int]:
    """Accept lengths of the oracle worker after a prompt that ends with `token`, the last one cut at `num_tokens` emitted tokens."""
    out = markov_continuation(token, num_tokens + width)
    lens, emitted = [], 1
    while emitted < num_tokens:
        run = 1
        while run < width and not _is_wrong_after(out[emitted + run - 2]):
            run += 1
        run = min(run, num_tokens - emitted)
        lens.append(run)
        emitted += run
    return lens


def build(target, algorithm: str = "plain", worker=None, tokenizer=None, **settings) -> Engine:
    """A small engine that checks every invariant after every transition; one program of each kind unless `settings` ask for more."""
    defaults = dict(page_size=16, max_running=4, checked=True)
    if algorithm == "ngram":
        defaults["num_draft_tokens"] = 5
    settings = {**defaults, **settings}
    settings.setdefault("batch_buckets", (settings["max_running"],))
    # Whole batches of prompts at once, unless a test asks for chunks.
    most = settings.get("prefill_buckets", (4 * settings.get("context_len", target.facts.context_len),))[-1]
    settings.setdefault("max_prefill_tokens", most)
    settings.setdefault("prefill_buckets", (settings["max_prefill_tokens"],))
    settings.setdefault("mixed_batches", False)
    return Engine(EngineConfig(algorithm=algorithm, **settings), target=target, worker=worker, tokenizer=tokenizer)


def prompts_of(count: int, *, seed: int = 0, shortest: int = 1, longest: int = 40) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCAB, rng.integers(shortest, longest + 1)).tolist() for _ in range(count)]


@functools.cache
def _full_forward(forward, logits, init_kv, padded: int, init_recurrent=lambda num_rows, num_pages, page_size: ()):
    page_size = 16
    pages = -(-padded // page_size)

    @jax.jit
    def run(params, tokens, length):
        one, table = jnp.ones(1, jnp.int32), jnp.arange(1, pages + 1, dtype=jnp.int32)[None]
        batch, last = prefill_batch(tokens, one, one - 1, length[None], table, page_size=page_size)
        out = forward(params, batch, init_kv(pages, page_size), recurrent=init_recurrent(2, 0, page_size))
        return logits(params, out.hidden[last])[0]

    return run


def slow_greedy(target, prompt: list[int], num_tokens: int, stop=()) -> list[int]:
    """Greedy decoding that recomputes the whole sequence for every token: no cache, no engine."""
    padded = target.facts.context_len
    run = _full_forward(target.forward, target.logits, target.init_kv, padded, target.init_recurrent)
    sequence, out = list(prompt), []
    while len(out) < num_tokens and len(sequence) < padded:
        tokens = np.zeros(padded, np.int32)
        tokens[: len(sequence)] = sequence
        token = int(np.argmax(run(target.params, tokens, np.int32(len(sequence)))))
        sequence.append(token)
        out.append(token)
        if token in stop:
            break
    return out


@functools.cache
def transformer_continuation(prompt: tuple[int, ...], length: int = 24) -> list[int]:
    """What M2 decodes greedily after `prompt`, without any cache."""
    return slow_greedy(transformer(), list(prompt), length)


def assert_known_lens(worker, lens_of, *, overlap: bool, num_tokens: int = 24) -> None:
    """A worker of M1: drafts all right, all wrong, mixed, and all of these in one batch; `lens_of(last token, tokens)` says the accept length of every verify."""
    engine = build(markov(), worker=worker, page_size=4, overlap=overlap, max_running=8)
    for level in (*ACCEPT, "every"):
        prompts = prompts_of(6, seed=6)
        if level != "every":
            prompts = [[*prompt[:-1], ACCEPT[level][i]] for i, prompt in enumerate(prompts)]
        for prompt, output in zip(prompts, engine.generate(prompts, greedy(num_tokens)), strict=True):
            assert output.token_ids == markov_continuation(prompt[-1], num_tokens)
            assert output.accept_lens == lens_of(prompt[-1], num_tokens)
    assert_idle(engine)


def assert_schedules_change_nothing(worker) -> None:
    """A worker of M2: long prompts in chunks, running rows riding along, a pool too small for all, prompts with a common beginning."""
    shared = prompts_of(1, seed=77, shortest=24, longest=24)[0]
    prompts = [*prompts_of(5, seed=5, shortest=20), *[[*shared, i, i + 1] for i in range(4)]]
    sizes = {"page_size": 4, "max_running": 4, "kv_tokens": 160, "max_prefill_tokens": 16}
    engine = build(transformer(), worker=worker, mixed_batches=True, schedule_conservativeness=0.1, **sizes)
    outputs = engine.generate(prompts, greedy(24))
    assert [o.token_ids for o in outputs] == [transformer_continuation(tuple(prompt)) for prompt in prompts]
    assert sum(o.retractions for o in outputs) > 0 and sum(o.cached_tokens for o in outputs) > 0
    assert_idle(engine)


def assert_idle(engine: Engine) -> None:
    """O3: nothing held, nothing waiting, every page free or cached. At most the last launch, with rows of ended requests, is still to be settled."""
    while engine.has_work:
        assert not list(engine.step())
    state = engine.state
    assert not engine.has_work and not state.waiting and not state.launched
    assert int(state.ledger.num_free) + len(state.prefix_cache.pages) == state.ledger.free_pages.shape[0] - 1
    assert not state.ledger.page_locks.any()
    assert not state.requests.serial.any() and not state.ledger.kv_allocated_len.any()


def greedy(num_tokens: int, **kwargs) -> SamplingParams:
    return SamplingParams(max_new_tokens=num_tokens, **kwargs)


def mixed_params(max_new_tokens: int) -> list[SamplingParams]:
    """Greedy twice (`top_k=1` is), and every filter, each with a seed of its own."""
    sampled = (
        {"temperature": 1.0, "seed": 7},
        {"temperature": 1.0, "top_k": 1, "seed": 8},
        {"temperature": 5.0, "top_k": 2, "seed": 9},
        {"temperature": 0.8, "top_p": 0.3, "seed": 10},
        {"temperature": 0.7, "min_p": 0.2, "seed": 11},
    )
    return [SamplingParams(max_new_tokens=max_new_tokens, **given) for given in ({}, *sampled)]
