"""Sounds and images: uploads that are no JSON, and answers that are not made of tokens."""
