from laminar.config import RelayConfig
from tests.relay.relay_machines import TOKEN, LocalRelay


def test_a_closed_relay_gives_back_its_port_and_its_name(run_id):
    """The old one is still referred to, so it is not the garbage collector that closes its sockets."""
    first = LocalRelay(0, run_id, RelayConfig(), TOKEN)
    first.relay.close()
    second = LocalRelay(0, run_id, RelayConfig(port=first.address[1]), TOKEN)
    second.relay.close()
    assert second.address == first.address
