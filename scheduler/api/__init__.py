"""HTTP and WebSocket endpoints: admin API, agents' and routers' control connections, joining."""
