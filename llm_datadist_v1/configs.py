"""Configuration."""

from llm_datadist.configs import *
