"""Models that read and write nothing: embeddings and reranking, by the same engine process.

They keep nothing between requests, so there is no KV and no sequence: a thread takes whole texts
from a queue, as many as a step's budget allows, and answers with numbers.
"""
