"""The drafts that come with jspec: small, licensed, recorded, and harmless on real prompts."""

import json

import pytest

from jspec import Engine, EngineConfig, SamplingParams
from jspec.bench.decode_compare import first_difference
from jspec.bench.fitting import fit_config
from jspec.bench.prompts import encode_prompt, load_prompt_sets
from jspec.models.loading import load_model, model_name
from jspec.models.shipped_drafts import FOLDER, SHIPPED, best_algorithm, find_draft

MAX_BYTES = 12e6


@pytest.mark.parametrize(("model", "algorithm"), SHIPPED)
def test_what_lies_beside_a_draft(model, algorithm):
    folder = find_draft(algorithm, model)
    prefix = "adapter_" if algorithm == "uno" else ""
    assert (folder / f"{prefix}model.safetensors").stat().st_size <= MAX_BYTES
    assert "Apache License" in (folder / "LICENSE").read_text("utf-8")
    record = json.loads((folder / "training.json").read_text("utf-8"))
    assert record["held_out"]["accept_len"] > 1.3 and record["tokens"] > 100_000 and record["sequences"] > 1000
    config = json.loads((folder / f"{prefix}config.json").read_text("utf-8"))
    if algorithm == "uno":
        assert config["base_model_name_or_path"] == model_name(model) == record["model"]
        assert config["uno_config"]["block_size"] == len(record["held_out"]["agree"]) + 1
        assert record["held_out"]["accept_len"] > 2.3  # two tokens are emitted whatever it drafts
    else:
        assert config["draft_vocab_size"] < 49152


def test_nothing_else_is_shipped():
    assert sorted(folder.name for folder in FOLDER.iterdir()) == sorted(SHIPPED.values())
    assert best_algorithm("smollm2") == "eagle3" and best_algorithm("some/path") == "ngram"


@pytest.fixture(scope="module")
def loaded():
    try:
        return load_model()
    except FileNotFoundError as error:
        pytest.skip(str(error))


def engine_of(loaded, prompts, **settings):
    config = EngineConfig(max_running=1, **settings)
    fitted = fit_config(config, [len(p) for p in prompts], max_new_tokens=64, model_context_len=8192)
    return Engine(fitted, target=loaded.target, tokenizer=loaded.tokenizer)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"algorithm": "eagle3"},
        {"algorithm": "eagle3", "num_steps": 4, "topk": 3, "num_draft_tokens": 8},
        {"algorithm": "multi-layer-eagle"},
        {"algorithm": "dflash"},
        {"algorithm": "dspark"},
        {"algorithm": "dspark", "ragged_verify": "compact"},
        {"algorithm": "frozen-kv-mtp"},
        {"algorithm": "uno"},
        {"algorithm": "uno", "topk": 3, "num_draft_tokens": 8},
    ],
    ids=["chain", "tree", "multi-layer", "dflash", "dspark", "dspark, compact", "frozen-kv", "uno", "uno tree"],
)
def test_fifty_real_prompts(loaded, settings):
    """Greedy on 25 prompts of MT-bench and 25 of HumanEval: plain's text, token for token, and more than a token a verify."""
    try:
        sets = load_prompt_sets(["mt-bench", "humaneval"], num_prompts=25)
    except ValueError as error:
        pytest.skip(str(error))
    prompts = [encode_prompt(loaded.tokenizer, text) for prompt_set in sets for text in prompt_set.texts]
    params = SamplingParams(max_new_tokens=64)
    plain = engine_of(loaded, prompts, algorithm="plain").generate(prompts, params)
    engine = engine_of(loaded, prompts, **settings)
    drafted = engine.generate(prompts, params)
    pairs = zip(prompts, plain, drafted, strict=True)
    found = [first_difference(loaded.target, i, p, a.token_ids, b.token_ids) for i, (p, a, b) in enumerate(pairs)]
    differences = [difference for difference in found if difference is not None]
    print(f"{len(differences)} near ties: {differences}")
    assert all(difference.near_tie for difference in differences) and len(differences) <= 1
    assert engine.summary().accept_length > (2.3 if settings["algorithm"] == "uno" else 1.4)
