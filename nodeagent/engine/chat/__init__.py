"""Chat formats: prompts rendered by the model's template, and tool calls read from its output.

`chat_template` renders messages and tools into a prompt. `call_format` knows how each model family
writes tool calls, `call_scanner` reads one call, `call_parser` finds calls in streamed text.
"""
