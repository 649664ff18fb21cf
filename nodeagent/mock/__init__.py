"""The mock engine for tests: numbered tokens and faults on request, on a Unix socket.

The mock has its own small OpenAI surface. The embedded engine's needs torch and a tokenizer, and
refuses fields that a test may send. Only the error bodies are shared (wire/errors).
"""
