"""One file an engine: how it is started, asked and watched."""
