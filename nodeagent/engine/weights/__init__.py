"""Reading model files: GGUF, and Hugging Face folders. A lie in a file is refused in words."""
