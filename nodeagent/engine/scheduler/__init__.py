"""Who runs in the next step, and in which KV blocks: pure, no tensor, no clock, no thread."""
