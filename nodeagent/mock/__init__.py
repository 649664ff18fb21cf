"""The mock engine for tests: numbered tokens and faults on request, on a Unix socket.

It has its own small OpenAI surface, because the embedded engine's needs torch and a tokenizer.
Requests beyond its row of the capabilities are refused. Error bodies are shared (wire/errors).
"""
