"""The package's logger."""

from llm_datadist._log import _find_caller, error, get_logger, info, warn

__all__ = ["_find_caller", "error", "get_logger", "info", "warn"]
