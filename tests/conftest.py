"""Which cases the fast suite leaves to `scripts/test --slow`, and how long compiled programs live."""

import gc
import pathlib

import jax
import pytest

LEFT_TO_SLOW = {
    "bench/test_serve.py": ("test_the_trace_of_a_model", "test_launches_are_counted"),
    "engine/test_eagle.py": (
        "test_a_chain_ends_where_the_draft_is_unsure",
        "test_a_draft_of_nan_changes_nothing[eagle]",
        "test_a_lossy_threshold_accepts_more_says_so_and_leaves_greedy_rows_alone[chain]",
        "test_acceptance_does_not_fade",
        "test_greedy_equals_full_recompute[chain while sure-4-True]",
        "test_greedy_equals_full_recompute[chain-16-False]",
        "test_greedy_equals_full_recompute[tree-64-False]",
        "test_greedy_equals_full_recompute[wide tree-1-True]",
        "test_known_accept_lengths[no-overlap-eagle]",
        "test_more_steps_never_accept_less[8]",
        "test_the_accepted_path_may_be_any_branch[1-0]",
    ),
    "engine/test_eagle_programs.py": (
        "test_depth_0_drafts_nothing_and_tries_again",
        "test_two_dispatches_one_upload_one_download[chain]",
    ),
    "engine/test_eagle_sampling.py": (
        "test_rejection_accepts_more_than_a_best_guess",
        "test_the_joint_law_of_four_tokens[rejection, top-k and top-p]",
    ),
    "engine/test_min_new_tokens.py": ("test_chains_and_trees_keep_the_ban_along_their_paths[True-0.0]",),
    "engine/test_scenarios.py": (
        "test_b01_relay_rows_survive_many_prefills[plain-4]",
        "test_b06_padding_is_nobody[3]",
        "test_b07_exact_pool_at_page_boundaries[8]",
    ),
    "engine/test_scheduling.py": (
        "test_abort_in_the_middle_of_a_prompt[no-overlap]",
        "test_chunks_and_tails_change_no_token[chain-overlap]",
        "test_chunks_and_tails_change_no_token[multi-layer-overlap]",
        "test_retraction_changes_no_token[multi-layer]",
        "test_retraction_changes_no_token[plain]",
        "test_the_length_of_chunks_changes_no_draft[multi-layer]",
    ),
    "test_cli.py": ("test_a_draft_of_ones_own",),
    "training/test_loss.py": ("test_starts_that_are_left_out_change_nothing[eagle3-options0]",),
}
"""By file: tests whose programs take long to compile, and whose neighbours cover most of what they do. A name without brackets is every case of a test."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    for item in items:
        file = item.nodeid.split("::")[0].removeprefix("tests/")
        names = LEFT_TO_SLOW.get(file, ())
        if item.name in names or item.name.split("[")[0] in names:
            item.add_marker(pytest.mark.slow)


MAPS = pathlib.Path("/proc/self/maps")


@pytest.fixture(scope="module", autouse=True)
def _programs_end_with_their_file(request):
    """A program that XLA compiled for CPU takes a dozen of the 65,530 memory maps that Linux gives a process, and one too many is a crash: the engines that the
    tests of a file share end with it, and before there is need so do programs that others might have used again."""
    yield
    for value in list(vars(request.module).values()):
        if hasattr(value, "cache_clear") and value.__module__ == request.module.__name__:
            value.cache_clear()
    gc.collect()
    if MAPS.exists() and MAPS.read_text().count("\n") > 30_000:
        jax.clear_caches()
