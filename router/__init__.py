"""The front door: one in every PoP. Holds no database and asks none."""

# First of all: it lets the modules of this package be loaded compiled (isochrone/compiled.py).
import isochrone as isochrone
