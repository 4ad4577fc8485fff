"""Random small configurations, as arrays for the simulation and as objects for the slow engine."""

import dataclasses

import numpy as np
from sim.slow_engine import Job, SlowEngine

from jspec import sim

REQUESTS, PAGE_SIZE, MOST_ROWS, WIDEST = 8, 4, 5, 6


@dataclasses.dataclass
class Case:
    """One configuration."""

    max_running: int
    verify_width: int
    draft_steps: int
    alloc_len: int
    overlap: bool
    mixed: bool
    kv_pages: int
    max_prefill_tokens: int
    ratios: tuple[float, float, float]
    prompts: list[int]
    most: list[int]
    stops: list[int]
    arrivals: list[float]
    count: int
    accepts: list[list[int]]
    seconds: dict[str, float]  # fields of a `Roofline`

    @property
    def reserve_len(self) -> int:
        return (1 + self.overlap) * self.alloc_len

    def slow_engine(self) -> SlowEngine:
        jobs = [
            Job(serial + 1, *facts)
            for serial, facts in enumerate(
                zip(self.prompts, self.most, self.stops, self.arrivals, self.accepts, strict=True)
            )
        ]
        s = self.seconds

        def device_s(rows, width, positions, drafts, prefill_tokens, prefill_pairs):
            tokens = rows * width + prefill_tokens
            linear = max(s["weight_s"], s["token_s"] * tokens)
            pairs = positions * width + prefill_pairs
            attention = max(s["kv_token_s"] * (positions + tokens), s["pair_s"] * pairs)
            draft = max(s["draft_weight_s"], s["draft_token_s"] * rows)
            draft += s["draft_kv_token_s"] * positions + s["draft_step_s"]
            return s["launch_s"] + linear + attention + (self.draft_steps * draft if drafts else 0)

        return SlowEngine(
            jobs=jobs[: self.count],
            max_running=self.max_running,
            width=self.verify_width,
            alloc_len=self.alloc_len,
            overlap=self.overlap,
            mixed=self.mixed,
            pages=self.kv_pages,
            page_size=PAGE_SIZE,
            max_prefill_tokens=self.max_prefill_tokens,
            ratios=self.ratios,
            device_s=device_s,
            host_s=s["host_s"],
        )


def random_case(rng: np.random.Generator, requests: int = REQUESTS, most_rows: int = MOST_ROWS) -> Case:
    """Short of pages, chunked, mixed, overlapped or not: as chance has it."""

    def some(low, high):
        return rng.integers(low, high + 1, requests).tolist()

    width = int(rng.integers(1, WIDEST + 1))
    alloc_len, overlap = min(width + int(rng.integers(0, 2)), WIDEST), bool(rng.integers(2))
    prompts, most = some(1, int(rng.choice([4, 25]))), some(1, int(rng.choice([12, 60])))
    stops = [int(rng.integers(1, n + 1)) if rng.random() < 0.3 else n for n in most]
    reserve = alloc_len * (1 + overlap)
    least = max(-(-(p + (m - 2 + reserve if m > 1 else 0)) // PAGE_SIZE) for p, m in zip(prompts, most, strict=True))
    kv_pages = least + int(rng.integers(0, 4)) if rng.random() < 0.7 else least * most_rows
    closed = rng.random() < 0.5
    ratio = float(rng.choice([0.01, 0.1, 0.7]))
    names = [name for name in sim.Roofline.RANKS if name != "host_s"]
    return Case(
        max_running=int(rng.integers(1, most_rows + 1)),
        verify_width=width,
        draft_steps=int(rng.integers(0, width)),
        alloc_len=alloc_len,
        overlap=overlap,
        mixed=bool(rng.integers(2)),
        kv_pages=kv_pages,
        max_prefill_tokens=int(rng.choice([PAGE_SIZE, 10, 17, 60])),
        ratios=(ratio, 0.14 * ratio, float(rng.integers(2, 50))),
        prompts=prompts,
        most=most,
        stops=stops,
        arrivals=[0.0] * requests if closed else np.cumsum(rng.exponential(8.0, requests)).tolist(),
        count=requests if rng.random() < 0.8 else int(rng.integers(1, requests)),
        accepts=[rng.integers(1, WIDEST + 1, 9).tolist() for _ in range(requests)],
        seconds={name: float(rng.random() * 0.1) for name in names} | {"host_s": float(rng.choice([0, 0.3, 2.0]))},
    )


def random_cases(count: int, seed: int = 0, **sizes: int) -> list[Case]:
    rng = np.random.default_rng(seed)
    return [random_case(rng, **sizes) for _ in range(count)]


def parts_of(cases: list[Case]):
    """Arguments of `simulate`, with an axis of configurations everywhere."""

    def column(name):
        return np.array([getattr(case, name) for case in cases])

    policy = sim.policy(
        **{
            name: column(name)
            for name in ("max_running", "verify_width", "draft_steps", "alloc_len", "overlap", "mixed", "kv_pages", "max_prefill_tokens")
        },
        **{
            name: np.array([case.ratios[i] for case in cases])
            for i, name in enumerate(("new_token_ratio", "min_new_token_ratio", "ratio_steps"))
        },
    )  # fmt: skip
    requests = sim.open_trace(
        arrival_s=column("arrivals"),
        prompt_len=column("prompts"),
        max_new_tokens=column("most"),
        stop_len=column("stops"),
        count=column("count"),
    )
    lens = column("accepts").astype(np.int32)
    acceptance = sim.Replayed(lens=lens, counts=np.full(lens.shape[:2], lens.shape[2], np.int32))
    latency = sim.Roofline(
        **{name: np.array([case.seconds[name] for case in cases], np.float32) for name in sim.Roofline.RANKS}
    )
    return policy, requests, acceptance, latency
