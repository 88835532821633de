"""Two helpers that programs borrow."""

from llm_datadist.v2.llm_utils import *
