"""The OpenAI surface: chat completions, completions, embeddings, reranking, model lists."""
