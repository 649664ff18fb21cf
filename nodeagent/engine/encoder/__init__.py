"""Encoder models: embeddings and reranking in the same engine process.

An encoder keeps nothing between requests, so it has no KV cache and no sequences. Its thread takes
whole texts from a queue, as many as a step's token budget allows, and answers with numbers.
"""
