"""Engine processes: folders, logs, ports, adapters, standby."""
