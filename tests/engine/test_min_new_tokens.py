"""No end before `min_new_tokens`: with every algorithm the tokens of plain decoding, which cannot choose what would end it."""

import numpy as np
import pytest
import tokenizers
from engine.kit import VOCAB, assert_idle, build, markov, markov_table, oracle_worker, shadow_draft, transformer
from tokenizers import decoders, models

from jspec import SamplingParams
from jspec.models.tokenizer import Tokenizer
from jspec.spec_workers import EagleSizes, eagle


def expected(start, eos, minimum, length):
    """M1 from `start`: the table's token, or while it is banned the lowest id that is not (all others have the same logit)."""
    out, token = [], start
    while len(out) < length:
        token = markov_table()[token]
        if token == eos and len(out) < minimum:
            token = 0 if eos != 0 else 1
        out.append(token)
        if token == eos:
            break
    return out


@pytest.mark.parametrize("overlap", [True, False])
def test_b26_no_end_before_the_minimum(overlap):
    """B26: the model says EOS at index 3; with every minimum the first EOS is where plain decoding has it; neighbours without a minimum end at 3."""
    engine = build(markov(), worker=oracle_worker(), max_running=4, overlap=overlap)
    for start in (2, 25, 45):
        eos = expected(start, -1, 0, 4)[3]
        engine.target = markov()._replace(facts=markov(eos_token_ids=(eos,)).facts)
        minima = [0, 1, 3, 4, 5, 6, 9, 12]
        params = [SamplingParams(max_new_tokens=14, min_new_tokens=minimum) for minimum in minima]
        outputs = engine.generate([[start]] * len(minima), params)
        for minimum, output in zip(minima, outputs, strict=True):
            want = expected(start, eos, minimum, 14)
            assert output.token_ids == want, (start, minimum)
            assert output.finish_reason == ("stop" if want[-1] == eos else "length")
            assert output.token_ids.index(eos) >= max(3, minimum) if eos in output.token_ids else True
    assert_idle(engine)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("rejection", [False, True])
def test_chains_and_trees_keep_the_ban_along_their_paths(temperature, rejection):
    """Half of the vocabulary would end the request: whatever is drafted, nothing of it is chosen before its time."""
    stops = tuple(range(0, 16, 2))
    params = SamplingParams(
        max_new_tokens=20, min_new_tokens=9, stop_token_ids=stops, temperature=temperature, seed=4, top_k=30
    )
    prompts = [[1, 2, 3], [9], [4] * 7]
    plain = [o.token_ids for o in build(transformer(), "plain", max_running=2).generate(prompts, params)]
    sizes = (
        [EagleSizes(num_steps=3)]
        if rejection
        else [EagleSizes(num_steps=3), EagleSizes(num_steps=3, topk=2, num_draft_tokens=6)]
    )
    for size in sizes:
        worker = eagle(transformer(), shadow_draft(transformer()), sizes=size, rejection_sampling=rejection)
        outputs = build(transformer(), worker=worker, max_running=2).generate(prompts, params)
        for output, want in zip(outputs, plain, strict=True):
            assert not np.isin(output.token_ids[:9], stops).any()
            assert (output.finish_reason == "stop" and output.token_ids[-1] in stops) or len(output.token_ids) == 20
            if not (rejection and temperature):
                assert output.token_ids == want


def test_a_stop_string_before_the_minimum_is_text():
    backend = tokenizers.Tokenizer(models.WordLevel({f"{i:02d}.": i for i in range(VOCAB)}, unk_token="00."))
    backend.decoder = decoders.Fuse()
    engine = build(markov(), worker=oracle_worker(), max_running=1)
    engine.tokenizer = Tokenizer(backend=backend)
    first = expected(2, -1, 0, 12)
    stop = (f"{first[2]:02d}", f"{first[6]:02d}")
    (output,) = engine.generate([[2]], SamplingParams(max_new_tokens=12, min_new_tokens=4, stop=stop))
    assert output.token_ids == first[:7] and output.finish_reason == "stop"
    assert output.text == "".join(f"{t:02d}." for t in first[:6])


def test_a_minimum_above_the_maximum_is_refused():
    with pytest.raises(ValueError, match=r"min_new_tokens=9 must lie in \[0, 8\]: max_new_tokens comes first"):
        SamplingParams(max_new_tokens=8, min_new_tokens=9)
