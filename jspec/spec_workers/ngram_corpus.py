"""Prompt lookup in more than the prompt: what other requests said, and documents of a file, propose beside the text so far. No draft model."""

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from jspec.config import MAX_VERIFY_WIDTH
from jspec.corpus import Source, Trie, automaton, build_automaton, empty_trie, insert, propose, trie
from jspec.future_map import stash
from jspec.models.target import TargetModel
from jspec.spec_workers.base import (
    DeviceState,
    HostLaunch,
    HostOutcome,
    HostSide,
    PhaseOutput,
    SpecWorker,
    VerifyKind,
)
from jspec.spec_workers.chain import Carry, chain
from jspec.spec_workers.featured import start, verify_tree
from jspec.spec_workers.forward import history
from jspec.spec_workers.grafting import Nodes, add_chain, as_tree, descend
from jspec.spec_workers.lookup import lookup
from jspec.spec_workers.upload import DecodeInputs

WINDOWS = 3
"""Windows of drafts that a launch is given, `W - 1` nodes each. Under overlap the launch before may emit a whole one of them."""


def ngram_corpus(
    target: TargetModel,
    *,
    name: str = "ngram-corpus",
    num_draft_tokens: int = 8,
    min_ngram: int = 2,
    max_ngram: int = 4,
    documents: Sequence[Sequence[int]] = (),
    corpus_share: int | None = None,
    max_trie_depth: int = 18,
    capacity: int = 1 << 18,
) -> SpecWorker:
    """A worker whose drafts come from a corpus on the host, and from the row's own text on the device, as one tree.

        resolve -> descend -> look up -> verify -> accept -> move KV -> PUBLISH, stash

    The corpus is a trie of all requests that ended here, prompt and output, and a suffix automaton of `documents`. For each row of a launch the host finds
    where the longest suffixes of its settled tokens occur, and sends up a tree of what followed: see `propose`.

    Its lag: the host knows a row up to the launch that was settled last, so under overlap its tree hangs at a token that is older by what the launch under way
    emits, the first token after a prefill included; without overlap by nothing. The device, which has every token, goes down the tree along those emitted
    since (*descend*), and verifies what hangs below; where they left the tree, the host proposes nothing. The row's own text, which the device looks up as
    `ngram` does, adds a branch where the tree leaves places free. Either way drafts follow from tokens alone, never from what will be drawn: the output
    is that of plain decoding. Nothing is left to do after publish, so a step is one program; one in which no row has drafts is a plain step.

    The host's part costs microseconds for each token of a request that ends, and about a tenth of a millisecond for each row of a launch: under overlap it is
    hidden as long as that is less than a step. Where many rows run, `ngram` is the one without it.

    Near the end of the target's context a row drafts nothing and decodes on.

    Args:
        target: the model.
        name: how it is listed.
        num_draft_tokens: `W`, the pending token and up to `W - 1` drafts.
        min_ngram: tokens of the shortest match that proposes, everywhere.
        max_ngram: of the longest one that the device looks for.
        documents: the external corpus, token ids; see `read_documents`.
        corpus_share: nodes of each window that are kept for it, of `W - 1`; what one corpus leaves free the other takes. None: half of them, or 0 where
            there are no documents.
        max_trie_depth: tokens of the longest match in the trie.
        capacity: nodes of the trie; the least recently used go first.

    Raises:
        ValueError: sizes that make no sense.

    Source: prompt lookup decoding (Saxena 2023); the n-gram worker of SGLang, with its trie and its external corpus.
    """
    width = num_draft_tokens
    share = _share(width, corpus_share, documents)
    if not 1 <= min_ngram <= max_ngram:
        raise ValueError(f"min_ngram={min_ngram} and max_ngram={max_ngram} must satisfy 1 <= min_ngram <= max_ngram")
    if min_ngram > max_trie_depth:
        raise ValueError(f"max_trie_depth={max_trie_depth} must be at least min_ngram={min_ngram}: raise it")
    plain = chain(name, target)
    num_nodes = WINDOWS * (width - 1)
    side = corpus_side(
        empty_trie(max_depth=max_trie_depth, capacity=capacity),
        automaton.source(build_automaton(documents)) if documents else None,
        shortest=min_ngram,
        window=width - 1,
        share=share,
    )

    def verify_phase(params, device: DeviceState, inputs: DecodeInputs, *, table_width: int, depth: int) -> PhaseOutput:
        rows, context_len = inputs.rows, target.facts.context_len
        begun = start(device, inputs, table_width=table_width, depth=depth, context_len=context_len)
        known = history(begun.device, rows, table_width=table_width)
        lens = jnp.where(begun.num_drafts > 0, begun.seq_lens + 1, 0)
        settled, *words = jnp.split(inputs.row_words, [1, 1 + num_nodes], axis=1)
        proposed = Nodes(*(jnp.pad(x, ((0, 0), (1, 0))) for x in words))
        nodes = descend(proposed, known, lens, settled[:, 0], width)
        nodes = add_chain(nodes, lookup(known, lens, min_ngram=min_ngram, max_ngram=max_ngram, num_drafts=width - 1))
        out = verify_tree(
            target,
            params,
            begun,
            inputs,
            as_tree(nodes, begun.carry.bonus),
            layers=(),
            output_stride=width,
            num_nodes=nodes.num_nodes,
            widths=(1, width),
        )
        tokens, accept_lens = out.handoff.tokens, out.handoff.accept_lens
        bonus = jnp.take_along_axis(tokens, accept_lens[:, None] - 1, axis=1)[:, 0]
        future = stash(out.device.future, rows, Carry(bonus), forward_iter=inputs.forward_iter)
        return out._replace(device=dataclasses.replace(out.device, future=future), handoff=())

    return plain._replace(
        verify_width=width,
        output_stride=width,
        alloc_len=width,
        fixed_accept=None,
        verify_kind=VerifyKind.TREE,
        verify_phase=verify_phase,
        depths=(width - 1,),
        host=side,
    )


def corpus_side(ended: Trie, external: Source | None, *, shortest: int, window: int, share: int) -> HostSide:
    """Proposes a tree for each row of a launch, and keeps what requests said when they end: its state is the trie of that, and nothing of any row.

    The words of a row: the number of its settled tokens, then tokens and parents of the `WINDOWS * window` nodes after the root, which is the last of these;
    a node that is not used has the token -1.

    Args:
        ended: the trie to begin with.
        external: a corpus that does not change, or None.
        shortest, window, share: as of `propose`.
    """
    num_nodes = WINDOWS * window

    def inputs(ended: Trie, launch: HostLaunch):
        words = np.zeros((len(launch.rows), 1 + 2 * num_nodes), np.int32)
        words[:, 1 : 1 + num_nodes] = -1
        sources = [trie.source(ended), *([] if external is None else [external])]
        for of_row, row in zip(words, launch.rows.tolist(), strict=True):
            text = launch.tokens_of(row)
            tail = tuple(text[-ended.max_depth :].tolist())
            draft = propose(sources, tail, shortest=shortest, window=window, windows=WINDOWS, share=share)
            of_row[0], count = len(text), len(draft.tokens)
            of_row[1 : 1 + count] = draft.tokens
            of_row[1 + num_nodes : 1 + num_nodes + count] = draft.parents
        return words, np.zeros(0, np.int32)

    def observe(ended: Trie, outcome: HostOutcome) -> Trie:
        for row in outcome.rows[outcome.live & outcome.finished].tolist():
            ended = insert(ended, outcome.tokens_of(row).tolist())
        return ended

    return HostSide(
        row_words=1 + 2 * num_nodes,
        batch_words=0,
        outcome_words=0,
        init=lambda num_rows: ended,
        inputs=inputs,
        observe=observe,
    )


def _share(width: int, corpus_share: int | None, documents: Sequence[Sequence[int]]) -> int:
    """Nodes of a window for the external corpus, after checking the sizes."""
    if not 2 <= width <= MAX_VERIFY_WIDTH:
        raise ValueError(
            f"num_draft_tokens={width} must be at least 2, the pending token and a draft, and at most {MAX_VERIFY_WIDTH}, what can be verified: "
            "use algorithm 'plain' for no drafts"
        )
    if corpus_share is None:
        return width // 2 if documents else 0
    if not documents:
        raise ValueError(f"corpus_share={corpus_share} means nothing without a corpus: give one, or leave it out")
    if not 0 <= corpus_share < width:
        raise ValueError(
            f"corpus_share={corpus_share} must lie in [0, {width - 1}]: a verify of num_draft_tokens={width} has so many drafts"
        )
    return corpus_share
