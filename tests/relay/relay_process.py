"""Is one machine's relay, for the tests: orders as JSON lines on stdin, replies and happenings on stdout."""

import json
import sys
import threading

import msgspec

from laminar.config import RelayConfig
from laminar.relay.relay import Relay

speaking = threading.Lock()


def say(message: dict[str, object]) -> None:
    with speaking:
        sys.stdout.write(json.dumps(message) + "\n")
        sys.stdout.flush()


def main() -> None:
    start = json.loads(sys.stdin.readline())
    relay = Relay(
        start["machine"],
        start["run_id"],
        bytes.fromhex(start["token"]),
        RelayConfig(**start["config"]),
        lambda happening: say({**msgspec.structs.asdict(happening), "type": type(happening).__name__}),
    )
    say({"reply": relay.address})
    for line in sys.stdin:
        order = json.loads(line)
        if "set_next" in order:
            relay.set_next(tuple(order["set_next"]) if order["set_next"] else None, order["epoch"])
            say({"reply": None})
        elif "retain" in order:
            relay.retain(order["retain"])
            say({"reply": None})
        else:
            say({"reply": msgspec.to_builtins(relay.status())})
    relay.close()


if __name__ == "__main__":
    sys.path.insert(0, ".")
    main()
