"""Tests of the package that all services share."""
