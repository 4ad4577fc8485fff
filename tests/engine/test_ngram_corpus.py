"""Drafts from a corpus on the host: plain decoding's tokens, whatever it proposes; and what it learns of whom."""

import functools
import json

import numpy as np
import pytest
from engine.kit import (
    ACCEPT,
    CONTEXT,
    VOCAB,
    assert_idle,
    assert_schedules_change_nothing,
    build,
    greedy,
    markov,
    markov_continuation,
    mixed_params,
    prompts_of,
    transformer,
    transformer_continuation,
)
from typer.testing import CliRunner

from jspec import Engine, EngineConfig
from jspec.bench.host_probe import counted_traffic
from jspec.cli import app
from jspec.corpus import empty_trie, trie
from jspec.spec_workers import VerifyKind, build_worker, ngram_corpus
from jspec.spec_workers.base import HostLaunch, HostOutcome
from jspec.spec_workers.ngram_corpus import WINDOWS, corpus_side

TOKENS, WIDTH = 24, 5


@functools.cache
def misled():
    """A worker of M2 whose external corpus is right in the beginning, wrong from there on, and never silent."""
    documents = [[*transformer_continuation(tuple(prompt))[:9], *prompt] for prompt in prompts_of(8, seed=8)]
    return ngram_corpus(transformer(), num_draft_tokens=WIDTH, min_ngram=1, documents=documents)


@pytest.mark.parametrize(
    ("page_size", "overlap"),
    [
        (1, True),
        *[
            pytest.param(page_size, overlap, marks=pytest.mark.slow)
            for page_size in (1, 4, 16, 64)
            for overlap in (True, False)
            if (page_size, overlap) != (1, True)
        ],
    ],
)
def test_greedy_equals_full_recompute(page_size, overlap):
    """Each batch twice: the second time the corpus knows all of it."""
    engine = build(transformer(), worker=misled(), page_size=page_size, overlap=overlap, max_running=8)
    for count in (1, 3, 8):
        prompts = prompts_of(count, seed=count)
        for again in (False, True):
            for prompt, output in zip(prompts, engine.generate(prompts, greedy(TOKENS)), strict=True):
                assert output.token_ids == transformer_continuation(tuple(prompt))
                assert len(output.token_ids) == 1 + sum(output.accept_lens)
                assert not again or len(output.accept_lens) <= TOKENS // 2
        assert_idle(engine)
    assert engine.summary().compiles_after_warmup == 0


def test_schedules_change_nothing():
    assert_schedules_change_nothing(misled())


def test_sampled_equals_plain_decoding():
    """Twice: what was sampled the first time is drafted the second time, and the tokens are those of the seeds."""
    params = mixed_params(TOKENS)
    prompts = prompts_of(len(params), seed=5, shortest=4)
    engine = build(transformer(), "plain", overlap=False, page_size=1, max_running=1)
    alone = [engine.generate([prompt], param)[0].token_ids for prompt, param in zip(prompts, params, strict=True)]
    engine = build(transformer(), worker=misled(), page_size=1, max_running=8)
    lens = []
    for shift in (0, 2):
        order = np.roll(np.arange(len(params)), shift).tolist()
        outputs = engine.generate([prompts[i] for i in order], [params[i] for i in order])
        assert [o.token_ids for o in outputs] == [alone[i] for i in order]
        lens.append([len(o.accept_lens) for o in outputs])
    assert sum(lens[1]) < sum(lens[0]) / 2
    assert_idle(engine)


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no-overlap"])
def test_what_ended_is_drafted_when_it_comes_again(overlap):
    """M1 goes through cycles of 21 or 22 tokens: nothing to draft in 16 of them, the first time. A row that comes after another knows what that said when it
    ended, and nothing of what it was about to say."""
    engine = build(markov(), worker=ngram_corpus(markov(), num_draft_tokens=WIDTH), overlap=overlap, max_running=2)
    begins = {name: [cycle[0], *markov_continuation(cycle[0], 1)] for name, cycle in ACCEPT.items()}
    for name, count, lens in (
        ("all", 16, [1] * 15),
        ("all", 16, [5, 5, 5]),
        ("all", 21, [5, 5, 5, *[1] * 5]),  # nobody said what comes after these
        ("all", 21, [5, 5, 5, 5]),
        ("mixed", 2, [1]),
        ("none", 16, [1] * 15),
        ("mixed", 16, [2, *[1] * 13]),
    ):
        (output,) = engine.generate([begins[name]], greedy(count))
        assert output.token_ids == markov_continuation(begins[name][-1], count)
        assert output.accept_lens == lens, name
    assert_idle(engine)


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no-overlap"])
def test_an_external_corpus_is_drafted_from_the_start(overlap, tmp_path):
    """Built by name: options and file arrive."""
    path, document = tmp_path / "corpus.jsonl", markov_continuation(ACCEPT["all"][0], 21) * 2
    path.write_text(json.dumps(document))
    options = {"corpus": str(path), "corpus_share": 2, "num_draft_tokens": WIDTH}
    engine = build(markov(), "ngram-corpus", overlap=overlap, max_running=2, **options)
    facts = engine.worker
    assert (facts.verify_width, facts.output_stride, facts.alloc_len) == (WIDTH, WIDTH, WIDTH)
    assert (facts.verify_kind, facts.depths, facts.num_non_draft_tokens) == (VerifyKind.TREE, (WIDTH - 1,), 1)
    (output,) = engine.generate([document[:2]], greedy(16))
    assert output.token_ids == document[2:18] and output.accept_lens == [5, 5, 5]


def launch_of(texts):
    rows = np.arange(1, len(texts) + 1, dtype=np.int32)
    return HostLaunch(rows, rows, lambda row: np.asarray(texts[row - 1], np.int32))


def outcome_of(texts, *, live, finished):
    rows = np.arange(1, len(texts) + 1, dtype=np.int32)
    ones, words = np.ones_like(rows), np.zeros((len(rows), 0), np.int32)

    def tokens_of(row):
        assert live[row - 1], "a row of somebody else was read"
        return np.asarray(texts[row - 1], np.int32)

    return HostOutcome(rows, rows, np.asarray(live), np.asarray(finished), ones, words, tokens_of)


def test_words_of_a_launch():
    """Settled length, then tokens and parents; the state is what ended, and an old one stays what it was."""
    side = corpus_side(empty_trie(), None, shortest=2, window=2, share=0)
    begin = side.init(3)
    texts = [[1, 2, 3, 4], [5, 6, 7], [8, 9, 8, 9]]
    outcome = outcome_of(texts, live=[True, True, False], finished=[True, False, True])
    after = side.observe(begin, outcome)
    assert trie.find(after, (2, 3, 4)) and not trie.find(after, (5,)) and not trie.find(after, (8,))
    words, of_batch = side.inputs(after, launch_of([[9, 1, 2], [6, 7], [1, 2, 3]]))
    assert words.dtype == np.int32 and words.shape == (3, side.row_words) and not of_batch.size
    nothing = [-1] * (WINDOWS * 2)
    assert words[0].tolist() == [3, 3, 4, *nothing[2:], 0, 1, 0, 0, 0, 0]
    assert words[1].tolist() == [2, *nothing, *[0] * 6]
    assert words[2].tolist() == [3, 4, *nothing[1:], *[0] * 6]
    words, _ = side.inputs(begin, launch_of([[9, 1, 2]]))
    assert words[0].tolist() == [3, *nothing, *[0] * 6]


def test_one_dispatch_one_upload_one_download():
    """Bytes are those of rows, runs and words, not of context."""
    costs, worker = [], ngram_corpus(markov(), num_draft_tokens=WIDTH, documents=prompts_of(3))
    for context_len in (64, CONTEXT):
        engine = build(markov(), worker=worker, context_len=context_len, max_running=2)
        for prompt in prompts_of(2, seed=1):
            engine.submit(prompt[:20], greedy(20))
        with counted_traffic(engine) as traffic:
            while engine.has_work:
                engine.step()
        costs.append(traffic.per_launch())
        assert engine.summary().compiles_after_warmup == 0
    assert costs[0] == costs[1]
    assert (costs[0]["dispatches"], costs[0]["uploads"], costs[0]["downloads"]) == (1, 1, 1)
    assert costs[0]["download_bytes"] == 2 * (3 + WIDTH) * 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_draft_tokens": 1}, "num_draft_tokens=1 must be at least 2.* use algorithm 'plain'"),
        ({"corpus": "CORPUS", "corpus_share": 8}, r"corpus_share=8 must lie in \[0, 7\]"),
        ({"corpus": "CORPUS", "corpus_share": 3, "num_draft_tokens": 3}, r"corpus_share=3 must lie in \[0, 2\]"),
        ({"corpus_share": 2}, "corpus_share=2 means nothing without a corpus"),
        ({"corpus": "CORPUS", "algorithm": "ngram"}, "corpus=.* means nothing to algorithm='ngram'.*'ngram-corpus'"),
        ({"corpus": "EMPTY"}, "holds no tokens: fill it, or leave corpus out"),
        ({"corpus": "WIDE"}, rf"line 2: id {VOCAB} must lie in \[0, {VOCAB}\)"),
        ({"corpus": "TEXT"}, "is text, but there is no tokenizer"),
    ],
)
def test_what_does_not_fit_is_refused(options, message, tmp_path):
    for name, content in {"CORPUS": "[1, 2]", "EMPTY": "\n", "WIDE": f"[1]\n[2, {VOCAB}]", "TEXT": "hello"}.items():
        path = tmp_path / (f"{name}.txt" if name == "TEXT" else f"{name}.jsonl")
        path.write_text(content)
        if options.get("corpus") == name:
            options = {**options, "corpus": str(path)}
    with pytest.raises(ValueError, match=message):
        build_worker(markov(), EngineConfig(**{"algorithm": "ngram-corpus", **options}))


def test_a_missing_file_is_found_before_anything_is_loaded():
    config = EngineConfig(algorithm="ngram-corpus", corpus="/no/such/file.txt", model="/no/such/model")
    with pytest.raises(FileNotFoundError, match=r"corpus='/no/such/file\.txt' is no file"):
        Engine(config)
    run = CliRunner().invoke(
        app, ["generate", "--algorithm", "ngram-corpus", "--corpus", "/no/such/file.txt", "--prompt", "a"]
    )
    assert run.exit_code == 2 and "corpus='/no/such/file.txt' is no file" in run.stderr


def test_sizes_of_matches():
    for options, message in (
        ({"min_ngram": 0}, "min_ngram=0 and max_ngram=4 must satisfy"),
        ({"min_ngram": 3, "max_ngram": 2}, "min_ngram=3 and max_ngram=2 must satisfy"),
        ({"min_ngram": 4, "max_trie_depth": 3}, "max_trie_depth=3 must be at least min_ngram=4"),
    ):
        with pytest.raises(ValueError, match=message):
            ngram_corpus(markov(), **options)


def test_text_is_read_with_the_models_tokenizer(tmp_path):
    class Letters:
        def encode(self, text, *, add_special_tokens):
            assert not add_special_tokens
            return [ord(c) - ord("a") for c in text]

    path = tmp_path / "corpus.txt"
    path.write_text("abcdef\nxyz\n")
    config = EngineConfig(algorithm="ngram-corpus", corpus=str(path), num_draft_tokens=3)
    worker = build_worker(markov(), config, Letters())
    words, _ = worker.host.inputs(worker.host.init(2), launch_of([[0, 1, 2], [23, 24]]))
    assert words[:, :4].tolist() == [[3, 3, 4, 5], [2, 25, -1, -1]]
