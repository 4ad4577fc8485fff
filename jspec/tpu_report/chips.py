"""What is assumed of each TPU generation, and where from."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Chip:
    """One generation. Rates are those of one device as the compiler sees it: a v5p device is a chip of two cores, a v4 and a v7x device one core."""

    name: str
    version: str
    """What Pallas calls it."""
    topology: str
    """Smallest name that `jax.experimental.topologies` knows."""
    clock_ghz: float
    clock_source: str
    hbm_gb_per_s: float
    hbm_gib: int
    bf16_tflops: float
    cores: int = 1
    """Cores of a device that share a kernel's rows."""


_PEAK = "peak bf16 rate / (matrix units x their rows and columns x 2)"

CHIPS = {
    chip.name: chip
    for chip in (
        Chip(
            "v4", "v4", "v4:2x2x1", 1.05, f"{_PEAK}: 275 TFLOP/s over 2 cores of 4 units of 128 x 128", 614, 16, 137.5
        ),
        Chip("v5e", "v5e", "v5e:2x2", 1.50, f"{_PEAK}: 197 TFLOP/s over 4 units of 128 x 128", 819, 16, 197),
        Chip(
            "v5p",
            "v5p",
            "v5p:2x2x1",
            1.75,
            f"{_PEAK}: 459 TFLOP/s over 2 cores of 4 units of 128 x 128",
            2765,
            95,
            459,
            2,
        ),
        Chip(
            "v6e",
            "v6e",
            "v6e:2x2",
            1.75,
            f"{_PEAK} x 2 rows a cycle: 918 TFLOP/s over 2 units of 256 x 256",
            1638,
            32,
            918,
        ),
        Chip(
            "v7x",
            "7x",
            "tpu7x:2x2x1",
            2.20,
            f"{_PEAK} x 2 rows a cycle: 2307 TFLOP/s over 2 cores of 2 units of 256 x 256",
            3685,
            96,
            1153.5,
        ),
    )
}
"""Peak rates and bandwidths are those of Google's public TPU pages."""


def chips_named(names: str) -> tuple[Chip, ...]:
    """Chips of a list such as "v5e,v7x"; "" is all of them.

    Raises:
      ValueError: a name is unknown.
    """
    chosen = [name.strip() for name in names.split(",") if name.strip()] or list(CHIPS)
    if unknown := [name for name in chosen if name not in CHIPS]:
        raise ValueError(f"chips={unknown[0]!r} is unknown: choose from {', '.join(CHIPS)}")
    return tuple(CHIPS[name] for name in chosen)
