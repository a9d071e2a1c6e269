"""A small search agent: documents, questions about them, a search tool (after Leiden University's agent)."""

from jaxagent.envs.search.corpus import Corpus, Document, Question, read, write
from jaxagent.envs.search.retrieval import Bm25, Dense, Retriever
from jaxagent.envs.search.tasks import Search, SearchEpisode

__all__ = ["Bm25", "Corpus", "Dense", "Document", "Question", "Retriever", "Search", "SearchEpisode", "read", "write"]
