"""Penalties, biases, bad words, log-probabilities, several answers: what each does, and that no algorithm does it otherwise."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from engine.kit import CONTEXT, VOCAB, _full_forward, assert_idle, build, greedy, prompts_of, shadow_draft, transformer
from engine.test_frozen_kv import often_right
from engine.test_uno import random_lora
from tokenizers import decoders, models

from jspec import SamplingParams
from jspec.config import MAX_BAD_WORD_LEN
from jspec.models.tiny_draft import random_draft
from jspec.models.tokenizer import Tokenizer
from jspec.spec_workers import EagleSizes, eagle, frozen_kv_mtp, multi_layer_eagle, ngram, plain, uno

TOKENS = 24


@functools.cache
def engine_of(name: str):
    target = transformer()
    shapes = {"chain": EagleSizes(num_steps=3), "tree": EagleSizes(num_steps=3, topk=2, num_draft_tokens=6)}
    worker = {
        "plain": lambda: plain(target),
        "ngram": lambda: ngram(target, num_draft_tokens=5, min_ngram=1),
        "chain": lambda: eagle(target, shadow_draft(target), sizes=shapes["chain"]),
        "tree": lambda: eagle(target, shadow_draft(target), sizes=shapes["tree"]),
        "multi-layer": lambda: multi_layer_eagle(target, random_draft(target, 3, kind="multi-layer")),
        "frozen-kv tree": lambda: frozen_kv_mtp(target, often_right(target), sizes=shapes["tree"]),
        "uno": lambda: uno(target, random_lora(target)),
        "uno tree": lambda: uno(target, random_lora(target), topk=2, num_draft_tokens=6),
    }[name]()
    return build(target, worker=worker, page_size=4, max_prefill_tokens=48, mixed_batches=True, tokenizer=letters())


SPECULATIVE = ["ngram", "chain", "tree", "multi-layer"]
SPECULATIVE += [pytest.param(name, marks=pytest.mark.slow) for name in ("frozen-kv tree", "uno", "uno tree")]
WORKERS = ["plain", *SPECULATIVE]


@functools.cache
def letters() -> Tokenizer:
    """A letter a token: `chr(48 + id)`; a space is token 16."""
    names = {chr(48 + i) if i != 16 else " ": i for i in range(VOCAB)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=names, merges=[], fuse_unk=False))
    backend.decoder = decoders.Fuse()
    return Tokenizer(backend=backend)


def model_logits(sequence) -> np.ndarray:
    """f32[V] after the sequence, from one forward over all of it."""
    target = transformer()
    run = _full_forward(target.forward, target.logits, target.init_kv, CONTEXT)
    padded = np.zeros(CONTEXT, np.int32)
    padded[: len(sequence)] = sequence
    return np.asarray(run(target.params, padded, np.int32(len(sequence))))


def penalised(logits, prompt, output, p: SamplingParams, bad=()):
    """The rules one token at a time, in plain Python: repetition, frequency and presence, bias, bad words, stops that come too early."""
    logits = logits.astype(np.float32).copy()
    for token in set(prompt) | set(output):
        penalty = np.float32(p.repetition_penalty)
        logits[token] = logits[token] / penalty if logits[token] > 0 else logits[token] * penalty
    for token in set(output):
        logits[token] -= np.float32(p.frequency_penalty) * output.count(token) + np.float32(p.presence_penalty)
    for token, bias in p.logit_bias.items():
        logits[token] += np.float32(bias)
    for word in bad:
        if output[len(output) - len(word) + 1 :] == list(word[:-1]) and len(output) >= len(word) - 1:
            logits[word[-1]] = -1e30
    if len(output) < p.min_new_tokens:
        logits[list(p.stop_token_ids)] = -1e30
    return logits


def slow(prompt, p: SamplingParams, bad=()) -> list[int]:
    out = []
    while len(out) < p.max_new_tokens:
        out.append(int(np.argmax(penalised(model_logits([*prompt, *out]), prompt, out, p, bad))))
        if out[-1] in p.stop_token_ids:
            break
    return out


CASES = {
    "repetition": {"repetition_penalty": 1.3},
    "repetition below 1": {"repetition_penalty": 0.8},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.7},
    "negative": {"presence_penalty": -0.4, "frequency_penalty": -0.2},
    "bias": {"logit_bias": {3: 4.0, 11: -5.0, 40: 2.5}},
    "all": {
        "repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.3, "logit_bias": {7: 1.5},
        "min_new_tokens": 10, "stop_token_ids": (1, 2, 5, 7),
    },
}  # fmt: skip


@functools.cache
def prompts():
    return prompts_of(len(CASES), seed=31, shortest=3, longest=30)


@functools.cache
def wanted():
    return {name: slow(prompts()[i], greedy(TOKENS, **case)) for i, (name, case) in enumerate(CASES.items())}


@pytest.mark.parametrize("worker", WORKERS)
def test_greedy_rules_equal_full_recompute(worker):
    """B29: all cases in one batch, beside a request that asks for nothing: every token is what the rules, applied one at a time, choose."""
    params = [greedy(TOKENS, **case) for case in CASES.values()]
    outputs = engine_of(worker).generate([*prompts(), prompts()[0]], [*params, greedy(TOKENS)])
    for name, output in zip(CASES, outputs, strict=False):
        assert output.token_ids == wanted()[name], name
    assert outputs[-1].token_ids == slow(prompts()[0], greedy(TOKENS))
    if worker in ("ngram", "chain", "tree"):
        assert any(length > 1 for output in outputs for length in output.accept_lens), "no draft was accepted"
    assert_idle(engine_of(worker))


def test_each_rule_changes_the_output():
    for i, name in enumerate(CASES):
        assert wanted()[name] != slow(prompts()[i], greedy(TOKENS)), name


@pytest.mark.parametrize("worker", SPECULATIVE)
def test_sampled_rules_equal_plain_decoding(worker):
    """With one seed, each rule under temperature and filters gives the tokens of plain decoding."""
    params = [
        SamplingParams(max_new_tokens=TOKENS, temperature=1.1, top_p=0.95, seed=i, **case)
        for i, case in enumerate(CASES.values())
    ]
    want, got = ([o.token_ids for o in engine_of(name).generate(prompts(), params)] for name in ("plain", worker))
    assert got == want


# --- bad words -------------------------------------------------------------------------------------------------------


def ids(text: str) -> list[int]:
    return letters().encode(text)


@pytest.mark.parametrize("worker", WORKERS)
def test_bad_words_do_not_come(worker):
    """Of what would be said, a token, a pair and a run of the longest kind are forbidden: the rest is as the rule chooses, at every place of a draft."""
    for i, prompt in enumerate(prompts()[:3]):
        free = slow(prompt, greedy(TOKENS))
        length = (1, 2, MAX_BAD_WORD_LEN - 1)[i]
        word = letters().decode(free[3 : 3 + length]).lstrip(" ") or "0"
        spelt = [ids(word), ids(" " + word)]
        params = greedy(TOKENS, bad_words=(word,))
        output = engine_of(worker).generate([prompt], params)[0]
        assert output.token_ids == slow(prompt, params, bad=spelt)
        assert word not in output.text and output.token_ids != free


def test_bad_words_that_cannot_be_kept_are_refused():
    engine = engine_of("plain")
    with pytest.raises(ValueError, match=r"bad_words holds 'abcdefgh', which is 8 tokens; at most 6"):
        engine.submit([1], greedy(3, bad_words=("abcdefgh",)))
    with pytest.raises(ValueError, match="bad_words are 20 token sequences"):
        engine.submit([1], greedy(3, bad_words=tuple("0123456789")))
    with pytest.raises(ValueError, match="needs a tokenizer"):
        build(transformer(), "plain", max_running=1).submit([1], greedy(3, bad_words=("a",)))
    with pytest.raises(ValueError, match=r"logit_bias names token id 64, outside the model's vocabulary \[0, 64\)"):
        engine.submit([1], greedy(3, logit_bias={64: 1.0}))
    assert_idle(engine)


# --- log-probabilities ------------------------------------------------------------------------------------------------


def expect_logprobs(found, sequence, token, num_top):
    logprobs = np.asarray(jax.nn.log_softmax(jnp.asarray(model_logits(sequence))))
    assert found.token_id == token and found.logprob == pytest.approx(float(logprobs[token]), abs=1e-4)
    best = np.argsort(-logprobs, kind="stable")[:num_top]
    assert list(found.top.values()) == pytest.approx(logprobs[best].tolist(), abs=1e-4)
    assert len(found.top) == num_top and list(found.top) == best.tolist()


@pytest.mark.parametrize("worker", WORKERS)
def test_logprobs_of_output_and_prompt(worker):
    """B42: the model's own, whatever penalties and temperature do to the choice; chunks, tails and neighbours that do not ask change nothing."""
    params = [
        greedy(10, logprobs=3),
        SamplingParams(max_new_tokens=10, temperature=2.0, seed=5, logprobs=0, presence_penalty=2.0),
        greedy(10),
        greedy(4, prompt_logprobs=2),
        greedy(4, logprobs=20, prompt_logprobs=0, stop_token_ids=(9,)),
    ]
    asked = prompts_of(len(params), seed=32, shortest=20, longest=70)
    for _ in range(2):  # the second time with a warm cache
        outputs = engine_of(worker).generate(asked, params)
        for prompt, p, output in zip(asked, params, outputs, strict=True):
            assert (output.logprobs is None) == (p.logprobs is None)
            assert (output.prompt_logprobs is None) == (p.prompt_logprobs is None)
            if output.logprobs is not None:
                assert len(output.logprobs) == len(output.token_ids)
                for i, found in enumerate(output.logprobs):
                    expect_logprobs(found, [*prompt, *output.token_ids[:i]], output.token_ids[i], p.logprobs)
            if output.prompt_logprobs is not None:
                assert output.prompt_logprobs[0] is None and len(output.prompt_logprobs) == len(prompt)
                for i in range(1, len(prompt), 5):
                    expect_logprobs(output.prompt_logprobs[i], prompt[:i], prompt[i], p.prompt_logprobs)


def test_prompt_logprobs_survive_a_retraction():
    """A request is taken off its row in the middle of its prompt, and computed from the start again: no token is told of twice, or wrongly."""
    engine = engine_of("chain")
    engine.reset_summary()
    prompt = prompts_of(1, seed=34, shortest=110, longest=110)[0]
    low = engine.submit(prompt, greedy(3, prompt_logprobs=1, logprobs=0))
    engine.step()
    engine.submit(prompts()[0], greedy(3, priority=1))
    outputs = {}
    while engine.has_work:
        outputs.update({e.rid: e.output for e in engine.step() if e.output is not None})
    assert engine.summary().retractions == 1 and outputs[low].retractions == 1
    found = outputs[low].prompt_logprobs
    assert len(found) == len(prompt) and [x.token_id for x in found[1:]] == prompt[1:]
    for i in range(1, len(prompt), 7):
        expect_logprobs(found[i], prompt[:i], prompt[i], 1)


def test_logprobs_end_where_the_output_does():
    """A stop inside an accepted run: as many log-probabilities as tokens, in the result and in the stream."""
    engine = engine_of("chain")
    prompt = prompts()[1]
    free = slow(prompt, greedy(TOKENS))
    for place in range(1, 8):
        stop = free[place]
        params = greedy(TOKENS, logprobs=1, stop_token_ids=(stop,))
        emissions = list(engine.generate([prompt], params, stream=True))
        output = emissions[-1].output
        assert output.token_ids == free[: free.index(stop) + 1]
        assert [x.token_id for x in output.logprobs] == output.token_ids
        assert [x for e in emissions for x in e.logprobs or []] == output.logprobs


# --- several answers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("worker", ["plain", "chain"])
def test_n_answers(worker):
    """B78: each is what a request with its own seed says; they come together, in order, and share the prompt's KV."""
    engine = engine_of(worker)
    prompt = prompts_of(1, seed=33, shortest=40, longest=40)[0]
    params = SamplingParams(max_new_tokens=8, temperature=1.5, seed=100)
    each = [SamplingParams(max_new_tokens=8, temperature=1.5, seed=100 + i) for i in range(3)]
    alone = [engine.generate([prompt], p)[0].token_ids for p in each]
    several = SamplingParams(max_new_tokens=8, temperature=1.5, seed=100, n=3)
    outputs = engine.generate([prompt, prompt[:5]], [several, params])
    assert [(o.index, o.token_ids) for o in outputs[:3]] == list(enumerate(alone)) and len({*map(tuple, alone)}) == 3
    assert len(outputs) == 4 and len({o.rid for o in outputs[:3]}) == 1
    assert all(o.cached_tokens == 36 for o in outputs[:3])
    rid = engine.submit(prompt, several)
    assert engine.abort(rid) and not engine.abort(rid)
    ended = [e.output for e in engine.step() if e.output is not None]
    assert sorted(o.index for o in ended) == [0, 1, 2] and {o.finish_reason for o in ended} == {"abort"}
    assert_idle(engine)


# --- text as it comes ---------------------------------------------------------------------------------------------------


def test_streamed_text_joins_to_the_text():
    """Pieces never hold what a stop string takes back, and join to the text, whether or not anybody looked at all of them."""
    engine = engine_of("chain")
    prompt = prompts()[2]
    free = letters().decode(slow(prompt, greedy(TOKENS)))
    for stop in ((), (free[9:12],), (free[4:9], "zzz")):
        emissions = list(engine.generate([prompt], greedy(TOKENS, stop=stop), stream=True))
        output = emissions[-1].output
        assert "".join(e.text for e in emissions) == output.text == (free.split(stop[0])[0] if stop else free)
    engine.submit(prompt, greedy(TOKENS))
    engine.step(), engine.step(), engine.step()
    engine.step()
    rest = []
    while engine.has_work:
        rest += engine.step()
    assert "".join(e.text for e in rest) == rest[-1].output.text == free
