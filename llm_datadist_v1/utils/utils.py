"""Checks of arguments."""

from llm_datadist.utils.utils import *
