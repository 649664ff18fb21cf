"""The properties of a request that ranking needs."""

from isochrone.native_class import mypyc_attr
from router.decide.caches.affinity import SessionBinding
from router.decide.caches.prefix_index import NO_MATCHES, PrefixMatches


@mypyc_attr(acyclic=True, free_list_len=1)
class RouteQuery:
    """A request as ranking sees it.

    `matches` says how much of the prompt each slot has cached. `binding`, where the session was
    answered last, counts only if there are no matches. `queue_refusals` counts the replicas that
    have refused it because more waited there than this router knew. Its adapter takes `adapter_ms`
    to load, 0 without one, but at the slots of `adapter_mask`.
    """

    def __init__(
        self,
        request_id: str,
        prompt_tokens: int,
        output_tokens: int,
        session: str = "",
        binding: SessionBinding | None = None,
        matches: PrefixMatches = NO_MATCHES,
        queue_refusals: int = 0,
        adapter_ms: float = 0.0,
        adapter_mask: int = 0,
    ) -> None:
        self.request_id = request_id
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens
        self.session = session
        self.binding = binding
        self.matches = matches
        self.queue_refusals = queue_refusals
        self.adapter_ms = adapter_ms
        self.adapter_mask = adapter_mask
