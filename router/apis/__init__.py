"""The public API surfaces, one package each: request schema, decoding, encoding."""
