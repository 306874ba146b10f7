"""How long tests wait for what must come."""

SECONDS = 300.0
"""Only a hang lasts as long, however busy the machine is. `make test` gives a test twice that."""
