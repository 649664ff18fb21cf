"""The capabilities of engines agree with the drivers, the options and the document."""

import pytest

from isochrone.wire.engines.adapter_rank import adapter_rank_max
from isochrone.wire.engines.engine_capabilities import (
    ENGINE_CAPABILITIES,
    FEATURES,
    capabilities_of,
    lacking_features,
    sleep_problem,
    weights_problem,
)
from isochrone.wire.engines.engine_options import ENGINE_OPTIONS
from isochrone.wire.models.model import EngineSettings
from nodeagent.drivers import DRIVERS, sglang, tensorrt_llm, vllm
from nodeagent.drivers.installed_version import VersionRange
from ops.engines.capability_table import DOCUMENT, with_table


def test_every_engine_has_capabilities() -> None:
    assert ENGINE_CAPABILITIES.keys() == ENGINE_OPTIONS.keys() == DRIVERS.keys()


@pytest.mark.parametrize("driver", sorted(ENGINE_CAPABILITIES))
def test_capabilities_agree_with_the_driver(driver: str) -> None:
    stated, actual = ENGINE_CAPABILITIES[driver], DRIVERS[driver]
    assert stated.features <= FEATURES.keys()
    assert stated.resumes == actual.resumes
    # Our own engines do so by themselves.
    assert stated.counts_tokens == actual.counts_tokens or driver in ("embedded", "mock")
    salted = {"": 0, "header": 0, "chat_body": 1, "body": 2, "uncached": 2}
    assert len(actual.salted_paths) == salted[stated.salt]
    assert stated.sequences_option == actual.sequences_option or driver in ("mock", "command")
    sized = {stated.sequences_option, stated.step_tokens_option, stated.waiting_option} - {""}
    assert sized <= ENGINE_OPTIONS[driver].names


@pytest.mark.parametrize(
    ("driver", "versions"),
    [
        ("vllm", vllm.VERSIONS),
        ("sglang", sglang.VERSIONS),
        ("tensorrt_llm", tensorrt_llm.VERSIONS),
    ],
)
def test_the_versions_are_those_that_the_driver_checks(driver: str, versions: VersionRange) -> None:
    stated = ENGINE_CAPABILITIES[driver]
    first, before = (".".join(map(str, limit)) for limit in versions)
    assert (stated.version_min, stated.version_below) == (first, before)


@pytest.mark.parametrize("driver", sorted(ENGINE_CAPABILITIES))
def test_the_options_for_the_type_of_the_kv_cache_are_options(driver: str) -> None:
    assert set(ENGINE_CAPABILITIES[driver].kv_type_options) <= ENGINE_OPTIONS[driver].names


def test_an_unknown_engine_lacks_nothing() -> None:
    assert lacking_features("of a later release") == ()
    assert capabilities_of("tensorrt_llm").features < set(FEATURES)


def test_the_document_has_the_current_table() -> None:
    text = DOCUMENT.read_text()
    assert with_table(text) == text, "run python -m ops.engines.capability_table"


@pytest.mark.parametrize(
    ("driver", "paths", "problem"),
    [
        ("vllm", ["config.json", "model-00001-of-00002.safetensors"], ""),
        ("vllm", ["m.gguf", "config.json"], "use embedded or llama_cpp"),
        ("vllm", ["m.gguf", "model.safetensors", "config.json"], ""),
        ("llama_cpp", ["model.safetensors"], "use embedded or vllm or sglang or tensorrt_llm"),
        ("embedded", ["m.gguf"], ""),
        ("vllm", ["model.safetensors", "tokenizer.json"], "without a config.json"),
        ("embedded", ["model.safetensors"], "without a config.json"),
        ("embedded", ["m.gguf", "model.safetensors"], ""),
        ("command", ["model.safetensors"], ""),
        ("sglang", ["pytorch_model.bin"], ""),
        ("command", ["m.gguf"], ""),
        ("of a later release", ["m.gguf"], ""),
    ],
)
def test_an_engine_that_cannot_read_the_weights_names_those_that_can(
    driver: str, paths: list[str], problem: str
) -> None:
    found = weights_problem(driver, paths)
    assert problem in found
    assert bool(found) == bool(problem)


@pytest.mark.parametrize(
    ("engine", "problem"),
    [
        (EngineSettings(driver="embedded"), ""),
        (EngineSettings(driver="embedded", devices=2), "several devices"),
        (EngineSettings(driver="embedded", options={"draft_path": "x"}), "draft model"),
        (EngineSettings(driver="vllm"), "enable_sleep_mode=true"),
        (EngineSettings(driver="vllm", options={"enable_sleep_mode": "true"}), ""),
        (EngineSettings(driver="sglang"), "sglang cannot sleep"),
        (EngineSettings(driver="mock", devices=2, nodes=2), "several nodes"),
    ],
)
def test_over_commitment_needs_an_engine_that_can_sleep(
    engine: EngineSettings, problem: str
) -> None:
    found = sleep_problem(engine)
    assert problem in found
    assert bool(found) == bool(problem)


@pytest.mark.parametrize(
    ("driver", "options", "kind", "rank_max"),
    [
        ("embedded", {}, "chat", 256),
        ("embedded", {}, "embedding", 0),
        ("embedded", {}, "classify", 0),
        ("vllm", {}, "chat", 0),
        ("vllm", {"enable_lora": "true"}, "embedding", 16),
        ("mock", {}, "chat", 0),
    ],
)
def test_the_engine_and_the_kind_decide_whether_adapters_are_taken(
    driver: str, options: dict[str, str], kind: str, rank_max: int
) -> None:
    assert adapter_rank_max(EngineSettings(driver=driver, options=options), kind) == rank_max
