"""Which nodes and replicas answer: probes, outlier ejection, slow start."""
