"""For all tests: property tests have no deadline, for the machine may be busy."""

from hypothesis import settings

settings.register_profile("megarl", deadline=None)
settings.load_profile("megarl")
