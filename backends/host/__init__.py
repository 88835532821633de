"""Memory of this process that the processor can reach, as more than one backend needs it."""
