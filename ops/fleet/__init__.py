"""The demo fleet: three PoPs on one machine, with the distance between them emulated."""
