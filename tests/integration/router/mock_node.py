"""A node whose requests the mock engine answers, with the calls of tools that a prompt asks for."""

from aiohttp import web

from isochrone.service.network.http_server import error_middleware, openai_json_error
from isochrone.wire.engines.engine import EngineConfig
from nodeagent.mock.engine import MockEngine
from nodeagent.mock.server import MockServer
from tests.integration.router.fake_node import FakeNode


class MockNode(FakeNode):
    """A fake node with a whole mock engine in it."""

    def __init__(self, context_tokens: int = 100_000) -> None:
        super().__init__()
        config = EngineConfig(
            socket="", model_path="", served_name="tiny", context_tokens_max=context_tokens
        )
        self._server = MockServer(MockEngine(config), config)
        self._in_openai_form = error_middleware(openai_json_error)

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """Answer as the mock engine does."""
        self.request_headers.append(dict(request.headers))
        return await self._in_openai_form(request, self._server.answer)

    async def tokenize(self, request: web.Request) -> web.Response:
        """Count as the mock engine does."""
        response = await self._in_openai_form(request, self._server.tokenize)
        assert isinstance(response, web.Response)
        return response
