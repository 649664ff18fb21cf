"""Tokens and text: vocabularies of Hugging Face folders and GGUF files, and streaming detokenizers.

`loading` opens the vocabulary of a checkpoint; nothing here knows about requests or chats.
"""
