"""``llm-datadist validate``: shows what works on a machine, and how fast."""
