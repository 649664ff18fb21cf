"""The front door: one in every PoP. Holds no database and asks none."""
