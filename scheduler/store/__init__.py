"""The only room that speaks SQL. Functions take a connection first and return frozen values."""
