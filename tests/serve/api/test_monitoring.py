"""`/metrics` and the dashboard: their figures, and who may see them."""

import asyncio
import base64
import hashlib
import json
import re
from importlib.resources import files

from prometheus_client.parser import text_string_to_metric_families

from jaxkv.serve.dashboard.page import page, page_with
from tests.serve.http.serving import MODEL, serving

KEY = "a-key-of-tests"
VLLM = (
    *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"),
    *("prompt_tokens_total", "generation_tokens_total", "num_preemptions_total"),
    *("request_success_total", "prefix_cache_queries_total", "prefix_cache_hits_total"),
    *("time_to_first_token_seconds_bucket", "inter_token_latency_seconds_bucket"),
    *("request_time_per_output_token_seconds_bucket", "e2e_request_latency_seconds_bucket"),
    *("request_queue_time_seconds_sum", "request_prefill_time_seconds_sum"),
    *("request_decode_time_seconds_sum", "request_inference_time_seconds_count"),
    *("request_prompt_tokens_bucket", "request_generation_tokens_bucket"),
)
"""Series that vLLM's own boards query."""


def basic(password, name="any"):
    return "Basic " + base64.b64encode(f"{name}:{password}".encode()).decode()


async def scraped(server):
    """Returns name -> samples."""
    answer = await server.http.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    found = {}
    for family in text_string_to_metric_families(answer.text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append(sample)
    return found


def serve(work, **options):
    async def run():
        async with serving(**options) as server:
            await work(server)

    asyncio.run(asyncio.wait_for(run(), 30))


async def generate_some(server, ids, max_tokens=4):
    from jaxkv.config.sampling import SamplingParams

    generation = server.service.begin(ids, SamplingParams(max_tokens=max_tokens))
    while await generation.deltas():
        pass
    generation.abort()


def test_metrics_have_the_names_and_labels_of_vllm():
    async def work(server):
        found = await scraped(server)
        for name in VLLM:
            for sample in found[f"vllm:{name}"]:
                assert {"model_name": MODEL, "engine": "0"}.items() <= sample.labels.items()
        reasons = {each.labels["finished_reason"] for each in found["vllm:request_success_total"]}
        assert reasons == {"stop", "length", "abort", "error"}

    serve(work)


def test_metrics_count_what_was_served():
    async def work(server):
        await generate_some(server, [5, 6, 7])
        await generate_some(server, [5, 6, 7, 8, 9])
        server.engine.stats["running"] = 3
        found = await scraped(server)

        def value(name, **labels):
            [sample] = [one for one in found[name] if labels.items() <= one.labels.items()]
            return sample.value

        assert value("vllm:prompt_tokens_total") == 8
        assert value("vllm:generation_tokens_total") == 7
        assert value("vllm:request_success_total", finished_reason="length") == 1
        assert value("vllm:request_success_total", finished_reason="stop") == 1
        assert value("vllm:time_to_first_token_seconds_count") == 2
        assert value("vllm:request_prompt_tokens_bucket", le="2.0") == 0
        assert value("vllm:request_prompt_tokens_bucket", le="5.0") == 2
        assert value("vllm:request_prompt_tokens_sum") == 8
        assert value("vllm:num_requests_running") == 3
        stats = server.engine.stats
        [pages, states] = stats["cache"]
        assert pages["used"] / pages["total"] != states["used"] / states["total"]
        assert value("vllm:kv_cache_usage_perc") == pages["used"] / pages["total"]
        reused, computed = (stats["prefix"][f"tokens_{name}"] for name in ("reused", "computed"))
        assert value("vllm:prefix_cache_hits_total") == reused
        assert value("vllm:prefix_cache_queries_total") == reused + computed
        assert value("jaxkv:cache_units", group="gqa", state="kept") == pages["kept"]
        assert value("vllm:spec_decode_num_drafts_total") == 300
        assert value("vllm:spec_decode_num_draft_tokens_total") == 500
        assert value("vllm:spec_decode_num_accepted_tokens_total") == 300
        assert value("vllm:spec_decode_num_accepted_tokens_per_pos_total", position="1") == 90
        assert value("jaxkv:draft_steps_total") == 180
        assert value("jaxkv:draft_steps_overlapped_total") == 160
        assert value("jaxkv:draft_steps_by_drafts_total", drafts="2") == 140
        assert value("jaxkv:drafts_paused") == 0
        assert value("jaxkv:programs") == stats["programs"]
        assert value("jaxkv:host_written_total") == stats["host"]["written"]

    serve(work)


def test_metrics_do_without_a_prefix_cache_and_a_host_tier():
    async def work(server):
        server.engine.stats |= {"prefix": None, "host": None, "host_cache": "off"}
        server.engine.stats |= {"speculation": None}
        found = await scraped(server)
        assert found["vllm:prefix_cache_queries_total"][0].value == 0
        assert not [name for name in found if name.startswith("jaxkv:host")]
        assert (await server.http.get("/dashboard/data")).json()["stats"]["host"] is None

    serve(work)


def test_the_shipped_board_queries_only_what_metrics_answers():
    board = json.loads(files("jaxkv.serve").joinpath("grafana.json").read_text())
    texts = re.findall(r"(?:vllm|jaxkv):\w+", json.dumps(board))

    async def work(server):
        names = set(await scraped(server))
        assert set(texts) <= names
        assert len(set(texts)) > 15

    serve(work)
    numbers = [panel["id"] for panel in board["panels"]]
    assert len(set(numbers)) == len(numbers)
    for panel in board["panels"]:
        assert panel["type"] == "row" or panel["targets"], panel["title"]
        assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24
    # A variable serves an import by hand and a provisioned file alike; `__inputs` serve only the former.
    variables = {each["name"]: each["type"] for each in board["templating"]["list"]}
    assert variables == {"DS_PROMETHEUS": "datasource", "model_name": "query"}
    assert "__inputs" not in board
    assert {each["datasource"]["uid"] for each in board["panels"] if each["type"] != "row"} == {
        "${DS_PROMETHEUS}"
    }


def test_the_dashboards_data_are_the_engines_figures_without_any_text_or_token():
    async def work(server):
        await generate_some(server, [2718, 2719])
        answer = await server.http.get("/dashboard/data")
        assert answer.headers["cache-control"] == "no-store"
        view = answer.json()
        assert (view["model"], view["state"]) == (MODEL, "live")
        assert view["maps"] == server.engine.picture["maps"]
        assert view["stats"]["cache"] == server.engine.stats["cache"]
        assert sum(view["first_token"]["counts"]) == 1
        assert view["finished"]["stop"] == 1
        assert "2718" not in answer.text
        assert "maps" not in view["stats"]

    serve(work)


def test_a_silent_engine_is_a_503_and_an_old_picture_says_its_age(monkeypatch):
    from jaxkv.serve import stats_poll

    monkeypatch.setattr(stats_poll, "WAIT_SECONDS", 0.01)

    async def work(server):
        server.engine.answers_stats = False
        for path in ("/metrics", "/dashboard/data"):
            answer = await server.http.get(path)
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_silent")
        assert (await server.http.get("/dashboard")).status_code == 200

    serve(work)


def test_a_browser_may_give_the_key_as_a_password_for_the_dashboard_alone():
    async def work(server):
        for path in ("/dashboard", "/dashboard/data"):
            answer = await server.http.get(path)
            assert answer.status_code == 401
            assert answer.headers["www-authenticate"].startswith("Basic ")
            for good in (basic(KEY), basic(KEY, name=""), f"Bearer {KEY}"):
                answer = await server.http.get(path, headers={"authorization": good})
                assert answer.status_code == 200, good
            bad = (
                basic("wrong-key-here"),
                basic(""),
                f"Basic {KEY}",
                "Basic",
                "Basic =",
                "Basic Og",
            )
            for wrong in (
                *bad,
                basic(f"{KEY}:{KEY}"),
                "Basic " + base64.b64encode(KEY.encode()).decode(),
            ):
                answer = await server.http.get(path, headers={"authorization": wrong})
                assert answer.status_code == 401, wrong
        for path in ("/metrics", "/v1/models", "/version", "/dashboard/", "/dashboard/data/"):
            answer = await server.http.get(path, headers={"authorization": basic(KEY)})
            assert answer.status_code == 401, path
            assert answer.headers["www-authenticate"] == "Bearer"

    serve(work, keys=(KEY,))


def policy_of(text):
    return dict(part.strip().split(" ", 1) for part in text.split(";"))


def test_the_page_allows_its_own_script_and_style_and_nothing_else():
    async def work(server):
        answer = await server.http.get("/dashboard")
        policy = policy_of(answer.headers["content-security-policy"])
        assert policy["default-src"] == policy["frame-ancestors"] == "'none'"
        assert policy["form-action"] == policy["base-uri"] == "'none'"
        assert policy["connect-src"] == "'self'"
        assert answer.headers["x-content-type-options"] == "nosniff"
        text = answer.text
        for tag, rule in (("script", "script-src"), ("style", "style-src")):
            [inside] = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
            digest = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
            assert policy[rule] == f"'sha256-{digest}'"
        # Handlers and styles in attributes would be refused, and markup from data would be possible.
        assert not re.findall(r"<[^>]*\s(?:on\w+|style|src)=", text)
        assert not re.findall(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(", text)
        addresses = set(re.findall(r"https?://[^\s\"']+", text))
        assert addresses == {"http://www.w3.org/2000/svg"}

    serve(work)


def test_data_inside_the_page_cannot_end_its_element():
    view = {"model": "</script><script>alert(1)</script><!--&amp;", "n": 1}
    text = page_with(view)
    [inside] = re.findall(r'id="embedded">(.*?)</script>', text, re.DOTALL)
    assert json.loads(inside) == view
    assert not set("<>&") & set(inside)
    assert text.count("<script") == page().decode().count("<script")
    [policy] = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)
    assert policy_of(policy)["default-src"] == "'none'"
