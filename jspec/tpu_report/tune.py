"""Makes the table of block sizes that the attention kernel reads: `python -m jspec.tpu_report.tune [CHIPS]`.

Every way to cut the work that may be worth it is compiled for the chip, and the loop with the fewest bundles for a token wins; of loops within
one percent of it the shortest block does, which starts sooner and wastes less at a row's end. Chips that are not named keep their entries.
"""

import importlib.resources
import json
import pathlib
import sys
from collections.abc import Iterator, Sequence

from rich.progress import track

from jspec.pallas_kernels.block_sizes import MAX_BLOCK_BYTES, TABLE, tile_lines
from jspec.tpu_report.chips import Chip, chips_named
from jspec.tpu_report.jobs import SHAPES, VERIFY, KernelJob
from jspec.tpu_report.report import today, versions
from jspec.tpu_report.run import KernelResult, check_libtpu, compile_jobs

WIDTHS = (1, 8, 16, 32, 64)
"""Query tokens of a block; 64 are those of prefill."""

BLOCK_LENS = (512, 1024, 2048)

MIN_BLOCK_BYTES = 1 << 20
"""Shorter blocks are not tried where longer ones fit: starting their copies weighs too much."""


def candidates() -> list[KernelJob]:
    """Whatever may be the best for some shape and width."""
    jobs = []
    for shape in SHAPES.values():
        bytes_of_token = shape.num_kv_heads * 2 * shape.head_dim * 2
        for width in WIDTHS:
            jobs += [
                KernelJob(VERIFY, shape.name, width, block_len=block_len, heads_at_once=heads)
                for block_len in BLOCK_LENS
                if MIN_BLOCK_BYTES <= block_len * bytes_of_token <= MAX_BLOCK_BYTES
                for heads in sorted({min(shape.num_kv_heads, most) for most in (2, 3, 4, 8)})
            ]
    return jobs


def best(chip: Chip, results: Sequence[KernelResult]) -> Iterator[dict]:
    """An entry for each shape and width of which something compiles."""
    found: dict[tuple, list[KernelResult]] = {}
    for result in results:
        if result.block_tokens:
            shape, job = SHAPES[result.job.shape], result.job
            lines = tile_lines(job.width, shape.group, job.dtype)
            key = (shape.num_kv_heads, shape.head_dim, job.dtype, lines)
            found.setdefault(key, []).append(result)
    for (num_kv_heads, head_dim, dtype, lines), ways in found.items():
        least = min(result.bundles_per_512 for result in ways)
        close = [result for result in ways if result.bundles_per_512 <= 1.01 * least]
        chosen = min(close, key=lambda result: (result.block_tokens, result.bundles))
        yield {
            "chip": chip.version,
            "num_kv_heads": num_kv_heads,
            "head_dim": head_dim,
            "dtype": dtype,
            "lines": lines,
            "block_len": chosen.job.block_len,
            "heads_at_once": chosen.job.heads_at_once,
            "bundles_per_512": round(chosen.bundles_per_512),
            "made": f"{today()}, " + ", ".join(f"{name} {version}" for name, version in versions().items()),
        }


def main() -> None:
    """Command line, see above."""
    check_libtpu()
    path = pathlib.Path(str(importlib.resources.files("jspec.pallas_kernels") / TABLE))
    jobs = candidates()
    for chip in chips_named(" ".join(sys.argv[1:])):
        results = compile_jobs(
            [chip], jobs, progress=lambda work, total, name=chip.name: track(work, f"Compiling for {name}", total=total)
        )
        kept = [entry for entry in json.loads(path.read_text())["sizes"] if entry["chip"] != chip.version]
        entries = kept + list(best(chip, results))
        lines = ",\n".join("  " + json.dumps(entry) for entry in entries)
        path.write_text('{\n "made_by": "scripts/tune-blocks",\n "sizes": [\n' + lines + "\n ]\n}\n")


if __name__ == "__main__":
    main()
