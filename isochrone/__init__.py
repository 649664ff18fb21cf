"""What the three services share: what they say to one another, and what each is made of."""

__version__ = "0.1.0"
