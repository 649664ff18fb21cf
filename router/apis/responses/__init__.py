"""OpenAI's Responses and Conversations. The scheduler stores them."""
