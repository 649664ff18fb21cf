"""The OpenAPI document of the public API, made from the types that the surfaces decode."""
