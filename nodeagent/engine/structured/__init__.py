"""Structured outputs: grammars built from schemas, regular expressions and choices.

A grammar is compiled outside the step thread (`compiler`), and the resulting constraint masks the
logits of each step (`constraint`).
"""
