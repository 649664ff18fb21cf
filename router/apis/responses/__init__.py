"""OpenAI's Responses API, without memory: nothing of an answer is kept for a later request."""
