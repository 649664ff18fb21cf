"""The capabilities of each engine, as data for the CLI, the router, the scheduler and the agent.

A difference between engines is a row here, not an exception elsewhere. The table in docs/engine.md
is made from it.
"""

from collections.abc import Collection, Mapping
from typing import Final, Literal, get_args

import msgspec

from isochrone.wire.digits import parse_digits
from isochrone.wire.http.headers import INEXACT, SEEDED
from isochrone.wire.models.model import EngineSettings

MIB: Final = 1024 * 1024
CPU: Final = "cpu"
"""The device class of a node without GPUs."""

SLEEP_OPTION: Final = "enable_sleep_mode"
TRUE_VALUES: Final = frozenset({"true"})
WeightFiles = Literal["safetensors", "gguf"]
WEIGHT_FILES: Final[tuple[WeightFiles, ...]] = get_args(WeightFiles)
ALL_ROLES: Final = ("unified", "prefill", "decode")

FEATURES: Final[Mapping[str, str]] = {
    "chat": "`/v1/chat/completions`",
    "completions": "`/v1/completions`",
    "embeddings": "`/v1/embeddings`",
    "rerank": "`/v1/rerank`",
    "classify": "`/classify`, `/v1/moderations`",
    "transcriptions": "`/v1/audio/transcriptions`",
    "translations": "`/v1/audio/translations`",
    "speech": "`/v1/audio/speech`",
    "image_generation": "`/v1/images/generations`",
    "tools": "`tools`",
    "forced_tools": "`tool_choice` required or a named tool",
    "strict_tools": "`tools` whose functions are `strict`",
    "structured_output": "`response_format` of type json_object or json_schema",
    "logprobs": "`logprobs`",
    "completion_logprobs": "`logprobs` of a completion",
    "logit_bias": "`logit_bias`",
    "several_answers": "`n` above 1",
    "several_prompts": "several texts in `prompt`",
    "seed": "`seed`",
    "images": "image parts of a message",
    "audio": "audio parts of a message",
    "suffix": "`suffix` of a completion",
    "echo": "`echo` of a completion",
    "best_of": "`best_of` above `n`",
    "token_count": "counts of a prompt's tokens without an answer",
}
"""Features that a request may use and an engine may lack, by name."""

KV_TYPE_BITS: Final[Mapping[str, float]] = {
    **{"fp32": 32, "f32": 32, "float32": 32},
    **{"bf16": 16, "fp16": 16, "f16": 16, "bfloat16": 16, "float16": 16},
    **{"fp8": 8, "fp8_e4m3": 8, "fp8_e5m2": 8, "fp8_inc": 8, "fp8_ds_mla": 8},
    # ggml's blocks of 32 values, with their scales
    **{"q8_0": 8.5, "q5_1": 6, "q5_0": 5.5, "q4_1": 5, "q4_0": 4.5, "iq4_nl": 4.5},
}
"""Bits of a value in the KV cache, by the names that engines have for its type."""

_TEXT: Final = frozenset({"chat", "completions"})
_PLAIN_FIELDS: Final = frozenset(
    {"tools", "logprobs", "completion_logprobs", "several_answers", "several_prompts", "seed"}
)
_COUNT: Final = frozenset({"token_count"})
_FIELDS: Final = _PLAIN_FIELDS | {
    "forced_tools",
    "strict_tools",
    "structured_output",
    "logit_bias",
}
_POOLING: Final = frozenset({"embeddings", "rerank"})
_CLASSES: Final = frozenset({"classify"})
_MEDIA: Final = frozenset({"images", "audio"})
_HEARING: Final = frozenset({"transcriptions", "translations"})


class EngineCapabilities(msgspec.Struct, frozen=True, kw_only=True):
    """The capabilities of one engine.

    `features` are names of FEATURES: the surfaces and request fields that it honours. `roles` are
    the phases that its replicas can run apart, and `handshake` the protocol between them. With
    `fixed_roles` a replica is started for its role and keeps it, and with `needs_prefill` one that
    decodes cannot read a prompt itself. `transfer_option` is the option that chooses how it sends
    KV, `transfer_default` the default; "" if it always can. `transfer_choices` are its other
    values. `shares_kv` says whether replicas use each other's KV of prompts without a request that
    has two legs: over the nodes' API, or through `kv_store`, a vendor's store to which all of them
    belong. With `kv_store_by_option` they always use the nodes' API, and the store if the
    deployment sets `kv_store_bytes`. `resumes` says which interrupted answers it continues exactly:
    SEEDED (greedy and seeded), INEXACT (with another text), or "" for none. With `counts_tokens` an
    event of a stream says how many tokens it has if that is not one. Without `counts_steps` its
    statistics move only when a request ends: an answer without a stream shows no progress. `salt`
    says where it reads the tenant's cache salt ("uncached": it caches no prompt instead), and
    `priority` whether it orders its own queue by priority. With `preempts`, a waiting request also
    takes the place of a running one of lower priority. With `sleeps_on_cpu` its sleep frees memory
    on CPUs, too.
    `memory_options` are the options that limit its memory; the agent sets them from the plan.
    Versions are those that were tried: at least `version_min`, below `version_below`; "" for any.
    `weights` are the files of weights that it reads, () for any.

    `sequences_option`, `step_tokens_option` and `waiting_option` name the options with the limits
    of concurrent sequences, of tokens in one step and of waiting requests; "" if there is none.
    `copies_option` is how many copies of the model run on devices of their own (data parallelism),
    each with these limits. With `shared_experts_option` they have their experts in common.
    Beside weights, KV cache and activations it takes `overhead_bytes` of each device (code, a CUDA
    context, communication buffers), and `graph_bytes` for CUDA graphs unless the flag
    `no_graphs_option` is set. `has_kv_cache` is false for an engine that needs no memory for KV,
    and `sequences_share_kv` for one that gives each sequence an equal part of it.
    `kv_type_options` name the options with the type of the KV cache, of keys and values apart where
    there are two; `cpu_kv_bits` is the size of a value on a CPU without them, 0 for the model's.
    With `limits_all_requests` the limit of concurrent sequences holds for requests of all kinds.

    Prompts are cached in units of at most `cache_block_tokens`, 0 if none is by default.
    `generates_text` is false for an engine whose answers do not depend on the prompt. An engine may
    answer a request for an unknown model unless it `checks_model_name`, one with sampling settings
    out of range unless it `checks_sampling`, one that names a tool with a text unless it
    `forces_named_tools`, and one with misspelt fields unless it `refuses_unknown_fields`.
    """

    features: frozenset[str] = frozenset(FEATURES)
    roles: tuple[str, ...] = ("unified",)
    handshake: str = ""
    fixed_roles: bool = False
    needs_prefill: bool = False
    transfer_option: str = ""
    transfer_default: str = ""
    transfer_choices: tuple[str, ...] = ()
    shares_kv: bool = False
    kv_store: str = ""
    kv_store_by_option: bool = False
    over_nodes: bool = False
    limits_all_requests: bool = False
    adapters: Literal["", "with_option", "always"] = ""
    sleep: Literal["", "with_option", "always"] = ""
    sleeps_on_cpu: bool = True
    kv_events: bool = False
    resumes: str = ""
    counts_tokens: bool = False
    counts_steps: bool = True
    salt: Literal["", "body", "chat_body", "header", "uncached"] = ""
    priority: bool = False
    preempts: bool = False
    memory_options: tuple[str, ...] = ()
    version_min: str = ""
    version_below: str = ""
    weights: tuple[WeightFiles, ...] = ()
    sequences_option: str = ""
    step_tokens_option: str = ""
    waiting_option: str = ""
    copies_option: str = ""
    shared_experts_option: str = ""
    overhead_bytes: int = 256 * MIB
    graph_bytes: int = 0
    no_graphs_option: str = ""
    has_kv_cache: bool = True
    sequences_share_kv: bool = True
    kv_type_options: tuple[str, ...] = ()
    cpu_kv_bits: float = 0.0
    cache_block_tokens: int = 16
    generates_text: bool = True
    checks_model_name: bool = True
    checks_sampling: bool = True
    forces_named_tools: bool = True
    refuses_unknown_fields: bool = False

    @property
    def sends_kv(self) -> bool:
        """True if a prefill replica sends the KV of prompts to a decode replica."""
        return "prefill" in self.roles

    @property
    def versions(self) -> str:
        """The versions that were tried, in words."""
        least = f"from {self.version_min}" if self.version_min else ""
        below = f"below {self.version_below}" if self.version_below else ""
        return " ".join(word for word in (least, below) if word) or "any"


ENGINE_CAPABILITIES: Final[Mapping[str, EngineCapabilities]] = {
    "embedded": EngineCapabilities(
        features=_TEXT | _FIELDS | _POOLING | _CLASSES | _COUNT,
        roles=ALL_ROLES,
        handshake="frames over HTTP",
        shares_kv=True,
        kv_store="Mooncake Store",
        kv_store_by_option=True,
        refuses_unknown_fields=True,
        over_nodes=True,
        adapters="always",
        sleep="always",
        resumes=SEEDED,
        counts_tokens=True,
        salt="header",
        priority=True,
        preempts=True,
        memory_options=("kv_memory_bytes",),
        weights=("safetensors", "gguf"),
        sequences_option="sequences_max",
        step_tokens_option="batch_tokens_max",
        waiting_option="waiting_max",
        kv_type_options=("kv_dtype",),
        # It computes in 32 bits there.
        cpu_kv_bits=32.0,
    ),
    # Numbered tokens, whatever the prompt is.
    "mock": EngineCapabilities(
        features=_TEXT
        | _PLAIN_FIELDS
        | {"forced_tools", "strict_tools", "structured_output"}
        | _HEARING
        | {"speech", "image_generation"}
        | _COUNT,
        sleep="always",
        resumes=SEEDED,
        counts_tokens=True,
        salt="header",
        priority=True,
        has_kv_cache=False,
        generates_text=False,
        refuses_unknown_fields=True,
        checks_model_name=False,
        forces_named_tools=False,
    ),
    "vllm": EngineCapabilities(
        features=_TEXT | _FIELDS | _POOLING | _CLASSES | _MEDIA | _HEARING | _COUNT | {"echo"},
        roles=ALL_ROLES,
        handshake="`kv_transfer_params` of NIXL or Mooncake, one leg after the other",
        transfer_option="kv_connector",
        transfer_default="nixl",
        transfer_choices=("nixl", "mooncake"),
        shares_kv=True,
        kv_store="Mooncake Store",
        over_nodes=True,
        adapters="with_option",
        sleep="with_option",
        sleeps_on_cpu=False,
        kv_events=True,
        resumes=INEXACT,
        counts_tokens=True,
        overhead_bytes=768 * MIB,
        graph_bytes=768 * MIB,
        no_graphs_option="enforce_eager",
        salt="body",
        priority=True,
        memory_options=("gpu_memory_utilization", "kv_cache_memory_bytes"),
        # 0.32 has no reader of GGUF any more; GPTQ and AWQ are safetensors.
        weights=("safetensors",),
        version_min="0.11",
        version_below="1.0",
        sequences_option="max_num_seqs",
        step_tokens_option="max_num_batched_tokens",
        copies_option="data_parallel_size",
        shared_experts_option="enable_expert_parallel",
        kv_type_options=("kv_cache_dtype",),
        cache_block_tokens=128,  # 16 on GPUs
        forces_named_tools=False,
    ),
    # `--parallel` slots, each with an equal part of the KV cache.
    "llama_cpp": EngineCapabilities(
        # Its completions have the logprobs of chats, and its usage is that of one answer.
        features=_TEXT | (_FIELDS - {"completion_logprobs", "several_answers", "several_prompts"}),
        resumes=INEXACT,
        overhead_bytes=512 * MIB,
        salt="uncached",
        memory_options=("ctx_size",),
        weights=("gguf",),
        sequences_option="parallel",
        step_tokens_option="batch_size",
        sequences_share_kv=False,
        kv_type_options=("cache_type_k", "cache_type_v"),
        # A slot's prompt is not separated by tenant.
        cache_block_tokens=0,
        checks_model_name=False,
        checks_sampling=False,
        forces_named_tools=False,
    ),
    "sglang": EngineCapabilities(
        features=_TEXT | _FIELDS | _POOLING | _MEDIA | {"echo"},
        roles=ALL_ROLES,
        handshake="a bootstrap room, both legs at once",
        fixed_roles=True,
        needs_prefill=True,
        transfer_option="disaggregation_transfer_backend",
        transfer_default="nixl",
        transfer_choices=("nixl", "mooncake"),
        over_nodes=True,
        adapters="with_option",
        resumes=INEXACT,
        counts_tokens=True,
        overhead_bytes=768 * MIB,
        graph_bytes=1024 * MIB,
        no_graphs_option="disable_cuda_graph",
        salt="body",
        memory_options=("mem_fraction_static",),
        weights=("safetensors",),
        version_min="0.5",
        version_below="0.6",
        sequences_option="max_running_requests",
        step_tokens_option="chunked_prefill_size",
        kv_type_options=("kv_cache_dtype",),
        checks_model_name=False,
        checks_sampling=False,  # 0.5.23 takes any `n`
    ),
    # The agent makes a grammar of calls that are required or `strict` (drivers/guided_decoding.py).
    "tensorrt_llm": EngineCapabilities(
        features=_TEXT | _FIELDS | {"images", "echo", "best_of"},
        roles=ALL_ROLES,
        handshake="`disaggregated_params`, context first",
        fixed_roles=True,
        transfer_option="cache_transceiver_backend",
        transfer_default="DEFAULT",
        transfer_choices=("DEFAULT", "UCX", "NIXL", "MPI"),
        counts_tokens=True,
        counts_steps=False,
        overhead_bytes=1024 * MIB,
        graph_bytes=512 * MIB,
        salt="chat_body",
        memory_options=("kv_cache_config.max_gpu_total_bytes",),
        weights=("safetensors",),
        # Its protocol's models forbid other fields.
        refuses_unknown_fields=True,
        checks_model_name=False,
        version_min="1.2",
        version_below="2.0",
        sequences_option="max_batch_size",
        step_tokens_option="max_num_tokens",
    ),
    # An operator's own server (command_engine.py): a deployment says which features it has.
    "command": EngineCapabilities(
        features=frozenset(FEATURES) - _COUNT,
        has_kv_cache=False,
        cache_block_tokens=0,
        limits_all_requests=True,
        checks_model_name=False,
        checks_sampling=False,
        forces_named_tools=False,
    ),
}
"""The capabilities by driver. `ENGINE_OPTIONS` has the same keys."""

UNKNOWN_ENGINE: Final = EngineCapabilities()
"""Assumed of an engine that only a newer version of the other side knows: it can do all."""


class EngineEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One engine in the admin API: its name, capabilities and options."""

    driver: str
    capabilities: EngineCapabilities
    lacks: tuple[str, ...]
    options: tuple[str, ...]


def capabilities_of(driver: str) -> EngineCapabilities:
    """Return what an engine can do."""
    return ENGINE_CAPABILITIES.get(driver, UNKNOWN_ENGINE)


def lacking_features(driver: str) -> tuple[str, ...]:
    """Return the features that an engine lacks, in the order of FEATURES."""
    features = capabilities_of(driver).features
    return tuple(name for name in FEATURES if name not in features)


MODEL_CONFIGS: Final = frozenset({"config.json", "params.json"})
"""The files that describe a model of safetensors files; Mistral publishes the second one."""


def weights_problem(driver: str, paths: Collection[str]) -> str:
    """Return why an engine cannot load a model of these files, or ""."""
    can_read = capabilities_of(driver).weights
    found = [kind for kind in WEIGHT_FILES if any(path.endswith(f".{kind}") for path in paths)]
    if not can_read or not found:
        return ""
    readable = set(found).intersection(can_read)
    if readable:
        if readable != {"safetensors"} or not MODEL_CONFIGS.isdisjoint(paths):
            return ""
        return "it has safetensors files without a config.json: add the model with its whole folder"
    others = [
        name
        for name, capabilities in ENGINE_CAPABILITIES.items()
        if found[0] in capabilities.weights
    ]
    return (
        f"its weights are {found[0]} files and {driver} reads {' and '.join(can_read)}; use"
        f" {' or '.join(others)}, or add the model in that format"
    )


def sleep_problem(engine: EngineSettings) -> str:
    """Return why replicas with these settings cannot sleep, or "" if they can."""
    sleep = capabilities_of(engine.driver).sleep
    if not sleep:
        return f"{engine.driver} cannot sleep"
    if sleep == "with_option" and engine.options.get(SLEEP_OPTION, "").lower() not in TRUE_VALUES:
        return f"{engine.driver} sleeps only with --option {SLEEP_OPTION}=true"
    if engine.nodes > 1:
        return "a replica over several nodes cannot sleep"
    if engine.driver == "embedded" and (engine.devices > 1 or engine.options.get("draft_path")):
        return "embedded cannot sleep with several devices or a draft model"
    if engine.driver == "embedded" and engine.options.get("kv_store_bytes"):
        return "embedded cannot sleep with kv_store_bytes: the memory stays in the store"
    return ""


def sleep_problem_on(engine: EngineSettings, device_class: str) -> str:
    """Return why over-committed replicas with these settings cannot be on a device class, or ""."""
    if device_class != CPU or capabilities_of(engine.driver).sleeps_on_cpu:
        return ""
    return (
        f"cannot over-commit {engine.driver} on a CPU: its sleep frees no memory there; use GPUs,"
        " --driver embedded, or no --overcommit"
    )


def with_transfer(engine: EngineSettings) -> EngineSettings:
    """Return the settings of an engine whose replicas have roles: started so that it sends KV."""
    capabilities = capabilities_of(engine.driver)
    if not capabilities.transfer_option or capabilities.transfer_option in engine.options:
        return engine
    options = {**engine.options, capabilities.transfer_option: capabilities.transfer_default}
    return msgspec.structs.replace(engine, options=options)


def copies_of(engine: EngineSettings) -> int:
    """Return how many copies of its model a replica's engine runs, each on its own devices."""
    option = capabilities_of(engine.driver).copies_option
    return max(1, parse_digits(engine.options.get(option, "")) or 1)


def transfer_problem(engine: EngineSettings) -> str:
    """Return why an engine cannot be started so that it sends KV; "" if it can, or need not."""
    capabilities = capabilities_of(engine.driver)
    name = capabilities.transfer_option
    choice = engine.options.get(name, "") if name else ""
    if not choice:
        return ""
    if choice not in capabilities.transfer_choices:
        return (
            f"{name} {choice!r} is unknown; use one of {', '.join(capabilities.transfer_choices)}"
        )
    if "kv_transfer_config" in engine.options:
        return f"{name} makes a kv_transfer_config of its own: leave one of them out"
    if copies_of(engine) > 1:
        return f"{name} does not work with data_parallel_size: it is unknown which rank has the KV"
    return ""
