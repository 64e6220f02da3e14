"""Random requests made from the server's own OpenAPI document: no 500, and no answer that it does not document."""

import asyncio
import threading

import hypothesis
import pytest
import schemathesis
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

from jaxkv.serve.http.limits import Limits
from tests.serve.http.listening import listening

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    negative_data_rejection,
]


class Thread:
    """A server in a thread of its own."""

    def __enter__(self):
        self._started, self._end = threading.Event(), asyncio.Event()
        self._thread = threading.Thread(target=asyncio.run, args=(self._run(),))
        self._thread.start()
        assert self._started.wait(20)
        return self.url

    def __exit__(self, *error):
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join()

    async def _run(self):
        self._loop = asyncio.get_running_loop()
        # The engine may be silent while requests come that do not reach it.
        limits = Limits(silence_seconds=3600.0)
        async with listening(lambda submit: submit.ids[:8], limits=limits) as server:
            self.url = server.url
            self._started.set()
            await self._end.wait()


def fuzz(cases):
    with Thread() as url:
        schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
        for found in schema.get_all_operations():
            operation = found.ok()
            if operation.path == "/dashboard":
                continue

            @hypothesis.settings(
                max_examples=cases,
                deadline=None,
                database=None,
                derandomize=True,
                suppress_health_check=list(hypothesis.HealthCheck),
                phases=[hypothesis.Phase.generate],
            )
            @hypothesis.given(case=operation.as_strategy())
            def run(case):
                case.call_and_validate(checks=CHECKS)

            run()


def test_random_requests_get_documented_answers():
    fuzz(8)


@pytest.mark.slow
def test_many_random_requests_get_documented_answers():
    fuzz(400)
