"""Whether every request ends, from everywhere: asked of the graph of nodes.

What a launch brings is free, and a settle may find any of it: so the states have a cycle where the nodes have one, and reach an end where the nodes do.
"""

from collections.abc import Sequence

import numpy as np

NO_END = "every request ends, whatever was done before"
NO_PROGRESS = "the engine makes progress while nobody comes or aborts"


def find_livelock(
    inputs: Sequence[Sequence[int]], steps: Sequence[Sequence[int]], ended: Sequence[bool]
) -> tuple[list[int], str] | None:
    """Where something may go on for ever, and what that breaks; None if it cannot.

    Args:
        inputs: of each node, those that an arrival or an abort leads to.
        steps: of each node, those that an iteration leads to.
        ended: of each node, whether nobody is left, or still to come.

    Returns:
        A node that leads to no end, or the nodes of a cycle, the first one again at the end.
    """
    if (lost := _cannot_end(inputs, steps, ended)) is not None:
        return [lost], NO_END
    if (turning := _on_a_cycle(steps)) is not None:
        return turning, NO_PROGRESS
    return None


def _cannot_end(inputs, steps, ended) -> int | None:
    """The first node from which no way leads to an end."""
    count = len(ended)
    sources = np.array([node for node in range(count) for _ in (*inputs[node], *steps[node])], np.int64)
    targets = np.array([to for node in range(count) for to in (*inputs[node], *steps[node])], np.int64)
    order = np.argsort(targets, kind="stable")
    sources, starts = sources[order], np.searchsorted(targets[order], np.arange(count + 1))
    reaches = np.array(ended, bool)
    todo = np.nonzero(reaches)[0].tolist()
    while todo:
        node = todo.pop()
        for before in sources[starts[node] : starts[node + 1]].tolist():
            if not reaches[before]:
                reaches[before] = True
                todo.append(before)
    return None if reaches.all() else int(np.nonzero(~reaches)[0][0])


def _on_a_cycle(steps) -> list[int] | None:
    """A cycle of iterations, of what is left when those nodes are taken away, again and again, that nothing leads to."""
    count = len(steps)
    degree = np.zeros(count, np.int64)
    for following in steps:
        for to in following:
            degree[to] += 1
    todo = np.nonzero(degree == 0)[0].tolist()
    left = count
    while todo:
        left -= 1
        for to in steps[todo.pop()]:
            degree[to] -= 1
            if degree[to] == 0:
                todo.append(to)
    if not left:
        return None
    # What is left lies on a cycle, or behind one: go back until a node comes again.
    leads = {to: node for node in np.nonzero(degree > 0)[0].tolist() for to in steps[node]}
    way = [int(np.nonzero(degree > 0)[0][0])]
    while leads[way[-1]] not in way:
        way.append(leads[way[-1]])
    first = leads[way[-1]]
    return [first, *reversed(way[way.index(first) :])]
