"""The public surfaces, a folder each: schema, encode, decode."""
