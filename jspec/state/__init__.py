"""What exists between two transitions: frozen values, registered as pytrees. `R` rows, `B` rows of a batch, `P` pages a row, `N` pages."""

from jspec.state.batches import ForwardBatch, ForwardMode, ScheduleBatch
from jspec.state.ledger import KVLedger, init_ledger, num_pages_held, total_pages
from jspec.state.requests import FinishReason, RequestTable, Waiting, init_requests, seqlen
from jspec.state.results import GenerationBatchResult, Launched, RowStatus, record
from jspec.state.scheduler_state import Limits, SchedulerState, init_state

__all__ = [
    "FinishReason",
    "ForwardBatch",
    "ForwardMode",
    "GenerationBatchResult",
    "KVLedger",
    "Launched",
    "Limits",
    "RequestTable",
    "RowStatus",
    "ScheduleBatch",
    "SchedulerState",
    "Waiting",
    "init_ledger",
    "init_requests",
    "init_state",
    "num_pages_held",
    "record",
    "seqlen",
    "total_pages",
]
