"""Opens the two doors of a relay: a port for its upstream, an abstract Unix socket for its machine's replicas."""

import socket

from laminar.relay.lease import socket_name


def listen_on_port(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port), backlog=64)
    except OSError as error:
        raise OSError(
            error.errno,
            f"the relay cannot listen on {host}:{port} ({error.strerror}); set relay.port to a free one, or 0 for any",
        ) from error


def listen_locally(run_id: str, machine: int) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(socket_name(run_id, machine))
        listener.listen(64)
    except OSError as error:
        listener.close()
        raise OSError(
            error.errno, f"run {run_id!r} has a relay for machine {machine} already ({error.strerror})"
        ) from error
    except BaseException:
        listener.close()
        raise
    return listener
