"""The names of spans and of their attributes.

Where OpenTelemetry's conventions for generative AI have a name, it is theirs (release 0.66b2 of
opentelemetry-semantic-conventions); all others begin with `isochrone.`. No attribute holds a
prompt, an answer or a key. Times are in seconds.
"""

from typing import Final

# OpenTelemetry's.
OPERATION: Final = "gen_ai.operation.name"
PROVIDER: Final = "gen_ai.provider.name"
MODEL: Final = "gen_ai.request.model"
STREAM: Final = "gen_ai.request.stream"
CHOICES: Final = "gen_ai.request.choice.count"
INPUT_TOKENS: Final = "gen_ai.usage.input_tokens"
CACHED_TOKENS: Final = "gen_ai.usage.cache_read.input_tokens"
OUTPUT_TOKENS: Final = "gen_ai.usage.output_tokens"
FIRST_CHUNK_S: Final = "gen_ai.response.time_to_first_chunk"
"""From the span's start. On the router's span that is the arrival of the request."""

ERROR_TYPE: Final = "error.type"
STATUS: Final = "http.response.status_code"

# Names of this product: whose request it is, and which part of the fleet served it.
REQUEST_ID: Final = "isochrone.request_id"
TENANT: Final = "isochrone.tenant"
DEPLOYMENT: Final = "isochrone.deployment"
POP: Final = "isochrone.pop"
ROUTER_POP: Final = "isochrone.router.pop"
NODE: Final = "isochrone.node"
REPLICA: Final = "isochrone.replica"
SCHEDULER: Final = "isochrone.scheduler"

# The router's decisions.
OUTCOME: Final = "isochrone.outcome"
WHY: Final = "isochrone.why"
"""Why this replica was chosen, as in the header `x-isochrone-why`."""

ATTEMPTS: Final = "isochrone.attempts"
ATTEMPT: Final = "isochrone.attempt"
QUEUE_WAIT_S: Final = "isochrone.queue_wait"
PREDICTED_FIRST_CHUNK_S: Final = "isochrone.predicted_time_to_first_chunk"
RESUMED_TOKENS: Final = "isochrone.resumed_after_tokens"

# A node's work on a request.
HANDED_OFF_TO: Final = "isochrone.handed_off_to"
REFUSED: Final = "isochrone.refused"
LEG: Final = "isochrone.leg"
PREFILL_OUTCOME: Final = "isochrone.prefill.outcome"
"""Where and why the prompt was read: the values of the metric isochrone_node_prefill_legs."""

PREFILL_REPLICA: Final = "isochrone.prefill.replica"
DECODE_WAIT_S: Final = "isochrone.decode_wait"
"""From the prompt's last KV block to the first token."""

KV_BYTES: Final = "isochrone.kv.bytes"
KV_BLOCKS: Final = "isochrone.kv.blocks"
KV_AFTER_PREFILL_S: Final = "isochrone.kv.after_prefill"
"""The time of the transfer after the prompt was computed: its cost for the request."""

KV_OUTCOME: Final = "isochrone.kv.outcome"
KV_PLACE: Final = "isochrone.kv.place"

ISOCHRONE: Final = "isochrone"
"""The provider."""
