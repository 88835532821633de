"""The paths of the API's second generation. Nothing is made here; `llm_datadist` is where to import from."""
