"""Options of the simulator, as users give them."""

from __future__ import annotations

import pytest
from conftest_support import open_things
from pairs import options
from refusals import PARAM_INVALID, refuses

from llm_datadist import LLMDataDist, LLMRole

LISTEN = "10.0.0.1:26000"


@pytest.mark.parametrize("key", ["llm.Simulator.AddressSpace", "llm.Simulator.KeepFree"])
@pytest.mark.parametrize("value", ["", "x", "-1", "1.5", "1" * 30])
def test_s175_wrong_switch_of_the_backend(key: str, value: str) -> None:
    """S-175, api 4.5: a wrong value is refused with name and value, and leaves nothing."""
    before = open_things()
    dd = LLMDataDist(LLMRole.PROMPT, 1)
    with refuses(PARAM_INVALID, key, repr(value)):
        dd.init({**options(LISTEN), key: value})
    assert open_things() == before
    dd.init(options(LISTEN))
    dd.finalize()
