"""The package's logger."""

from llm_datadist.utils.log import *
