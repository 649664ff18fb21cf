"""Reads weights and shapes from model files: GGUF, safetensors folders, LoRA and EAGLE-3."""
