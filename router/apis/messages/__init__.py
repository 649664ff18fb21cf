"""Anthropic's Messages API, stateless, over the same deployments as the other surfaces."""
