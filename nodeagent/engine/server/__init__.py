"""The engine's HTTP server: routes, limits, open requests, and the life of the process.

`http_routes` has what every engine serves and `generation_server` what a text generator adds; the
bodies of the OpenAI API are in `openai`.
"""
