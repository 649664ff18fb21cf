"""The router: sends each request to a replica. One or more in every PoP, without a database."""

# First of all: it lets the modules of this package be loaded compiled (isochrone/compiled.py).
import isochrone as isochrone
