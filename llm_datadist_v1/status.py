"""Status codes, and the exceptions that carry them."""

from llm_datadist.status import *
