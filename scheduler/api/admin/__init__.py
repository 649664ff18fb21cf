"""The admin API: its table of endpoints, and the functions behind them."""
