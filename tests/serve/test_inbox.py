"""The engine process's end of the socket: what has arrived is taken at once, and a wait ends for every reason."""

import contextlib
import socket
import threading

import pytest

from jaxkv.serve.inbox import Inbox
from jaxkv.serve.wire import Abort, AskStats, Start, WireDamaged, frame


@pytest.fixture
def ends():
    ours, theirs = socket.socketpair()
    with ours, contextlib.closing(Inbox(theirs)) as inbox:
        yield ours, inbox


def test_messages_that_come_with_the_first_one_are_kept(ends):
    ours, inbox = ends
    sent = [Start(), AskStats(1), Abort(2)]
    data = b"".join(map(frame, sent))
    ours.sendall(data[:-3])
    assert inbox.first() == sent[0]
    assert inbox.take() == [sent[1]]
    assert inbox.take() == []
    ours.sendall(data[-3:])
    ours.shutdown(socket.SHUT_WR)
    assert not inbox.is_closed
    assert inbox.take() == [sent[2]]
    assert inbox.is_closed
    assert inbox.take() == []


def test_all_that_has_arrived_is_taken_at_once(ends):
    ours, inbox = ends
    sent = [Abort(number) for number in range(2000)]
    writing = threading.Thread(target=lambda: ours.sendall(b"".join(map(frame, sent))))
    writing.start()
    writing.join(30)
    assert inbox.take() == sent


@pytest.mark.parametrize(("busy_seconds", "polls"), [(0.0, [0, None]), (2.5, [0, 0, 0, None])])
def test_a_wait_sleeps_after_it_has_been_busy(ends, monkeypatch, busy_seconds, polls):
    _, inbox = ends
    inbox.busy_seconds = busy_seconds
    seen, seconds = [], iter(range(100))

    class Poll:
        register = staticmethod(lambda *given: None)

        def poll(self, milliseconds=None):
            seen.append(milliseconds)

    monkeypatch.setattr("jaxkv.serve.inbox.select.poll", Poll)
    monkeypatch.setattr("jaxkv.serve.inbox.time.monotonic", lambda: next(seconds))
    inbox.wait()
    assert seen == polls


def test_a_busy_wait_ends_with_what_arrives(ends):
    ours, inbox = ends
    inbox.busy_seconds = 3600.0
    writing = threading.Timer(0.05, lambda: ours.sendall(frame(Abort(1))))
    writing.start()
    inbox.wait()
    writing.join(30)
    assert inbox.take() == [Abort(1)]
    waking = threading.Timer(0.05, inbox.wake)
    waking.start()
    inbox.wait()
    waking.join(30)
    assert inbox.take() == []


def test_a_stream_that_ends_before_its_first_message_has_none(ends):
    ours, inbox = ends
    ours.close()
    assert inbox.first() is None
    assert inbox.peer_is_gone()


def test_an_end_that_was_closed_with_unread_bytes_is_the_end_of_the_stream():
    ours, theirs = socket.socketpair()
    with contextlib.closing(Inbox(ours)) as inbox:
        ours.send(b"unread")
        theirs.close()
        assert inbox.take() == []
        assert inbox.is_closed


def test_a_stream_without_messages_is_damaged(ends):
    ours, inbox = ends
    ours.sendall(b"\x01\0\0\0\xc1")
    with pytest.raises(WireDamaged):
        inbox.take()


def ended(wait):
    """Returns whether a wait in a thread has ended after `cause`."""
    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()

    def check(cause):
        waiting.join(0.05)
        assert waiting.is_alive()
        cause()
        waiting.join(30)
        return not waiting.is_alive()

    return check


@pytest.mark.parametrize("cause", ["message", "end", "wake"])
def test_a_wait_ends_for_a_message_for_the_end_and_when_it_is_woken(ends, cause):
    ours, inbox = ends
    causes = {"message": lambda: ours.send(frame(Abort(1))), "end": ours.close, "wake": inbox.wake}
    assert ended(inbox.wait)(causes[cause])


def test_a_wake_before_the_wait_counts_and_counts_once(ends):
    ours, inbox = ends
    for _ in range(100_000):
        inbox.wake()
    inbox.wait()
    assert ended(inbox.wait)(ours.close)


def test_messages_that_were_read_already_are_not_waited_for(ends):
    ours, inbox = ends
    ours.sendall(frame(Start()) + frame(Abort(1)))
    inbox.first()
    inbox.wait()
    assert inbox.take() == [Abort(1)]


def test_a_wait_for_room_ends_when_the_other_end_reads(ends):
    ours, inbox = ends
    inbox.end.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while inbox.end.send(bytes(2**16)):
            pass
    assert ended(lambda: inbox.wait(writable=True))(lambda: ours.recv(2**24))
