"""The scheduler refuses engine settings that no node can use."""

import pytest

from isochrone.wire.ids import PopId
from isochrone.wire.models.model import EngineSettings, PlacementPolicy
from scheduler.api.admin.deployments import device_problem, engine_problem
from tests.builders import a_pop


@pytest.mark.parametrize(
    ("driver", "options", "words"),
    [
        ("vllm", {"enforce-eager": "true"}, "'enforce-eager'; did you mean 'enforce_eager'?"),
        ("vllm", {"max_seqs": "4"}, "'max_seqs'; did you mean 'max_num_seqs'?"),
        ("vllm", {"enforce_eager": "yes"}, "is a flag: use true or false, not 'yes'"),
        ("sglang", {"dtype": ""}, "'dtype' needs a value"),
        ("vllm", {"speculative_config": "x" * 20_000}, "the limit is 16384"),
        ("embedded", {"zzz": "1"}, "'zzz'; known options: adapter_memory_bytes, "),
    ],
)
def test_options_that_the_driver_does_not_know_are_refused(
    driver: str, options: dict[str, str], words: str
) -> None:
    problem = engine_problem(EngineSettings(driver=driver, options=options))
    assert problem is not None
    assert problem.field == "options"
    assert words in problem.reason


def test_known_options_are_accepted() -> None:
    options = {"enable_auto_tool_choice": "true", "tool_call_parser": "hermes"}
    flags = ("enable_lora", "enable_expert_parallel", "enable_sleep_mode")
    options |= dict.fromkeys(flags, "true")
    options |= {"kv_events_config": "{}", "kv_cache_memory_bytes": "1073741824"}
    options |= {"kv_transfer_config": '{"kv_connector":"MooncakeStoreConnector"}'}
    assert engine_problem(EngineSettings(driver="vllm", options=options)) is None


@pytest.mark.parametrize(
    ("driver", "overcommit", "classes", "allow", "is_refused"),
    [
        ("vllm", 4.0, {"ams": ["cpu"]}, (), True),
        ("vllm", 4.0, {"ams": ["cpu"], "fra": ["cpu"]}, (), True),
        ("vllm", 4.0, {"ams": ["cpu", "h100-80g"]}, (), False),
        ("vllm", 4.0, {"ams": ["cpu"], "fra": ["h100-80g"]}, (), False),
        ("vllm", 4.0, {"ams": ["cpu"], "fra": ["h100-80g"]}, ("ams",), True),
        # Nodes may come later.
        ("vllm", 4.0, {}, (), False),
        ("vllm", 4.0, {"fra": ["cpu"]}, ("ams",), False),
        ("vllm", 1.0, {"ams": ["cpu"]}, (), False),
        ("embedded", 4.0, {"ams": ["cpu"]}, (), False),
    ],
)
def test_what_no_device_of_the_fleet_can_hold_is_refused(
    driver: str,
    overcommit: float,
    classes: dict[str, list[str]],
    allow: tuple[str, ...],
    is_refused: bool,
) -> None:
    engine = EngineSettings(driver=driver, options={"enable_sleep_mode": "true"})
    policy = PlacementPolicy(overcommit=overcommit, allow=allow)
    pops = (a_pop("ams"), a_pop("fra"))
    by_pop = {PopId(pop): names for pop, names in classes.items()}
    problem = device_problem(engine, policy, pops, by_pop)
    assert bool(problem) == is_refused
    if is_refused:
        assert "use GPUs, --driver embedded, or no --overcommit" in problem
