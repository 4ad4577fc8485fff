"""The engine on the Pallas kernels, in the TPU interpreter, where races are reported: the same tokens as with XLA's."""

import pytest
from engine.kit import build, greedy
from engine.test_frozen_kv import random_assistant
from engine.test_uno import random_lora

from jspec.models.tiny import random_target
from jspec.models.tiny_draft import random_draft
from jspec.spec_workers import EagleSizes, eagle, frozen_kv_mtp, multi_layer_eagle, uno

OPTIONS = dict(vocab_size=64, context_len=32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=64)

WORKERS = {
    "plain": None,
    "ngram": None,
    "eagle3 chain": lambda target: eagle(target, random_draft(target, 1, head_dim=64), sizes=EagleSizes(num_steps=2)),
    "eagle3 tree": lambda target: eagle(
        target, random_draft(target, 1, head_dim=64), sizes=EagleSizes(num_steps=2, topk=2, num_draft_tokens=5)
    ),
    "multi-layer": lambda target: multi_layer_eagle(
        target, random_draft(target, 1, kind="multi-layer", num_modules=2, head_dim=64)
    ),
    "frozen-kv": lambda target: frozen_kv_mtp(target, random_assistant(target), sizes=EagleSizes(num_steps=2)),
    "frozen-kv tree": lambda target: frozen_kv_mtp(
        target, random_assistant(target), sizes=EagleSizes(num_steps=2, topk=4, num_draft_tokens=3)
    ),
    "uno": lambda target: uno(target, random_lora(target)),
    "uno tree": lambda target: uno(target, random_lora(target), topk=2, num_draft_tokens=6),
}


@pytest.mark.parametrize(
    "name", [name if name == "eagle3 tree" else pytest.param(name, marks=pytest.mark.slow) for name in WORKERS]
)
def test_the_same_tokens_as_with_xla(capfd, name):
    tokens = {}
    for kernels in ("xla", "pallas_interpret"):
        target = random_target(1, kernels=kernels, **OPTIONS)
        make = WORKERS[name]
        chosen = {"worker": make(target)} if make else {}
        engine = build(target, name, max_running=2, page_size=8, batch_buckets=(2,), prefill_buckets=(32,), **chosen)
        outputs = engine.generate([[1, 2, 3], [4] * 9], greedy(4))
        tokens[kernels] = [output.token_ids for output in outputs]
    assert tokens["xla"] == tokens["pallas_interpret"]
    assert "RACE DETECTED" not in "".join(capfd.readouterr())


def test_a_page_size_it_cannot_take_is_refused_at_start_up():
    with pytest.raises(ValueError, match="page_size=12"):
        build(random_target(1, kernels="pallas_interpret", **OPTIONS), "ngram", page_size=12)


def test_the_engine_runs_what_its_target_was_built_with():
    with pytest.raises(ValueError, match="kernels='pallas_interpret', but the given target runs 'xla'"):
        build(random_target(1, **OPTIONS), "plain", kernels="pallas_interpret")
