"""An engine is cut to its prompts."""

from jspec.bench.fitting import fit_config, smallest_context
from jspec.config import EngineConfig


def test_smallest_context():
    assert smallest_context([10, 30], 20, 512) == 50
    assert smallest_context([500], 20, 512) == 512
    assert smallest_context([], 20, 512) == 21


def test_few_prompts_need_few_programs():
    config = fit_config(EngineConfig(), [10, 30], max_new_tokens=20, model_context_len=8192)
    assert (config.context_len, config.max_running) == (50, 2)
    assert (config.batch_buckets, config.prefill_buckets) == ((2,), (50,))


def test_what_was_asked_for_stays():
    asked = EngineConfig(context_len=4096, max_running=2, batch_buckets=(1, 2))
    config = fit_config(asked, [10, 30, 50], max_new_tokens=20, model_context_len=8192)
    assert (config.context_len, config.max_running, config.batch_buckets) == (4096, 2, (1, 2))
    assert config.prefill_buckets is None, "long contexts keep doubling sizes"
