"""Frames over sockets: in order, of any size, from several threads; the end of a process is the end of the stream."""

import socket
import threading

import numpy as np
import pytest

from jaxkv.links.channel import Channel, Listener, connect
from jaxkv.links.values import Values

VALUES = Values([])


@pytest.fixture
def ends():
    one, other = socket.socketpair()
    made = Channel(one, VALUES), Channel(other, VALUES)
    yield made
    for each in made:
        each.close()


def test_messages_arrive_in_order_whatever_their_size(ends):
    big = np.arange(10**6, dtype=np.int32)
    sender = threading.Thread(
        target=lambda: [ends[0].send("a", 1), ends[0].send(big), ends[0].send()]
    )
    sender.start()
    assert ends[1].receive() == ["a", 1]
    [array] = ends[1].receive()
    assert (array == big).all()
    assert ends[1].receive() == []
    sender.join()


def test_threads_do_not_mix_their_messages(ends):
    threads = [
        threading.Thread(target=lambda n=n: [ends[0].send(n, [n] * 5000) for _ in range(15)])
        for n in range(4)
    ]
    for thread in threads:
        thread.start()
    for _ in range(60):
        number, items = ends[1].receive()
        assert items == [number] * 5000
    for thread in threads:
        thread.join()


def test_a_closed_end_is_the_end_of_the_stream_for_both(ends):
    ends[0].close()
    assert ends[1].receive() is None
    assert ends[0].receive() is None
    with pytest.raises(OSError, match=r".+"):
        ends[0].send(1)
    ends[0].close()


def test_a_damaged_message_is_refused():
    one, other = socket.socketpair()
    channel = Channel(one, VALUES)
    other.sendall((2**63).to_bytes(8, "little"))
    with pytest.raises(ValueError, match="is damaged"):
        channel.receive()
    channel.close()
    other.close()


def test_a_listener_takes_those_who_know_its_key_alone():
    listener = Listener()
    stranger = socket.create_connection(("127.0.0.1", listener.port))
    stranger.sendall(b"x" * 32)
    silent = socket.create_connection(("127.0.0.1", listener.port))
    silent.close()
    friend = connect(("127.0.0.1", listener.port), listener.key, VALUES, seconds=10.0)
    [channel] = listener.accept(1, VALUES, seconds=10.0)
    channel.send("hello")
    assert friend.receive() == ["hello"]
    assert stranger.recv(1) == b""
    with pytest.raises(TimeoutError):
        listener.accept(1, VALUES, seconds=0.05)
    for each in (stranger, friend, channel, listener):
        each.close()
