"""Every test. Unit tests touch no socket, process or clock; the other folders touch real ones."""
