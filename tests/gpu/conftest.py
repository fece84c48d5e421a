"""A run and relays, as the relay's own tests have them."""

from tests.relay.conftest import run_id, start_relay

__all__ = ["run_id", "start_relay"]
