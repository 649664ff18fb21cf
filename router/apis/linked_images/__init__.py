"""Images that a chat links to: fetched by the router, so that no engine fetches anything."""
