"""Describes models in numbers: shapes, RoPE scaling, and the error of a file that does not fit."""
