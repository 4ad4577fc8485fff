"""Text that proposes continuations on the host: what requests said before, and documents of a file. Values and pure functions, no device."""

from jspec.corpus.automaton import SuffixAutomaton, build_automaton
from jspec.corpus.documents import check_is_file, read_documents
from jspec.corpus.proposal import Draft, Source, propose
from jspec.corpus.trie import Trie, empty_trie, insert

__all__ = [
    "Draft",
    "Source",
    "SuffixAutomaton",
    "Trie",
    "build_automaton",
    "check_is_file",
    "empty_trie",
    "insert",
    "propose",
    "read_documents",
]
