"""The backends that ship with the library: their names, and where each one's class is found."""

from typing import Final

__all__ = ["BUILT_IN"]

#: Written like an entry point (``module:class``), so that naming a backend imports none of them.
BUILT_IN: Final = {
    "acl": "llm_datadist.backends.acl.backend:AclBackend",
    "simulator": "llm_datadist.backends.simulator.backend:SimulatorBackend",
}
