"""The protocol between the services: frozen structs, codec, error codes, ids. Pure."""
