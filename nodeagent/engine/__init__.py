"""The embedded PyTorch engine: one model, one process, one Unix socket; knows nothing of the agent.

`step` is the corridor (batch, run, sample, commit, emit); `decide/` holds its decisions and is
pure; `runner`, `models/` and `layers/` hold the tensors; `server` and `openai` hold the HTTP.
"""
