"""Tensors."""

from llm_datadist.tensor import *
