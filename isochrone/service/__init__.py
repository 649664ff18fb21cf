"""What each service is made of: config, duties, logs, metrics, identity, the guarded HTTP door."""
