# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # When does speculative decoding stop paying?
#
# A verify of `k` drafts emits `(1 - a^(k+1)) / (1 - a)` tokens on average, where `a` is the share of drafts accepted (Leviathan, Kalman, Matias, arXiv
# [2211.17192](https://arxiv.org/abs/2211.17192)). At batch 1 the verify costs hardly more than a plain step: both wait for the weights. As the batch grows,
# the linear layers have more and more to compute, a verify costs up to `k + 1` plain steps, and the gain turns into a loss: the drafts that are rejected were
# computed for nothing (Su et al., arXiv [2310.18813](https://arxiv.org/abs/2310.18813); Liu et al., arXiv [2406.14066](https://arxiv.org/abs/2406.14066)).
# With long contexts it need not: then most of a step goes into reading the KV cache, which a verify reads once for all its tokens (Chen et al.,
# "MagicDec", arXiv [2408.11049](https://arxiv.org/abs/2408.11049)).
#
# Here both are reproduced with `jspec.sim`: jspec's own scheduler, compiled and run for all set-ups in one call, on a roofline of Llama-3.1-8B on one
# TPU v5p (per-operator rooflines as in Yuan et al., arXiv [2402.16363](https://arxiv.org/abs/2402.16363)). Every number is modelled.

# %%
import dataclasses
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np

if "ipykernel" not in sys.modules:
    matplotlib.use("Agg")
import matplotlib.pyplot as plt

from jspec import sim
from jspec.tpu_report.chips import CHIPS

# %% [markdown]
# ## The machine
#
# Peak rates are those of Google's public TPU pages. The draft is as large as an EAGLE-3 one for this model (a layer, and a head over 32,000 tokens;
# Li et al., arXiv [2503.01840](https://arxiv.org/abs/2503.01840)). It drafts a chain, so `k` drafts are `k` steps of it.

# %%
CHIP = CHIPS["v5p"]
ACCEPTED = 0.8  # of the drafts, each given that all before it were
roof = sim.roofline(
    CHIP,
    params=7.5e9,  # without the embedding, which is looked up
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    draft_params=0.4e9,
    draft_layers=1,
    bandwidth_share=0.85,
    compute_share=0.7,
    launch_s=50e-6,
    draft_step_s=30e-6,
    host_s=0.3e-3,
)


# %% [markdown]
# A latency model is any pytree with `host_s` and `device_s`. The figure is about decoding, so this one lets the prompts be prefilled elsewhere, as in
# disaggregated serving: a launch without decoding rows takes no time.


# %%
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefilledElsewhere(sim.Roofline):
    """A roofline whose prompts cost nothing."""

    def device_s(self, work):
        return jnp.where(work.rows > 0, super().device_s(work), 0.0)


latency = PrefilledElsewhere(**vars(roof))

# %% [markdown]
# ## All set-ups in one call
#
# Batch size, draft depth and context length vary together: every combination is one configuration. Each serves four requests a row or more, one after
# another, so that the batch stays full; the KV pages are those that fit beside the weights.

# %%
BATCHES, DEPTHS, CONTEXTS = 2 ** np.arange(9), [0, 1, 2, 4, 8], [256, 4096]
NEW_TOKENS, PAGE_SIZE = 256, 128
KV_BYTES = 32 * 2 * 8 * 128 * 2  # of one position
KV_PAGES = int((CHIP.hbm_gib * 2**30 * 0.9 - 16e9) / KV_BYTES / PAGE_SIZE)

points = sim.grid(context=CONTEXTS, depth=DEPTHS, batch=BATCHES)
pages_of_a_row = -(-(points["context"] + NEW_TOKENS + 2 * (1 + points["depth"])) // PAGE_SIZE)
fits = points["batch"] * pages_of_a_row <= KV_PAGES

started = time.perf_counter()
report = sim.simulate(
    sim.policy(
        max_running=points["batch"],
        verify_width=1 + points["depth"],
        kv_pages=KV_PAGES,
        mixed=False,
    ),
    sim.closed_batch(
        num_requests=4 * int(BATCHES[-1]),
        count=np.maximum(4 * points["batch"], 32),
        prompt_len=points["context"][:, None],
        max_new_tokens=NEW_TOKENS,
    ),
    sim.geometric(ACCEPTED),
    latency,
    page_size=PAGE_SIZE,
)
seconds = time.perf_counter() - started
assert report.complete.all()
rounds = report.row_rounds.sum()
print(f"{len(fits)} configurations, {rounds:,} request-rounds: {seconds:.1f} s, the compiler's time included")

# %%
shape = (len(CONTEXTS), len(DEPTHS), len(BATCHES))
tokens_per_s = np.where(fits, report.tokens_per_s, np.nan).reshape(shape)
accept_length = report.accept_length.reshape(shape)
speedup = tokens_per_s / tokens_per_s[:, :1]

# %% [markdown]
# At batch 1 the simulation must agree with the closed form `(1 - a^(k+1)) / ((1 - a) (k c + 1))`, where `c` is what a step of the draft costs in steps of the
# target (arXiv 2211.17192, theorem 3.8). It lies a little below: a request's last verify is cut at its end, and one more is launched in vain, since the host
# learns of the end a step late.

# %%
row = sim.Work(
    rows=1, width=1, kv_tokens=CONTEXTS[0], draft_steps=0, prefill_rows=0, prefill_tokens=0, prefill_pairs=0.0
)
plain_s, drafted_s = (float(latency.device_s(row._replace(draft_steps=steps))) for steps in (0, 1))
cost = (drafted_s - plain_s) / plain_s
print(f"a step of the draft costs {cost:.3f} steps of the target; speed-up at batch 1, context {CONTEXTS[0]}:")
for j, depth in enumerate(DEPTHS):
    expected = (1 - ACCEPTED ** (depth + 1)) / (1 - ACCEPTED) / (depth * cost + 1)
    print(
        f"  k = {depth}: {speedup[0, j, 0]:.2f}x simulated, {expected:.2f}x by the formula, accept length {accept_length[0, j, 0]:.2f}"
    )


# %% [markdown]
# ## The figure


# %%
def break_even(curve) -> float | None:
    """Batch size at which a curve falls to 1, on a straight line over the logarithm."""
    known = ~np.isnan(curve)
    x, y = np.log2(BATCHES[known]), curve[known]
    for i in range(len(y) - 1):
        if y[i] >= 1 > y[i + 1]:
            return 2 ** float(x[i] + (y[i] - 1) / (y[i] - y[i + 1]) * (x[i + 1] - x[i]))
    return None


figure, axes = plt.subplots(1, len(CONTEXTS), figsize=(10.5, 4.9), sharey=True, layout="constrained")
colors = plt.get_cmap("viridis")(np.linspace(0.05, 0.85, len(DEPTHS) - 1))
for i, (axis, context) in enumerate(zip(axes, CONTEXTS, strict=True)):
    axis.axhspan(0, 1, color="0.95", zorder=0)
    axis.axhline(1, color="0.25", linestyle="--", linewidth=1.2, label="break-even")
    for j, depth in enumerate(DEPTHS[1:], start=1):
        axis.plot(
            BATCHES,
            speedup[i, j],
            marker="o",
            markersize=4,
            color=colors[j - 1],
            label=f"{depth} draft{'s' * (depth > 1)} a verify",
        )
        if (batch := break_even(speedup[i, j])) is not None:
            axis.plot(
                batch,
                1,
                marker="D",
                markersize=8,
                color="white",
                markeredgecolor=colors[j - 1],
                markeredgewidth=2,
                zorder=5,
            )
            axis.vlines(batch, 0, 1, color=colors[j - 1], linestyle=":", linewidth=1.2)
            axis.text(batch * 1.05, 0.05, f"{batch:.0f}", color=colors[j - 1], fontsize=9)
    axis.set_xscale("log", base=2)
    axis.set_xticks(BATCHES, [str(batch) for batch in BATCHES])
    axis.set_xlim(0.9, BATCHES[-1] * 1.12)
    axis.set_ylim(0, None)
    axis.set_xlabel("batch size (requests that decode together)")
    axis.set_title(f"prompts of {context:,} tokens, {NEW_TOKENS} new ones", fontsize=11)
    axis.grid(alpha=0.3)
    if np.isnan(speedup[i]).any():
        first = BATCHES[np.isnan(speedup[i, 0])][0]
        axis.axvspan(first / 2**0.5, BATCHES[-1] * 1.12, color="0.85", hatch="//", alpha=0.5, linewidth=0)
        axis.text(
            1.04 * first / 2**0.25,
            2.1,
            "KV does not fit the chip",
            rotation=90,
            ha="center",
            va="center",
            fontsize=9,
            color="0.3",
        )
axes[0].set_ylabel("speed-up over plain decoding\n(tokens/s over tokens/s)")
axes[0].text(1.0, 0.9, "slower than plain decoding", fontsize=9, color="0.35", va="top")
handles, labels = axes[0].get_legend_handles_labels()
handles.append(
    plt.Line2D([], [], marker="D", markersize=7, linestyle="", color="white", markeredgecolor="0.3", markeredgewidth=2)
)
figure.legend(
    handles,
    [*labels, "batch size at break-even"],
    loc="outside lower center",
    ncols=len(handles),
    fontsize=9,
    frameon=False,
)
figure.suptitle(
    f"Speculative decoding against batch size: Llama-3.1-8B (bf16) on one TPU {CHIP.name}, {ACCEPTED:.0%} of drafts accepted, modelled",
    fontsize=11,
)
out = Path(sys.argv[1] if "ipykernel" not in sys.modules and len(sys.argv) > 1 else "speedup_against_batch.png")
figure.savefig(out, dpi=150)
print(f"written: {out}")
