"""Installs the vendors' engines that tests and benchmarks run against, each apart."""
