"""One file per algorithm. A worker is a value: pure functions and the static facts that the scheduler plans with."""

from jspec.spec_workers.base import DeviceSizes, DeviceState, HostSide, PhaseOutput, SpecWorker, VerifyKind
from jspec.spec_workers.chain import Proposal, chain
from jspec.spec_workers.dflash import dflash
from jspec.spec_workers.dspark import dspark
from jspec.spec_workers.eagle import eagle
from jspec.spec_workers.eagle_sizes import EagleSizes
from jspec.spec_workers.frozen_kv_mtp import frozen_kv_mtp
from jspec.spec_workers.multi_layer_eagle import multi_layer_eagle
from jspec.spec_workers.ngram import ngram
from jspec.spec_workers.ngram_corpus import ngram_corpus
from jspec.spec_workers.plain import plain
from jspec.spec_workers.registry import ALGORITHMS, Algorithm, algorithms, build_worker, check_algorithm, for_algorithm
from jspec.spec_workers.uno import uno

__all__ = [
    "ALGORITHMS",
    "Algorithm",
    "DeviceSizes",
    "DeviceState",
    "EagleSizes",
    "HostSide",
    "PhaseOutput",
    "Proposal",
    "SpecWorker",
    "VerifyKind",
    "algorithms",
    "build_worker",
    "chain",
    "check_algorithm",
    "dflash",
    "dspark",
    "eagle",
    "for_algorithm",
    "frozen_kv_mtp",
    "multi_layer_eagle",
    "ngram",
    "ngram_corpus",
    "plain",
    "uno",
]
