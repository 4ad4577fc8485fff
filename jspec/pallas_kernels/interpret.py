"""How kernels run in the TPU interpreter (backend "pallas_interpret")."""

from jax.experimental.pallas import tpu as pltpu

INTERPRET = pltpu.InterpretParams(
    detect_races=True,  # prints "RACE DETECTED"; the result is still returned
    uninitialized_memory="nan",
    out_of_bounds_reads="raise",
    # Every copy takes a random entry of the clock. By default there is one for all, and two copies never seem to race.
    vector_clock_size=256,
)
