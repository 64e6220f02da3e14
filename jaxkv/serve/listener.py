"""Opens the socket on which the server listens. Without an API key only this machine may reach it."""

import ipaddress
import socket

_BACKLOG = 2048


def open_listener(host: str, port: int, *, has_keys: bool) -> socket.socket:
    """Returns a listening socket.

    Args:
        host: a name or address of this machine.
        port: 0 for any free port.
        has_keys: requests need a key, so that other machines may send some.

    Raises:
        ValueError: other machines could reach the address, and requests need no key.
        OSError: the address is none of this machine's, or another server has the port.
    """
    family, address = _resolve(host, port)
    if not has_keys and not ipaddress.ip_address(address[0].partition("%")[0]).is_loopback:
        raise ValueError(
            f"--host {host} lets other machines in, which needs a key; give --api-key, --api-key-file or "
            "JAXKV_API_KEY, or leave the host at 127.0.0.1"
        )
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        # Connections of a server that has just ended must not keep the next one from its port.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise OSError(f"cannot listen on {host} port {port}: {error.strerror}") from error
    return listener


def url_of(listener: socket.socket, host: str) -> str:
    """Returns the address of a listening socket as clients write it."""
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{listener.getsockname()[1]}"


def _resolve(host: str, port: int) -> tuple[socket.AddressFamily, tuple]:
    """Returns the family and address of a host's name; IPv4 if it has both."""
    if not host:
        raise ValueError("--host must be a name or an address such as 127.0.0.1, got an empty text")
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise ValueError(f"--host {host} cannot be resolved: {error}") from error
    family, _, _, _, address = min(found, key=lambda each: each[0] != socket.AF_INET)
    return family, address
