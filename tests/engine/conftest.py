"""Settings of the engine tests."""

from hypothesis import settings

# How long one example takes says nothing on a busy machine.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")
