"""Tests with engines of other vendors, which `make test-engines` installs. Not in `make test`."""
