"""The kernels of torch itself: they run on every device."""
