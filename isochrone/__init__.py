"""What the three services share: what they say to one another, and what each is made of."""

from isochrone import compiled as _compiled

__version__ = "0.1.0"

_compiled.install()
