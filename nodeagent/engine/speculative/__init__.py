"""Speculative decoding: cheap drafts that the target model verifies, several in one step.

Drafts come from n-grams of the text itself (`ngram`), from a grammar that allows one token, or from
a draft model (`draft_model`). `draft_length` decides how many are worth verifying, and
`speculation` puts them together.
"""
