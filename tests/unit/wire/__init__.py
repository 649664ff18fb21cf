"""Tests of what the services share."""
