"""The public types."""

from llm_datadist._compat import *
