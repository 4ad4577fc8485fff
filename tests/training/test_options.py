"""Options of a training run."""

import jax.numpy as jnp
import numpy as np
import pytest

from jspec.training.optimizer import learning_rate, make_optimizer
from jspec.training.options import TrainOptions, parse_unroll_schedule


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("steps", 0),
        ("batch_size", 0),
        ("seq_len", 2),
        ("warmup_steps", -1),
        ("learning_rate", 0.0),
        ("clip_norm", -1.0),
        ("weight_decay", -0.1),
        ("decay", 1.5),
        ("held_out_every", 1),
        ("unroll_schedule", ()),
        ("unroll_schedule", ((1, 2),)),
        ("unroll_schedule", ((0, 2), (0, 3))),
        ("unroll_schedule", ((0, 0),)),
    ],
)
def test_a_bad_option_is_named(field, value):
    with pytest.raises(ValueError, match=f"{field}=.* must"):
        TrainOptions(**{field: value})


def test_the_chain_grows_by_the_schedule():
    options = TrainOptions(unroll_schedule=parse_unroll_schedule("0:1,10:2,20:5"))
    assert [options.unroll_at(step) for step in (0, 9, 10, 19, 20, 99)] == [1, 1, 2, 2, 5, 5]
    assert options.max_unroll == 5
    assert parse_unroll_schedule("3") == ((0, 3),)


@pytest.mark.parametrize("text", ["", "x", "0:1,5", "0:1:2"])
def test_a_schedule_that_is_none_is_refused(text):
    with pytest.raises(ValueError, match="unroll="):
        parse_unroll_schedule(text)


def test_the_learning_rate_rises_and_falls():
    options = TrainOptions(steps=100, warmup_steps=9, learning_rate=1.0)
    rate = np.array([learning_rate(options)(step) for step in range(101)])
    assert rate[0] == pytest.approx(0.1) and rate.argmax() == 9 and rate[9] == 1.0 and rate[100] == pytest.approx(0.1)
    assert learning_rate(TrainOptions(steps=1, warmup_steps=50))(0) == pytest.approx(TrainOptions.learning_rate)


def test_norms_do_not_decay():
    options = TrainOptions(steps=1, warmup_steps=0, weight_decay=0.5)
    params = {"module_0": {"norms": jnp.ones((2, 3)), "o": jnp.ones((3, 3))}, "final_norm": jnp.ones(3)}
    optimizer = make_optimizer(options)
    zeros = {"module_0": {"norms": jnp.zeros((2, 3)), "o": jnp.zeros((3, 3))}, "final_norm": jnp.zeros(3)}
    updates, _ = optimizer.update(zeros, optimizer.init(params), params)
    assert not updates["module_0"]["norms"].any() and not updates["final_norm"].any()
    np.testing.assert_allclose(updates["module_0"]["o"], -0.5 * options.learning_rate)
