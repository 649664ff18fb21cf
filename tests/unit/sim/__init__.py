"""Tests of the simulator: it must be right before what it says counts."""
