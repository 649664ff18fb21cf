"""The mock engine for tests: numbered tokens and faults on request, on a Unix socket.

It has its own small OpenAI surface instead of the embedded engine's: that one needs torch and a
tokenizer. What it cannot do is refused, as its row of the capabilities says. Error bodies are
shared (wire/errors).
"""
