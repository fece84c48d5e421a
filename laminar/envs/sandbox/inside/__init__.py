"""Is sent to the sandbox's own interpreter as text: standard library only, and Python 3.10 is enough."""
