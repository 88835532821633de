"""Element types of caches."""

from typing import TYPE_CHECKING

from llm_datadist import data_type
from llm_datadist.data_type import *

if TYPE_CHECKING:
    from llm_datadist.data_type import dtype_to_np_dtype as dtype_to_np_dtype
    from llm_datadist.data_type import np_dtype_to_dtype as np_dtype_to_dtype
    from llm_datadist.data_type import valid_np_dtypes as valid_np_dtypes
else:

    def __getattr__(name: str) -> object:
        # The tables for numpy, which importing must not load.
        return getattr(data_type, name)
