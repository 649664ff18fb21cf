"""The mock engine for tests: numbered tokens and faults on request, on a Unix socket.

It has its own small OpenAI surface instead of the embedded engine's: that one needs torch and a
tokenizer, and refuses fields that a test may send. Here the error bodies are shared (wire/errors).
"""
