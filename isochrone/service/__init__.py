"""What all services are built from: configuration, periodic jobs, logs, identity, HTTP servers."""
