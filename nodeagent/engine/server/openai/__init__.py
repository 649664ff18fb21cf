"""The OpenAI API of the engine: request bodies and headers in, response bodies and events out.

Fields of OpenAI, vLLM and Workers AI with the same meaning are accepted side by side. A field that
the engine does not support is refused if ignoring it would change the answer; unknown fields are
ignored.
"""
