"""OpenAI's Responses API, stateless: no response is stored for a later request."""
