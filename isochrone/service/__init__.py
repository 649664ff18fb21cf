"""The parts that all services share: configuration, periodic jobs, logs, identity, HTTP servers."""
