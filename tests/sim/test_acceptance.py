"""What a verify accepts: the distributions that were asked for, the same draws whatever else runs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec import sim
from jspec.sim.acceptance import uniform

I32 = np.int32
MANY = 20_000


def drawn(acceptance, width, count=MANY, request=1):
    serial, index = np.full(count, request, I32), np.arange(count, dtype=I32)
    return np.asarray(acceptance.accept_lens(serial, index, I32(width)))


@pytest.mark.parametrize(("rate", "drafts"), [(0.0, 3), (0.3, 4), (0.8, 5), (0.9, 1), (1.0, 7), (0.6, 0)])
def test_geometric_has_the_mean_of_leviathan(rate, drafts):
    lens = drawn(sim.geometric(rate, seed=5), drafts + 1)
    expected = drafts + 1 if rate == 1 else (1 - rate ** (drafts + 1)) / (1 - rate)
    assert lens.min() >= 1 and lens.max() <= drafts + 1
    assert lens.mean() == pytest.approx(expected, abs=4 * lens.std() / np.sqrt(MANY) + 1e-9)


def test_by_position_accepts_each_place_as_often_as_it_was_told():
    probs = np.array([0.9, 0.5, 0.7], np.float32)
    lens = drawn(sim.by_position(probs, seed=1), 8)
    for k, p in enumerate(probs, start=1):
        reached = lens >= k  # so many tokens: the draft before was accepted
        assert (lens > k)[reached].mean() == pytest.approx(p, abs=0.02)
    assert lens.max() == 4


def test_a_histogram_is_drawn_as_it_was_counted():
    counts = [5, 0, 3, 2]
    lens = drawn(sim.histogram(counts, seed=2), 8)
    np.testing.assert_allclose(np.bincount(lens, minlength=5)[1:] / MANY, np.array(counts) / 10, atol=0.015)
    narrow = drawn(sim.histogram(counts, seed=2), 2)
    np.testing.assert_array_equal(narrow, np.minimum(lens, 2))


def test_draws_do_not_depend_on_the_place_in_a_batch():
    acceptance = sim.geometric(0.7, seed=3)
    serial, index = np.array([4, 9, 1, 9], I32), np.array([7, 2, 0, 3], I32)
    lens = acceptance.accept_lens(serial, index, I32(6))
    for i in range(4):
        assert lens[i] == acceptance.accept_lens(serial[i : i + 1], index[i : i + 1], I32(6))[0]


def test_numpy_and_jax_draw_the_same():
    serial, index = np.arange(500, dtype=I32), np.arange(500, dtype=I32)[::-1]
    np.testing.assert_array_equal(
        uniform(np.uint32(11), serial, index), jax.jit(uniform)(np.uint32(11), jnp.asarray(serial), jnp.asarray(index))
    )


def test_draws_are_spread_evenly_and_not_related():
    """Along requests, along verifies, and between seeds."""
    request, index = (x.reshape(-1).astype(I32) for x in np.meshgrid(np.arange(1, 201), np.arange(200), indexing="ij"))
    a, b = (uniform(np.uint32(seed), request, index) for seed in (0, 1))
    assert a.min() >= 0 and a.max() < 1
    np.testing.assert_allclose(np.histogram(a, bins=20, range=(0, 1))[0] / a.size, 0.05, atol=0.006)
    grid = a.reshape(200, 200)
    for x, y in ((grid[1:], grid[:-1]), (grid[:, 1:], grid[:, :-1]), (a, b)):
        assert abs(np.corrcoef(x.reshape(-1), y.reshape(-1))[0, 1]) < 0.02


def test_a_record_is_replayed_and_starts_anew():
    acceptance = sim.recorded([[3, 1, 2], [5], []])
    serial, index = np.array([1, 1, 1, 1, 2, 2, 3, 0], I32), np.array([0, 1, 2, 3, 0, 4, 1, 0], I32)
    lens = np.asarray(acceptance.accept_lens(serial, index, I32(4)))
    assert lens[:-1].tolist() == [3, 1, 2, 3, 4, 4, 1]  # a verify of 4 holds no 5


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: sim.geometric(1.5), "rate=1.5 must be at most 1"),
        (lambda: sim.geometric([0.2, -0.1]), r"rate=\[-0.1\] must be at least 0"),
        (lambda: sim.geometric(float("nan")), "rate=nan must be finite"),
        (lambda: sim.geometric(0.5, max_width=0), "max_width=0 must be at least 1"),
        (lambda: sim.geometric(0.5, seed=-1), "seed=-1 must be at least 0"),
        (lambda: sim.by_position(0.5), "probs=0.5 must be a sequence"),
        (lambda: sim.by_position([0.5, 2]), r"probs=\[2.0\] must be at most 1"),
        (lambda: sim.histogram([]), "must be a sequence: one count an accept length"),
        (lambda: sim.histogram([0, 0]), "hold no verify"),
        (lambda: sim.histogram([3, -1]), "must be at least 0"),
        (lambda: sim.recorded([]), "accept_lens is empty"),
        (lambda: sim.recorded([[2, 0]]), r"accept_lens\[0\]=\[0\] must be at least 1"),
        (lambda: sim.recorded([[[2]]]), "flat sequence"),
    ],
)
def test_what_is_no_distribution_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_what_is_no_number_is_refused():
    for make in (lambda: sim.geometric("high"), lambda: sim.recorded([[1.5]]), lambda: sim.histogram([[1], [1, 2]])):
        with pytest.raises(TypeError, match="must be"):
            make()
