"""The demo fleet: three PoPs on one machine, with emulated network latency between them."""
