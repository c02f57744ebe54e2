"""Property tests share the machine with others, so being slow is no failure of an example."""

from hypothesis import HealthCheck, settings

settings.register_profile("layout", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("layout")
