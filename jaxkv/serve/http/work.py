"""`Work`: the generations of one request, read together."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

from jaxkv.config.sampling import SamplingParams
from jaxkv.serve.engine_client import EngineLost, RequestRefused
from jaxkv.serve.generation import Delta, Generation
from jaxkv.serve.http.errors import ApiError, bad_request
from jaxkv.serve.http.service import Service
from jaxkv.wording import clip

_LOG = logging.getLogger(__name__)

Numbered = tuple[int, Delta]
"""The index of a prompt, and new text of one of its samples."""


@dataclass(frozen=True)
class Usage:
    """Token counts of a request.

    Attributes:
        prompt: tokens of all prompts, each counted once.
        output: generated tokens of all samples.
        cached: tokens of prompts that the prefix cache held.
    """

    prompt: int
    output: int
    cached: int


class Work:
    """One request's prompts, which begin in the engine together.

    Args:
        service: begins them.
        prompts: token ids of each prompt.
        params: sampling parameters of all.
        priority: lower numbers are served first.
        salt: see `prefix_salt`.
        request_id: for the log.
        demanding: the field that demands a form of the text, for errors about its grammar; may be empty.
    """

    def __init__(
        self,
        service: Service,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        *,
        priority: int = 0,
        salt: bytes | None = None,
        request_id: str = "",
        demanding: str = "",
    ) -> None:
        self.prompts = prompts
        self.params = params
        self.generations: list[Generation] = []
        self._service = service
        self._priority = priority
        self._salt = salt
        self._request_id = request_id
        self._demanding = demanding

    @property
    def usage(self) -> Usage:
        """Token counts so far."""
        counts = [each.counts for each in self.generations]
        return Usage(
            prompt=sum(each.prompt_tokens for each in counts),
            output=sum(each.output_tokens for each in counts),
            cached=sum(each.cached_tokens for each in counts),
        )

    async def deltas(self) -> AsyncGenerator[list[Numbered]]:
        """Begins all prompts and yields new texts until all samples have ended. Closing the generator aborts them.

        Raises:
            ApiError: a prompt cannot begin, see `Service.begin`, its grammar cannot be used, or a sample ended with an
                error.
            RequestRefused, EngineBusy, SlowReader, EngineLost: see `Call.arrivals`.
        """
        try:
            self._begin()
            if len(self.generations) == 1:
                while new := await self.generations[0].deltas():
                    yield [(0, self._checked(delta)) for delta in new]
                return
            async for new in _together(self.generations):
                yield [(index, self._checked(delta)) for index, delta in new]
        except RequestRefused as error:
            text, own = clip(error, 500), "structured_outputs"
            if not self._demanding or own not in text:
                raise
            raise bad_request(text.replace(own, self._demanding), self._demanding) from error
        finally:
            for generation in self.generations:
                generation.abort()

    def _begin(self) -> None:
        self._service.check_takes(len(self.prompts) * self.params.n)
        for ids in self.prompts:
            generation = self._service.begin(
                ids, self.params, priority=self._priority, salt=self._salt
            )
            self.generations.append(generation)

    def _checked(self, delta: Delta) -> Delta:
        if delta.finish_reason == "error":
            _LOG.error("request %s: %s", self._request_id, clip(delta.error, 300))
            raise ApiError(
                500,
                delta.code,
                f"the generation failed; the server's log names the request {self._request_id}",
            )
        if delta.finish_reason == "abort":
            raise EngineLost("the engine aborted the request")
        return delta


async def _together(generations: Sequence[Generation]) -> AsyncGenerator[list[Numbered]]:
    """Yields the new texts of several generations, all that are there at once."""
    reading = {asyncio.create_task(each.deltas()): index for index, each in enumerate(generations)}
    try:
        while reading:
            done, _ = await asyncio.wait(reading, return_when=asyncio.FIRST_COMPLETED)
            batch = []
            for task in done:
                index = reading.pop(task)
                if new := task.result():
                    batch += [(index, delta) for delta in new]
                    reading[asyncio.create_task(generations[index].deltas())] = index
            if batch:
                yield batch
    finally:
        for task in reading:
            task.cancel()
        await asyncio.gather(*reading, return_exceptions=True)


def check_prompts(service: Service, prompts: int, samples: int) -> None:
    """Checks the number of texts that a request asks for.

    Raises:
        ApiError: 400 if they are too many; see `Service.check_takes`.
    """
    most = min(service.limits.prompts, service.most_samples)
    if prompts * samples > most:
        raise bad_request(
            f"{prompts} prompts with n={samples} are {prompts * samples} texts, at most {most} may be asked for at "
            f"once; send several requests",
            "prompt" if prompts > 1 else "n",
        )
    service.check_takes(prompts * samples)
