"""Requests over HTTP: headers, and checks of bodies."""
