"""The client's end of the corridor on a surface of another shape than OpenAI's."""

from collections.abc import Callable

from router.dataplane import sse
from router.dataplane.http_messages import HttpResponse, ResponseWriter

Translate = Callable[[bytes], bytes]


class TranslatingWriter:
    """Passes on to a client what comes as OpenAI's: frames, whole answers, a replica's refusals."""

    def __init__(
        self, client: ResponseWriter, *, frame: Translate, whole: Translate, refusal: Translate
    ) -> None:
        """Translate each of them; `frame` may answer with none or several."""
        self._client = client
        self._frame = frame
        self._whole = whole
        self._refusal = refusal
        # These are the same on every surface.
        self.begin, self.end = client.begin, client.end
        self.reads_from, self.drained = client.reads_from, client.drained

    def send(self, data: bytes) -> None:
        """Send whole frames, each translated."""
        told = b"".join([self._frame(frame) for frame in sse.split(data)])
        if told:
            self._client.send(told)

    def reply(self, reply: HttpResponse) -> None:
        """Send a whole answer, or a replica's refusal of the request."""
        translate = self._whole if reply.status == 200 else self._refusal
        self._client.reply(HttpResponse(reply.status, translate(reply.body), reply.lines))
