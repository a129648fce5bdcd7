"""Speech models that run in the proxy's own process."""
