"""OpenAI's Responses and Conversations. What is stored of them is stored by the scheduler."""
