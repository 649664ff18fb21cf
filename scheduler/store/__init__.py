"""The only package that uses SQL. Functions take a connection and return frozen values."""
