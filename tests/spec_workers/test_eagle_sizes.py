"""How wide and deep a draft may be, and which options which algorithm heeds."""

import pytest
from engine.kit import markov, markov_table, transformer

from jspec import EngineConfig
from jspec.models.eagle_files import save_draft
from jspec.models.tiny_draft import markov_draft, random_draft
from jspec.spec_workers import (
    ALGORITHMS,
    EagleSizes,
    VerifyKind,
    build_worker,
    check_algorithm,
    eagle,
    for_algorithm,
    multi_layer_eagle,
)


@pytest.mark.parametrize(
    ("given", "width", "alloc_len", "depths"),
    [
        ({}, 4, 4, (3,)),
        ({"num_steps": 1}, 2, 2, (1,)),
        ({"num_steps": 31}, 32, 32, (31,)),
        ({"num_steps": 3, "topk": 1, "num_draft_tokens": 4}, 4, 4, (3,)),
        ({"num_steps": 3, "topk": 4}, 8, 8, (3,)),
        ({"num_steps": 5, "topk": 4, "num_draft_tokens": 8}, 8, 16, (5,)),
        ({"num_steps": 1, "topk": 3}, 4, 4, (1,)),
        ({"num_steps": 5, "depths": (0, 1, 5)}, 6, 6, (0, 1, 5)),
    ],
)
def test_what_follows_from_the_sizes(given, width, alloc_len, depths):
    """`alloc_len` is the larger of the verify's width and the draft's nodes, page size or not."""
    sizes = EagleSizes(**given)
    assert (sizes.verify_width, sizes.alloc_len, sizes.depths) == (width, alloc_len, depths)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"num_steps": 0}, "num_steps=0 must be at least 1"),
        ({"topk": 0}, "topk=0 must be at least 1"),
        ({"num_steps": 3, "num_draft_tokens": 8}, r"num_draft_tokens=8 must be num_steps \+ 1 = 4 for a chain"),
        ({"num_steps": 3, "topk": 2, "num_draft_tokens": 12}, r"num_draft_tokens=12 must lie in \[2, 11\]"),
        ({"num_steps": 3, "topk": 2, "num_draft_tokens": 1}, r"num_draft_tokens=1 must lie in \[2, 11\]"),
        ({"num_steps": 4, "topk": 8, "num_draft_tokens": 33}, r"num_draft_tokens=33 must lie in \[2, 32\]"),
        ({"num_steps": 32}, r"num_draft_tokens=33 must lie in \[2, 32\]"),
        ({"num_steps": 9, "topk": 5}, r"\(num_steps - 1\) \* topk = 40 exceeds 32"),
        ({"num_steps": 3, "depths": (1, 2)}, r"depths=\(1, 2\) must ascend"),
        ({"num_steps": 3, "depths": (3, 1, 3)}, "must ascend"),
        ({"num_steps": 3, "topk": 2, "depths": (1, 3)}, "needs topk=1"),
        ({"min_draft_prob": 1.5}, r"min_draft_prob=1.5 must lie in \[0, 1\]"),
        ({"min_draft_prob": 0.5, "topk": 2}, "min_draft_prob=0.5 needs topk=1"),
    ],
)
def test_sizes_that_make_no_sense(given, message):
    with pytest.raises(ValueError, match=message):
        EagleSizes(**given)


def test_static_facts():
    chain = eagle(markov(), markov_draft(markov(), markov_table()))
    assert (chain.verify_width, chain.output_stride, chain.alloc_len, chain.verify_kind) == (4, 4, 4, VerifyKind.CHAIN)
    sizes = EagleSizes(num_steps=3, topk=4, num_draft_tokens=16)
    tree = eagle(markov(), markov_draft(markov(), markov_table()), sizes=sizes)
    assert (tree.verify_width, tree.output_stride, tree.alloc_len, tree.verify_kind) == (16, 4, 16, VerifyKind.TREE)
    several = multi_layer_eagle(markov(), markov_draft(markov(), markov_table(), kind="multi-layer"), num_steps=2)
    assert (several.verify_width, several.output_stride, several.alloc_len) == (3, 3, 3)
    assert several.draft_kv_bytes_per_token == 3 * chain.draft_kv_bytes_per_token


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda d: eagle(transformer(), d("eagle3", of=markov)), "hidden_size|num_layers|layers"),
        (lambda d: eagle(transformer(), d("multi-layer")), "use algorithm 'multi-layer-eagle'"),
        (
            lambda d: multi_layer_eagle(transformer(), d("multi-layer"), num_steps=4),
            r"num_steps=4 must lie in \[1, 3\]",
        ),
        (
            lambda d: eagle(transformer(), d("eagle3", token_ids=(1, 2)), sizes=EagleSizes(topk=3)),
            "topk=3 exceeds the draft's vocabulary of 2",
        ),
        (
            lambda d: eagle(transformer(), d("eagle3"), sizes=EagleSizes(topk=2), rejection_sampling=True),
            "rejection_sampling=True needs topk=1",
        ),
        (
            lambda d: eagle(transformer(), d("eagle3"), sizes=EagleSizes(min_draft_prob=0.4), rejection_sampling=True),
            "rejection_sampling=True needs min_draft_prob=0",
        ),
        (
            lambda d: eagle(transformer(), d("eagle3"), rejection_sampling=True, lossy_threshold=0.5),
            "rejection_sampling=True .* lossy_threshold=0.5 .* choose one",
        ),
    ],
)
def test_drafts_that_do_not_fit(make, message):
    def draft(kind, of=transformer, **options):
        if of is not transformer:  # a draft of a larger model
            from jspec.models.tiny import random_target

            return random_draft(random_target(1, num_layers=5), 0, kind=kind, capture_layers=(4,))
        return random_draft(transformer(), 0, kind=kind, **options)

    with pytest.raises(ValueError, match=message):
        make(draft)


# --- by name --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("drafts")
    for kind in ("eagle3", "eagle", "multi-layer"):
        save_draft(folder / kind, random_draft(transformer(), 0, kind=kind))
    return folder


def test_workers_by_name(saved):
    def worker(algorithm, kind, **options):
        return build_worker(transformer(), EngineConfig(algorithm=algorithm, draft=str(saved / kind), **options))

    assert worker("eagle3", "eagle3").verify_width == 4
    assert worker("eagle", "eagle", num_steps=2).verify_width == 3
    assert worker("eagle3", "eagle3", num_steps=3, topk=2, num_draft_tokens=7).verify_kind is VerifyKind.TREE
    assert worker("eagle3", "eagle3", num_steps=2, min_draft_prob=0.5).verify_width == 3
    assert worker("eagle3", "eagle3", adaptive_steps=((1, (1, 3)), (8, (0, 1)))).depths == (0, 1, 3)
    assert worker("multi-layer-eagle", "multi-layer", num_steps=2).verify_width == 3
    assert worker("multi-layer-eagle", "multi-layer", num_draft_tokens=4).verify_width == 4


@pytest.mark.parametrize(
    ("algorithm", "kind", "options", "message"),
    [
        ("eagle3", "eagle", {}, "is of kind 'eagle', but algorithm='eagle3' runs 'eagle3'"),
        ("multi-layer-eagle", "eagle3", {}, "is of kind 'eagle3'"),
        ("eagle3", "eagle3", {"num_steps": 2, "num_draft_tokens": 9}, "num_draft_tokens=9 must be num_steps"),
        ("multi-layer-eagle", "multi-layer", {"num_draft_tokens": 9}, r"num_draft_tokens=9 must be num_steps \+ 1 = 4"),
        ("multi-layer-eagle", "multi-layer", {"topk": 2}, "topk=2 means nothing to algorithm='multi-layer-eagle'"),
        ("multi-layer-eagle", "multi-layer", {"adaptive_steps": ((1, (1,)),)}, "adaptive_steps.*means nothing"),
        ("multi-layer-eagle", "multi-layer", {"min_draft_prob": 0.5}, "min_draft_prob=0.5 means nothing"),
        ("plain", "eagle3", {}, "draft=.*means nothing to algorithm='plain'"),
        ("eagle3", "eagle3", {"num_steps": 2, "adaptive_steps": ((1, (1, 3)),)}, "must be one of the depths"),
        ("eagle3", "eagle3", {"topk": 2, "adaptive_steps": ((1, (1, 3)),)}, "needs topk=1"),
    ],
)
def test_what_is_refused_by_name(saved, algorithm, kind, options, message):
    with pytest.raises(ValueError, match=message):
        build_worker(transformer(), EngineConfig(algorithm=algorithm, draft=str(saved / kind), **options))


def test_before_anything_is_loaded(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        check_algorithm(EngineConfig(algorithm="eagle3", draft=str(tmp_path / "nowhere")))
    with pytest.raises(ValueError, match="no draft comes with jspec for model='mine'"):
        check_algorithm(EngineConfig(algorithm="eagle3", model="mine"))
    with pytest.raises(ValueError, match="no draft comes with jspec for model='smollm2' and algorithm='eagle'"):
        check_algorithm(EngineConfig(algorithm="eagle"))


def test_options_of_others_are_left_out_for_a_comparison():
    config = EngineConfig(algorithm="eagle3", num_steps=3, topk=2, num_draft_tokens=6, page_size=4)
    for name in ALGORITHMS:
        fitted = for_algorithm(config, name)
        assert fitted.page_size == 4 and fitted.algorithm == name
        assert (fitted.topk == 2) == ("topk" in ALGORITHMS[name].options)
    assert for_algorithm(config, "plain") == EngineConfig(algorithm="plain", page_size=4)
