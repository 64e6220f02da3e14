"""The benchmark of the load client counts every event that its server sends."""

import asyncio

import pytest

from benchmarks import load_client


@pytest.mark.parametrize("read", [load_client.read_with_us, load_client.read_with_httpx])
def test_every_event_is_counted_in_packets_of_any_size(read, capsys):
    async def main():
        serving = asyncio.create_task(load_client.serve(per_packet=3, events=6, period=0.001))
        while not (port := capsys.readouterr().out.strip()):
            await asyncio.sleep(0.001)
        counted = await read(f"http://127.0.0.1:{port}", 5)
        serving.cancel()
        await asyncio.wait([serving])
        return counted

    assert asyncio.run(main()) == 5 * 6
