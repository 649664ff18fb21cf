"""Code that the three services share: their messages, and the parts that each is built from."""

from isochrone import compiled as _compiled

__version__ = "0.1.0"

_compiled.install()
