"""Output that follows a grammar: with every algorithm the tokens of plain decoding, which may choose only what the grammar allows."""

import functools
import json
import re
import string

import llguidance
import numpy as np
import pytest
import tokenizers
from engine.kit import CONTEXT, VOCAB, _full_forward, assert_idle, build, greedy, prompts_of, shadow_draft, transformer
from engine.test_frozen_kv import often_right
from engine.test_uno import random_lora
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask
from tokenizers import decoders, models, pre_tokenizers

from jspec import SamplingParams
from jspec.models.tokenizer import Tokenizer
from jspec.spec_workers import EagleSizes, eagle, frozen_kv_mtp, ngram, plain, uno

TEXTS = [*string.digits, *string.ascii_lowercase, *'{}[]":,-._', *"ABCDEFGHIJKLMNOPQ", "<eos>"]
EOS = TEXTS.index("<eos>")
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "n": {"type": "integer", "minimum": 0, "maximum": 999}},
    "required": ["ok", "n"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
GRAMMARS = {
    "json": {"json_schema": SCHEMA},
    "regex": {"regex": "[a-f]{2,9}-[0-9]{3}"},
    "gbnf": {"ebnf": 'root ::= pair ("," pair){1,3}\npair ::= [a-c]+ ":" [0-9]'},
}


@functools.cache
def letters() -> Tokenizer:
    """A character a token, and an end-of-sequence token."""
    backend = tokenizers.Tokenizer(models.BPE(vocab={text: i for i, text in enumerate(TEXTS)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<eos>"])
    return Tokenizer(backend=backend, eos_token_ids=(EOS,))


WORKERS = {
    "plain": plain,
    "ngram": lambda target: ngram(target, num_draft_tokens=4, min_ngram=1),
    "chain": lambda target: eagle(target, shadow_draft(target), sizes=EagleSizes(num_steps=3)),
    "tree": lambda target: eagle(
        target, shadow_draft(target), sizes=EagleSizes(num_steps=3, topk=2, num_draft_tokens=6)
    ),
    "frozen-kv": lambda target: frozen_kv_mtp(target, often_right(target)),
    "uno": lambda target: uno(target, random_lora(target)),
    "uno tree": lambda target: uno(target, random_lora(target), topk=2, num_draft_tokens=6),
}


def target():
    return transformer(eos_token_ids=(EOS,))


@functools.cache
def engine_of(worker: str, **settings):
    sizes = {"page_size": 4, "max_prefill_tokens": 32, "structured_output": True, "mixed_batches": True, **settings}
    return build(target(), worker=WORKERS[worker](target()), tokenizer=letters(), **sizes)


def slow(prompt, params: SamplingParams) -> list[int]:
    """One token at a time, without a cache: the best of those the grammar allows."""
    ((field, text),) = ((k, v) for k in ("json_schema", "regex", "ebnf") if (v := getattr(params, k)) is not None)
    grammar = llguidance.grammar_from(field, text if isinstance(text, str) else json.dumps(text))
    matcher = llguidance.LLMatcher(
        llguidance.LLTokenizer(letters().backend.to_str(), n_vocab=VOCAB, eos_token=EOS), grammar
    )
    run, out = _full_forward(target().forward, target().logits, target().init_kv, CONTEXT), []
    while len(out) < params.max_new_tokens and EOS not in out:
        padded = np.zeros(CONTEXT, np.int32)
        padded[: len(prompt) + len(out)] = [*prompt, *out]
        logits = np.array(run(target().params, padded, np.int32(len(prompt) + len(out))))
        mask = allocate_token_bitmask(1, VOCAB)
        fill_next_token_bitmask(matcher, mask)
        allowed = np.unpackbits(mask.view(np.uint8), bitorder="little")[:VOCAB].astype(bool)
        out.append(int(np.argmax(np.where(allowed, logits, -np.inf))))
        assert matcher.consume_token(out[-1])
    return out


def check(name: str, text: str) -> None:
    if name == "json":
        found = json.loads(text)
        assert set(found) == {"ok", "n"} and isinstance(found["ok"], bool) and 0 <= found["n"] <= 999
    elif name == "regex":
        assert re.fullmatch(GRAMMARS["regex"]["regex"], text)
    else:
        assert re.fullmatch(r"[a-c]+:[0-9](,[a-c]+:[0-9]){1,3}", text)


@functools.cache
def asked():
    """Prompts and parameters: each grammar, and a neighbour without one."""
    prompts = prompts_of(4, seed=40, shortest=3, longest=40)
    return prompts, [*(greedy(40, **given) for given in GRAMMARS.values()), greedy(40)]


@functools.cache
def wanted():
    prompts, params = asked()
    return [slow(prompt, p) for prompt, p in zip(prompts[:3], params, strict=False)]


def each(*names: str, slow: tuple[str, ...]):
    return [*names, *(pytest.param(name, marks=pytest.mark.slow) for name in slow)]


OTHERS = ("frozen-kv", "uno", "uno tree")


@pytest.mark.parametrize("worker", each("plain", "chain", slow=("ngram", "tree", *OTHERS)))
def test_greedy_output_follows_its_grammar(worker):
    """B43, B44: JSON schema, regular expression and GBNF in one batch, beside a request without: token for token what masking one token at a time gives."""
    prompts, params = asked()
    outputs = engine_of(worker).generate(prompts, params)
    for name, want, output in zip(GRAMMARS, wanted(), outputs, strict=False):
        assert output.token_ids == want, name
        if output.finish_reason == "stop":
            check(name, output.text)
    assert any(output.finish_reason == "stop" for output in outputs[:3])
    free = engine_of("plain").generate([prompts[3]], greedy(40))[0]
    assert outputs[3].token_ids == free.token_ids
    if worker != "plain":
        assert any(length > 1 for output in outputs[:3] for length in output.accept_lens), "no draft was accepted"
    assert_idle(engine_of(worker))


@pytest.mark.parametrize("worker", each("chain", slow=("ngram", "tree", *OTHERS)))
def test_sampled_output_follows_its_grammar(worker):
    prompts, _ = asked()
    sampled = [
        SamplingParams(max_new_tokens=40, temperature=1.5, top_p=0.9, seed=i, **given)
        for i, given in enumerate(GRAMMARS.values())
    ]
    want, got = (engine_of(name).generate(prompts[:3], sampled) for name in ("plain", worker))
    assert [o.token_ids for o in got] == [o.token_ids for o in want]
    for name, output in zip(GRAMMARS, got, strict=True):
        if output.finish_reason == "stop":
            check(name, output.text)


@pytest.mark.parametrize("worker", each("ngram", slow=("chain", "tree", *OTHERS)))
def test_a_retracted_request_goes_on_with_its_grammar(worker):
    """Steps under way are thrown away and done again: the grammar follows the tokens, not the steps."""
    engine = engine_of(worker, kv_tokens=120, schedule_conservativeness=0.01)
    engine.reset_summary()
    prompts = prompts_of(8, seed=41, shortest=2, longest=8)
    params = greedy(40, regex="([a-f]{5}-){6}[0-9]{3}")
    outputs = engine.generate(prompts, params)
    assert engine.summary().retractions > 0
    assert [o.token_ids for o in outputs] == [slow(prompt, params) for prompt in prompts]
    assert all(re.fullmatch(params.regex, o.text) and o.finish_reason == "stop" for o in outputs)
    assert_idle(engine)


def test_what_cannot_be_followed_is_refused():
    """Before anything is queued, with the field and the way out; the engine goes on."""
    engine = engine_of("plain")
    for given, message in (
        ({"regex": "[a-"}, "regex is no grammar that can be followed"),
        ({"json_schema": "{not json"}, "json_schema is no grammar"),
        ({"ebnf": "root = ="}, "ebnf is no grammar"),
    ):
        with pytest.raises(ValueError, match=message):
            engine.submit([1, 2], greedy(4, **given))
    with pytest.raises(ValueError, match=r"regex needs EngineConfig.structured_output=True"):
        build(target(), "plain", max_running=1, tokenizer=letters()).submit([1], greedy(4, regex="a"))
    with pytest.raises(ValueError, match="json_schema and regex are given"):
        greedy(4, regex="a", json_schema={})
    with pytest.raises(ValueError, match="regex needs ignore_eos=False"):
        greedy(4, regex="a", ignore_eos=True)
    with pytest.raises(ValueError, match="needs a tokenizer"):
        build(target(), "plain", structured_output=True)
    with pytest.raises(ValueError, match="end-of-sequence"):
        build(transformer(), "plain", structured_output=True, tokenizer=letters())
    assert_idle(engine)
