"""The mock engine: numbered tokens and faults on request, behind the same socket as a real one."""
